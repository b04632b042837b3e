"""The HTTP API for operators, and the rights of callers."""
