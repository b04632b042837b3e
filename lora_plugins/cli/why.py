"""`why NAME…`: whether a request for a name would be served, step by step, and why not.

Runs in the command's own process. Asks a running server over its admin API first; for names that the server does not
serve, asks this environment's sources as a server would at a first request, and fetches and verifies the adapter into
the store, unless `--dry-run` is given. Out: for each name the steps, a verdict, and an exit code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from lora_plugins.cli.base_model import BaseModelPath, MaxRank, ServedNames, base_of_options
from lora_plugins.cli.fit_verdict import compared_with, why_not_compared, would_be_served
from lora_plugins.cli.lookup import LookUp, Stored, look_up
from lora_plugins.cli.name_arguments import Asked, AskedName, NamesFile, expand, malformed, wanted
from lora_plugins.cli.output import Output, Result, ago, error_fields, line, listed, number, short, size, steps_table
from lora_plugins.cli.server_client import DEFAULT_URL, AdminClient, ServerUrl, Timeout
from lora_plugins.cli.sources import names_of_environment
from lora_plugins.errors import AdapterNotFound, InvalidSettings, LoRAPluginsError, SourceUnavailable
from lora_plugins.findings import Step, resolvers_not_asked
from lora_plugins.resolvers.search import SourceAnswer
from lora_plugins.resolvers.sources.pushed import LABEL as PUSHED
from lora_plugins.settings import Settings
from lora_plugins.store.blocked_names import Blocks, blocked
from lora_plugins.store.layout import Layout

# The texts of verdicts; the texts of `served` and `not compared` depend on the adapter.
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
# The step at which an error ends the steps, by the error's exit code; with any other code, at the step `adapter`.
_STEP_OF_ERROR = {Exit.SETTINGS: "settings", Exit.UNAVAILABLE: "fetch", Exit.NO_ROOM: "store"}


@dataclass(slots=True)
class Explanation:
    """One name: what server and sources say, the steps of a request up to its end, and the verdict.

    Attributes:
        asked: the look-up at the sources; without a result where a request would not get as far as the sources.
        view: the adapter at the running server; None where the server has not the name, or was not asked.
        is_blocked: whether an operator has blocked the name, on the server or in the store.
        of_server: the server's steps. steps: all steps, in a request's order.
        near: the names like an unknown name, in words; empty without any.
        verdict: for programs, a key of `_VERDICTS`, `served` or `not compared`. text: the verdict for people.
        code: the exit code of this name.
    """

    asked: LookUp
    view: AdapterView | None = None
    is_blocked: bool = False
    of_server: list[Step] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    near: str = ""
    verdict: str = "unknown"
    text: str = _VERDICTS["unknown"]
    code: Exit = Exit.NOT_FOUND

    @property
    def asks_sources(self) -> bool:
        """Whether a request for the name gets as far as the sources: a draining adapter takes no new request."""
        return not self.is_blocked and (self.view is None or self.view.state is ServedState.DRAINING)

    @property
    def has_adapter(self) -> bool:
        """Whether a source has the adapter: it is in the store now, or a dry run has found it."""
        return self.asked.stored is not None or self.asked.would_fetch is not None

    def add(self, check: str, state: str, found: str, remedy: str = "") -> None:
        """Add a step; `Step` describes the arguments."""
        self.steps.append(Step(check, state, found, remedy))

    def end(self, verdict: str, code: Exit = Exit.OK, text: str = "") -> None:
        """Set the verdict; without `text`, with the verdict's text in `_VERDICTS`."""
        self.verdict, self.code, self.text = verdict, code, text or _VERDICTS[verdict]

    def fail(self, error: LoRAPluginsError, check: str, verdict: str = "", remedy: str = "") -> None:
        """Set the verdict of an error, and add a step for it, unless a source's own step shows the error already.

        Without `verdict`, the error's class decides whether the name is `unavailable` or `refused`.
        """
        if error not in self.asked.found.answers.values():
            self.add(check, "failed", str(error), remedy)
        self.asked.found.error = error
        of_error = "unavailable" if isinstance(error, SourceUnavailable) else "refused"
        self.end(verdict or of_error, exit_of(error))


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
        bool, typer.Option("--no-server", help="Ask the sources alone, as at a first request.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Ask the sources; fetch nothing into the store.")] = False,
    base_model: BaseModelPath = None,
    served_model_name: ServedNames = None,
    max_lora_rank: MaxRank = None,
) -> Result:
    """Say whether names are served, by which version, and why not.

    Examples:
        why team/sql --url http://gpu-7:8000
        why 'team/*' --no-server --dry-run
        why team/sql --base-model org/llama-8b --max-lora-rank 16
    """
    settings = Settings.from_env()
    base = base_of_options(settings, base_model, served_model_name, max_lora_rank)
    base_path = "" if base is None else base.path
    asked = expand(wanted(names, file), lambda: names_of_environment(settings, base_path), "the sources")
    if dry_run:  # a mixture is made of its parts' files, which a dry run does not fetch: look up the parts instead
        asked = [part for one in asked for part in _parts_of(one)]
    all_named = [one.name for one in asked if not isinstance(one, LoRAPluginsError)]
    by_name = {name: Explanation(LookUp(name, name)) for name in all_named}
    # Malformed names are asked nowhere; `_explain` gives them their verdict.
    well_formed = {name: one for name, one in by_name.items() if malformed(name) is None}
    client = AdminClient(url, timeout_s)
    if not no_server:
        _ask_server(client, well_formed)
    blocks = Blocks(Layout(settings.store_dir))  # all servers with this store refuse the blocked names
    for name, one in well_formed.items():
        one.is_blocked = name in blocks or (one.view is not None and one.view.state is ServedState.BLOCKED)
    # The names that a request would have looked up at the sources.
    rest = [one for one in well_formed.values() if one.asks_sources]
    labels: list[str] = []
    try:
        if rest:
            note = f"fetching into {settings.store_dir}, to verify; --dry-run writes nothing"
            look_ups = [one.asked for one in rest]
            labels = look_up(output, settings, look_ups, base_path, base, dry_run=dry_run, before_fetch=note)
    except InvalidSettings as error:
        if no_server:
            raise
        # The server's answers stand, although this environment has no sources.
        for one in rest:
            one.asked.found.error = error
    _find_near_names(rest, settings, base_path, blocks)
    # The doctor's check of vLLM's settings, as a warning here: the adapter itself may be in order.
    not_asked = [item._replace(check="vllm", state="warning") for item in resolvers_not_asked(settings)]
    for one in by_name.values():
        _explain(one, not_asked, labels, base)
    results = [one if isinstance(one, LoRAPluginsError) else _result(by_name[one.name]) for one in asked]
    return listed(results, blank_between=True)


