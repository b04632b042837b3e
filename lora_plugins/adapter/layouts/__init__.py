"""Bring an adapter's tensors into the form in which the engine's model has its modules.

`conversion.py` plans it from the header alone, by rules: `names.py`, `fused.py`, `experts.py`; `writing.py` writes it.
"""
