"""`resolve`: the way of one name as a server would go it, each step with its verdict."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from lora_plugins.adapter.names import AdapterName
from lora_plugins.cli.amounts import number, size
from lora_plugins.cli.base_model import BasePath, MaxRank, ServedNames, read_base
from lora_plugins.cli.exits import Exit, exit_of
from lora_plugins.cli.output import Json, Output, error_fields
from lora_plugins.cli.progress import shown_progress
from lora_plugins.cli.sources import Answer, require_sources, sources_of_environment
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.events import AdapterFetched, AdapterResolved, Event
from lora_plugins.resolvers.resolution import SourceChain
from lora_plugins.resolvers.versions import ResolvedAdapter
from lora_plugins.settings import Settings


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `verdict` is `ok`, `yes`, `no`, `not asked`, `not checked`, `warning` or `failed`.

    An error is kept as it is until the end: whoever passes it on may still add the adapter's name to it.
    """

    step: str
    verdict: str
    detail: str | LoRAPluginsError


@dataclass(slots=True)
class Course:
    """What has happened to one name so far."""

    name: str
    steps: list[Step] = field(default_factory=list)
    resolved: AdapterResolved | None = None
    fetched: AdapterFetched | None = None

    def answered(self, answer: Answer) -> None:
        """A source has answered."""
        if answer.error is not None:
            self.steps.append(Step(answer.source, "failed", answer.error))
        elif answer.located is None:
            self.steps.append(Step(answer.source, "no", "has no such adapter"))
        else:
            located = answer.located
            size_bytes = sum(file.size_bytes for file in located.files)
            files = f"{number(len(located.files), 'file')}, {size(size_bytes)}"
            self.steps.append(Step(answer.source, "yes", f"{located.uri}, version {located.version[:12]}, {files}"))

    def happened(self, event: Event) -> None:
        """A hook for the chain's events."""
        if isinstance(event, AdapterFetched):
            self.fetched = event
        elif isinstance(event, AdapterResolved):
            self.resolved = event


def resolve(
    name: Annotated[str, typer.Argument(help="The adapter's name, as a request's model field has it.")],
    *,
    base_model: BasePath = None,
    served_model_name: ServedNames = None,
    max_lora_rank: MaxRank = None,
    as_json: Json = False,
) -> Exit:
    """Go the way of one name as a server would, step by step."""
    output, settings, course = Output(as_json=as_json), Settings.from_env(), Course(name)
    base = read_base(settings, base_model, served_model_name, max_lora_rank)
    chain = sources_of_environment(settings, base, hook=course.happened, report=course.answered)
    require_sources(chain)
    return asyncio.run(_resolve(output, chain, course))


async def _resolve(output: Output, chain: SourceChain, course: Course) -> Exit:
    if not chain.settings.runtime_lora_updating:
        course.steps.append(
            Step("vllm", "warning", "asks no resolver unless VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 is set; it is not")
        )
    try:
        AdapterName.parse(course.name)
    except AdapterNotFound as error:
        course.steps.append(Step("name", "failed", error))
        return _end(output, course, error)
    course.steps.append(Step("name", "ok", "is well-formed"))
    try:
        async with shown_progress(output, chain.store, course.name):
            found = await chain.resolve(course.name, chain.base.path if chain.base else "")
    except LoRAPluginsError as error:
        _add_skipped(chain, course)
        if all(step.detail is not error for step in course.steps):
            course.steps.append(Step(_where(error), "failed", error))
        return _end(output, course, error)
    if found is None:
        return _end(output, course, None)
    _add_skipped(chain, course)
    _add_stored(chain, course, found)
    chain.release(found.name, found.path)
    return _end(output, course, None, found)


def _where(error: LoRAPluginsError) -> str:
    """The step of an error that no source reported."""
    if isinstance(error, SourceUnavailable):
        return "fetch"
    return "store" if isinstance(error, (NoFreeSlot, OutOfMemory)) else "adapter"


def _add_skipped(chain: SourceChain, course: Course) -> None:
    asked = {step.step for step in course.steps}
    for source in chain.sources:
        if source.label not in asked:
            course.steps.append(Step(source.label, "not asked", "an earlier source has decided"))


def _add_stored(chain: SourceChain, course: Course, found: ResolvedAdapter) -> None:
    event = course.resolved
    if event is None:
        raise AssertionError("unreachable: a new chain emits what it resolves")
    if course.fetched is None:
        course.steps.append(Step("store", "ok", f"has it: {found.path}"))
    else:
        course.steps.append(Step("store", "ok", f"fetched in {course.fetched.fetch_s:.2f} s: {found.path}"))
    course.steps.append(Step("adapter", "ok", f"verified: rank {event.rank}, {size(event.size_bytes)}"))
    if chain.base is None:
        course.steps.append(Step("base", "not checked", "no --base-model was given"))
    else:
        course.steps.append(Step("base", "ok", "; ".join(event.notes) or f"fits {chain.base.path}"))


def _end(output: Output, course: Course, error: LoRAPluginsError | None, found: ResolvedAdapter | None = None) -> Exit:
    if found is not None:
        verdict, code = "served", Exit.OK
    elif error is None:
        verdict, code = "unknown", Exit.NOT_FOUND
    else:
        verdict, code = ("unavailable" if isinstance(error, SourceUnavailable) else "refused"), exit_of(error)
        if course.steps[-1].step == "name":
            verdict = "unknown"
    output.table(("step", "verdict", ""), [(step.step, step.verdict, str(step.detail)) for step in course.steps])
    output.line()
    output.line(f"{course.name}: {_SAID[verdict]}", style="bold green" if code is Exit.OK else "bold red")
    answer: dict[str, Any] = {
        "name": course.name,
        "verdict": verdict,
        "steps": [{"step": step.step, "verdict": step.verdict, "detail": str(step.detail)} for step in course.steps],
        "adapter": None,
    }
    if found is not None and course.resolved is not None:
        answer["adapter"] = {
            "lora_id": found.adapter_id,
            "source": found.source,
            "version": found.version,
            "digest": found.digest,
            "path": str(found.path),
            "rank": course.resolved.rank,
            "size_bytes": course.resolved.size_bytes,
            "fetched": course.resolved.fetched,
            "notes": list(course.resolved.notes),
        }
    if error is not None:
        answer["error"] = error_fields(error)
    output.json(answer)
    return code


_SAID = {
    "served": "would be served",
    "unknown": "no source has it; a request gets vLLM's 404",
    "refused": "would be refused",
    "unavailable": "unavailable now; a request gets a 503",
}
