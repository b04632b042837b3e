"""`LLM`, without a server: a broken or missing adapter fails in isolation, and a small budget only takes time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.forking_vllm import run_forked
from testbed.models import DEMO_ADAPTERS, PROMPT
from testbed.offline_any_order import REPEATED
from testbed.reference import Reference
from testbed.server import outer_environment
from tests.e2e.broken import BROKEN
from tests.e2e.servers import ENVIRONMENT
from tests.repetitions import times

NAMES = [spec.name for spec in DEMO_ADAPTERS]
HOST_MAX_BYTES = 2_600_000  # "wide" takes 2.1 MB of it, the others less than 0.6: not all five fit
NIGHTLY = pytest.mark.nightly  # what is left out else: each starts an engine of its own


def said_by(
    program: str,
    bed: Bed,
    home: Path,
    processes: int,
    adapters: Sequence[tuple[str, str | None]],
    *,
    prompt: str = PROMPT,
    **env: str,
) -> dict[str, Any]:
    """The answer of a program of the testbed that is asked for these adapters."""
    arguments = json.dumps([str(bed.base), prompt, MAX_TOKENS, adapters])
    said, _ = ran(program, arguments, home, VLLM_ENABLE_V1_MULTIPROCESSING=str(processes), **env)
    return said


def ran(program: str, arguments: str, home: Path, **env: str) -> tuple[dict[str, Any], str]:
    """What a program of the testbed says in JSON, and all that it prints."""
    environment = {
        **outer_environment(),
        **ENVIRONMENT,
        "VLLM_PLUGINS": "lora_lru_manager,lora_kernels",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LORA_PLUGINS_STORE_DIR": str(home / "store"),
        "HF_HUB_OFFLINE": "1",
        **env,
    }
    run = run_forked(f"testbed.{program}:main", [program, arguments], home=home, environment=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith(('{"outputs"', '{"said"', '{"called"')))
    return dict(json.loads(line)), run.stdout + run.stderr


@pytest.mark.parametrize(
    "processes", [1, pytest.param(0, marks=NIGHTLY)], ids=["engine in a process", "engine in this process"]
)
def test_broken_adapters_fail_in_isolation_and_others_are_answered(bed: Bed, tmp_path: Path, processes: int) -> None:
    shutil.copytree(bed.adapters / "sql", tmp_path / "truncated")
    next(case for case in BROKEN if case.name == "truncated").make(tmp_path / "truncated")
    adapters = [(name, str(bed.adapters / name)) for name in NAMES]
    asked = [*adapters, ("truncated", str(tmp_path / "truncated")), ("nowhere", str(tmp_path / "no")), ("", None)]
    said = said_by("offline", bed, tmp_path, processes, asked, LORA_PLUGINS_HOST_MAX_BYTES=str(HOST_MAX_BYTES))
    answers = {name: output for (name, _), output in zip(asked, said["outputs"], strict=True)}
    for name in NAMES:
        assert answers[name] == ["length", "None", bed.answers[name]], name
    assert answers[""][2] == bed.answers[None]
    for name, code in (("truncated", "[L005]"), ("nowhere", "[L002]")):
        reason, text, ids = answers[name]
        assert (reason, ids) == ("error", []), name
        assert text.startswith(code), text
        assert name in text
    assert (said["loaded"], said["listed"]) == (True, True)


@pytest.mark.deployment(
    "another package's LoRA manager", "tested", "a subclass of vLLM's, or a copy as Unsloth's: it is asked to load"
)
@NIGHTLY
@pytest.mark.parametrize("other", ["copy after", "copy before", "subclass before", "subclass after"])
def test_managers_that_load_otherwise_are_asked_to_load(bed: Bed, tmp_path: Path, other: str) -> None:
    asked = [*((name, str(bed.adapters / name)) for name in NAMES), ("", None)]
    said = said_by("offline_other_manager", bed, tmp_path, 0, asked, OTHER_MANAGER=other)
    for (name, _), (_, text, ids) in zip(asked, said["outputs"], strict=True):
        assert ids == bed.answers[name or None], text
    assert (said["loaded"], said["listed"]) == (True, True)


@pytest.mark.deployment("another package's LoRA manager", "refused", "one that plans too: L007 names it")
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=NIGHTLY)])
def test_a_manager_that_plans_too_is_named_at_start(bed: Bed, tmp_path: Path, when: str) -> None:
    with pytest.raises(AssertionError, match=r"\[L007\] found testbed.offline_other_manager.PlansToo"):
        said_by(
            "offline_other_manager",
            bed,
            tmp_path,
            0,
            [("sql", str(bed.adapters / "sql"))],
            OTHER_MANAGER=f"more {when}",
        )


def test_an_engine_here_waits_for_nothing_only_we_end(bed: Bed, tmp_path: Path) -> None:
    asked = [(name, str(bed.adapters / name)) for name in ("sql", "chat", "stable")]
    answer = said_by("offline_in_use", bed, tmp_path, 0, asked)
    said = answer["said"]
    assert "hangs" not in said.values(), said
    assert said["remove_lora"] is said["add_lora after"] is True, said
    for name in ("add_lora", "pin_lora"):
        assert said[name] is True or said[name].startswith("[L001]"), said
    assert answer["outputs"] == {name: bed.answers[name] for name in ("sql", "chat")}


@NIGHTLY
@pytest.mark.parametrize("is_async", ["0", "1"], ids=["LLM", "AsyncLLM"])
def test_a_directory_that_changes_answers_as_it_was_taken(bed: Bed, tmp_path: Path, is_async: str) -> None:
    reference = Reference(bed.base)
    prompt = f"{PROMPT} the lazy dog. def shrink(x, a): return x @ a.T; " * 4
    ids = reference.prompt_ids(prompt)
    assert len(ids) > 100, "blocks of its prefix are cached"
    old, new = (reference.generate(bed.adapters / name, ids, MAX_TOKENS) for name in ("sql", "chat"))
    asked = [("old", str(bed.adapters / "sql")), ("new", str(bed.adapters / "chat")), ("", str(tmp_path / "policy"))]
    said = said_by("offline_by_path", bed, tmp_path, 1, asked, prompt=prompt, ASYNC=is_async)["said"]
    assert said == {
        "first": old,
        "files changed": old,
        "in place": new,
        "after it": new,
        "added": True,
        "stub": old,
        "added in place": True,
        "stub again": new,
        "another": old,
        "files gone": new,
        "stub at last": new,
    }


@NIGHTLY
def test_an_idle_session_frees_its_place_on_a_real_engine(bed: Bed, tmp_path: Path) -> None:
    """Alone, each turn of the session and each request of others has the same tokens."""
    asked = [(name, str(bed.adapters / name)) for name in ("sql", "chat")]
    said = said_by("offline_session", bed, tmp_path, 1, asked)["said"]
    assert said["other"] == bed.answers["chat"]
    assert said["others after"] == [bed.answers["chat"]] * 2
    assert said["session"] == said["alone"]
    assert len(said["session"]) == 3 * MAX_TOKENS
    assert said["session"][:MAX_TOKENS] == bed.answers["sql"]


@pytest.mark.parametrize("setting", [pytest.param("finish", marks=NIGHTLY), "inflight"])
def test_running_requests_finish_or_move_as_the_setting_says(bed: Bed, tmp_path: Path, setting: str) -> None:
    versions = [(name, str(bed.adapters / name)) for name in ("sql", "chat")]
    said = said_by("offline_moved", bed, tmp_path, 0, versions, LORA_PLUGINS_LOAD_INPLACE=setting)["said"]
    sql, chat = bed.answers["sql"], bed.answers["chat"]
    assert (said["kept"], said["late"]) == (sql, chat)
    assert said["again"] == sql, "no prefix of what moved"
    if setting == "finish":
        assert (said["moved"], said["versions"]) == (sql, None)
        return
    (first, began), (second, moved_at) = said["versions"]
    assert (began, 7 <= moved_at < MAX_TOKENS) == (0, True)
    assert first != second
    reference = Reference(bed.base)
    paths = (bed.adapters / "sql", bed.adapters / "chat")
    assert said["moved"] == reference.moved(*paths, reference.prompt_ids(PROMPT), moved_at, MAX_TOKENS)
    assert said["moved"] not in (sql, chat)


def test_calls_in_any_order_answer_as_the_version_they_name(bed: Bed, tmp_path: Path) -> None:
    versions = [(name, str(bed.adapters / name)) for name in ("sql", "chat", "stable", "team/poet")]
    reference = Reference(bed.base)
    prompt_ids = reference.prompt_ids(REPEATED * PROMPT)
    assert len(prompt_ids) > 64
    answers = json.dumps({name: reference.generate(Path(path), prompt_ids, MAX_TOKENS) for name, path in versions})
    examples = str(times(60, short=6))
    said = said_by("offline_any_order", bed, tmp_path, 0, versions, ANSWERS=answers, EXAMPLES=examples)
    assert int(said["said"]) > int(examples)


@NIGHTLY  # test_trained_tokens.py compares them with PEFT's in each run, on a server
@pytest.mark.parametrize("first", ["sql", None])
def test_prompt_logprobs_beside_others_are_those_alone(bed: Bed, tmp_path: Path, first: str | None) -> None:
    """Which crashes vLLM's CPU engine (docs/operate/known-limits.md)."""
    names = [first, "chat", None, "sql"]
    adapters = [(name or "", None if name is None else str(bed.adapters / name)) for name in names]
    (alone, answer), (beside, answers) = said_by("offline_prompt_logprobs", bed, tmp_path, 0, adapters)["said"]
    assert beside == pytest.approx(alone, abs=1e-4)
    assert len(set(alone)) > 1
    assert answer == [bed.answers[first]]
    assert answers == [bed.answers[name] for name in names]
