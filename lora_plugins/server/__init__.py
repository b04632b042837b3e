"""What stands in the API server's process: what is served, swapped and unloaded, and the way to the planners."""
