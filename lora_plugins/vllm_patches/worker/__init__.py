"""What is changed in vLLM's workers, which hold the tensors."""
