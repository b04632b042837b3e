"""Figure of docs/guides/rl.md#a-loop-on-the-cpu-measured, for R53: `make bench-rl`.

A policy that learns while it is served: three ways of handing each step's adapter to the server, side by side.

    make bench-rl                         # 200 steps of each
    python -m benchmarks.rl --steps 20    # a try

A tiny Llama gets a reward for tokens of a class, of which each prompt has its own; PEFT learns by GRPO's clipped
objective, with advantages normalised in the group of one prompt. Half of a step's rollouts are asked before the step's
version is handed over, half after the server's answer. Arms, of the same seeds:

- `finish` and `inflight`: pushes to one server of ours, as two names, whose steps alternate;
- `stock`: vLLM without our plugins, adapters in a directory, a new one in each step, and `load_inplace`.

Counted is what each rollout's stamp says: on policy (the pushed version), late (the version before), mixed, unknown.
Beside: whether the log-probabilities that the server gave with the tokens are PEFT's for the stamped version, and for
the step's version where no single one is stamped. Seconds are of rollouts and hand-over, without the learning; only
those of `finish` and `inflight` were measured together.

Writes rl.json below `benchmarks/results/`, and docs/images/rl.svg; 1 where a stamp of ours was false or lacking, or
where rewards did not rise.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks import plots
from benchmarks.record import keep
from lora_plugins.client import push_async
from testbed.models import build_base
from testbed.server import Server, vllm_server

if TYPE_CHECKING:
    import torch

PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "SELECT name, price FROM orders WHERE price > 10;",
    "A request names an adapter; the server finds it.",
    "def shrink(x, a): return x @ a.T",
)
VOCABULARY, GROUP, TOKENS, RANK = 512, 8, 16, 8
LEARNING_RATE, CLIP = 3e-3, 0.2
TOLERANCE = 1e-3  # of a token's log-probability, in float32
ON_POLICY, LATE, MIXED, UNKNOWN = "on policy", "late", "mixed", "unknown"
ARMS = {
    "finish": ("ours, finish", "#2f6690"),
    "inflight": ("ours, inflight", "#c98a1b"),
    "stock": ("vLLM's load_inplace", "#8a8f94"),
}
STAMPS = {ON_POLICY: "#2f6690", LATE: "#9db4c8", MIXED: "#c98a1b", UNKNOWN: "#8a8f94"}
HandOver = Callable[["Policy"], Awaitable[str | None]]  # returns the digest that is served now, if the server says it


@dataclass(frozen=True)
class Rollout:
    """One answer; `versions` are the digests that its stamp names, in their order."""

    prompt: int
    is_after: bool
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: tuple[str, ...]

    @property
    def reward(self) -> float:
        width = VOCABULARY // len(PROMPTS)
        return sum(token // width == self.prompt for token in self.ids) / len(self.ids)


def stamp(versions: Sequence[str], served: str | None, previous: str | None) -> str:
    """What an answer says of itself, to a trainer that knows the version handed over and the version before."""
    named = set(versions)
    if not named or not named <= {served, previous}:
        return UNKNOWN
    if len(named) > 1:
        return MIXED
    return ON_POLICY if served in named else LATE


class Policy:
    """The trainer's side: PEFT's model, and the model as it was one step before."""

    def __init__(self, base: Path) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(model, lora)
        self.earlier = copy.deepcopy(self.model)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.Adam(weights, lr=LEARNING_RATE)

    def learn(self, rollouts: list[Rollout], stamps: list[str]) -> list[bool]:
        """Take one step; return whether each rollout's log-probabilities are of the version that its stamp names."""
        import torch

        loss, are_right = torch.zeros(()), [False] * len(rollouts)
        for prompt in range(len(PROMPTS)):
            places = [place for place, rollout in enumerate(rollouts) if rollout.prompt == prompt]
            group = [rollouts[place] for place in places]
            rewards = torch.tensor([rollout.reward for rollout in group])
            advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
            sampled = torch.tensor([rollout.logprobs for rollout in group])
            scores = logprobs(self.model, group)
            ratios = (scores - sampled).exp()
            clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
            loss = loss - torch.minimum(ratios * advantages, clipped * advantages).mean() / len(PROMPTS)
            with torch.no_grad():
                earlier = logprobs(self.earlier, group)
            for row, place in enumerate(places):
                expected = earlier[row] if stamps[place] == LATE else scores[row]
                are_right[place] = bool((expected - sampled[row]).abs().max() <= TOLERANCE)
        self.earlier.load_state_dict(self.model.state_dict())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return are_right


