"""Our changes in vLLM's API server, and in its offline engine."""
