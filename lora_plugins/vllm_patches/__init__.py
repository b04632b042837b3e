"""Our changes in vLLM: a folder for each process, a file for each object, with the symbols in its `LEDGER`."""
