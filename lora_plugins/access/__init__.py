"""Which API key may use which adapters, and how a request meets that."""
