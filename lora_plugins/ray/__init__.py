"""Several replicas of `vllm serve` with our plugins behind one address, on Ray Serve (docs/guides/routing.md)."""
