"""What is changed in vLLM's engine core, where the scheduler runs."""
