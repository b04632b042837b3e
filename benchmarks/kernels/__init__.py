"""The figures of docs/explanation/kernels.md and kernels-gpu.md, and the README's figure."""
