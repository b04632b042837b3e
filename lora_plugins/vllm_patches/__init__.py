"""What is changed in vLLM, a file for each object that is; each names the symbols in its `LEDGER`."""
