"""Our changes in vLLM's workers, which hold the tensors."""
