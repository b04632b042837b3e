"""The figures of benchmarks/results/faults.json, named in docs/benchmarks/index.md."""
