"""Policies that choose a replica for each request of an adapter, in memory and without I/O."""
