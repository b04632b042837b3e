"""`why`: what a running server says of names, and for the rest what a request would meet, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote

import typer

from lora_plugins.absence import Absence
from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.mixture import terms_of
from lora_plugins.adapter.names import MISSPELT, misspelt, near, why_absent
from lora_plugins.api.models import AdapterList, AdapterView, ServedState
from lora_plugins.cli import Exit, exit_of
from lora_plugins.cli.base_model import compared_with, on_base, why_not_compared, would_be_served
from lora_plugins.cli.lookup import LookUp, Stored, look_up
from lora_plugins.cli.name_arguments import (
    AskedName,
    NamesFile,
    expand,
    listed,
    malformed,
    names_of_environment,
    wanted,
)
from lora_plugins.cli.output import Output, Result, ago, error_fields, line, number, short, size, steps_table
from lora_plugins.cli.server_client import DEFAULT_URL, AdminClient, ServerUrl, Timeout
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError, SourceUnavailable
from lora_plugins.findings import Step, resolvers_not_asked
from lora_plugins.resolvers.search import SourceAnswer
from lora_plugins.resolvers.sources.pushed import LABEL as PUSHED
from lora_plugins.settings import Settings
from lora_plugins.store.blocked_names import Blocks, blocked
from lora_plugins.store.layout import Layout

_VERDICTS = {
    "found": "found, and nothing was fetched; without --dry-run it is verified too",
    "unknown": "no source has it; a request gets a 404",
    "refused": "would be refused",
    "unavailable": "unavailable now; a request gets a 503",
    "not asked": "not served now, and this environment names no source to ask",
    "no answer": "the server gives no answer, and this environment names no source to ask",
    "not resolved": "found, and no request finds it: vLLM asks no resolver; set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "paused": "served, and paused: requests wait for a resume",
}


# The steps of errors without a source.
_PLACES = {Exit.SETTINGS: "settings", Exit.UNAVAILABLE: "fetch", Exit.NO_ROOM: "store"}


@dataclass(slots=True)
class OfServer:
    """A running server's words on a name: the steps, and the adapter, if the server has the name.

    `near`: names like one that nobody has, in words.
    """

    steps: list[Step] = field(default_factory=list)
    view: AdapterView | None = None
    is_blocked: bool = False
    near: str = ""

    @property
    def state(self) -> ServedState | None:
        return None if self.view is None else self.view.state

    @property
    def is_the_end(self) -> bool:
        """Whether a request for the name asks no source."""
        return self.is_blocked or self.state not in (None, ServedState.DRAINING)


@on_base
def why(
    output: Output,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names as a request's model field has them, or patterns in quotes for what sources list."),
    ] = None,
    *,
    file: NamesFile = None,
    url: ServerUrl = DEFAULT_URL,
    timeout_s: Timeout = 5.0,
    no_server: Annotated[
        bool, typer.Option("--no-server", help="Ask the sources alone, as a server does at a first request.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Ask the sources and fetch nothing; the store stays as it is.")
    ] = False,
    settings: Settings,
    base: BaseModel | None,
) -> Result:
    """Say whether names are served, by which version, and why not.

    Examples:
        why team/sql --url http://gpu-7:8000
        why 'team/*' --no-server --dry-run
        why team/sql --base-model org/llama-8b --max-lora-rank 16
    """
    base_path = "" if base is None else base.path
    asked = expand(wanted(names, file), lambda: names_of_environment(settings, base_path), "the sources")
    if dry_run:  # no mixture is made without its parts
        asked = [part for one in asked for part in _parts_of(one)]
    by_name = {one.name: LookUp(one.name, one.name) for one in asked if not isinstance(one, LoRAPluginsError)}
    said = {name: OfServer() for name in by_name}
    well_formed = [name for name in by_name if malformed(name) is None]
    client = AdminClient(url, timeout_s)
    if not no_server:
        _ask(client, {name: said[name] for name in well_formed})
    blocks = Blocks(Layout(settings.store_dir))  # every server of the store heeds them
    for name in well_formed:
        said[name].is_blocked = said[name].state is ServedState.BLOCKED or name in blocks
    rest = [by_name[name] for name in well_formed if not said[name].is_the_end]
    labels: list[str] = []
    try:
        if rest:
            note = f"fetching into {settings.store_dir}, to verify; --dry-run writes nothing"
            labels = look_up(output, settings, rest, base_path, base, dry_run=dry_run, before_fetch=note)
    except InvalidSettings as error:
        if no_server:
            raise
        for one in rest:
            one.found.error = error
    unknown = [one.name for one in rest if _is_unknown(one) and not said[one.name].near]
    known = names_of_environment(settings, base_path, only_local=True) if unknown else ()
    for name in unknown:
        like = misspelt(name, [other for other in near(name, known) if other not in blocks])
        said[name].near = "" if like is None else like.expected
    not_asked = [item._replace(check="vllm", state="warning") for item in resolvers_not_asked(settings)]

    def explain(one: LookUp) -> Result:
        of_server = said[one.name]
        explanation = _Explanation([] if of_server.is_the_end else [*not_asked])
        explanation.go(one, of_server, labels, base, is_resolved=not not_asked)
        return _result(one, of_server, explanation)

    explained = [one if isinstance(one, LoRAPluginsError) else explain(by_name[one.name]) for one in asked]
    return listed(explained, blank_between=True)


def _ask(client: AdminClient, names: Mapping[str, OfServer]) -> None:
    """Ask a server for names; a server that does not answer is asked no more."""
    try:
        declared: dict[str, Any] | None = None
        for name, one in names.items():
            try:
                one.view = client.ask(AdapterView, "GET", f"/{quote(name)}")
                one.steps += _steps_of_server(one.view, client.url)
            except AdapterNotFound as error:
                one.near = error.expected if error.found == MISSPELT else ""
                one.steps.append(Step("server", "no", f"{client.url} does not serve it"))
                if declared is None:
                    listed = client.ask(AdapterList, "GET", "?limit=1").declared
                    declared = {} if listed is None else {it.lora_name: it for it in listed.loras}
                if (it := declared.get(name)) is not None:
                    why = it.error or "in LORA_PLUGINS_ADAPTERS_FILE, and not loaded now"
                    one.steps.append(Step("declared", str(it.state), why))
    except LoRAPluginsError as error:
        for one in names.values():
            one.steps = one.steps or [Step("server", "no answer", error.found, error.remedy)]


def _steps_of_server(view: AdapterView, url: str) -> Iterator[Step]:
    held = f", {view.requests_held} held until the adapter is loaded or has a slot" if view.requests_held else ""
    requests = f"{number(view.requests_in_flight, 'request')} in flight{held}"
    yield Step("server", "yes", f"{url} has it: {view.state}, {requests}, used {ago(view.last_used_at)}")
    if view.state is not ServedState.BLOCKED:
        facts = f"{size(view.size_bytes)}, in {', '.join(view.tiers) or 'no tier'}"
        yield Step("version", "ok", f"{_version(view)}, {'' if view.rank is None else f'rank {view.rank}, '}{facts}")
    if view.chat is not None:
        template = "its own template" if view.chat.template else "the base model's template"
        ends = ", ".join(filter(None, (view.chat.end_token, *map(str, view.chat.end_ids))))
        yield Step("chat", "ok", f"{template}; ends at {ends or 'the end of the base model'}")
    if view.pinned_digest:
        stays, then = f"stays at {short(view.pinned_digest)}", f"lora-plugins refresh {view.lora_name}"
        if view.source == PUSHED:
            yield Step("version", "ok", f"{stays}, which was pushed, until the next push")
        else:
            yield Step("version", "warning", stays, f"{then} goes to the newest version")
    yield from (Step("base", "warning", text) for text in view.warnings)
    if view.last_error is not None:
        yield Step("error", "warning", f"{ago(view.last_error.at)}: {view.last_error.message}")
    if view.state is ServedState.PAUSED:
        yield Step("pause", "failed", "new requests wait", f"lora-plugins resume {view.lora_name}")


def _version(view: AdapterView) -> str:
    text = short(view.digest) if view.digest else str(view.path)
    return f"{text} from {view.uri}" if view.uri else text


@dataclass(slots=True)
class _Explanation:
    """The steps of a request for a name, up to its end; then the verdict, in words too, and the exit code."""

    steps: list[Step] = field(default_factory=list)
    verdict: str = "unknown"
    text: str = _VERDICTS["unknown"]
    code: Exit = Exit.NOT_FOUND

    def end(self, verdict: str, code: Exit = Exit.OK, text: str = "") -> None:
        self.verdict, self.code, self.text = verdict, code, text or _VERDICTS.get(verdict, "")

    def fail(self, asked: LookUp, error: LoRAPluginsError, check: str, verdict: str = "", remedy: str = "") -> None:
        """End with an error, and its step, unless a source's step has told it."""
        if error not in asked.found.answers.values():
            self.steps.append(Step(check, "failed", str(error), remedy))
        asked.found.error = error
        of_error = "unavailable" if isinstance(error, SourceUnavailable) else "refused"
        self.end(verdict or of_error, exit_of(error))

    def go(
        self, asked: LookUp, of_server: OfServer, labels: Sequence[str], base: BaseModel | None, *, is_resolved: bool
    ) -> None:
        """Walk through the steps; a name that no source can have ends as an error."""
        if (fault := malformed(asked.name)) is not None:
            self.fail(asked, fault, "name", "unknown")
            return
        self.steps.append(Step("name", "ok", "is well-formed"))
        if terms := terms_of(asked.name):
            self.steps.append(Step("parts", "ok", ", ".join(f"{term.weight} of {term.name}" for term in terms)))
        self.steps += of_server.steps
        if of_server.is_blocked:
            remedy = f"lora-plugins load {asked.name.partition('@')[0]}"
            self.fail(asked, blocked(asked.name), "block", "refused", remedy)
        elif of_server.state is ServedState.PAUSED:
            self.end("paused", Exit.UNAVAILABLE)
        elif of_server.view is not None and of_server.is_the_end:
            is_warned = any(step.state == "warning" for step in of_server.steps)
            text = f"served, version {_version(of_server.view)}{', with a warning above' if is_warned else ''}"
            self.end("served", text=text)
        else:
            self._sources(asked, of_server, labels, base)
            if not is_resolved and asked.found.error is None and (asked.stored or asked.would_fetch):
                self.end("not resolved", Exit.WRONG)

    def _sources(self, asked: LookUp, of_server: OfServer, labels: Sequence[str], base: BaseModel | None) -> None:
        self.steps += (_step_of(label, asked.found.answers.get(label)) for label in labels)
        if of_server.near and not (asked.stored or asked.would_fetch):
            self.steps.append(Step("spelling", "warning", f"perhaps {of_server.near} was meant"))
        if (error := asked.found.error) is not None:
            is_silent = any(step.state == "no answer" for step in of_server.steps)
            without_source = "no answer" if is_silent else "not asked"
            place = _PLACES.get(exit_of(error), "adapter")
            self.fail(asked, error, place, without_source if place == "settings" else "")
        elif (located := asked.would_fetch) is not None:
            files = f"{number(len(located.adapter.files), 'file')}, {size(located.size_bytes)}"
            would = f"would fetch {files}, from {located.adapter.uri}"
            self.steps.append(Step("store", "ok", would if located.stored is None else f"has it: {located.stored}"))
            self.steps.append(Step("adapter", "not checked", "nothing is fetched with --dry-run"))
            self.end("found")
        elif asked.stored is not None:
            self._stored(asked.stored, base)
        elif (reason := why_absent(asked.name)) is not None:
            self.fail(asked, reason, "revision", "unknown")

    def _stored(self, stored: Stored, base: BaseModel | None) -> None:
        event = stored.facts
        how = f"fetched in {event.obtain_s:.2f} s" if event.fetched else "has it"
        self.steps.append(Step("store", "ok", f"{how}: {event.path}"))
        self.steps.append(Step("adapter", "ok", f"verified: rank {event.rank}, {size(event.size_bytes)}"))
        reason = why_not_compared(base, [file.name for file in stored.manifest.files])
        fits = "no --base-model was given" if base is None else compared_with(base)
        if base is not None and not reason:
            fits = f"fits {base.path}: {fits}"
        verdict = "warning" if event.warnings else "not checked" if reason else "ok"
        self.steps.append(Step("base", verdict, "; ".join((*event.warnings, *event.notes)) or fits))
        if reason:
            self.end("not compared", Exit.NOT_COMPARED, f"whole, and not compared: {reason}")
        else:
            self.end("served", text=would_be_served(base, event.rank))


