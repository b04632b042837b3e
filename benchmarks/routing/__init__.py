"""The figures of docs/guides/routing.md."""
