"""`resolve`: resolve names as a server would, each step with its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from lora_plugins.absence import Absence
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.names import AdapterName, why_absent
from lora_plugins.cli.base_model import (
    BasePath,
    MaxRank,
    ServedNames,
    compared_with,
    read_base,
    why_not_compared,
    would_be_served,
)
from lora_plugins.cli.exits import Exit, exit_of
from lora_plugins.cli.lookup import LookUp, SourceAnswer, look_up
from lora_plugins.cli.names import NamesFile, expand, is_several, together, wanted
from lora_plugins.cli.output import Output, Result, error_fields, line, number, size, table
from lora_plugins.cli.sources import names_of_environment
from lora_plugins.errors import AdapterNotFound, LoRAPluginsError, NoFreeSlot, OutOfMemory, SourceUnavailable
from lora_plugins.findings import resolvers_not_asked
from lora_plugins.settings import Settings

_VERDICTS = {
    "not compared": "whole, and not compared",
    "found": "found, and nothing was fetched; without --dry-run it is verified too",
    "unknown": "no source has it; a request gets a 404",
    "refused": "would be refused",
    "unavailable": "unavailable now; a request gets a 503",
}


class Step(NamedTuple):
    """A step: `verdict` is `ok`, `yes`, `no`, `not asked`, `not checked`, `warning` or `failed`."""

    step: str
    verdict: str
    detail: str
    hint: str = ""


def resolve(
    output: Output,
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
) -> Result:
    """Resolve names as a server would, step by step."""
    settings = Settings.from_env()
    base = read_base(settings, base_model, served_model_name, max_lora_rank)
    base_path = "" if base is None else base.path
    asked = expand(wanted(names, file), lambda: names_of_environment(settings, base_path), "the sources")
    by_name = {one.name: LookUp(one.name, one.name) for one in asked if not isinstance(one, LoRAPluginsError)}
    well_formed = [one for one in by_name.values() if _malformed(one.name) is None]
    labels = look_up(output, settings, well_formed, base_path, base, dry_run=dry_run)
    warnings = [Step("vllm", "warning", item.found, item.remedy) for item in resolvers_not_asked(settings)]
    answers: list[Result | LoRAPluginsError] = []
    for one in asked:
        if isinstance(one, LoRAPluginsError):
            answers.append(one)
        else:
            found = by_name[one.name]
            answers.append(_result(found, [*warnings, *_steps(found, labels, base)], base))
    return together(answers, is_list=is_several(names, file), blank_between=True)


def _malformed(name: str) -> AdapterNotFound | None:
    try:
        AdapterName.parse(name)
    except AdapterNotFound as error:
        return error
    return None


def _steps(asked: LookUp, labels: Sequence[str], base: BaseModel | None) -> Iterator[Step]:
    """Yield the steps of a request for the name, up to its end; a name that no source can have ends as an error."""
    malformed = _malformed(asked.name)
    if malformed is not None:
        asked.error = malformed
        yield Step("name", "failed", str(malformed))
        return
    yield Step("name", "ok", "is well-formed")
    for label in labels:
        yield _step_of(label, asked.answers.get(label))
    if asked.error is not None and asked.error not in asked.answers.values():
        yield Step(_place_of(asked.error), "failed", str(asked.error))
    elif asked.located is not None:
        located = asked.located
        files = f"{number(len(located.adapter.files), 'file')}, {size(located.size_bytes)}"
        would = f"would fetch {files}, from {located.adapter.uri}"
        yield Step("store", "ok", would if located.stored is None else f"has it: {located.stored}")
        yield Step("adapter", "not checked", "nothing is fetched with --dry-run")
    elif asked.stored is not None:
        event = asked.stored.event
        how = f"fetched in {event.obtain_s:.2f} s" if event.fetched else "has it"
        yield Step("store", "ok", f"{how}: {event.path}")
        yield Step("adapter", "ok", f"verified: rank {event.rank}, {size(event.size_bytes)}")
        said = "; ".join((*event.warnings, *event.notes))
        if base is None or _why_not_compared(asked, base):
            verdict = "warning" if event.warnings else "not checked"
            yield Step("base", verdict, said or ("no --base-model was given" if base is None else compared_with(base)))
        else:
            verdict = "warning" if event.warnings else "ok"
            yield Step("base", verdict, said or f"fits {base.path}: {compared_with(base)}")
    elif asked.error is None and (reason := why_absent(asked.name)) is not None:
        asked.error = reason
        yield Step("revision", "failed", str(reason))


def _step_of(source: str, answer: SourceAnswer | None) -> Step:
    if answer is None:
        return Step(source, "not asked", "an earlier source has decided")
    if isinstance(answer, LoRAPluginsError):
        return Step(source, "failed", str(answer))
    if isinstance(answer, Absence):
        detail = f"{answer.place}: {answer.detail}" if answer.place else answer.detail
        return Step(source, "no" if answer.was_asked else "not asked", detail, answer.hint)
    files = f"{number(len(answer.files), 'file')}, {size(sum(file.size_bytes for file in answer.files))}"
    return Step(source, "yes", f"{answer.uri}, version {answer.version[:12]}, {files}")


def _place_of(error: LoRAPluginsError) -> str:
    """Return the step of an error without a source."""
    if isinstance(error, SourceUnavailable):
        return "fetch"
    return "store" if isinstance(error, (NoFreeSlot, OutOfMemory)) else "adapter"


def _why_not_compared(asked: LookUp, base: BaseModel | None) -> str:
    return "" if asked.stored is None else why_not_compared(base, [file.name for file in asked.stored.manifest.files])


def _verdict(asked: LookUp, last: Step, base: BaseModel | None) -> tuple[str, Exit]:
    error = asked.error
    if error is None:
        if asked.stored is not None:
            return ("not compared", Exit.NOT_COMPARED) if _why_not_compared(asked, base) else ("served", Exit.OK)
        return ("found", Exit.OK) if asked.located else ("unknown", Exit.NOT_FOUND)
    if last.step in ("name", "revision"):
        return "unknown", exit_of(error)
    return "unavailable" if isinstance(error, SourceUnavailable) else "refused", exit_of(error)


def _in_words(asked: LookUp, verdict: str, base: BaseModel | None) -> str:
    if verdict == "served" and asked.stored is not None:
        return would_be_served(base, asked.stored.event.rank)
    reason = _why_not_compared(asked, base) if verdict == "not compared" else ""
    return f"{_VERDICTS[verdict]}: {reason}" if reason else _VERDICTS[verdict]


def _result(asked: LookUp, steps: Sequence[Step], base: BaseModel | None) -> Result:
    verdict, code = _verdict(asked, steps[-1], base)
    fields: dict[str, Any] = {
        "name": asked.name,
        "verdict": verdict,
        "steps": [step._asdict() for step in steps],
        "adapter": None,
    }
    if asked.stored is not None:
        found, event = asked.stored.adapter, asked.stored.event
        fields["adapter"] = {
            "lora_id": found.adapter_id,
            "source": found.source,
            "version": found.version,
            "digest": found.digest,
            "path": event.path,
            "rank": event.rank,
            "size_bytes": event.size_bytes,
            "fetched": event.fetched,
            "notes": list(event.notes),
        }
    if asked.located is not None:
        fields["located"] = asked.located.as_json()
    if asked.error is not None:
        fields["error"] = error_fields(asked.error)
    rows = []
    for step in steps:
        rows.append(step[:3])
        if step.hint:
            rows.append(("", "", f"→ {step.hint}"))
    style = {Exit.OK: "bold green", Exit.NOT_COMPARED: "bold yellow"}.get(code, "bold red")
    end = line(f"{asked.name}: {_in_words(asked, verdict, base)}", style)
    return Result(fields, [table(("step", "verdict", ""), rows), line(), end], code)