def _parts_of(one: Asked) -> Iterable[Asked]:
    """The names of a mixture's parts; `one` itself where it is no mixture, or an error."""
    terms = () if isinstance(one, LoRAPluginsError) else terms_of(one.name) or ()
    return [AskedName(term.name) for term in terms] or [one]


def _ask_server(client: AdminClient, explanations: dict[str, Explanation]) -> None:
    """Note what a server says of each name, in `view`, `of_server` and `near`.

    After a call without an answer, the server is asked no more; each remaining name gets a step that says so.
    """
    try:
        # The server's declared adapters, by name: asked for once, for the first name that the server does not serve.
        declared: dict[str, Any] | None = None
        for name, one in explanations.items():
            try:
                one.view = client.ask(AdapterView, "GET", f"/{quote(name)}")
                one.of_server += _steps_of_server(one.view, client.url)
            except AdapterNotFound as error:
                one.near = error.expected if error.found == MISSPELT else ""  # such an error expects the near names
                one.of_server.append(Step("server", "no", f"{client.url} does not serve it"))
                if declared is None:
                    listed = client.ask(AdapterList, "GET", "?limit=1").declared
                    declared = {} if listed is None else {row.lora_name: row for row in listed.loras}
                if (row := declared.get(name)) is not None:
                    reason = row.error or "in LORA_PLUGINS_ADAPTERS_FILE, and not loaded now"
                    one.of_server.append(Step("declared", str(row.state), reason))
    except LoRAPluginsError as error:
        for one in explanations.values():
            one.of_server = one.of_server or [Step("server", "no answer", error.found, error.remedy)]


def _steps_of_server(view: AdapterView, url: str) -> Iterator[Step]:
    held = f", {view.requests_held} held until the adapter is loaded or has a slot" if view.requests_held else ""
    requests = f"{number(view.requests_in_flight, 'request')} in flight{held}"
    yield Step("server", "yes", f"{url} has it: {view.state}, {requests}, used {ago(view.last_used_at)}")
    if view.state is not ServedState.BLOCKED:  # a blocked name need not have a version
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


def _find_near_names(explanations: Iterable[Explanation], settings: Settings, base_path: str, blocks: Blocks) -> None:
    """Set `near` of unknown names from the lists of sources on this machine, where the server has set none."""
    unknown = [one for one in explanations if one.asked.found.error is None and not one.has_adapter and not one.near]
    known = names_of_environment(settings, base_path, only_local=True) if unknown else ()
    for one in unknown:
        like = misspelt(one.asked.name, [name for name in near(one.asked.name, known) if name not in blocks])
        one.near = "" if like is None else like.expected


