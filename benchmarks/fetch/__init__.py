"""The figures of docs/benchmarks/fetch.md."""
