"""Small adapters for SmolLM2-135M-Instruct, trained here in a minute each; `python -m examples.training NAME …`."""
