"""`compare NAME`: whether a server's answers with an adapter are the answers that were trained.

Runs in the command's process, against any vLLM server, ours or not. In: logarithms of the probabilities of prompts'
tokens: the server's, by `/v1/completions`, and the trained ones, from a trainer's file or computed here by PEFT. Out: a
verdict for each prompt. Differences are counted in multiples of the floor: how far the server is from the trainer for
the base model alone, which no adapter explains. `at_fault.py` names the modules that differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from lora_plugins.cli import Exit, UsageProblem
from lora_plugins.cli.at_fault import ByPeft, Trained, apart, at_fault
from lora_plugins.cli.name_arguments import lines_of
from lora_plugins.cli.output import Output, Result, Shown, line, table
from lora_plugins.cli.server_client import DEFAULT_URL, VLLM_KEY, AdminClient, ServerUrl, Timeout
from lora_plugins.errors import AdapterNotFound, SourceUnavailable

T = TypeVar("T")
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "SELECT name, price FROM orders WHERE price > 10 ORDER BY name;",
    "User: What is the capital of France?\nAssistant: The capital of France is Paris.",
    "def mean(values):\n    return sum(values) / len(values)\n",
)
# Of a floor, largest and mean: float32's own rounding, in logarithms of probabilities. Of tokens that a model holds for
# next to impossible, adapters round ten times as far as their base model.
_SMALLEST_LARGEST, _SMALLEST_MEAN = 1e-4, 1e-5
_FARTHEST = 0.5  # mean floor of one model in two dtypes, or quantised; beyond, the two models differ
_STRANGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, StopIteration)
OK, OUT, AS_BASE = "ok", "out", "out: answers as the base model"
UNSEEN, OTHER_BASE = "cannot tell: trained to almost no effect", "cannot tell: the base models differ"


def compare(
    output: Output,
    name: Annotated[str, typer.Argument(help="The adapter, as a request's model field has it.")],
    *,
    trainer: Annotated[Path | None, typer.Option("--trainer", help="What the trainer computed: JSON lines.")] = None,
    peft: Annotated[Path | None, typer.Option("--peft", help="PEFT directory, computed here by PEFT.")] = None,
    base: Annotated[str | None, typer.Option("--base", help="With --peft: another base than it names.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="With --peft: a file with a prompt a line.")] = None,
    limit: Annotated[float, typer.Option("--limit", min=1.0, help="Multiples of the floor that are still right.")] = 5,
    by_token: Annotated[bool, typer.Option("--by-token", help="A request for each token, for lm_head.")] = False,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 120.0,
) -> Result:
    """Compare a server's answers with what was trained.

    Examples:
        compare team/sql --peft ./out/checkpoint-500
        compare policy --trainer logprobs.jsonl --url http://gpu-7:8000
    """
    if (trainer is None) == (peft is None) or (peft is None and (base or prompts)):
        raise UsageProblem("give --trainer LOGPROBS.jsonl, or --peft DIRECTORY, to which --base and --prompts belong")
    server = CompletionServer(url, timeout_s)
    served_base, model = server.base_model(), None
    if trainer is not None:
        trained = list(read_trained(trainer))
    else:
        output.progress("computing what was trained with PEFT")
        model = ByPeft(peft or Path(), base)
        trained = [*map(model.trained, PROMPTS if prompts is None else lines_of(prompts, "--prompts"))]
        by_token = by_token or model.trains_head  # `prompt_logprobs` may be wrong there (`CompletionServer.logprobs`)
    by_adapter = [server.logprobs(name, one.token_ids, by_token=by_token) for one in trained]
    by_base = [server.logprobs(served_base, one.token_ids, by_token=by_token) for one in trained]
    floor, rows = judge(trained, by_adapter, by_base, limit)
    verdicts, causes = {row.verdict for row in rows}, list[str]()
    if verdicts & {OUT, AS_BASE}:
        output.progress("computing which modules are at fault")
        without = "which modules are at fault is told with --peft DIRECTORY"
        causes = [at_fault(trained, by_adapter, floor.largest * limit, model) if model else without]
    is_right = OK in verdicts and verdicts <= {OK, UNSEEN}
    fields = {"name": name, "url": url, "base": served_base, "limit": limit, "verdict": OK if is_right else OUT}
    fields |= {"floor": floor._asdict(), "prompts": [asdict(row) for row in rows], "at_fault": causes}
    from_trainer = f"{floor.largest:.2g} at most, {floor.mean:.2g} in the mean"
    ending = "served as trained" if is_right else "not shown to be served as trained"
    shown: list[Shown] = [
        table(("prompt", "tokens", "largest", "mean", "verdict"), map(_cells, rows)),
        line(
            f"\nin multiples of the floor: how far {served_base} is from its trainer's, {from_trainer}"
            f"; up to {limit:g} are right"
        ),
        *map(line, causes),
        line(f"{name}: {ending}", f"bold {'green' if is_right else 'red'}"),
    ]
    return Result(fields, shown, Exit.OK if is_right else Exit.WRONG)


class Floor(NamedTuple):
    """How far the server's base model is from the trainer's, in logarithms of probabilities of tokens."""

    largest: float
    mean: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt: its largest and mean difference of logarithms of probabilities, in multiples of the floor."""

    prompt: str
    tokens: int
    largest: float
    mean: float
    verdict: str


def _cells(row: Compared) -> tuple[str, ...]:
    return repr(row.prompt[:40]), str(row.tokens), f"{row.largest:.1f}", f"{row.mean:.1f}", row.verdict


