"""Kernels whose cost follows the adapter's own rank: reference, CPU backend, and the choice between backends."""
