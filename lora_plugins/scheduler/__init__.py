"""The scheduler's half: which adapter is loaded, has a slot, and runs requests; no vLLM, no torch."""
