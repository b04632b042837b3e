"""Our changes in vLLM's engine core, where the scheduler runs."""
