"""Which requests a fault has hit, for whom, and that a copy of the product has the mistake of a control."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.soak.causes import AFTER_S, Causes
from benchmarks.soak.mutants import _PACKAGE, MUTANTS
from benchmarks.soak.source_faults import Hits, named
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


@pytest.mark.parametrize("name", MUTANTS)
def test_each_control_finds_what_it_breaks(name: str) -> None:
    mutant = MUTANTS[name]
    assert (_PACKAGE / mutant.file).read_text().count(mutant.old) == 1
