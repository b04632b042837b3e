"""Read and verify a LoRA adapter as PEFT saves it, without torch and before any engine sees it."""
