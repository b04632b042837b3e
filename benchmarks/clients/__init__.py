"""Programs that ask servers like OpenAI's, unchanged, on one `vllm serve` with our plugins: `make test-clients`."""
