"""The figures of docs/benchmarks/index.md#several-api-servers."""
