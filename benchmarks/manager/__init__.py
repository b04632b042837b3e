"""The figures of docs/benchmarks/manager.md."""