def judge(
    trained: Sequence[Trained], by_adapter: Sequence[Sequence[float]], by_base: Sequence[Sequence[float]], limit: float
) -> tuple[Floor, list[Compared]]:
    """Return the floor, and a verdict for each prompt."""
    both = [(served, one.base_logprobs) for one, served in zip(trained, by_base, strict=True)]
    floors = [one for served, plain in both if plain is not None for one in apart(served, plain)]
    floor = Floor(max(*floors, _SMALLEST_LARGEST), max(sum(floors) / len(floors), _SMALLEST_MEAN))
    rows, near = [], limit * floor.largest
    for one, adapted, plain in zip(trained, by_adapter, by_base, strict=True):
        away = apart(adapted, one.logprobs)
        largest, mean = max(away) / floor.largest, sum(away) / len(away) / floor.mean
        if floor.mean > _FARTHEST:
            verdict = OTHER_BASE
        elif not largest <= limit >= mean:  # NaN is out
            verdict = AS_BASE if max(apart(adapted, plain)) <= near else OUT
        else:
            verdict = UNSEEN if max(apart(one.logprobs, one.base_logprobs or plain)) <= near else OK
        rows.append(Compared(one.prompt, len(one.token_ids), largest, mean, verdict))
    return floor, rows


def read_trained(path: Path) -> Iterator[Trained]:
    """Yield a trainer's records: an object a line.

    Raises:
        UsageProblem: the file cannot be read, is something else, or has no answers of the base model.
    """
    has_floor = False
    for place, text in enumerate(lines_of(path, "--trainer"), 1):
        try:
            raw = json.loads(text)
            ids, plain = tuple(map(int, raw["token_ids"])), raw.get("base_logprobs")
            base = None if plain is None else _after_the_first(plain, len(ids))
            prompt = str(raw.get("prompt", f"line {place}"))
            one = Trained(prompt, ids, _after_the_first(raw["logprobs"], len(ids)), base)
        except _STRANGE as error:
            what = f"line {place} of {path} is no object with token_ids, logprobs and base_logprobs"
            raise UsageProblem(f"--trainer: {what} ({type(error).__name__}: {error})") from None
        has_floor = has_floor or base is not None
        yield one
    if not has_floor:
        why = "the base model's without the adapter, which say how far trainer and server are from each other anyway"
        raise UsageProblem(f"--trainer: no line of {path} has base_logprobs, {why}")


def _after_the_first(values: Sequence[Any], tokens: int) -> tuple[float, ...]:
    """Return a number for each token but the first: no model predicts the first, and trainers write null or nothing."""
    found = tuple(map(float, values[len(values) - tokens + 1 :]))
    if tokens < 2 or len(values) not in (tokens, tokens - 1) or not all(map(math.isfinite, found)):
        raise ValueError(f"{len(values)} logprobs of {tokens} tokens, or a number that is not finite")
    return found


class CompletionServer:
    """A server with OpenAI's API, as vLLM has the API.

    Raises, in every method:
        AdapterNotFound: the server does not know the model. SourceUnavailable: any other answer than vLLM's.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._server = AdminClient(url, timeout_s, keys=(VLLM_KEY,))

    def base_model(self) -> str:
        """Return the base model's name: the first in `/v1/models` without a parent."""
        return self._ask(
            "base model",
            lambda said: next(str(card["id"]) for card in said["data"] if card.get("parent") is None),
            "/v1/models",
        )

    def logprobs(self, model: str, token_ids: Sequence[int], *, by_token: bool = False) -> tuple[float, ...]:
        """Return for each token but the first the logarithm of its probability, as the server computes it with `model`.

        Args:
            model: the model's name at the server.
            token_ids: the prompt.
            by_token: let each token be generated, at the price of a request for each. Without `lora_lru_manager`, vLLM
                (0.30 to 0.33) computes an adapter's head for prompt_logprobs with the rows of another step, and for
                generated tokens rightly.
        """
        asked = {"model": model, "max_tokens": 1, "temperature": 0}

        def of_prompt(said: Any) -> tuple[float, ...]:
            # vLLM has no probability of a prompt's first token.
            both = zip(said["choices"][0]["prompt_logprobs"][1:], token_ids[1:], strict=True)
            return tuple(float(of_token[str(token)]["logprob"]) for of_token, token in both)

        def generated(at: int) -> float:
            # The only token allowed: masks do not change the logarithm.
            more = {"prompt": list(token_ids[:at]), "logprobs": 0, "allowed_token_ids": [token_ids[at]]}
            return self._ask(
                "logprobs of the token",
                lambda said: float(said["choices"][0]["logprobs"]["token_logprobs"][0]),
                "/v1/completions",
                {**asked, **more},
            )

        if by_token:
            return tuple(map(generated, range(1, len(token_ids))))
        body = {**asked, "prompt": list(token_ids), "prompt_logprobs": 0}
        return self._ask("prompt_logprobs of each token", of_prompt, "/v1/completions", body)

    def _ask(self, what: str, read: Callable[[Any], T], path: str, body: dict[str, Any] | None = None) -> T:
        answer = self._server.request("GET" if body is None else "POST", path, json=body)
        if answer.status_code == 404 and body is not None:
            raise AdapterNotFound("no such model", remedy="see the server's /v1/models", adapter=body["model"])
        try:
            return read(answer.json())
        except _STRANGE:
            raise SourceUnavailable(
                f"no {what} from {self._server.url}{path}, but HTTP {answer.status_code}: {answer.text[:300]}",
                expected="what vLLM answers",
                remedy="check --url and VLLM_API_KEY, and that the server runs; see its log",
            ) from None
