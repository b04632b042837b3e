"""Brings an adapter's tensors into the form in which the engine's model has its modules.

`conversion_plan.py` plans the conversion from the header alone, by rules: `fused.py`, `experts.py`; `writing.py` writes
the result.
"""
