"""The adapter manager against vLLM's own: admission, stalls, activation, memory; `python -m benchmarks.manager`."""
