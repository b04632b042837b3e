"""What stands in the API server's process: the gate."""
