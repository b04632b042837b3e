"""Adapters of the Hugging Face Hub."""
