"""What adapters cost on a model that writes sentences, SmolLM2-135M-Instruct; `python -m benchmarks.real`."""
