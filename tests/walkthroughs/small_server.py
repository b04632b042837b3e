"""Servers of pages as tests start them: a tiny Llama on two cores, without a network, on a port of their own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import openai

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete
from testbed.models import PROMPT
from testbed.server import reserved_port
from tests.walkthroughs.conftest import SMALL
from tests.walkthroughs.reader import Reader, Walk, reading

BESIDE = "other servers run beside this one"
PORT = ("127.0.0.1:{port}", BESIDE)


def small(model: str, why: str = "two cores and no network: a tiny Llama") -> dict[str, tuple[str, str]]:
    """The page's server, of the model at `{base}`."""
    return {f"vllm serve {model}": (f"vllm serve {{base}} --host 127.0.0.1 --port {{port}} {SMALL}", why)}


def folder_of_adapters(path: str) -> dict[str, tuple[str, str]]:
    return {f"={path}": ("={adapters}", "a folder of this test")}


@contextmanager
def reads(
    walk: Walk,
    folder: Path,
    base: Path,
    env: Mapping[str, str],
    served: Callable[[str, str], None] = lambda first, url: None,
) -> Iterator[Reader]:
    """As `reading`, on a free port; `served` gets the first line of each server's block, and the URL."""
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        values = {"base": str(base), "port": str(port), "adapters": str(folder / "adapters")}
        with reading(walk, folder, env=env, values=values, url=url, served=lambda first: served(first, url)) as reader:
            yield reader


def put(bed: Bed, root: Path, *names: str) -> None:
    """The same adapter under each name."""
    for name in names:
        shutil.copytree(bed.adapters / "sql", root / name)


def tokens(url: str, name: str, key: str = "none") -> tuple[str, list[int]]:
    """Error and token IDs of an answer."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=240)
    answer = complete(client, name, PROMPT, MAX_TOKENS)
    return answer.error, list(answer.token_ids)
