"""The adapter that PEFT makes of a mixture, to compare a server's answers with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from testbed.reference import Reference


def mixed_by_peft(reference: Reference, parts: Mapping[Path, float], target: Path) -> Path:
    """Save the sum of adapters, by their directories and with their weights, by `add_weighted_adapter` with `cat`."""
    first, *others = parts
    model = reference.load(first)
    for other in others:
        model.load_adapter(str(other), adapter_name=f"part{len(model.peft_config)}")  # PEFT takes "1" for a layer
    names = list(model.peft_config)
    model.add_weighted_adapter(names, list(parts.values()), "mixture", combination_type="cat")
    model.set_adapter("mixture")
    model.save_pretrained(str(target), selected_adapters=["mixture"])
    return target / "mixture"
