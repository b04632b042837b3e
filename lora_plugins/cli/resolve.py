"""`resolve`: resolve names as a server would, each step with its verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from lora_plugins.absence import Absence
from lora_plugins.adapter.names import AdapterName, why_absent
from lora_plugins.cli.amounts import number, size
from lora_plugins.cli.base_model import BasePath, MaxRank, ServedNames, read_base
from lora_plugins.cli.dry_run import WouldFetch, locate
from lora_plugins.cli.exits import Exit, exit_of
from lora_plugins.cli.output import Json, Output, Quiet, error_fields
from lora_plugins.cli.progress import FetchBars
from lora_plugins.cli.several import NamesFile, end_of_several, expand, failure, is_several, wanted
from lora_plugins.cli.sources import (
    Answer,
    names_of_environment,
    require_sources,
    resolver_of_environment,
    sources_of_environment,
)
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.events import AdapterFetched, AdapterResolved, Event
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.source import Source
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
    hint: str = ""


@dataclass(slots=True)
class Trace:
    """The steps of one name so far."""

    name: str
    steps: list[Step] = field(default_factory=list)
    resolved: AdapterResolved | None = None
    fetched: AdapterFetched | None = None
    answer: dict[str, Any] = field(default_factory=dict)

    def add(self, step: str, verdict: str, detail: str | LoRAPluginsError, hint: str = "") -> None:
        """Add a step."""
        self.steps.append(Step(step, verdict, detail, hint))

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """The steps for people, each hint in a row of its own."""
        rows = []
        for step in self.steps:
            rows.append((step.step, step.verdict, str(step.detail)))
            if step.hint:
                rows.append(("", "", f"→ {step.hint}"))
        return rows

    def on_answer(self, answer: Answer) -> None:
        """Add the step of a source."""
        found = answer.found
        if isinstance(found, LoRAPluginsError):
            self.add(answer.source, "failed", found)
        elif isinstance(found, Absence):
            detail = f"{found.place}: {found.detail}" if found.place else found.detail
            self.add(answer.source, "no" if found.was_asked else "not asked", detail, found.hint)
        else:
            size_bytes = sum(file.size_bytes for file in found.files)
            files = f"{number(len(found.files), 'file')}, {size(size_bytes)}"
            self.add(answer.source, "yes", f"{found.uri}, version {found.version[:12]}, {files}")

    def on_event(self, event: Event) -> None:
        """Keep what later steps need; a hook for events."""
        if isinstance(event, AdapterFetched):
            self.fetched = event
        elif isinstance(event, AdapterResolved):
            self.resolved = event


def resolve(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names as a request's model field has them, or patterns in quotes for what sources list."),
    ] = None,
    *,
    file: NamesFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Ask the sources and fetch nothing; the store stays as it is.")
    ] = False,
    base_model: BasePath = None,
    served_model_name: ServedNames = None,
    max_lora_rank: MaxRank = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> Exit:
    """Resolve names as a server would, step by step."""
    output, settings = Output(as_json=as_json, quiet=quiet), Settings.from_env()
    base = read_base(settings, base_model, served_model_name, max_lora_rank)
    base_path = "" if base is None else base.path
    asked = expand(wanted(names, file), lambda: names_of_environment(settings, base_path), "the sources")
    answers, codes = [], []
    for place, one in enumerate(asked):
        if isinstance(one, LoRAPluginsError):
            codes.append(failure(output, one))
            answers.append({"name": one.adapter, "error": error_fields(one)})
            continue
        if place:
            output.line()
        trace = Trace(one.name)
        if dry_run:
            sources = sources_of_environment(settings, trace.on_answer)
            require_sources(sources)
            codes.append(asyncio.run(_look(output, settings, trace, sources, base_path)))
        else:
            bars = FetchBars(output)

            def hook(event: Event, trace: Trace = trace, bars: FetchBars = bars) -> None:
                trace.on_event(event)
                bars.on_event(event)

            resolver = resolver_of_environment(settings, base, hook=hook, report=trace.on_answer)
            require_sources(resolver.sources)
            codes.append(asyncio.run(_resolve(output, resolver, trace, bars)))
        answers.append(trace.answer)
    if is_several(names, file):
        return end_of_several(output, answers, codes)
    output.json(answers[0])
    return codes[0]


def _is_name(output: Output, settings: Settings, trace: Trace) -> Exit | None:
    """The first steps, which are the same whether something is fetched or not; the end where it is no name."""
    if not settings.runtime_lora_updating:
        trace.add("vllm", "warning", "asks no resolver unless VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 is set; it is not")
    try:
        AdapterName.parse(trace.name)
    except AdapterNotFound as error:
        trace.add("name", "failed", error)
        return _end(output, trace, error)
    trace.add("name", "ok", "is well-formed")
    return None


async def _resolve(output: Output, resolver: AdapterResolver, trace: Trace, bars: FetchBars) -> Exit:
    end = _is_name(output, resolver.settings, trace)
    if end is not None:
        return end
    try:
        async with bars.shown(trace.name):
            found = await resolver.resolve(trace.name, resolver.base.path if resolver.base else "")
    except LoRAPluginsError as error:
        return _failed(output, resolver.sources, trace, error)
    if found is None:
        return _unknown(output, trace)
    _add_skipped(resolver.sources, trace)
    _add_stored(resolver, trace, found)
    resolver.store.release(found.name, found.path)
    return _end(output, trace, None, found)


async def _look(output: Output, settings: Settings, trace: Trace, sources: Sequence[Source], base_path: str) -> Exit:
    """As `_resolve`, up to where something would be fetched."""
    end = _is_name(output, settings, trace)
    if end is not None:
        return end
    try:
        found = await locate(sources, AdapterName.parse(trace.name), base_path, settings)
    except LoRAPluginsError as error:
        return _failed(output, sources, trace, error)
    if found is None:
        return _unknown(output, trace)
    _add_skipped(sources, trace)
    if found.stored is not None:
        trace.add("store", "ok", f"has it: {found.stored}")
    else:
        files = number(len(found.adapter.files), "file")
        trace.add("store", "ok", f"would fetch {files}, {size(found.size_bytes)}, from {found.adapter.uri}")
    trace.add("adapter", "not checked", "nothing is fetched with --dry-run")
    return _end(output, trace, None, located=found)


def _failed(output: Output, sources: Sequence[Source], trace: Trace, error: LoRAPluginsError) -> Exit:
    _add_skipped(sources, trace)
    if all(step.detail is not error for step in trace.steps):
        trace.add(_where(error), "failed", error)
    return _end(output, trace, error)


def _unknown(output: Output, trace: Trace) -> Exit:
    reason = why_absent(trace.name)
    if reason is not None:
        trace.add("revision", "failed", reason)
    return _end(output, trace, reason)


def _where(error: LoRAPluginsError) -> str:
    """The step of an error that no source reported."""
    if isinstance(error, SourceUnavailable):
        return "fetch"
    return "store" if isinstance(error, (NoFreeSlot, OutOfMemory)) else "adapter"


def _add_skipped(sources: Sequence[Source], trace: Trace) -> None:
    asked = {step.step for step in trace.steps}
    for source in sources:
        if source.label not in asked:
            trace.add(source.label, "not asked", "an earlier source has decided")


def _add_stored(resolver: AdapterResolver, trace: Trace, found: ResolvedAdapter) -> None:
    event = trace.resolved
    if event is None:
        raise AssertionError("unreachable: a new resolver emits what it resolves")
    if trace.fetched is None:
        trace.add("store", "ok", f"has it: {found.path}")
    else:
        trace.add("store", "ok", f"fetched in {trace.fetched.fetch_s:.2f} s: {found.path}")
    trace.add("adapter", "ok", f"verified: rank {event.rank}, {size(event.size_bytes)}")
    if resolver.base is None:
        trace.add("base", "not checked", "no --base-model was given")
    else:
        trace.add("base", "ok", "; ".join(event.notes) or f"fits {resolver.base.path}")


def _end(
    output: Output,
    trace: Trace,
    error: LoRAPluginsError | None,
    found: ResolvedAdapter | None = None,
    located: WouldFetch | None = None,
) -> Exit:
    if found is not None:
        verdict, code = "served", Exit.OK
    elif located is not None:
        verdict, code = "found", Exit.OK
    elif error is None:
        verdict, code = "unknown", Exit.NOT_FOUND
    else:
        verdict, code = ("unavailable" if isinstance(error, SourceUnavailable) else "refused"), exit_of(error)
        if trace.steps[-1].step in ("name", "revision"):
            verdict = "unknown"
    output.table(("step", "verdict", ""), trace.rows)
    output.line()
    output.line(f"{trace.name}: {_VERDICTS[verdict]}", style="bold green" if code is Exit.OK else "bold red")
    answer: dict[str, Any] = {
        "name": trace.name,
        "verdict": verdict,
        "steps": [
            {"step": step.step, "verdict": step.verdict, "detail": str(step.detail), "hint": step.hint}
            for step in trace.steps
        ],
        "adapter": None,
    }
    if found is not None and trace.resolved is not None:
        answer["adapter"] = {
            "lora_id": found.adapter_id,
            "source": found.source,
            "version": found.version,
            "digest": found.digest,
            "path": str(found.path),
            "rank": trace.resolved.rank,
            "size_bytes": trace.resolved.size_bytes,
            "fetched": trace.resolved.fetched,
            "notes": list(trace.resolved.notes),
        }
    if located is not None:
        answer["located"] = located.as_json()
    if error is not None:
        answer["error"] = error_fields(error)
    trace.answer = answer
    return code


_VERDICTS = {
    "served": "would be served",
    "found": "found, and nothing was fetched; without --dry-run it is verified too",
    "unknown": "no source has it; a request gets a 404",
    "refused": "would be refused",
    "unavailable": "unavailable now; a request gets a 503",
}
