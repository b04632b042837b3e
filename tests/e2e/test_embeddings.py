"""The embeddings route of a pooling server resolves unknown names too, and its vectors are PEFT's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from lora_plugins.lifecycle.response import HEADER
from testbed.bed import Bed
from testbed.client import connect
from testbed.models import PROMPT
from testbed.reference import Reference
from testbed.server import Server
from tests.e2e.digests import of_files
from tests.e2e.servers import RESOLVER, lora_server
from tests.e2e.test_tokens_by_adapter import counted, of_usage, settled


@pytest.fixture(scope="module")
def server(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("pooling")
    arguments = ("--runner", "pooling", "--convert", "embed")
    root = str(bed.adapters)
    with lora_server(bed, home, *arguments, plugins=[RESOLVER], VLLM_LORA_RESOLVER_CACHE_DIR=root) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return connect(server)


@pytest.mark.deployment("embeddings and pooling", "tested", "without lora_lru_manager")
@pytest.mark.parametrize("name", [None, "sql", "team/poet"])
def test_embedding_equals_peft(client: openai.OpenAI, bed: Bed, name: str | None) -> None:
    expected = vector_of(bed, bed.adapters / name if name else None)
    answer = client.embeddings.create(model=name or str(bed.base), input=PROMPT)
    assert answer.data[0].embedding == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [PROMPT, PROMPT]}),
        ("/pooling", {"input": PROMPT}),
        ("/score", {"text_1": PROMPT, "text_2": "jumps over the lazy dog"}),
        ("/tokenize", {"prompt": PROMPT}),
    ],
)
def test_each_route_says_which_version_answered(
    client: openai.OpenAI, bed: Bed, path: str, body: dict[str, object]
) -> None:
    url = f"{str(client.base_url).removesuffix('/v1/')}{path}"
    answer = httpx.post(url, json={"model": "sql", **body}, timeout=240)
    assert (answer.status_code, answer.headers[HEADER]) == (200, of_files(bed.adapters / "sql")), answer.text
    assert HEADER not in httpx.post(url, json={"model": str(bed.base), **body}, timeout=240).headers


def test_tokens_by_adapter_are_those_of_the_usage(server: Server) -> None:
    before = counted(server)
    body = {"model": "sql", "input": [PROMPT, "the lazy dog"]}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    expected = before + of_usage("sql", answer.json()["usage"])
    assert settled(server, expected) == expected != before


def test_unknown_name_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody/has-this", input=PROMPT)


def vector_of(bed: Bed, adapter: Path | None) -> list[float]:
    """The last token's normed hidden state, as a decoder's last-token pooling has it."""
    import torch

    reference = Reference(bed.base)
    ids = torch.tensor([reference.prompt_ids(PROMPT)])
    with torch.no_grad():
        hidden = reference.load(adapter)(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
    return [float(value) for value in torch.nn.functional.normalize(hidden, dim=0)]