def _parts_of(one: AskedName | LoRAPluginsError) -> Iterable[AskedName | LoRAPluginsError]:
    terms = () if isinstance(one, LoRAPluginsError) else terms_of(one.name) or ()
    return [AskedName(term.name) for term in terms] or [one]


def _is_unknown(asked: LookUp) -> bool:
    return asked.found.error is None and asked.stored is None and asked.would_fetch is None


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


def _result(asked: LookUp, of_server: OfServer, explanation: _Explanation) -> Result:
    fields: dict[str, Any] = {
        "name": asked.name,
        "verdict": explanation.verdict,
        "steps": [dict(zip(("step", "verdict", "detail", "hint"), step, strict=True)) for step in explanation.steps],
        "server": None if of_server.view is None else of_server.view.model_dump(mode="json"),
        "adapter": None,
    }
    if asked.stored is not None:
        found, event = asked.stored.adapter, asked.stored.facts
        fields["adapter"] = {
            "lora_id": found.adapter_id,
            **{name: getattr(found, name) for name in ("source", "version", "digest")},
            **{name: getattr(event, name) for name in ("path", "rank", "size_bytes", "fetched")},
            "notes": list(event.notes),
        }
    if asked.would_fetch is not None:
        fields["located"] = asked.would_fetch.as_json()
    if asked.found.error is not None:
        fields["error"] = error_fields(asked.found.error)
    style = {Exit.OK: "bold green", Exit.NOT_COMPARED: "bold yellow"}.get(explanation.code, "bold red")
    shown = (
        steps_table(("step", "verdict", ""), explanation.steps, {}),
        line(f"\n{asked.name}: {explanation.text}", style),
    )
    return Result(fields, shown, explanation.code)
