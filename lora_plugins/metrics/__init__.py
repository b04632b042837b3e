"""Figures on vLLM's own `/metrics`: a hook on events, and what the engines count."""