def _explain(one: Explanation, not_asked: Sequence[Step], labels: Sequence[str], base: BaseModel | None) -> None:
    """Add the steps of a request for the name in their order, up to the step that ends the request; set the verdict.

    `not_asked` has a warning where vLLM asks no resolver, and is empty otherwise. `labels` are the sources' labels, in
    the order in which sources are asked. `base` is None where no base model was given.
    """
    name, view = one.asked.name, one.view
    one.steps += not_asked if one.asks_sources else ()
    if (fault := malformed(name)) is not None:
        one.fail(fault, "name", "unknown")
        return
    one.add("name", "ok", "is well-formed")
    if terms := terms_of(name):
        one.add("parts", "ok", ", ".join(f"{term.weight} of {term.name}" for term in terms))
    one.steps += one.of_server
    if one.is_blocked:
        one.fail(blocked(name), "block", "refused", f"lora-plugins load {name.partition('@')[0]}")
    elif one.asks_sources or view is None:
        _explain_sources(one, labels, base)
        # The sources have the adapter, but no request would get as far.
        if not_asked and one.asked.found.error is None and one.has_adapter:
            one.end("not resolved", Exit.WRONG)
    elif view.state is ServedState.PAUSED:
        one.end("paused", Exit.UNAVAILABLE)
    else:
        is_warned = any(step.state == "warning" for step in one.of_server)
        one.end("served", text=f"served, version {_version(view)}{', with a warning above' if is_warned else ''}")


def _explain_sources(one: Explanation, labels: Sequence[str], base: BaseModel | None) -> None:
    """Add what each source has answered, and end with the adapter that was found, or with the reason for none."""
    asked = one.asked
    one.steps += (_step_of(label, asked.found.answers.get(label)) for label in labels)
    if one.near and not one.has_adapter:
        one.add("spelling", "warning", f"perhaps {one.near} was meant")
    if (error := asked.found.error) is not None:
        check = _STEP_OF_ERROR.get(exit_of(error), "adapter")
        # An error of the settings says that there is no source to ask, and nothing about the adapter.
        is_silent = any(step.state == "no answer" for step in one.of_server)
        without_source = "no answer" if is_silent else "not asked"
        one.fail(error, check, without_source if check == "settings" else "")
    elif (located := asked.would_fetch) is not None:
        files = f"{number(len(located.adapter.files), 'file')}, {size(located.size_bytes)}"
        would = f"would fetch {files}, from {located.adapter.uri}"
        one.add("store", "ok", would if located.stored is None else f"has it: {located.stored}")
        one.add("adapter", "not checked", "nothing is fetched with --dry-run")
        one.end("found")
    elif asked.stored is not None:
        _explain_stored(one, asked.stored, base)
    elif (reason := why_absent(asked.name)) is not None:
        # The verdict is `unknown` from the start; here the step says why no source has the revision.
        one.fail(reason, "revision", "unknown")


def _explain_stored(one: Explanation, stored: Stored, base: BaseModel | None) -> None:
    event = stored.facts
    how = f"fetched in {event.obtain_s:.2f} s" if event.fetched else "has it"
    one.add("store", "ok", f"{how}: {event.path}")
    one.add("adapter", "ok", f"verified: rank {event.rank}, {size(event.size_bytes)}")
    reason = why_not_compared(base, [file.name for file in stored.manifest.files])
    fits = "no --base-model was given" if base is None else compared_with(base)
    if base is not None and not reason:
        fits = f"fits {base.path}: {fits}"
    state = "warning" if event.warnings else "not checked" if reason else "ok"
    one.add("base", state, "; ".join((*event.warnings, *event.notes)) or fits)
    if reason:
        one.end("not compared", Exit.NOT_COMPARED, f"whole, and not compared: {reason}")
    else:
        one.end("served", text=would_be_served(base, event.rank))


def _step_of(source: str, answer: SourceAnswer | None) -> Step:
    """The step of a source, by its label; None where the source was not asked."""
    if answer is None:
        return Step(source, "not asked", "an earlier source has decided")
    if isinstance(answer, LoRAPluginsError):
        return Step(source, "failed", str(answer))
    if isinstance(answer, Absence):
        detail = f"{answer.place}: {answer.detail}" if answer.place else answer.detail
        return Step(source, "no" if answer.was_asked else "not asked", detail, answer.hint)
    files = f"{number(len(answer.files), 'file')}, {size(sum(file.size_bytes for file in answer.files))}"
    return Step(source, "yes", f"{answer.uri}, version {answer.version[:12]}, {files}")


def _result(one: Explanation) -> Result:
    asked = one.asked
    fields: dict[str, Any] = {
        "name": asked.name,
        "verdict": one.verdict,
        "steps": [dict(zip(("step", "verdict", "detail", "hint"), step, strict=True)) for step in one.steps],
        "server": None if one.view is None else one.view.model_dump(mode="json"),
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
    style = {Exit.OK: "bold green", Exit.NOT_COMPARED: "bold yellow"}.get(one.code, "bold red")
    shown = steps_table(("step", "verdict", ""), one.steps, styles={}), line(f"\n{asked.name}: {one.text}", style)
    return Result(fields, shown, one.code)
