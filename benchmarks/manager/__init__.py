"""The adapter manager against vLLM's own: stalls, thrashing, activation, memory; `python -m benchmarks.manager`."""
