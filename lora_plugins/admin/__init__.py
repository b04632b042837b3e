"""The admin API: what is served, over HTTP."""
