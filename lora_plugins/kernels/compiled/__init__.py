"""The CPU product in C, compiled when the engine starts."""
