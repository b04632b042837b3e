"""Logs and metrics: hooks on events, and the engines' counts."""
