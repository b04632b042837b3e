"""What a server with this environment would do: what is on, what is off, and why; nothing is changed by looking."""
