"""The scheduler's half: which adapter is loaded, which has a slot, and which requests may run; no vLLM, no torch."""
