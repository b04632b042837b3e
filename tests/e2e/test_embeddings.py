"""The embeddings route of a pooling server resolves unknown names too, and its vectors are PEFT's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from lora_plugins.server.response import HEADER
from testbed.bed import Bed
from testbed.client import connect
from testbed.models import PROMPT
from testbed.reference import Reference
from tests.e2e.digests import of_files
from tests.e2e.servers import RESOLVER, lora_server


@pytest.fixture(scope="module")
def client(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    home = tmp_path_factory.mktemp("pooling")
    arguments = ("--runner", "pooling", "--convert", "embed")
    root = str(bed.adapters)
    with lora_server(bed, home, *arguments, plugins=[RESOLVER], VLLM_LORA_RESOLVER_CACHE_DIR=root) as server:
        yield connect(server)


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
