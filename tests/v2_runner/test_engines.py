"""Model Runner V2 in engines of other kinds: beside drafts, asleep, and without a server."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import pytest

from testbed import v2_runner
from testbed.bed import MAX_TOKENS, prepare
from testbed.decoding import Decoding
from testbed.models import DEMO_ADAPTERS, PROMPT, AdapterSpec, build_adapter, build_base, edit_config
from testbed.reference import Reference
from testbed.trained_tokens import with_tokens
from tests.deployments import test_drafts as drafts
from tests.deployments import test_memory_and_weights as sleeping
from tests.e2e import servers
from tests.e2e.standing_still import LONGEST_S
from tests.e2e.test_in_flight import body
from tests.e2e.test_offline import ran

NIGHTLY = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _servers_run_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "RUNS_V2", True)  # their logs must say so


def test_heads_of_adapters_meet_no_other_request_beside_drafts(tmp_path: Path) -> None:
    """Each head changes nearly every token: in another request's row it would be seen."""
    base, speculation = drafts.draft_model(prepare().base, tmp_path / "draft")
    reference = Reference(base)
    prompt = reference.prompt_ids(PROMPT)
    expected = {str(base): Decoding(reference, None).among(prompt, drafts.TOKENS, drafts.FEW)}
    for name in ("head-1", "head-2", "head-3"):
        directory = build_adapter(base, tmp_path / "adapters", AdapterSpec(name, 8, ("lm_head",)))
        edit_config(directory, lora_alpha=400)
        expected[name] = Decoding(reference, directory).among(prompt, drafts.TOKENS, drafts.FEW)
    tokens = {"model.embed_tokens": drafts.FEW[:3], "lm_head": drafts.FEW[1:]}
    directory = with_tokens(prepare().adapters / "sql", tmp_path / "adapters" / "tokens", tokens, features=256)
    expected["tokens"] = Decoding(reference, directory).among(prompt, drafts.TOKENS, drafts.FEW)
    assert len({*map(tuple, expected.values())}) == len(expected)

    async def ask(url: str, names: list[str]) -> list[list[int]]:
        async with httpx.AsyncClient(base_url=url, timeout=LONGEST_S) as client:
            asked = [body(name, drafts.TOKENS, allowed_token_ids=drafts.FEW) for name in names]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in asked))
        return [answer.json()["choices"][0]["token_ids"] for answer in answers]

    arguments = ("--speculative-config", json.dumps({**speculation, "num_speculative_tokens": 2}))
    with servers.admin_server(prepare(), tmp_path, "--max-loras", "4", *arguments) as server:
        names = [*expected] * 2
        assert asyncio.run(ask(server.url, names)) == [expected[name] for name in names]


@NIGHTLY
@pytest.mark.parametrize(
    ("made_by", "adapters"),
    [
        (drafts.draft_model, (*drafts.DEMO, drafts.ENDS.name)),
        (drafts.eagle, (*drafts.DEMO, drafts.ENDS.name)),
        (drafts.eagle3, (*drafts.DEMO, drafts.ENDS.name)),
        (drafts.multi_token, drafts.DEMO),
    ],
)
def test_tokens_beside_a_draft_are_those_of_peft(
    tmp_path: Path, made_by: drafts.Making, adapters: tuple[str, ...]
) -> None:
    drafts.test_tokens_beside_a_draft_are_those_of_peft(prepare(), tmp_path, made_by, adapters)


@NIGHTLY
@pytest.mark.parametrize("level", [1, 2])
def test_what_a_sleep_loses_is_written_again(tmp_path: Path, level: int) -> None:
    bed = prepare()
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    other = build_base(tmp_path / "other-weights", seed=7)
    with servers.admin_server(bed, tmp_path, *sleeping.ARGUMENTS) as server:
        sleepy = sleeping.Sleepy(server, bed, Reference(other))
        sleeping.test_what_a_sleep_loses_is_written_again(sleepy, level)


@NIGHTLY
@pytest.mark.parametrize("processes", [1, 0], ids=["engine in a process", "engine in this process"])
def test_an_engine_without_a_server_answers_as_peft_does(tmp_path: Path, processes: int) -> None:
    bed = prepare()
    asked: list[tuple[str, str | None]] = [(one.name, str(bed.adapters / one.name)) for one in DEMO_ADAPTERS]
    environment = {**v2_runner.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": f"{processes}"}
    question = json.dumps([str(bed.base), PROMPT, MAX_TOKENS, [*asked, ("", None)]])
    said, printed = ran("offline", question, tmp_path, **environment)
    assert all(line in printed for line in v2_runner.LOGGED), "the engine runs another model runner"
    found = {name: ids for (name, _), (_, _, ids) in zip([*asked, ("", None)], said["outputs"], strict=True)}
    assert found == {name or "": ids for name, ids in bed.answers.items()}
    assert (said["loaded"], said["listed"]) == (True, True)
