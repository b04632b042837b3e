"""Two real `vllm serve` on real Ray: answers are PEFT's, before and after one of them is killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.models import PROMPT
from testbed.server import SMALL_ENGINE
from tests.ray.conftest import App, Cluster, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
KEY = "secret"


@pytest.fixture(scope="module")
def bed() -> Bed:
    return prepare()


@pytest.fixture(scope="module")
def app(cluster: Cluster, bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    from ray import serve

    from lora_plugins.ray.application import Options, build

    home = tmp_path_factory.mktemp("real")
    shutil.copytree(bed.adapters, home / "adapters")
    lora = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "4")
    options = Options(
        arguments=[str(bed.base), *SMALL_ENGINE, "--served-model-name", "base", *lora],
        env={
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_PLUGINS": "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(home / "adapters"),
            "LORA_PLUGINS_STORE_DIR": str(home / "store"),
            "LORA_PLUGINS_ADMIN_KEY": KEY,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        replicas=2,
        resources={"num_cpus": 1},
    )
    serve.run(build(options), name="lora-plugins", route_prefix="/")
    yield App(cluster.url, Path(), options)
    serve.delete("lora-plugins")


def answers(app: App, bed: Bed) -> dict[str, tuple[list[int], str]]:
    """The token ids for each adapter and the base model, and which replica answered."""
    found = {}
    for name in bed.answers:
        raw = app.client().completions.with_raw_response.create(
            model=name or "base",
            prompt=PROMPT,
            max_tokens=MAX_TOKENS,
            temperature=0,
            timeout=240,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        replica = raw.headers["x-lora-plugins-replica"]
        found[name] = list(raw.parse().choices[0].token_ids), replica
    return found


def test_answers_are_those_of_peft_and_adapters_stay(app: App, bed: Bed) -> None:
    first = answers(app, bed)
    assert {name: ids for name, (ids, _) in first.items()} == bed.answers
    again = answers(app, bed)
    assert {name: it for name, it in again.items() if name} == {name: it for name, it in first.items() if name}


def test_every_replica_says_what_it_serves(app: App, bed: Bed) -> None:
    answers(app, bed)
    headers = {"Authorization": f"Bearer {KEY}"}
    listed = httpx.get(f"{app.url}/v1/loras", headers=headers, timeout=60).json()["replicas"]
    assert {row["replica"] for row in listed} == set(app.replicas())
    served = {view["lora_name"] for row in listed for view in row["body"]["loras"]}
    assert served == {name for name in bed.answers if name}
    assert httpx.get(f"{app.url}/v1/loras", timeout=60).status_code in {401, 403}


def test_unknown_name_is_refused_as_by_one_server(app: App) -> None:
    with pytest.raises(openai.NotFoundError):
        app.client().completions.create(model="nobody", prompt=PROMPT)


def test_answers_are_right_while_a_replica_is_replaced(app: App, bed: Bed) -> None:
    before = app.replicas()
    os.kill(next(iter(before.values())), signal.SIGKILL)
    assert {name: ids for name, (ids, _) in answers(app, bed).items()} == bed.answers
    wait_for(lambda: len(app.replicas()) == 2, 600)
    assert {name: ids for name, (ids, _) in answers(app, bed).items()} == bed.answers