def logprobs(model: Any, group: list[Rollout]) -> torch.Tensor:
    """The log-probability of each token of a prompt's answers."""
    import torch

    tokens = torch.tensor([rollout.prompt_ids + rollout.ids for rollout in group])
    scores = model(tokens).logits[:, -TOKENS - 1 : -1].log_softmax(-1)
    return torch.gather(scores, 2, tokens[:, -TOKENS:, None])[..., 0]


@contextmanager
def server_of(base: Path, home: Path, plugins: str) -> Iterator[Server]:
    home.mkdir()
    env = {"VLLM_PLUGINS": plugins, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if plugins:
        env["LORA_PLUGINS_STORE_DIR"] = str(home / "store")
    # All prompts fit into a step: vLLM 0.32 on the CPU ends where a prompt of a request with a seed is split.
    arguments = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "4", "--max-cpu-loras", "8",
                 "--max-num-seqs", str(GROUP * len(PROMPTS)), "--max-num-batched-tokens", "2048")  # fmt: skip
    with vllm_server(base, home / "server.log", arguments=arguments, env=env) as server:
        yield server


def by_push(server: Server, mode: str) -> HandOver:
    from peft import get_peft_model_state_dict

    async def push(policy: Policy) -> str | None:
        config = policy.model.peft_config["default"].to_dict()
        return (
            await push_async(mode, get_peft_model_state_dict(policy.model), config, servers=[server.url], mode=mode)
        ).digest

    return push


def by_directory(server: Server, root: Path) -> HandOver:
    async def load(policy: Policy) -> None:
        folder = root / f"version-{time.time_ns()}"  # vLLM's prefix cache knows versions apart by their paths
        policy.model.save_pretrained(folder)
        body = {"lora_name": "stock", "lora_path": str(folder), "load_inplace": True}
        async with httpx.AsyncClient(timeout=300) as client:
            (await client.post(f"{server.url}/v1/load_lora_adapter", json=body)).raise_for_status()

    return load


