"""Our changes in vLLM: a folder for each process, a file for each object. Docstrings say why, and until when."""
