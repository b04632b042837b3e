"""Which requests a fault has hit, and for whom; which bits change."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from soak.bank import WEIGHTS
from soak.mutants import MUTANTS, mutated
from soak.oracle import AFTER_S, Causes
from soak.source_faults import Hits, named
from soak.store_faults import damage
from testbed.proxy import Request


@pytest.mark.parametrize(
    ("source", "path", "query", "name"),
    [
        ("s3", "/adapters", "list-type=2&prefix=loras%2Fs003%2F&delimiter=%2F", "s003"),
        ("s3", "/adapters", "list-type=2&prefix=loras%2Facme%2Fprobe-1%2F", "acme/probe-1"),
        ("s3", "/adapters/loras/team-1/f003/adapter_model.safetensors", "", "team-1/f003"),
        ("s3", "/adapters/uris/u003/adapter_config.json", "versionId=7", "u003"),
        ("s3", "/adapters", "location", None),
        ("hub", "/api/models/acme/h003", "blobs=true", "acme/h003"),
        ("hub", "/api/models/acme/h003/revision/main", "blobs=true", "acme/h003"),
        ("hub", "/acme/h003/resolve/0123/adapter_config.json", "", "acme/h003"),
        ("hub", "/other/u004/resolve/0123/adapter_config.json", "", "u004"),
        ("hub", "/api/models/other/u004/revision/main", "", "u004"),
        ("hub", "/api/models", "author=acme", None),
    ],
)
def test_a_request_says_for_whom_it_is(source: str, path: str, query: str, name: str | None) -> None:
    assert named(source, Request("GET", path, query, {}, None)) == name


def test_a_hit_explains_until_a_while_after_its_end() -> None:
    requests = [Request("GET", "/adapters/loras/s003/adapter_config.json", "", {}, None, began=5)]
    proxy = SimpleNamespace(requests=lambda: requests, forget=requests.clear)
    causes = Causes()
    hits = Hits("s3", proxy, SimpleNamespace(oracle=SimpleNamespace(causes=causes)))
    refusal = ((503, "L006"), "[L006] it fails")

    def explained(began: float, whom: str = "s003") -> bool:
        return causes.explaining([whom], *refusal, began, began + 1) is not None

    assert not explained(6), "no fault has hit it"
    requests[0].fault = "stall"
    assert explained(6)
    assert explained(600), "it goes on"
    assert not explained(6, "s004")
    hits.forget()
    assert requests, "it goes on"
    requests[0].ended = 7
    assert explained(7 + AFTER_S)
    assert not explained(7.1 + AFTER_S)
    hits.forget()
    assert not requests
    assert explained(7 + AFTER_S), "causes stay"


def test_one_bit_of_what_the_source_has_is_flipped(tmp_path: Path) -> None:
    """As a disk does it: size and time stay. What is held, or no longer at its source, is left alone."""
    names = [SimpleNamespace(name=f"n{i}", adapter=i, current=None if i == 1 else 0, is_held=i == 2) for i in range(3)]
    bank = SimpleNamespace(versions_by_digest={f"d{i}": (i, 0) for i in range(3)})
    for i in range(3):
        path = tmp_path / f"d{i}" / WEIGHTS
        path.parent.mkdir()
        path.write_bytes(bytes(100))
        os.utime(path, (5, 5))
    assert damage(tmp_path, SimpleNamespace(names=names, bank=bank), random.Random(1)) == ["n0"]
    after = [(tmp_path / f"d{i}" / WEIGHTS).read_bytes() for i in range(3)]
    assert [sum(byte.bit_count() for byte in data) for data in after] == [1, 0, 0]
    assert (tmp_path / "d0" / WEIGHTS).stat().st_mtime == 5


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mistake_fits_the_present_product(name: str, tmp_path: Path) -> None:
    assert MUTANTS[name].new in (mutated(name, tmp_path) / "lora_plugins" / MUTANTS[name].file).read_text()
