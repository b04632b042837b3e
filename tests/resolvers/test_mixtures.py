"""Mixtures in the store: what they compute, their versions, their files for chats, their leases and refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load

from lora_plugins.adapter.chat import TEMPLATE_FILE, TOKENIZER_FILE
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter, SourceUnavailable
from lora_plugins.resolvers import admission
from lora_plugins.resolvers.sources import mixtures
from lora_plugins.resolvers.sources.source import VersionChanged
from tests.make import BASE, adapter_files, config, config_bytes, pair, weights
from tests.resolvers.fakes import FakeSource, RecordingResolver
from tests.resolvers.sources.contract import content
from tests.resolvers.test_versions import leased, newest

SQL, STYLE = adapter_files(), adapter_files(weights(2), r=2, lora_alpha=6)


def products(files: dict[str, bytes]) -> Iterator[tuple[str, np.ndarray]]:
    """The scaled product of each module, by the configuration's one rank, or by the ranks of patterns."""
    settings, tensors = json.loads(files[CONFIG_FILE]), load(files[WEIGHTS_FILE])
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            rank = a.shape[0]
            alpha = rank if settings.get("alpha_pattern") else settings["lora_alpha"]
            yield name, (alpha / rank) * (b.astype(np.float64) @ a.astype(np.float64))


def served(resolver: RecordingResolver, name: str) -> dict[str, bytes]:
    """The files of a mixture, with the configuration that engines read."""
    found = resolver.ask(name)
    return content(found.path) | {CONFIG_FILE: (found.path / CONFIG_FILE).read_bytes()}


def make_source(**more: dict[str, bytes]) -> FakeSource:
    return FakeSource("s3", {"sql": SQL, "style": STYLE, **more})


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_mixture_computes_the_sum_of_its_parts(make, dtype: str) -> None:
    import torch
    from safetensors.torch import save

    few = {name: torch.from_numpy(it).to(getattr(torch, dtype)) for name, it in weights(2).items() if ".v_proj" in name}
    as_64 = {name: tensor.double().numpy() for name, tensor in few.items()}
    rounded = adapter_files(as_64, r=2, lora_alpha=3, target_modules=["v_proj"])
    source = make_source(few={**rounded, WEIGHTS_FILE: save(few)})
    made = dict(products(served(make(source), "sql*0.7+few*-1.5")))
    wanted = {name: 0.7 * value for name, value in products(SQL)}
    for name, value in products(rounded):
        wanted[name] = wanted.get(name, 0) - 1.5 * value
    assert made.keys() == wanted.keys()
    for name, value in made.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_equal_mixtures_are_one_version(make) -> None:
    resolver = make(make_source())
    first, second = resolver.ask("sql*0.7+style*0.3"), resolver.ask("style*0.30+sql*0.700")
    assert (first.name, first.rank, first.source) == ("sql*0.7+style*0.3", 6, "mixture")
    assert first == second
    assert list(first.parts) == ["sql", "style"]
    assert first.parts["sql"] == resolver.ask("sql").digest
    assert resolver.ask("sql*0.5").digest != first.digest


def test_a_new_version_of_a_part_is_a_new_mixture(make) -> None:
    source = make_source()
    resolver = make(source)
    first = resolver.ask("sql*0.7+style*0.3")
    assert newest(resolver, "sql*0.7+style*0.3") == first
    source.answers["style"] = adapter_files(weights(3), r=3, lora_alpha=6)
    resolver.known.disbelieve(("style", ""))
    second = newest(resolver, "sql*0.7+style*0.3")
    assert second.digest != first.digest
    assert second.rank == 7


def test_leases_of_parts_end_with_the_writing(make) -> None:
    resolver = make(make_source())
    resolver.on_abandoned = lambda version: resolver.store.release(version.name, version.path)
    made = resolver.ask("sql*0.7+style*0.3")
    assert leased(resolver, made)
    assert not any(resolver.store.leases.holders(digest) for digest in made.parts.values())


def test_parts_removed_before_the_writing_are_fetched_again(make) -> None:
    source = make_source()
    resolver = make(source)
    resolver.on_abandoned = lambda version: resolver.store.release(version.name, version.path)
    assert asyncio.run(resolver.has("sql*0.5", BASE.path))
    part = resolver.known.last("sql")
    assert resolver.store.remove(part.digest)
    assert resolver.ask("sql*0.5").parts == {"sql": part.digest}
    assert source.fetched == ["sql", "sql"]


def test_served_parts_go_before_those_of_sources(make) -> None:
    resolver = make(make_source())
    style = resolver.ask("style")

    async def served_now(name: str, holder: object):
        return resolver.store.acquire(style.digest, holder) if name == "sql" else None

    resolver.lease_served = served_now
    assert resolver.ask("sql*0.5").parts == {"sql": style.digest}


def test_parts_by_revision_and_digest(make) -> None:
    resolver = make(make_source(**{"sql@v3": STYLE}))
    style, sql = resolver.ask("style"), resolver.ask("sql")
    found = resolver.ask(f"sql@v3*0.5+sql@{sql.digest[:12]}*1")
    assert set(found.parts.values()) == {style.digest, sql.digest}


CHAT = {TEMPLATE_FILE: b"{{ messages }}", TOKENIZER_FILE: b'{"eos_token": "</s>"}'}


