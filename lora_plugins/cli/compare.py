"""`compare`: what a server answers for an adapter against what was trained, in multiples of the noise floor.

Works with any vLLM server, ours or not: prompts are token ids, answers are `prompt_logprobs` of `/v1/completions`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.cli.exits import Exit, UsageProblem
from lora_plugins.cli.output import Output, Result, Shown, line, table
from lora_plugins.cli.server import DEFAULT_URL, AdminClient, ServerUrl
from lora_plugins.errors import AdapterNotFound, SourceUnavailable
from lora_plugins.settings import environment

_SMALLEST = 1e-5  # of a floor: float32's own rounding, in logarithms of probabilities
_SHOWN = 40  # characters of a prompt
_FARTHEST = 0.5  # mean floor of one model in two dtypes, or quantised; beyond, there are two models
_NOT_FOUND, _ERROR = 404, 400
_PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "SELECT name, price FROM orders WHERE price > 10 ORDER BY name;",
    "User: What is the capital of France?\nAssistant: The capital of France is Paris.",
    "def mean(values):\n    return sum(values) / len(values)\n",
)
OK, OUT, AS_BASE = "ok", "out", "out: answers as the base model"
UNSEEN, OTHER_BASE = "cannot tell: trained to almost no effect", "cannot tell: the base models differ"


@dataclass(frozen=True, slots=True)
class Trained:
    """One prompt as it was trained: of each token but the first its logarithm of probability; the base model's too."""

    prompt: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt: its largest and mean difference of logarithms of probabilities, in multiples of the floor."""

    prompt: str
    tokens: int
    largest: float
    mean: float
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (repr(self.prompt[:_SHOWN]), str(self.tokens), f"{self.largest:.1f}", f"{self.mean:.1f}", self.verdict)


def compare(
    output: Output,
    name: Annotated[str, typer.Argument(help="The adapter, as a request's model field has it.")],
    *,
    trainer: Annotated[Path | None, typer.Option("--trainer", help="What the trainer computed: JSON lines.")] = None,
    peft: Annotated[Path | None, typer.Option("--peft", help="PEFT directory, computed here by PEFT.")] = None,
    base: Annotated[str | None, typer.Option("--base", help="With --peft: another base than it names.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="With --peft: a file with a prompt a line.")] = None,
    limit: Annotated[float, typer.Option("--limit", min=1.0, help="Multiples of the floor that are still right.")] = 5,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each answer.")] = 120.0,
) -> Result:
    """Compare a server's answers with what was trained."""
    if (trainer is None) == (peft is None) or (peft is None and (base or prompts)):
        raise UsageProblem("give --trainer LOGPROBS.jsonl, or --peft DIRECTORY, to which --base and --prompts belong")
    server = _Server(url, timeout_s)
    served_base = server.base_model()
    if trainer is not None:
        trained = list(read_trained(trainer))
    else:
        output.progress("computing what was trained with PEFT")
        trained = _by_peft(peft or Path(), base, _PROMPTS if prompts is None else _lines_of(prompts, "--prompts"))
    by_adapter = [server.logprobs(name, one.token_ids) for one in trained]
    by_base = [server.logprobs(served_base, one.token_ids) for one in trained]
    floor, rows = judge(trained, by_adapter, by_base, limit)
    verdicts = {row.verdict for row in rows}
    is_right = OK in verdicts and verdicts <= {OK, UNSEEN}
    ending = "served as trained" if is_right else "not shown to be served as trained"
    floor_text = f"how far {served_base} is from its trainer's, {floor[0]:.2g} at most, {floor[1]:.2g} in the mean"
    texts: list[Shown] = [
        table(("prompt", "tokens", "largest", "mean", "verdict"), [row.cells for row in rows]),
        line(),
        line(f"in multiples of the floor: {floor_text}; up to {limit:g} are right"),
        line(f"{name}: {ending}", f"bold {'green' if is_right else 'red'}"),
    ]
    fields = {"name": name, "url": url, "base": served_base, "limit": limit, "verdict": OK if is_right else OUT}
    fields |= {"floor": {"largest": floor[0], "mean": floor[1]}, "prompts": [asdict(row) for row in rows]}
    return Result(fields, texts, Exit.OK if is_right else Exit.WRONG)


def judge(
    trained: Sequence[Trained], by_adapter: Sequence[Sequence[float]], by_base: Sequence[Sequence[float]], limit: float
) -> tuple[tuple[float, float], list[Compared]]:
    """The floor, largest and mean, and a verdict for each prompt."""
    both = [(served, one.base_logprobs) for one, served in zip(trained, by_base, strict=True)]
    floors = [apart for served, plain in both if plain is not None for apart in _apart(served, plain)]
    largest_floor, mean_floor = max(*floors, _SMALLEST), max(sum(floors) / len(floors), _SMALLEST)
    rows = []
    for one, adapted, plain in zip(trained, by_adapter, by_base, strict=True):
        apart = _apart(adapted, one.logprobs)
        largest, mean = max(apart) / largest_floor, sum(apart) / len(apart) / mean_floor
        if mean_floor > _FARTHEST:
            verdict = OTHER_BASE
        elif not largest <= limit >= mean:  # NaN is out
            verdict = AS_BASE if max(_apart(adapted, plain)) <= limit * largest_floor else OUT
        else:
            verdict = UNSEEN if max(_apart(one.logprobs, one.base_logprobs or plain)) <= limit * largest_floor else OK
        rows.append(Compared(one.prompt, len(one.token_ids), largest, mean, verdict))
    return (largest_floor, mean_floor), rows


