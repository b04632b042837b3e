"""What the benchmarks say of a refusal."""

from __future__ import annotations

import tempfile

from benchmarks.models.trainers import shortened


def test_a_refusal_names_the_adapter_without_its_temporary_folder() -> None:
    home = f"{tempfile.gettempdir()}/tmpxv0yqhrr"
    said = f"While loading {home}/adapters/verl, expected modules in {{'up_proj'}} but received {home}/some.other"
    assert shortened(said) == "While loading verl, expected modules in {'up_proj'} but received some.other"
