"""Sleep and wake-up, and base weights that are replaced: adapters answer right after both."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import Answer, complete, connect
from testbed.models import DEMO_ADAPTERS, PROMPT, build_base
from testbed.reference import Reference
from testbed.server import Server
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, admin_server
from tests.e2e.standing_still import LONGEST_S

NAMES = [spec.name for spec in DEMO_ADAPTERS]
ARGUMENTS = (
    "--max-loras", "2",
    "--worker-extension-cls", "testbed.worker_memory.WorkerMemory",
    "--weight-transfer-config", '{"backend": "file"}',
)  # fmt: skip

pytestmark = pytest.mark.nightly


@dataclass(frozen=True)
class Sleepy:
    """A server whose worker can lose its memory, and the answers of two base models."""

    server: Server
    bed: Bed
    other: Reference

    def post(self, path: str, **params: Any) -> Any:
        answer = httpx.post(f"{self.server.url}{path}", params=params, timeout=LONGEST_S)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        body = {"method": method, "args": args, "kwargs": kwargs}
        answer = httpx.post(f"{self.server.url}/collective_rpc", json=body, timeout=LONGEST_S)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["results"])

    def ask(self, name: str) -> Answer:
        return complete(connect(self.server), name, PROMPT, MAX_TOKENS)

    def wrong(self, answers: dict[str, list[int]] | None = None) -> list[tuple[str, Answer]]:
        """Which adapters, and the base model, are not answered as PEFT does."""
        expected = answers or {name or str(self.bed.base): ids for name, ids in self.bed.answers.items()}
        found = {name: self.ask(name) for name in expected}
        return [(name, found[name]) for name, ids in expected.items() if list(found[name].token_ids) != ids]

    def answers_of_the_other(self) -> dict[str, list[int]]:
        prompt = self.other.prompt_ids(PROMPT)
        answers = {name: self.other.generate(self.bed.adapters / name, prompt, MAX_TOKENS) for name in NAMES}
        return {**answers, str(self.bed.base): self.other.generate(None, prompt, MAX_TOKENS)}


@pytest.fixture(scope="module", params=[(KERNELS,), ()], ids=["our kernels", "vLLM's kernels"])
def sleepy(bed: Bed, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Sleepy]:
    home = tmp_path_factory.mktemp("sleepy")
    shutil.copytree(bed.adapters, home / "adapters")
    other = build_base(home / "other-weights", seed=7)
    with admin_server(bed, home, *ARGUMENTS, VLLM_PLUGINS=",".join((RESOLVER, MANAGER, ADMIN, *request.param))) as one:
        yield Sleepy(one, bed, Reference(other))


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(1, marks=pytest.mark.deployment("sleep, level 1", "tested", "slots are lost and written again")),
        pytest.param(2, marks=pytest.mark.deployment("sleep, level 2", "tested", "slots and base weights are lost")),
    ],
)
def test_what_a_sleep_loses_is_written_again(sleepy: Sleepy, level: int) -> None:
    assert sleepy.wrong() == []
    sleepy.post("/v1/loras/sql/pin")
    sleepy.post("/sleep", level=level)
    assert sleepy.rpc("spoil_slots") != ["0"]
    before = sleepy.rpc("slots_digest")
    held: list[Answer] = []
    asking = threading.Thread(target=lambda: held.append(sleepy.ask("chat")))
    asking.start()
    sleepy.post("/v1/loras/stable/prefetch")
    assert sleepy.rpc("slots_digest") == before, "nothing is written while the engine sleeps"
    assert not held
    if level == 2:
        sleepy.rpc("spoil_weights")
        assert sleepy.post("/wake_up", tags="weights")["status"] == "sleeping"
        sleepy.rpc("reload_weights")
        sleepy.post("/wake_up", tags="kv_cache")
    else:
        sleepy.post("/wake_up")
    asking.join(LONGEST_S)
    assert list(held[0].token_ids) == sleepy.bed.answers["chat"]
    assert sleepy.wrong() == []
    view = httpx.get(f"{sleepy.server.url}/v1/loras/sql", timeout=LONGEST_S).json()
    assert (view["pinned"], "slot" in view["tiers"]) == (True, True)
    sleepy.post("/v1/loras/sql/unpin")


@pytest.mark.deployment("reload_weights", "tested", "base weights are replaced, of layers with adapters too")
def test_reloaded_weights_are_used_below_every_adapter(sleepy: Sleepy) -> None:
    assert sleepy.wrong() == []
    sleepy.rpc("reload_weights", weights_path=str(sleepy.other.base))
    sleepy.post("/reset_prefix_cache")
    assert sleepy.wrong(sleepy.answers_of_the_other()) == []
    sleepy.rpc("reload_weights", weights_path=str(sleepy.bed.base))
    sleepy.post("/reset_prefix_cache")
    assert sleepy.wrong() == []


@pytest.mark.deployment("weight updates", "tested", "by vLLM's weight transfer, as trainers do it")
def test_updated_weights_are_used_below_every_adapter(sleepy: Sleepy) -> None:
    assert sleepy.wrong() == []
    for directory, answers in ((sleepy.other.base, sleepy.answers_of_the_other()), (sleepy.bed.base, None)):
        sleepy.post("/pause", mode="keep", clear_cache="true")
        sleepy.rpc("start_weight_update")
        sleepy.rpc("update_weights", {"directory": str(directory)})
        sleepy.rpc("finish_weight_update")
        sleepy.post("/reset_prefix_cache")
        sleepy.post("/resume")
        assert sleepy.wrong(answers) == []