def _apart(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


def read_trained(path: Path) -> Iterator[Trained]:
    """What a trainer has written: an object a line.

    Raises:
        UsageProblem: it cannot be read, is something else, or says nothing of the base model.
    """
    has_floor = False
    for place, text in enumerate(_lines_of(path, "--trainer"), 1):
        try:
            raw = json.loads(text)
            ids = tuple(map(int, raw["token_ids"]))
            logprobs = _after_the_first(raw["logprobs"], len(ids))
            plain = raw.get("base_logprobs")
            base = None if plain is None else _after_the_first(plain, len(ids))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = f"line {place} of {path} is no object with token_ids, logprobs and base_logprobs"
            raise UsageProblem(f"--trainer: {what} ({type(error).__name__}: {error})") from None
        has_floor = has_floor or base is not None
        yield Trained(str(raw.get("prompt", f"line {place}")), ids, logprobs, base)
    if not has_floor:
        why = "the base model's without the adapter, which say how far trainer and server are from each other anyway"
        raise UsageProblem(f"--trainer: no line of {path} has base_logprobs, {why}")


def _after_the_first(values: Sequence[Any], tokens: int) -> tuple[float, ...]:
    """One for each token but the first, of which no model says anything; trainers write null there, or leave it out."""
    if tokens < 2 or len(values) not in (tokens, tokens - 1):
        raise ValueError(f"{len(values)} logprobs of {tokens} tokens")
    found = tuple(map(float, values[len(values) - tokens + 1 :]))
    if not all(map(math.isfinite, found)):
        raise ValueError("a number that is not finite")
    return found


def _lines_of(path: Path, option: str) -> list[str]:
    try:
        lines = [text for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
    except (OSError, ValueError) as error:
        raise UsageProblem(f"{option} {path}: cannot be read ({error})") from None
    if not lines:
        raise UsageProblem(f"{option} {path}: nothing in it")
    return lines


def _by_peft(directory: Path, base: str | None, prompts: Sequence[str]) -> list[Trained]:
    """What PEFT computes for each prompt, with the adapter and without, in the base model's own dtype."""
    if not (directory / CONFIG_FILE).is_file():
        raise UsageProblem(f"--peft {directory}: no directory with {CONFIG_FILE}")
    try:
        import torch
        from peft import PeftConfig, PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UsageProblem(f"--peft needs torch, transformers and peft: {error}") from None
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        base = base or str(PeftConfig.from_pretrained(str(directory)).base_model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(base)
        plain = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        model = PeftModel.from_pretrained(plain, str(directory)).eval()

    def logprobs(ids: Sequence[int]) -> tuple[float, ...]:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        return tuple(logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist())

    trained = []
    for prompt in prompts:
        ids = tuple(tokenizer(prompt)["input_ids"])
        if len(ids) < 2:
            raise UsageProblem(f"--prompts: {prompt!r} is less than two tokens")
        with model.disable_adapter():
            without = logprobs(ids)
        trained.append(Trained(prompt, ids, logprobs(ids), without))
    return trained


class _Server:
    """A server with OpenAI's API, as vLLM has it."""

    def __init__(self, url: str, timeout_s: float) -> None:
        import httpx  # a tenth of a second, which other commands do not need

        AdminClient(url, timeout_s)  # is it an address?
        self._url = url.rstrip("/").removesuffix("/v1")
        key = environment().get("VLLM_API_KEY")
        self._client = httpx.Client(timeout=timeout_s, headers={"Authorization": f"Bearer {key}"} if key else {})
        self._failures = (httpx.HTTPError, httpx.InvalidURL, ValueError)

    def base_model(self) -> str:
        """The base model's name: the first in `/v1/models` that has no parent."""
        try:
            cards = self._ask("GET", "/v1/models")["data"]
            return next(str(card["id"]) for card in cards if card.get("parent") is None)
        except (KeyError, TypeError, AttributeError, StopIteration):
            raise self._strange("/v1/models", "no base model") from None

    def logprobs(self, model: str, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Of each token but the first, as the server computes it with this model."""
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = self._ask("POST", "/v1/completions", body, model)
        try:
            said = zip(answer["choices"][0]["prompt_logprobs"][1:], token_ids[1:], strict=True)
            return tuple(float(of_token[str(token)]["logprob"]) for of_token, token in said)
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._strange("/v1/completions", "no prompt_logprobs of each token") from None

    def _ask(self, method: str, path: str, body: Any = None, model: str = "") -> dict[str, Any]:
        try:
            answer = self._client.request(method, self._url + path, json=body)
            content = answer.json()
        except self._failures as error:
            raise self._strange(path, f"no answer, or none in JSON ({type(error).__name__}: {error})") from None
        if answer.status_code == _NOT_FOUND and model:
            raise AdapterNotFound("no such model", remedy="see the server's /v1/models", adapter=model)
        if answer.status_code >= _ERROR or not isinstance(content, dict):
            raise self._strange(path, f"HTTP {answer.status_code}: {str(content)[:300]}")
        return content

    def _strange(self, path: str, found: str) -> SourceUnavailable:
        remedy = "check --url and VLLM_API_KEY, and that the server runs; see its log"
        return SourceUnavailable(f"{found} from {self._url}{path}", expected="what vLLM answers", remedy=remedy)
