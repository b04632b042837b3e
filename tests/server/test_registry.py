"""The names of one API server, as vLLM's own table has them."""

from __future__ import annotations

import itertools

from lora_plugins.adapter.names import adapter_id
from lora_plugins.server.registry import Registry
from tests.server.world import NameTable, Request, Version


def test_the_registry_follows_vllms_table() -> None:
    table, versions = NameTable(), {"sql": Version("aa")}
    registry = Registry(table, versions.get)
    table.lora_requests["sql"] = Request("sql", 1, "/store/aa")
    first = registry.get("sql")
    assert first is not None
    assert first.version == Version("aa")
    assert registry.get("sql") is first
    table.lora_requests["sql"] = Request("sql", 2, "/by/hand")
    second = registry.get("sql")
    assert second is not None
    assert (second.version, second is first) == (None, False)
    del table.lora_requests["sql"]
    assert (registry.get("sql"), registry.all()) == (None, [])


def test_two_names_never_have_one_id() -> None:
    seen: dict[int, str] = {}
    names = (f"adapter-{number}" for number in itertools.count())
    second = next(name for name in names if seen.setdefault(adapter_id(name), name) != name)
    first = seen[adapter_id(second)]
    registry = Registry(NameTable(), {}.get)
    ids = [registry.adapter_id(name) for name in (first, second, "sql", first, second)]
    assert ids[0] == adapter_id(first) == adapter_id(second)
    assert len({*ids}) == 3
    assert ids[:2] == ids[3:]
    assert all(1 <= number < 2**31 for number in ids)
