"""A trainer's run, recorded, and what it was: rollouts failed, cut or whole, its syncs, and whose weights answered."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recorder import Call, Recorder
from testbed.reference import Reference

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
PAUSE = "/pause"
# Of a token's log-probability in float32; a version is told apart where another one's differ ten times as much.
TOLERANCE = 5e-3
_OF_A_VERSION = 2  # so many rollouts of each version are computed by PEFT


@dataclass(kw_only=True)
class Run(Recorder):
    """A recorder that copies the directory of each adapter that is loaded, as trainers delete theirs.

    Attributes:
        kept: the folder with the copies, by the adapters' names.
        slots: what `/server_info` says of `--max-loras`, where a trainer refuses a server that has fewer.
        status: what the trainer ended with.
    """

    kept: Path
    slots: int | None = None
    status: int | None = None

    async def before_answer(self, call: Call, given: bytes) -> bytes:
        if call.path == LOAD and call.status == 200:
            await asyncio.to_thread(shutil.copytree, call.body["lora_path"], self.kept / call.body["lora_name"])
        if call.path == "/server_info" and self.slots:
            info = json.loads(given)
            info["vllm_config"]["lora_config"]["max_loras"] = self.slots
            return json.dumps(info).encode()
        return given


@dataclass(frozen=True)
class Sync:
    """One version handed over, from the pause to the answer of the unload (of the resume where nothing is unloaded)."""

    began_s: float
    ended_s: float
    unload_s: float | None
    seconds: Mapping[str, float]  # of each call; the rest is the trainer's own


def syncs(calls: Sequence[Call]) -> Iterator[Sync]:
    """A trainer's syncs; it makes their calls one after another."""
    of_syncs = [call for call in calls if call.path in (PAUSE, "/resume", LOAD, UNLOAD)]
    begins = [place for place, call in enumerate(of_syncs) if call.path == PAUSE]
    for begin, end in zip(begins, [*begins[1:], len(of_syncs)], strict=True):
        last = of_syncs[end - 1]
        seconds = {call.path: round(call.seconds, 4) for call in of_syncs[begin:end]}
        yield Sync(of_syncs[begin].began_s, last.ended_s, seconds.get(UNLOAD), seconds)


def choice_of(call: Call) -> dict[str, Any]:
    """The one choice of a rollout's answer."""
    (choice,) = json.loads(call.answer)["choices"]
    return dict(choice)


def fault_of(call: Call) -> str | None:
    """Why a rollout failed or was cut; None where it is whole, and where the trainer left before the answer."""
    if call.status is None:
        return None
    if call.status != 200:
        return f"{call.status}: {call.answer[:200]}"
    choice = choice_of(call)
    count, reason = len(choice["token_ids"]), choice["finish_reason"]
    if reason == "stop" or (reason == "length" and count == call.body["max_tokens"]):
        return None
    return f"{reason} after {count} of {call.body['max_tokens']} tokens"


def figures(calls: Sequence[Call]) -> dict[str, Any]:
    """Of one run: its rollouts and its syncs."""
    rollouts = [call for call in calls if call.path == COMPLETIONS]
    answered = [call for call in rollouts if call.status is not None]
    handed = list(syncs(calls))
    unloaded = {call.body["lora_name"]: call.ended_s for call in calls if call.path == UNLOAD}
    with_unload = [one for one in handed if one.unload_s is not None]
    digests: dict[str, set[str | None]] = {}
    counts = []
    for call in answered:
        if call.status == 200:
            digests.setdefault(call.model, set()).add(call.digest)
            counts.append(len(choice_of(call)["token_ids"]))
    return {
        "rollouts": len(answered),
        "left_by_the_trainer": len(rollouts) - len(answered),
        "faults": [fault for call in answered if (fault := fault_of(call))],
        "longer_than_a_version": sum(
            any(call.began_s < one.began_s and one.ended_s < call.ended_s for one in handed) for call in answered
        ),
        "ended_after_their_unload": sum(
            call.began_s < unloaded.get(call.model, 0.0) < call.ended_s for call in answered
        ),
        "sync_s": [round(one.ended_s - one.began_s, 4) for one in with_unload],
        "unload_s": [one.unload_s for one in with_unload],
        "calls_s": [one.seconds for one in handed],
        "digests": {name: sorted(map(str, said)) for name, said in sorted(digests.items())},
        "mean_tokens": round(statistics.fmean(counts), 1) if counts else 0,
    }


class Weights:
    """PEFT's log-probabilities of rollouts, with the directories that a recorder kept."""

    def __init__(self, base: Path, kept: Path) -> None:
        self._kept, self._models = kept, {"": Reference(base).load(None)}
        self._reference = Reference(base)

    def of(self, calls: Sequence[Call]) -> dict[str, int]:
        """How many rollouts of how many versions were computed, were their own version's, and not another's.

        A first version whose B is zero is the base model: it shows nothing, so it is left out of `told_apart`.
        """
        by_version: dict[str, list[Call]] = {}
        for call in calls:
            if call.path == COMPLETIONS and call.status == 200 and call.model:
                by_version.setdefault(call.model, []).append(call)
        counts = {"versions": 0, "computed": 0, "own": 0, "told_apart": 0}
        other: str = ""
        for name, of_version in sorted(by_version.items(), key=lambda it: int(it[0].rpartition("-v")[2])):
            longest = sorted(of_version, key=lambda call: -call.seconds)[:_OF_A_VERSION]
            counts["versions"] += 1
            for call in longest:
                counts["computed"] += 1
                own = self._apart(name, call)
                counts["own"] += own <= TOLERANCE
                counts["told_apart"] += self._apart(other, call) > 10 * max(own, TOLERANCE / 10)
            other = name
        return counts

    def _apart(self, name: str, call: Call) -> float:
        """The largest difference of a rollout's log-probabilities from those of a version, "" being the base model."""
        import torch

        choice = choice_of(call)
        tokens = torch.tensor([*call.body["prompt"], *choice["token_ids"]])
        if name not in self._models:
            self._models = {"": self._models[""], **dict(list(self._models.items())[-1:])}
            self._models[name] = self._reference.load(self._kept / name)
        with torch.no_grad():
            scores = self._models[name](input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, tokens[1:, None])[-len(choice["token_ids"]) :, 0]
        return float((expected - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max())
