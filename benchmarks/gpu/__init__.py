"""Programs for a machine with a GPU; `python -m benchmarks.gpu`, and docs/explanation/kernels-gpu.md has the way."""
