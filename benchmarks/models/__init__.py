"""The figures of docs/reference/models.md."""
