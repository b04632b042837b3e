"""An adapter in another layout than the engine's: both forms in the store, the converted one served and leased."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from lora_plugins.adapter.landing import Model
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.events import AdapterFetched, AdapterResolved
from lora_plugins.store.manifest import Manifest
from tests.make import BASE, MODULES, adapter_files, config_bytes, read_name, weights
from tests.resolvers.fakes import FakeSource, RecordingResolver
from tests.resolvers.sources.contract import content
from tests.resolvers.test_versions import leased, newest, of_digest

PLAIN = adapter_files()
NAMED = adapter_files({name.replace(".weight", ".default.weight"): array for name, array in weights().items()})


def manifest(resolved) -> Manifest:
    return Manifest.read(resolved.path)


def original(resolver: RecordingResolver, resolved) -> str:
    return manifest(resolved).converted.original_digest


def test_the_converted_form_is_served_and_says_so(make):
    resolver = make(FakeSource("s3", {"sql": NAMED}))
    resolved = resolver.ask()
    found = manifest(resolved)
    assert found.converted.changes == ("keys renamed (4 modules)",)
    assert (found.uri, found.version) == (resolved.uri, resolved.version)
    kept = resolver.store.layout.adapter(found.converted.original_digest)
    assert content(kept) == NAMED
    assert leased(resolver, resolved)
    assert not resolver.store.leases.holders(kept.name)
    (event,) = [event for event in resolver.emitted if isinstance(event, AdapterResolved)]
    assert "converted into the engine's form: keys renamed (4 modules)" in event.notes
    assert event.path == str(resolved.path)


def test_what_is_in_the_engines_form_is_not_converted(make):
    resolved = make(FakeSource("s3", {"sql": PLAIN})).ask()
    assert manifest(resolved).converted is None
    assert content(resolved.path) == PLAIN


def test_the_original_is_not_fetched_again_for_another_name(make, serving):
    source, resolver = serving("s3", {"sql": NAMED})
    first = resolver.ask()
    assert resolver.store.remove(original(resolver, first))
    resolver.store.release("sql", first.path)
    assert newest(resolver).digest == first.digest
    again = make(source).ask()
    assert again.digest == first.digest
    assert source.fetched == ["sql"]
    assert resolver.kinds.count(AdapterFetched) == 1


def test_another_engine_gets_another_form(make):
    """One store, two servers: what one has converted is no other's, if their modules differ."""
    source = FakeSource("s3", {"sql": NAMED})
    first = make(source).ask()
    other = make(source)
    modules = dataclasses.replace(MODULES, vllm_version="0.33.0")
    other.base = dataclasses.replace(BASE, model=Model(modules, read_name))
    second = other.ask()
    assert second.digest == first.digest, "the same bytes"
    assert source.fetched == ["sql"], "of one original"


def test_a_rollback_finds_both_digests_and_serves_the_converted(serving):
    source, resolver = serving("s3", {"sql": NAMED})
    first = resolver.ask()
    digests = first.digest, original(resolver, first)
    source.answers["sql"] = {**PLAIN, "adapter_config.json": config_bytes(lora_alpha=4)}
    second = newest(resolver)
    assert second.digest not in digests
    for digest in digests:
        back = of_digest(resolver, "sql", digest[:12])
        assert back.digest == first.digest
        assert leased(resolver, back)


def test_what_cannot_be_converted_leaves_no_lease(make):
    resolver = make(FakeSource("s3", {"sql": NAMED}))
    modules = dataclasses.replace(MODULES, places={})
    resolver.base = dataclasses.replace(BASE, model=Model(modules, read_name))
    with pytest.raises(IncompatibleAdapter):
        resolver.ask()
    (digest,) = resolver.store.layout.digests()
    assert not resolver.store.leases.holders(digest)


def test_a_crowd_of_names_converts_once(serving):
    source, resolver = serving("s3", {f"name-{number}": NAMED for number in range(6)})

    async def ask() -> set[str]:
        found = await asyncio.gather(*(resolver.resolve(name, BASE.path) for name in source.answers))
        return {one.digest for one in found}

    assert len(asyncio.run(ask())) == 1
    assert len(resolver.store.layout.digests()) == 2
    assert not list((resolver.store.layout.folder("tmp")).iterdir())
