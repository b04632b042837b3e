"""Adapters that only an engine's workers have: requests name their id, whatever the path says."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.frameworks.versions import PROMPT
from testbed.hub import local_hub
from testbed.offline_stub import BARE, LIKE_A_REPO, REPO, STUBS, UNASKED
from testbed.reference import Reference
from tests.e2e.test_offline import said_by

MANAGER = "lora_lru_manager,lora_kernels"
WITH_RESOLVER = f"{MANAGER},lora_hf_hub_resolver"


@pytest.mark.parametrize(
    ("processes", "is_async", "plugins"),
    [
        pytest.param(0, "0", MANAGER, id="LLM in this process"),
        pytest.param(1, "0", WITH_RESOLVER, id="LLM with a resolver", marks=pytest.mark.nightly),
        pytest.param(1, "1", WITH_RESOLVER, id="AsyncLLM with a resolver"),
    ],
)
def test_an_id_that_engines_hold_answers_at_any_path(
    bed: Bed, tmp_path: Path, processes: int, is_async: str, plugins: str
) -> None:
    reference = Reference(bed.base)
    sql, chat = (reference.generate(bed.adapters / name, PROMPT, MAX_TOKENS) for name in ("sql", "chat"))
    adapters = [(name, str(bed.adapters / name)) for name in ("sql", "chat", "stable")]
    with local_hub() as hub:
        hub.commit(REPO, {path.name: path.read_bytes() for path in (bed.adapters / "stable").iterdir()})
        env = {**hub.env(tmp_path / "hf"), "VLLM_LORA_RESOLVER_HF_REPO_LIST": "team/other"}
        said = said_by("offline_stub", bed, tmp_path, processes, adapters, VLLM_PLUGINS=plugins, ASYNC=is_async, **env)[
            "said"
        ]
        asked = [request.path for request in hub.requests()]
    removed, lost = said.pop("removed"), said.pop("lost by workers")
    assert said.pop("calls") == []
    held = ["given", "by path", "by path, evicted", *(["in process", "in process, evicted"] if not processes else [])]
    assert said == {
        **{f"{when}: {path!r}": sql for when in held for path in STUBS},
        "given: another name": sql,
        **{f"{when}: {path!r}": chat for when in ("given again", "added by id") for path in STUBS},
    }
    assert asked[0] == UNASKED
    stable = reference.generate(bed.adapters / "stable", PROMPT, MAX_TOKENS)
    assert ("[L002]" in lost[0], lost[1], removed[REPO]) == (True, stable, stable), "known from a refusal"
    assert all(isinstance(removed[path], str) for path in (BARE, LIKE_A_REPO)), removed
