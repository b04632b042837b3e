"""Two real `vllm serve` on real Ray: answers are PEFT's, before and after one of them is killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lora_plugins.lifecycle.response import HEADER
from testbed.bed import MAX_TOKENS, Bed, prepare
from testbed.models import PROMPT, edit_config
from testbed.server import SMALL_ENGINE
from tests.e2e.broken import BROKEN
from tests.e2e.digests import of_files
from tests.e2e.servers import BLOCKS
from tests.ray.conftest import App, Cluster, wait_for

SAID = "names, broken adapters, swaps, pushes, rollbacks, blocks and pauses at two replicas; one is killed"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.deployment("Ray Serve's app", "tested", SAID),
]
KEY = "secret"


@pytest.fixture(scope="module")
def bed() -> Bed:
    return prepare()


@pytest.fixture(scope="module")
def home(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters and the store of both replicas."""
    home = tmp_path_factory.mktemp("real")
    shutil.copytree(bed.adapters, home / "adapters")
    return home


@pytest.fixture(scope="module")
def app(cluster: Cluster, bed: Bed, home: Path) -> Iterator[App]:
    from ray import serve

    from lora_plugins.ray.application import Options, build

    lora = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "4")
    options = Options(
        arguments=[str(bed.base), *SMALL_ENGINE, *BLOCKS, "--served-model-name", "base", *lora],
        env={
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_PLUGINS": "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(home / "adapters"),
            "LORA_PLUGINS_STORE_DIR": str(home / "store"),
            "LORA_PLUGINS_ADMIN_KEY": KEY,
            "LORA_PLUGINS_REFRESH_S": "0",
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


# --- what every front end answers (tests/front_ends), at two replicas that share a store ---


def administered(app: App, method: str, path: str, status: int = 200, **more: Any) -> list[Any]:
    """What each replica says of an administrator's call, all with one status."""
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.request(method, f"{app.url}{path}", headers=headers, timeout=240, **more)
    rows = answer.json()["replicas"]
    assert {row["status"] for row in rows} == {answer.status_code} == {status}, answer.text
    assert len(rows) == 2
    return [row["body"] for row in rows]


def published(home: Path, bed: Bed, name: str, original: str, number: int = 0) -> Path:
    """Put another version in the place of what has this name."""
    fresh, target = home / f"fresh-{name}", home / "adapters" / name
    shutil.copytree(bed.adapters / original, fresh)
    edit_config(fresh, revision=str(number))
    shutil.rmtree(target, ignore_errors=True)
    return fresh.rename(target)


def asked(app: App, name: str, count: int = 12) -> list[httpx.Response]:
    """Answers on new connections, several at once, so that one busy replica is not asked alone."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}

    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{app.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=240)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


def is_served(app: App, bed: Bed, name: str, original: str, digest: str) -> None:
    for answer in asked(app, name):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == bed.answers[original]
        assert answer.headers[HEADER] == digest


def test_a_broken_adapter_is_refused_until_it_is_repaired(app: App, bed: Bed, home: Path) -> None:
    case = next(case for case in BROKEN if case.name == "truncated")
    case.make(published(home, bed, "truncated", "sql"))
    for answer in asked(app, "truncated"):
        assert answer.status_code == case.status
        assert all(text in answer.text for text in case.texts)
    is_served(app, bed, "truncated", "sql", of_files(published(home, bed, "truncated", "sql", 1)))


def test_after_a_swap_every_replica_answers_with_the_new_version(app: App, bed: Bed, home: Path) -> None:
    for number, original in enumerate(["sql", "chat"] * 2):
        digest = of_files(published(home, bed, "swapped", original, number))
        path, body = ("/v1/loras/swapped/refresh", None) if number else ("/v1/loras", {"lora_name": "swapped"})
        assert {view["digest"] for view in administered(app, "POST", path, json=body)} == {digest}
        is_served(app, bed, "swapped", original, digest)


def test_a_push_and_a_rollback_reach_every_replica(app: App, bed: Bed) -> None:
    digests = []
    for original in ("sql", "chat"):
        files = {name: (name, (bed.adapters / original / name).read_bytes())
                 for name in ("adapter_config.json", "adapter_model.safetensors")}  # fmt: skip
        (digest,) = {it["digest"] for it in administered(app, "PUT", "/v1/loras/pushed", files=files)}
        digests.append(digest)
        is_served(app, bed, "pushed", original, digest)
    assert {it["digest"] for it in administered(app, "POST", "/v1/loras/pushed/rollback")} == {digests[0]}
    is_served(app, bed, "pushed", "sql", digests[0])


def test_what_is_blocked_is_blocked_at_every_replica(app: App, bed: Bed, home: Path) -> None:
    digest = of_files(published(home, bed, "gone", "sql", 7))
    administered(app, "POST", "/v1/loras", json={"lora_name": "gone"})
    administered(app, "DELETE", "/v1/loras/gone?block=true")
    for answer in asked(app, "gone"):
        assert (answer.status_code, "blocked" in answer.text) == (404, True), answer.text
    administered(app, "POST", "/v1/loras", json={"lora_name": "gone"})
    is_served(app, bed, "gone", "sql", digest)


def test_a_pause_holds_requests_of_every_replica_until_a_resume(app: App, bed: Bed, home: Path) -> None:
    digest = of_files(published(home, bed, "paused", "sql"))
    administered(app, "POST", "/v1/loras", json={"lora_name": "paused"})
    administered(app, "POST", "/v1/loras/paused/pause?mode=keep")
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(is_served, app, bed, "paused", "sql", digest)
        wait_for(lambda: sum(it["requests_held"] for it in administered(app, "GET", "/v1/loras/paused")) == 12, 240)
        assert not served.done()
        administered(app, "POST", "/v1/loras/paused/resume")
        served.result()


def test_answers_are_right_while_a_replica_is_replaced(app: App, bed: Bed) -> None:
    before = app.replicas()
    os.kill(next(iter(before.values())), signal.SIGKILL)
    assert {name: ids for name, (ids, _) in answers(app, bed).items()} == bed.answers
    wait_for(lambda: len(app.replicas()) == 2, 600)
    assert {name: ids for name, (ids, _) in answers(app, bed).items()} == bed.answers
