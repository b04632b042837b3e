"""Each answer says the digest of its adapter version where resolvers run alone, beside fingerprints that are vLLM's."""

from __future__ import annotations

import openai
import pytest

from lora_plugins.server.response import HEADER
from testbed.models import PROMPT
from tests.e2e.conftest import World
from tests.e2e.digests import EVERY_WAY, of_files, seen_by


@EVERY_WAY
def test_resolvers_alone_say_it_beside_vllms_fingerprint(world: World, route: str, stream: bool) -> None:
    header, fingerprints = seen_by(world.client, route, "sql", stream=stream)
    assert header == of_files(world.root / "sql")
    if route != "responses":
        assert str(fingerprints[-1]).startswith("vllm-")
        assert set(fingerprints[:-1]) <= {None, fingerprints[-1]}, "no stream has two fingerprints"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_say_no_digest(world: World, stream: bool) -> None:
    ask = world.client.completions.create
    assert seen_by(world.client, "completions", "sql", stream=False)[0], "it is served"
    refused = {}
    for model, prompt in (("nobody/has-this", PROMPT), ("truncated", PROMPT), ("sql", "word " * 1000)):
        with pytest.raises(openai.APIStatusError) as caught:
            ask(model=model, prompt=prompt, max_tokens=4, stream=stream)
        assert HEADER not in caught.value.response.headers
        refused[model] = caught.value.status_code
    assert refused == {"nobody/has-this": 404, "truncated": 400, "sql": 400}


def test_an_adapter_loaded_by_its_path_says_none(world: World) -> None:
    assert seen_by(world.client, "completions", "static", stream=True)[0] is None