class Arm:
    """One policy, its name on a server, and what its rollouts were."""

    def __init__(self, name: str, base: Path, client: httpx.AsyncClient, hand_over: HandOver) -> None:
        self._name, self._client, self._hand_over = name, client, hand_over
        self._policy = Policy(base)
        self._served: str | None = None

    async def begin(self) -> None:
        self._served = await self._hand_over(self._policy)

    async def step(self, number: int) -> dict[str, Any]:
        """Ask, hand the version over, ask again, learn; the row of this step."""
        began = time.perf_counter()
        places = [(prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(GROUP)]
        before = [
            asyncio.create_task(self._ask(number, *place, is_after=False)) for place in places if place[1] < GROUP // 2
        ]
        await asyncio.sleep(0)
        previous, self._served = self._served, await self._hand_over(self._policy)
        after = [self._ask(number, *place, is_after=True) for place in places if place[1] >= GROUP // 2]
        rollouts: list[Rollout] = await asyncio.gather(*before, *after)
        elapsed_s = time.perf_counter() - began
        stamps = [stamp(rollout.versions, self._served, previous) for rollout in rollouts]
        are_right = self._policy.learn(rollouts, stamps)
        judged = list(zip(rollouts, stamps, are_right, strict=True))
        return {
            "arm": self._name,
            "step": number,
            "reward": round(statistics.fmean(rollout.reward for rollout in rollouts), 4),
            "tokens": sum(len(rollout.ids) for rollout in rollouts),
            "elapsed_s": round(elapsed_s, 4),
            "stamps": Counter(stamps),
            "other_logprobs": Counter(said for _, said, is_right in judged if not is_right),
            "other_logprobs_after": sum(one.is_after and not is_right for one, _, is_right in judged),
        }

    async def _ask(self, number: int, prompt: int, sample: int, *, is_after: bool) -> Rollout:
        body = {
            "model": self._name, "prompt": PROMPTS[prompt], "max_tokens": TOKENS, "ignore_eos": True,
            "temperature": 1.0, "seed": (number * len(PROMPTS) + prompt) * GROUP + sample, "logprobs": 0,
            "return_token_ids": True,
        }  # fmt: skip
        answer = (await self._client.post("/v1/completions", json=body)).raise_for_status()
        found = answer.json()
        moved = (found.get("kv_transfer_params") or {}).get("lora_versions", [])
        first = answer.headers.get("x-lora-digest")
        versions = tuple(digest for digest, _ in moved) or ((first,) if first else ())
        (choice,) = found["choices"]
        said = choice["logprobs"]["token_logprobs"]
        return Rollout(prompt, is_after, choice["prompt_token_ids"], choice["token_ids"], said, versions)


async def run(server: Server, base: Path, hand_overs: dict[str, HandOver], steps: int) -> list[dict[str, Any]]:
    """Let the arms of one server take turns; rows of all."""
    rows = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        arms = [Arm(name, base, client, hand_over) for name, hand_over in hand_overs.items()]
        for arm in arms:
            await arm.begin()
        for number in range(steps):
            for arm in arms[:: 1 - 2 * (number % 2)]:
                rows.append(await arm.step(number))
                if number % max(1, steps // 20) == 0 or number == steps - 1:
                    print({**rows[-1], "stamps": dict(rows[-1]["stamps"])}, flush=True)
    return rows


def summary(arm: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one arm: rewards of the first and the last tenth of the steps, and the counts of all."""
    own = [row for row in rows if row["arm"] == arm]
    tenth = max(1, len(own) // 10)
    return {
        "reward_first": statistics.fmean(row["reward"] for row in own[:tenth]),
        "reward_last": statistics.fmean(row["reward"] for row in own[-tenth:]),
        "rollouts": sum(sum(row["stamps"].values()) for row in own),
        "stamps": dict(sum((Counter(row["stamps"]) for row in own), Counter())),
        "other_logprobs": dict(sum((Counter(row["other_logprobs"]) for row in own), Counter())),
        "other_logprobs_after": sum(row["other_logprobs_after"] for row in own),
    }


def is_as_wanted(of_arm: dict[str, dict[str, Any]]) -> bool:
    """Whether all rewards rise, and each stamp of ours is there and true."""
    ours = [of_arm[arm] for arm in ("finish", "inflight")]
    return (
        all(one["reward_last"] > one["reward_first"] for one in of_arm.values())
        and not any(one["stamps"].get(UNKNOWN) for one in ours)
        and not any(one["other_logprobs"].get(said) for one in ours for said in (ON_POLICY, LATE))
    )


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        base = build_base(home / "base", hidden=128, vocab=VOCABULARY)
        with server_of(base, home / "ours", "lora_lru_manager,lora_kernels,lora_admin") as server:
            pushes = {mode: by_push(server, mode) for mode in ("finish", "inflight")}
            rows = asyncio.run(run(server, base, pushes, options.steps))
        with server_of(base, home / "alone", "") as server:
            loads = {"stock": by_directory(server, home / "versions")}
            rows += asyncio.run(run(server, base, loads, options.steps))
    of_arm = {arm: summary(arm, rows) for arm in ARMS}
    for arm, one in of_arm.items():
        print(f"{arm}: reward {one['reward_first']:.3f} → {one['reward_last']:.3f}, {one['rollouts']} rollouts, stamps "
              f"{one['stamps']}; other log-probabilities: {one['other_logprobs']}, of those asked after the hand-over "
              f"{one['other_logprobs_after']}")  # fmt: skip
    seconds = {arm: sum(row["elapsed_s"] for row in rows if row["arm"] == arm) for arm in ("finish", "inflight")}
    ratio = seconds["finish"] / seconds["inflight"]  # both have the same number of tokens
    print(f"tokens/s of inflight / finish: {ratio:.3f}")
    plots.rl(rows)
    print(f"written to {keep('rl', rows, summary=of_arm, ratio=ratio, load_before=load_before)}")
    return int(not is_as_wanted(of_arm))


if __name__ == "__main__":
    sys.exit(main())
