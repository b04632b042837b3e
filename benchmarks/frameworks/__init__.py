"""RL frameworks' own programs against `vllm serve`: modules from the package index, none of their calls changed."""
