"""Sources of adapters, and the chain that asks them in order."""
