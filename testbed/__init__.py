"""What tests, demo and benchmarks share: tiny models, a real server, reference answers. Not shipped."""
