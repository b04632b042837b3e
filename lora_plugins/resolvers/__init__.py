"""Sources of adapters, and the resolver that asks them in order."""