@pytest.mark.parametrize(
    ("of_style", "kept"), [(CHAT, CHAT), ({TEMPLATE_FILE: b"other"}, {}), ({}, {})], ids=["same", "other", "none"]
)
def test_files_for_chats_are_those_of_all_parts(make, of_style: dict[str, bytes], kept: dict[str, bytes]) -> None:
    resolver = make(make_source(sql={**SQL, **CHAT}, style={**STYLE, **of_style}))
    found = resolver.ask("sql*0.7+style*0.3")
    assert {name: data for name, data in content(found.path).items() if name in CHAT} == kept
    warned = [text for text in found.warnings if "the base model's template and end tokens are used" in text]
    assert bool(warned) is (kept != CHAT)
    assert resolver.known.warnings_of(found.digest) == found.warnings


def test_a_mixture_warns_as_its_parts(make) -> None:
    instruct = {**STYLE, CONFIG_FILE: config_bytes(r=2, base_model_name_or_path="org/tiny-0.5B-Instruct")}
    resolver = make(make_source(a=instruct, z=instruct))
    resolver.base = replace(BASE, path="org/tiny-0.5B")
    (warning,) = resolver.ask("z").warnings
    assert "org/tiny-0.5B-Instruct" in warning
    for name in ("sql*0.7+z*0.3", "a*0.3+sql*0.7", "a*0.3+z*0.7"):
        assert resolver.ask(name).warnings.count(warning) == 1, name


def test_a_flood_of_mixtures_takes_few_reading_places(make, readings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings of parts are a caller's, and the plan holds up no event loop."""
    resolver, plan, threads = make(make_source()), mixtures.plan_mixture, set()

    def noted(parts: object):
        threads.add(threading.current_thread())
        return plan(parts)

    async def flood() -> None:
        await resolver.resolve("sql", BASE.path)
        readings.most = 0
        monkeypatch.setattr(mixtures, "plan_mixture", noted)
        await asyncio.gather(*(resolver.has(f"sql*0.{number}5", BASE.path) for number in range(40)))

    asyncio.run(flood())
    assert 1 <= readings.most <= admission._FETCHES_OF_ONE
    assert threading.main_thread() not in threads


def test_a_part_that_nobody_has_is_named(make) -> None:
    with pytest.raises(AdapterNotFound, match="no adapter 'nobody', a part of the mixture") as caught:
        make(make_source()).ask("sql*0.7+nobody*0.3")
    assert caught.value.adapter == "nobody*0.3+sql*0.7"


def test_an_outage_of_a_parts_source_is_no_absence(make) -> None:
    with pytest.raises(SourceUnavailable, match="down"):
        make(make_source(style=SourceUnavailable("down"))).ask("sql*0.7+style*0.3")


def test_a_mixture_above_the_limit_names_the_ranks(make) -> None:
    large = adapter_files(weights(14), r=14)
    with pytest.raises(IncompatibleAdapter, match=r"rank 18, the sum of 14 of 'large', 4 of 'sql'.*at most 16"):
        make(make_source(large=large)).ask("sql*0.7+large*0.3")


HEAD = {"base_model.model.score.weight": np.ones((2, 8), np.float32)}
TOKENS = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((1, 8), np.float32)}


@pytest.mark.parametrize(
    ("tensors", "changes", "what"),
    [
        (HEAD, {"modules_to_save": ["score"]}, "a saved head"),
        (TOKENS, {"trainable_token_indices": [3]}, "token_adapter.trainable_tokens_delta"),
        (
            {
                name.replace("lora_B.weight", "lora_magnitude_vector"): np.ones(len(it), np.float32)
                for name, it in weights().items()
                if ".lora_B." in name
            },
            {"use_dora": True},
            "lora_magnitude_vector",
        ),
        (pair("model.layers.0.mlp.experts.0.gate_proj", 4, 8, 8), {}, "experts"),
    ],
)
def test_parts_of_other_kinds_are_refused_by_name(make, tensors, changes, what: str) -> None:
    resolver = make(make_source(other=adapter_files({**weights(), **tensors}, **config(**changes))))
    resolver.base = None
    with pytest.raises(IncompatibleAdapter, match=f"'other' with {what} as a part of a mixture"):
        resolver.ask("sql*0.7+other*0.3")


def test_parts_of_other_models_are_refused(make) -> None:
    wide = {name: np.ones((array.shape[0], 2 * array.shape[1]), np.float32) for name, array in weights().items()}
    narrow = {name: array if ".lora_A." in name else weights()[name] for name, array in wide.items()}
    resolver = make(make_source(other=adapter_files(narrow)))
    resolver.base = None
    with pytest.raises(IncompatibleAdapter, match="parts with other sizes of module"):
        resolver.ask("sql*0.7+other*0.3")


def test_a_sum_that_overflows_is_refused(make) -> None:
    large = {name: np.full_like(array, 20) for name, array in weights().items()}
    with pytest.raises(InvalidAdapter, match=r"numbers up to .* expected at most 65504"):
        make(make_source(large=adapter_files(large))).ask("large*9999")


def test_no_uri_gives_a_mixtures_name_files(make) -> None:
    resolver = make(make_source(), allowed_uris=("file:///adapters",))
    with pytest.raises(InvalidAdapter, match="the name of a mixture"):
        asyncio.run(resolver.resolve("sql*0.5", BASE.path, "file:///adapters/sql"))


def test_a_part_that_always_goes_ends_the_look_up(make) -> None:
    resolver = make(make_source())
    acquire = resolver.store.acquire
    resolver.store.acquire = lambda digest, holder="": None if not isinstance(holder, str) else acquire(digest, holder)
    with pytest.raises((VersionChanged, SourceUnavailable)):
        resolver.ask("sql*0.5")
