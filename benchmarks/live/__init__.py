"""The figures of docs/benchmarks/index.md#pushes."""
