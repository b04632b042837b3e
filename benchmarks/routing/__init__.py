"""The figures of docs/benchmarks/routing.md."""
