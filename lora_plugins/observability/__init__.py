"""Logs and metrics: hooks on events, and what the engines count."""
