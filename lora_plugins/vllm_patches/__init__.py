"""What is changed in vLLM, a file for each object that is; the symbols stand in `lora_plugins.vllm_patches.ledger`."""
