"""LoRA in Triton: chunks of rows per slot, shrink, expand, both fused, and what an H200, H100 or A100 would run."""
