"""Which replica a request for an adapter goes to: the policies, in memory and without I/O."""
