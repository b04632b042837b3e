"""The parts of the API server's process: served adapters, their changes, and the way to the planners."""
