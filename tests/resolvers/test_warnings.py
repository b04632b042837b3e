"""A warning about an adapter's base model: from its verification to the log, the list of adapters and the answers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from lora_plugins.events import AdapterResolved, Events
from lora_plugins.observability.logs import LogEvents
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.settings import Settings
from lora_plugins.store.store import open_store
from tests.make import BASE, adapter_files, put

SERVED, OTHER = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-Coder-7B"
SAID = f"trained on {OTHER}, served on {SERVED}: another name (coder, not plain)"


def test_a_warning_is_kept_with_the_version(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "root" / "coder", adapter_files(base_model_name_or_path=OTHER))
    put(tmp_path / "root" / "same", adapter_files(base_model_name_or_path="unsloth/qwen2.5-7b-bnb-4bit"))
    settings = Settings(store_dir=tmp_path / "store", refresh_s=0)
    seen: list[AdapterResolved] = []
    events = Events(LogEvents(), lambda event: seen.append(event) if isinstance(event, AdapterResolved) else None)

    async def resolve() -> None:
        for _ in range(2):  # the second time as after a restart, out of the store
            resolver = AdapterResolver(settings, events, open_store(settings))
            resolver.base = replace(BASE, path=SERVED)
            resolver.add(FilesystemSource(tmp_path / "root"))
            warned, same = [await resolver.resolve(name, SERVED) for name in ("coder", "same")]
            assert warned is not None
            assert same is not None
            assert (warned.warnings, same.warnings) == ((SAID,), ())
            assert (resolver.known.warnings_of(warned.digest), resolver.known.warnings_of(same.digest)) == ((SAID,), ())
            again = await resolver.of_digest("coder", warned.digest)
            assert again is not None
            assert again.warnings == (SAID,)

    asyncio.run(resolve())
    assert [event.warnings for event in seen] == [(SAID,), ()] * 2
    lines = [record for record in logged.records if SAID in record.message]
    assert [record.levelno for record in lines] == [logging.WARNING, logging.DEBUG], "once for a version"
    assert lines[0].message.startswith("Adapter 'coder' (")
    assert not any("every shape fits" in record.message and "coder" in record.message for record in logged.records)
