"""The names of one API server, as vLLM's own table has them."""

from __future__ import annotations

import itertools
from pathlib import Path

from lora_plugins.adapter.names import adapter_id
from lora_plugins.lifecycle.registry import Registry
from lora_plugins.store.blocked_names import Blocks
from lora_plugins.store.layout import Layout
from tests.lifecycle.world import NameTable, Request, Version


def test_the_registry_follows_vllms_table(tmp_path: Path) -> None:
    table, versions = NameTable(), {"sql": Version("aa")}
    registry = Registry(table, versions.get, Blocks(Layout(tmp_path)))
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


def test_two_names_never_have_one_id(tmp_path: Path) -> None:
    seen: dict[int, str] = {}
    names = (f"adapter-{number}" for number in itertools.count())
    second = next(name for name in names if seen.setdefault(adapter_id(name), name) != name)
    first = seen[adapter_id(second)]
    registry = Registry(NameTable(), {}.get, Blocks(Layout(tmp_path)))
    ids = [registry.adapter_id(name) for name in (first, second, "sql", first, second)]
    assert ids[0] == adapter_id(first) == adapter_id(second)
    assert len({*ids}) == 3
    assert ids[:2] == ids[3:]
    assert all(1 <= number < 2**31 for number in ids)
