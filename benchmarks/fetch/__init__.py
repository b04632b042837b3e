"""The figures of docs/benchmarks/fetch.md and index.md#fetching."""
