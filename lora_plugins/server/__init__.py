"""What stands in the API server's process: the gate, and what is served, swapped and unloaded."""
