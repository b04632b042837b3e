"""How RL frameworks hand adapters to vLLM, each form in our own words; docs/explanation/frameworks.md says whose it is.

    VLLM_PLUGINS= python -P -m testbed.frameworks [WORD ...]
    VLLM_PLUGINS=lora_lru_manager,lora_kernels python -P -m testbed.frameworks [WORD ...]

runs the forms whose names contain one of the words, or all, on vLLM alone and with our plugins, and prints a line of
JSON for each: what the calls returned, and whose answers came, the ones that PEFT gives for each version deciding.
"""
