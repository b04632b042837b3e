"""What is changed in vLLM's API server, and in its offline engine."""
