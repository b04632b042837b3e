"""Adapters by the path that a call of vLLM's own names: copied as they are now, verified, without an allow-list."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter, LoRAPluginsError
from lora_plugins.resolvers.sources.uri import is_by_path, place_by_path
from lora_plugins.settings import BaseMatch
from tests.adapter.test_deliberate_refusals import CASES
from tests.make import BASE, adapter_files, put
from tests.resolvers.fakes import RecordingResolver
from tests.resolvers.sources.contract import content

NAME = " /any name\n@ at all "


def take(resolver: RecordingResolver, path: Path | str, holder: object = None) -> Any:
    return asyncio.run(resolver.snapshot(NAME, str(path), BASE.path, holder))


@pytest.fixture
def resolver(make) -> RecordingResolver:
    return make()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return put(tmp_path / "a directory, @ any\\ name%41 ", adapter_files())


def test_a_directory_is_copied_and_leased(resolver: RecordingResolver, directory: Path) -> None:
    taken = take(resolver, directory)
    assert content(taken.path) == adapter_files()
    assert (taken.name, taken.source, taken.uri) == (NAME, "filesystem", directory.as_uri())
    assert resolver.store.leases.is_held(taken.digest, NAME)
    inodes = {(directory / file).stat().st_ino for file in adapter_files()}
    assert not inodes & {(taken.path / file).stat().st_ino for file in adapter_files()}
    with (directory / WEIGHTS_FILE).open("r+b") as file:
        file.write(b"written in place")
    shutil.rmtree(directory)
    assert content(taken.path) == adapter_files()


def test_each_time_it_is_what_lies_there_now(resolver: RecordingResolver, directory: Path) -> None:
    first = take(resolver, directory)
    put(directory, adapter_files(lora_alpha=9))
    second = take(resolver, directory)
    assert first.digest != second.digest
    assert asyncio.run(resolver.latest(NAME, str(directory), BASE.path)).digest == second.digest
    assert asyncio.run(resolver.of_digest(NAME, first.digest)).digest == first.digest


def test_symlinks_are_followed_wherever_they_lead(resolver: RecordingResolver, tmp_path: Path, directory: Path) -> None:
    """As in the Hub's cache, and `latest` beside checkpoints."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in adapter_files():
        (snapshot / file).symlink_to(directory / file)
    (tmp_path / "latest").symlink_to(snapshot)
    taken = take(resolver, tmp_path / "latest")
    assert content(taken.path) == adapter_files()
    assert not any((taken.path / file).is_symlink() for file in adapter_files())


@pytest.mark.parametrize("path", ["/not/there", "/", "/etc/passwd", "/dev/null/x", "no\0path"])
def test_where_no_adapter_lies_the_answer_is_none(resolver: RecordingResolver, path: str) -> None:
    assert take(resolver, path) is None
    assert resolver.emitted == [], "the workers may have it"


def test_a_uri_of_the_path_is_not_allowed_by_it(resolver: RecordingResolver, directory: Path) -> None:
    take(resolver, directory)
    for uri in (str(directory), directory.as_uri(), f"path://{directory}", "path:///"):
        with pytest.raises(InvalidAdapter):
            asyncio.run(resolver.resolve("sql", BASE.path, uri))


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"symlinks"}))
def test_what_is_refused_by_name_is_refused_by_path(make, tmp_path: Path, case: str) -> None:
    files, settings = CASES[case](tmp_path)
    path = put(tmp_path / "adapter", files)
    with pytest.raises(LoRAPluginsError) as refused:
        take(make(**settings), path)
    assert refused.value.http_status == 400
    assert refused.value.adapter == NAME


@pytest.mark.parametrize("described", [True, False])
def test_where_only_workers_can_compare_names_do_not_count(make, directory: Path, described: bool) -> None:
    put(directory, adapter_files(base_model_name_or_path="another/name"))
    for mode in BaseMatch:
        resolver = make(base_match=mode)
        if not described:
            resolver.base = None
        if mode is BaseMatch.STRICT:
            with pytest.raises(IncompatibleAdapter, match="another/name"):
                take(resolver, directory)
        else:
            assert take(resolver, directory)


def test_ranks_are_compared_where_the_engine_was_asked(resolver: RecordingResolver, directory: Path) -> None:
    resolver.base = replace(BASE, max_rank=2)
    with pytest.raises(IncompatibleAdapter, match="rank 4"):
        take(resolver, directory)


def test_a_lease_is_its_holders(resolver: RecordingResolver, directory: Path) -> None:
    leases, one, other = resolver.store.leases, object(), object()
    first, second = take(resolver, directory, one), take(resolver, directory, other)
    assert first.digest == second.digest
    resolver.store.release(first.holder, first.path)
    assert [leases.is_held(first.digest, who) for who in (one, other, NAME)] == [False, True, False]
    resolver.store.release(second.holder, second.path)
    assert not leases.is_held(first.digest, other)


def test_a_configuration_alone_is_no_adapter(resolver: RecordingResolver, directory: Path) -> None:
    (directory / WEIGHTS_FILE).unlink()
    with pytest.raises(LoRAPluginsError, match="L002"):
        take(resolver, directory)
    (directory / CONFIG_FILE).unlink()
    assert take(resolver, directory) is None


def test_paths_are_those_that_vllm_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert place_by_path("~/sql") == "/home/me/sql"
    assert place_by_path("adapters/sql") == "adapters/sql", "on the Hub"
    (tmp_path / "adapters" / "sql").mkdir(parents=True)
    assert place_by_path("adapters/sql") == os.path.join(os.getcwd(), "adapters/sql")
    assert place_by_path("/adapters/../sql") == "/adapters/../sql"
    assert [is_by_path(place) for place in ("/a", "/a://b", "org/a", "hf://org/a", None)] == [
        *[True] * 3,
        *[False] * 2,
    ]
