"""Texts for clients about broken adapters and broken places: no path of the server, wherever it lies."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lora_plugins.process import Process
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.settings import BaseMatch, Settings
from lora_plugins.vllm_patches.api_server.lora_resolver import LoRAPluginsResolver
from tests.e2e.broken import BROKEN, break_all
from tests.make import BASE, adapter_files, put

SERVED = {"no-such-layer", "half-of-another-model", "wrong-shapes", "wrong-rank"}  # these need a larger adapter


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "a secret" / "place.d"
    break_all(put(tmp_path / "good", adapter_files()), home / "adapters")
    return home


def texts(home: Path, name: str, **settings: object) -> tuple[str, str]:
    """What the client is told, and what the log has."""
    process = Process(Settings(store_dir=home / "store", **settings))
    process.add_source(FilesystemSource(home / "adapters"))
    process.resolver.base = replace(BASE, path=str(home / "base model"))
    logged: list[str] = []
    process.events.add(lambda event: logged.append(str(getattr(event, "error", ""))))
    with pytest.raises(Exception, match="L00") as caught:
        asyncio.run(LoRAPluginsResolver(process).resolve_lora(BASE.path, name))
    return str(getattr(caught.value, "detail", caught.value)), "".join(logged)


@pytest.mark.parametrize("case", [case for case in BROKEN if case.name not in SERVED], ids=lambda case: case.name)
@pytest.mark.parametrize("mode", [BaseMatch.COMPATIBLE, BaseMatch.STRICT])
def test_no_text_of_a_broken_adapter_shows_a_path(home, case, mode):
    told, _ = texts(home, case.name, base_match=mode)
    assert f"adapter '{case.name}'" in told
    assert "secret" not in told
    assert "place.d" not in told


def test_the_base_model_is_called_by_its_served_name(home):
    put(home / "adapters" / "other", adapter_files(base_model_name_or_path="/train/secret/x"))
    told, logged = texts(home, "other", base_match=BaseMatch.STRICT)
    assert "found base model '<path>'; expected '<path>' or tiny" in told
    assert f"'{home}/base model'" in logged


def test_a_missing_root_is_named_in_the_log_only(home):
    (home / "adapters").rename(home / "away")
    told, logged = texts(home, "sql")
    assert "[L006] adapter 'sql': found no directory at '<path>'" in told
    assert f"no directory at '{home}/adapters'" in logged
