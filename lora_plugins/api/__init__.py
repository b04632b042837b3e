"""The HTTP API for operators, and who may use what."""
