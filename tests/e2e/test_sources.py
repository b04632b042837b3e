"""Adapters from S3 and the Hub answer as PEFT does; an outage is an outage and never a 404."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest

from testbed.bed import MAX_TOKENS
from testbed.client import complete
from testbed.models import PROMPT
from tests.e2e.conftest import World
from tests.e2e.digests import CHAT
from tests.e2e.standing_still import LONGEST_S


@contextmanager
def s3_outage(world: World) -> Iterator[None]:
    world.s3_proxy.refuse(True)
    try:
        yield
    finally:
        world.s3_proxy.refuse(False)


def test_cold_adapters_are_listed_in_spite_of_an_outage(world: World) -> None:
    def listed() -> set[str]:
        return {card["id"] for card in httpx.get(f"{world.server.url}/v1/models", timeout=60).json()["data"]}

    cold = {"team/poet", "deep/er/cloud"}  # of the directory, and of S3
    assert cold <= listed()
    with s3_outage(world):
        time.sleep(2)
        assert cold <= listed()


def test_models_have_cards_before_and_after_their_first_request(world: World) -> None:
    base = world.client.models.retrieve(world.base)
    for name in ("static", "deep/er/cloud", "acme/poet@v1"):
        card = world.client.models.retrieve(name)
        assert (card.id, card.parent, card.max_model_len) == (name, world.base, base.max_model_len)  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="The model `nobody/has-this` does not exist"):
        world.client.models.retrieve("nobody/has-this")
    cards = {card.id: card for card in world.client.models.list()}
    assert {card.max_model_len for card in cards.values()} == {base.max_model_len}  # type: ignore[attr-defined]
    assert cards["static"].root == world.client.models.retrieve("static").root  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("cloud", "chat"),
        ("deep/er/cloud", "chat"),
        ("acme/poet", "wide"),
        ("acme/poet@v1", "team/poet"),
        ("acme/many/a/b", "chat"),
    ],
)
def test_remote_adapter_equals_peft(world: World, name: str, same_as: str) -> None:
    answer = complete(world.client, name, PROMPT, MAX_TOKENS)
    assert answer.status == 200, answer.error
    assert list(answer.token_ids) == world.bed.answers[same_as]


def test_first_source_that_has_it_wins(world: World) -> None:
    answer = complete(world.client, "shared", PROMPT, MAX_TOKENS)
    assert list(answer.token_ids) == world.bed.answers["sql"]  # the filesystem's; S3 has another under this name


def test_order_of_sources_is_logged(world: World) -> None:
    (line,) = (line for line in world.server.log().splitlines() if "resolves unknown model names from" in line)
    assert line.index("filesystem (") < line.index("s3 (") < line.index("hub (")


def test_local_path_template_links_to_what_the_engine_reads(world: World) -> None:
    assert complete(world.client, "cloud", PROMPT, 1).status == 200
    link = world.store.parent / "links" / "cloud"
    assert link.is_symlink()
    roots = {card.id: card.root for card in world.client.models.list()}
    assert str(link.resolve()) == roots["cloud"]


@pytest.mark.parametrize(
    ("name", "status", "texts"),
    [
        ("cloud-truncated", 400, ("L005", "adapter_model.safetensors", "bytes")),
        ("cloud-no-weights", 404, ("L002", "adapter_model.safetensors")),
        ("acme/nobody", 404, ("does not exist",)),
        ("other-org/repo", 404, ("does not exist",)),
        ("team/peot", 404, ("L002", "a name like 'team/poet'")),
    ],
)
def test_remote_refusal_has_its_reason(world: World, name: str, status: int, texts: tuple[str, ...]) -> None:
    answer = complete(world.client, name, PROMPT, 1)
    assert answer.status == status, answer.error
    for text in texts:
        assert text in answer.error


def test_an_outage_is_503_with_retry_after_until_it_ends(world: World) -> None:
    body = {"model": "late", "prompt": PROMPT, "max_tokens": 1}

    message = {"model": "late", "max_tokens": 1, "messages": CHAT}

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=world.server.url, timeout=LONGEST_S) as client:
            asked = [client.post("/v1/completions", json=body) for _ in range(40)]
            asked += [client.post(path, json=message) for path in ("/v1/messages", "/v1/messages/count_tokens")]
            return await asyncio.gather(*asked)

    with s3_outage(world):
        answers = asyncio.run(crowd())
    took_s = [one.elapsed.total_seconds() for one in answers]
    assert max(took_s) < min(took_s) + 2, "none waits for the outage behind another"
    answer = answers[0]
    assert {one.status_code for one in answers} == {503}, answer.text
    time.sleep(max(int(one.headers["Retry-After"]) for one in answers))
    assert all("L006" in one.text for one in answers)
    assert all(place not in answer.text for place in ("s3:", world.s3_proxy.url))
    place = f"at s3://{world.bucket.name}/loras/late/ on {world.s3_proxy.url}; expected"
    failed = [
        line for line in world.server.log().splitlines() if "Source did not answer (s3)" in line and place in line
    ]
    assert failed
    assert list(complete(world.client, "late", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["chat"]


def test_outage_does_not_hide_what_others_have(world: World) -> None:
    shutil.copytree(world.bed.adapters / "sql", world.root / "outage-proof")
    with s3_outage(world):
        for name, same_as in (("outage-proof", "sql"), ("acme/poet@main", "wide")):
            answer = complete(world.client, name, PROMPT, MAX_TOKENS)
            assert list(answer.token_ids) == world.bed.answers[same_as], answer.error


def test_deleted_and_overwritten_directory_changes_nothing(world: World) -> None:
    directory = world.root / "vanishing"
    assert list(complete(world.client, "vanishing", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["sql"]
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    _crowd_out_of_the_host_cache(world)
    assert list(complete(world.client, "vanishing", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["sql"]
    shutil.rmtree(directory)
    _crowd_out_of_the_host_cache(world)
    assert list(complete(world.client, "vanishing", PROMPT, MAX_TOKENS).token_ids) == world.bed.answers["sql"]


def _crowd_out_of_the_host_cache(world: World) -> None:
    """More adapters than `--max-cpu-loras`, so that vLLM reads the next one from its path again."""
    for number in range(9):
        name = f"crowd-{number}"
        if not (world.root / name).exists():
            shutil.copytree(world.bed.adapters / "sql", world.root / name)
        assert complete(world.client, name, PROMPT, 1).status == 200
