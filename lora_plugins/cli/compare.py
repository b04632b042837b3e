"""`compare`: a server's answers for an adapter against the trained answers, in multiples of the noise floor.

Works with any vLLM server, ours or not: prompts are token ids, answers are `prompt_logprobs` of `/v1/completions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_plugins.cli import Exit, UsageProblem
from lora_plugins.cli.at_fault import ByPeft, at_fault
from lora_plugins.cli.judging import AS_BASE, OK, OUT, UNSEEN, judge, lines_of, read_trained
from lora_plugins.cli.output import Output, Result, Shown, line, table
from lora_plugins.cli.server import DEFAULT_URL, VLLM_KEY, AdminClient, ServerUrl, Timeout
from lora_plugins.client.attempt import object_of
from lora_plugins.errors import AdapterNotFound, SourceUnavailable

_NOT_FOUND = 404
_WITHOUT_MODULES = "which modules are at fault is told with --peft DIRECTORY"
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "SELECT name, price FROM orders WHERE price > 10 ORDER BY name;",
    "User: What is the capital of France?\nAssistant: The capital of France is Paris.",
    "def mean(values):\n    return sum(values) / len(values)\n",
)


def compare(
    output: Output,
    name: Annotated[str, typer.Argument(help="The adapter, as a request's model field has it.")],
    *,
    trainer: Annotated[Path | None, typer.Option("--trainer", help="What the trainer computed: JSON lines.")] = None,
    peft: Annotated[Path | None, typer.Option("--peft", help="PEFT directory, computed here by PEFT.")] = None,
    base: Annotated[str | None, typer.Option("--base", help="With --peft: another base than it names.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="With --peft: a file with a prompt a line.")] = None,
    limit: Annotated[float, typer.Option("--limit", min=1.0, help="Multiples of the floor that are still right.")] = 5,
    by_token: Annotated[
        bool, typer.Option("--by-token", help="A request for each token, as lm_head needs it.")
    ] = False,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 120.0,
) -> Result:
    """Compare a server's answers with what was trained."""
    if (trainer is None) == (peft is None) or (peft is None and (base or prompts)):
        raise UsageProblem("give --trainer LOGPROBS.jsonl, or --peft DIRECTORY, to which --base and --prompts belong")
    server = CompletionServer(url, timeout_s)
    served_base = server.base_model()
    model = None
    if trainer is not None:
        trained = list(read_trained(trainer))
    else:
        output.progress("computing what was trained with PEFT")
        model = ByPeft(peft or Path(), base)
        trained = model.trained(PROMPTS if prompts is None else lines_of(prompts, "--prompts"))
    # `prompt_logprobs` of vLLM are wrong for an adapter's head (`CompletionServer.logprobs`).
    by_token = by_token or (model is not None and model.trains_head)
    by_adapter = [server.logprobs(name, one.token_ids, by_token=by_token) for one in trained]
    by_base = [server.logprobs(served_base, one.token_ids, by_token=by_token) for one in trained]
    floor, rows = judge(trained, by_adapter, by_base, limit)
    verdicts = {row.verdict for row in rows}
    is_right = OK in verdicts and verdicts <= {OK, UNSEEN}
    found: tuple[str, ...] = ()
    if verdicts & {OUT, AS_BASE}:
        output.progress("computing which modules are at fault")
        found = at_fault(trained, by_adapter, floor[0] * limit, model) if model else (_WITHOUT_MODULES,)
    ending = "served as trained" if is_right else "not shown to be served as trained"
    floor_text = f"how far {served_base} is from its trainer's, {floor[0]:.2g} at most, {floor[1]:.2g} in the mean"
    texts: list[Shown] = [
        table(("prompt", "tokens", "largest", "mean", "verdict"), [row.cells for row in rows]),
        line(),
        line(f"in multiples of the floor: {floor_text}; up to {limit:g} are right"),
        *(line(text) for text in found),
        line(f"{name}: {ending}", f"bold {'green' if is_right else 'red'}"),
    ]
    fields = {"name": name, "url": url, "base": served_base, "limit": limit, "verdict": OK if is_right else OUT}
    fields |= {"floor": {"largest": floor[0], "mean": floor[1]}, "prompts": [asdict(row) for row in rows]}
    fields["at_fault"] = list(found)
    return Result(fields, texts, Exit.OK if is_right else Exit.WRONG)


class CompletionServer:
    """A server with OpenAI's API, as vLLM has the API.

    Raises, in every method:
        AdapterNotFound: the server does not know the model. SourceUnavailable: any other answer than vLLM's.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._server = AdminClient(url, timeout_s, keys=(VLLM_KEY,))

    def base_model(self) -> str:
        """Return the base model's name: the first in `/v1/models` without a parent."""
        try:
            cards = self._ask("GET", "/v1/models")["data"]
            return next(str(card["id"]) for card in cards if card.get("parent") is None)
        except (KeyError, TypeError, AttributeError, StopIteration):
            raise self._strange("/v1/models", "no base model") from None

    def logprobs(self, model: str, token_ids: Sequence[int], *, by_token: bool = False) -> tuple[float, ...]:
        """Return for each token but the first the logarithm of its probability, as the server computes it with `model`.

        Args:
            model: the model's name at the server.
            token_ids: the prompt.
            by_token: let each token be generated, at the price of a request for each. vLLM (0.30 to 0.33) computes an
            adapter's head for prompt_logprobs with the rows of another step, and for generated tokens rightly.
        """
        if by_token:
            return tuple(self._generated(model, token_ids[:at], token_ids[at]) for at in range(1, len(token_ids)))
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = self._ask("POST", "/v1/completions", body, model)
        try:
            # vLLM has no probability of a prompt's first token.
            said = zip(answer["choices"][0]["prompt_logprobs"][1:], token_ids[1:], strict=True)
            return tuple(float(of_token[str(token)]["logprob"]) for of_token, token in said)
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._strange("/v1/completions", "no prompt_logprobs of each token") from None

    def _generated(self, model: str, before: Sequence[int], token: int) -> float:
        """Return the logarithm of the probability of the only token allowed; masks do not change the logarithm."""
        body = {"model": model, "prompt": list(before), "max_tokens": 1, "temperature": 0, "logprobs": 0}
        answer = self._ask("POST", "/v1/completions", {**body, "allowed_token_ids": [token]}, model)
        try:
            return float(answer["choices"][0]["logprobs"]["token_logprobs"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._strange("/v1/completions", "no logprobs of the token") from None

    def _ask(self, method: str, path: str, body: Any = None, model: str = "") -> dict[str, Any]:
        answer = self._server.request(method, path, json=body)
        if answer.status_code == _NOT_FOUND and model:
            raise AdapterNotFound("no such model", remedy="see the server's /v1/models", adapter=model)
        content = object_of(answer.content)
        if answer.is_error or not content:
            raise self._strange(path, f"HTTP {answer.status_code}: {answer.text[:300]}")
        return content

    def _strange(self, path: str, found: str) -> SourceUnavailable:
        remedy = "check --url and VLLM_API_KEY, and that the server runs; see its log"
        return SourceUnavailable(f"{found} from {self._server.url}{path}", expected="what vLLM answers", remedy=remedy)
