"""Which API key may use which adapters."""
