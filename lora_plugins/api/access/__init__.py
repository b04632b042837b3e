"""The adapters that each API key may use."""
