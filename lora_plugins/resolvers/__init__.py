"""Sources of adapters, and the resolver that asks the sources in order."""
