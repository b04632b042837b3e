"""Logging: one line per event, a rejection's warning once, and bounded memory for repeats."""

from __future__ import annotations

import logging

import pytest

from lora_plugins import events
from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.log import logger
from lora_plugins.observability import logs
from lora_plugins.observability.logs import LogEvents
from lora_plugins.resolvers.breaker import BreakerOpen


def resolved(**changes: object) -> events.AdapterResolved:
    facts = {
        "name": "sql",
        "source": "filesystem",
        "path": "/adapters/sql",
        "rank": 8,
        "size_bytes": 2_500_000,
        "locate_s": 0.001,
        "obtain_s": 0.02,
        "check_s": 0.003,
        "fetched": False,
    }
    return events.AdapterResolved(**{**facts, **changes})


def rejected(name="sql", found="x") -> events.AdapterRejected:
    return events.AdapterRejected(name, "filesystem", InvalidAdapter(found, adapter=name))


def levels(logged) -> list[int]:
    return [record.levelno for record in logged.records if record.name == "vllm.lora_plugins"]


FACTS_OF_A_LOAD = ("'sql'", "rank 8", "2.5 MB", "located in 1.0 ms", "checked in 3.0 ms", "/adapters/sql")


@pytest.mark.parametrize(
    ("event", "level", "facts"),
    [
        (resolved(), logging.INFO, (*FACTS_OF_A_LOAD, "filesystem", "found in the store in 20.0 ms")),
        (
            events.FetchGoesOn("sql", "s3", 35.2, 12_340_000, 400_000_000),
            logging.INFO,
            ["Adapter 'sql' is still being fetched from s3 after 35 s: 12.3 of 400.0 MB are here"],
        ),
        (
            events.AdapterSwapped("sql", "ab" * 32, "ab" * 32, 0.5),
            logging.INFO,
            ["'sql' repaired: abababababab fetched and loaded again, in 0.50 s"],
        ),
        (events.DeclaredSetReconciled(3, 2, 1), logging.INFO, ["2 of 3 declared adapters are served"]),
        (
            events.NotServed("declared", "sql", InvalidAdapter("x", adapter="sql")),
            logging.WARNING,
            ["Declared adapter 'sql' is not served as declared: [L005]"],
        ),
        (
            events.DeclaredFileInvalid(InvalidAdapter("no YAML")),
            logging.ERROR,
            ["What was declared before goes on: [L005] found no YAML"],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_event_is_one_line_with_its_facts(logged, event, level, facts):
    LogEvents()(event)
    assert levels(logged) == [level]
    assert [fact for fact in facts if fact not in logged.text] == []


def test_refused_look_ups_are_one_warning_a_minute(logged, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    hook = LogEvents()
    for number in range(100):
        hook(
            events.LookUpRefused(f"unknown-{number}", "s3", SourceUnavailable("too many", adapter=f"unknown-{number}"))
        )
    hook(events.LookUpRefused("sql", "hub", SourceUnavailable("too many")))
    assert levels(logged).count(logging.WARNING) == 2
    assert "s3 is asked about" in logged.text
    assert "'unknown-0'" in logged.text
    now_s += 61
    hook(events.LookUpRefused("sql", "hub", SourceUnavailable("too many")))
    assert levels(logged).count(logging.WARNING) == 3


def ready(name="sql", path="/adapters/sql") -> events.AdapterLoaded:
    return events.AdapterLoaded(name, path, 2_500_000, 0.04)


def with_manager() -> LogEvents:
    hook = LogEvents()
    hook.waits_for_load = True
    return hook


def infos(logged) -> list[str]:
    return [record.getMessage() for record in logged.records if record.levelno >= logging.INFO]


def test_load_is_one_line_with_the_time_of_each_step(logged):
    hook = with_manager()
    hook(events.AdapterFetched("sql", "s3", "s3://bucket/sql", 2_500_000, 0.02))
    hook(resolved(source="s3", uri="s3://bucket/sql", fetched=True))
    assert infos(logged) == []
    hook(ready())
    hook(events.RequestServed("sql"))
    (line,) = infos(logged)
    for fact in (*FACTS_OF_A_LOAD, "s3", "s3://bucket/sql", "fetched in 20.0 ms", "loaded in 40.0 ms"):
        assert fact in line


def test_repeated_load_by_path_is_logged_at_debug(logged):
    hook = with_manager()
    for _ in range(2):
        hook(ready("by\nhand", "/somewhere"))
    assert levels(logged) == [logging.INFO, logging.DEBUG]
    first, again = (record.getMessage() for record in logged.records)
    for fact in ("'by\\nhand'", "2.5 MB", "loaded in 40.0 ms", "/somewhere"):
        assert fact in first
    assert "again" in again
    assert "again" not in first


def test_load_of_another_version_does_not_use_the_resolved_line(logged):
    hook = with_manager()
    hook(resolved())
    hook(ready(path="/adapters/old"))
    hook(ready())
    other, own = infos(logged)
    assert "rank 8" not in other
    assert "rank 8" in own


@pytest.mark.parametrize("is_resolved", [True, False])
@pytest.mark.parametrize("stage", ["load", "request"])
def test_adapter_refused_by_the_engine_is_one_warning(logged, stage, is_resolved):
    hook, error = with_manager(), InvalidAdapter("x", adapter="sql")
    if is_resolved:
        hook(resolved())
    hook(events.NotServed(stage, "sql", error))
    hook(events.NotServed("request", "sql", error))
    *line, warning = infos(logged)
    assert [("rank 8" in text, "not loaded" in text) for text in line] == [(True, True)] * is_resolved
    assert "[L005]" in warning


def test_swap_unload_and_failed_update_are_a_line_each(logged):
    hook = LogEvents()
    hook(events.AdapterSwapped("sql", "ab" * 32, "/by/hand", 0.5))
    hook(events.AdapterUnloaded("sql", 1.5, 2))
    hook(events.NotServed("update", "sql", InvalidAdapter("x", adapter="sql")))
    swapped, unloaded, failed = infos(logged)
    assert "'sql' swapped from abababababab to /by/hand, loaded in 0.50 s" in swapped
    assert "'sql' unloaded after 1.50 s; 2 requests were ended" in unloaded
    assert "goes on with its old version: [L005]" in failed


def test_note_about_an_adapter_is_a_warning_once(logged):
    hook = LogEvents()
    for _ in range(2):
        hook(resolved(notes=("weights not verified",)))
    assert levels(logged) == [logging.INFO, logging.WARNING, logging.INFO, logging.DEBUG]
    assert "'sql': weights not verified" in logged.text


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (rejected(), "L005"),
        (events.SourceFailed("sql", "filesystem", SourceUnavailable("x", adapter="sql")), "L006"),
        (events.AdapterDenied("sql", "filesystem", SourceUnavailable("x", adapter="sql")), "L006"),
    ],
)
def test_repeated_failure_is_one_warning_and_then_debug(logged, event, code):
    hook = LogEvents()
    for _ in range(3):
        hook(event)
    assert levels(logged) == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    for part in (f"[{code}]", "'sql'", "filesystem"):
        assert part in logged.records[0].getMessage()


def test_names_refused_by_a_breaker_are_no_warnings(logged):
    hook = LogEvents()
    hook(events.BreakerOpened("s3", SourceUnavailable("silence")))
    for number in range(3):
        hook(events.SourceFailed(f"sql-{number}", "s3", BreakerOpen("a source that does not answer")))
    hook(events.BreakerClosed("s3", 12.34))
    assert levels(logged) == [logging.WARNING, *[logging.DEBUG] * 3, logging.WARNING]
    assert "s3 does not answer" in logged.records[0].getMessage()
    assert logged.records[-1].getMessage() == "s3 answers again, after 12.3 s"


def test_other_reason_or_adapter_is_another_warning(logged):
    hook = LogEvents()
    for event in (rejected(), rejected(found="y"), rejected(name="other")):
        hook(event)
    assert levels(logged) == [logging.WARNING] * 3


def test_unknown_name_is_one_line_that_forges_none(logged):
    hook = LogEvents()
    for _ in range(3):
        hook(events.AdapterUnknown("a\nWARNING forged\x1b[2J", "the character U+000A"))
    assert levels(logged) == [logging.INFO]
    (line,) = [record.getMessage() for record in logged.records]
    assert line == r"No adapter 'a\nWARNING forged\x1b[2J': the character U+000A; no source was asked"


def test_what_is_remembered_is_bounded_and_kept_by_use(logged, monkeypatch):
    """A warning that was forgotten is a warning again; so is a load, whose line names what was resolved."""
    monkeypatch.setattr(logs, "_REMEMBERED", 2)
    hook = LogEvents()
    for name in ("a", "b", "a", "c", "a", "b"):
        hook(rejected(name=name))
    warning, debug = logging.WARNING, logging.DEBUG
    assert levels(logged) == [warning, warning, debug, warning, debug, warning]
    logged.clear()
    hook = with_manager()
    for name in "abc":
        hook(resolved(name=name))
    for name in "abc":
        hook(ready(name))
    assert ["rank 8" in line for line in infos(logged)] == [False, True, True]


def test_logger_is_a_child_of_vllms():
    # vLLM's handlers and level apply to it, without our touching logging's configuration.
    assert logger.parent.name.startswith("vllm") or logger.name.startswith("vllm.")
    assert logger.handlers == []


def test_every_hook_is_notified_in_order():
    notified = []
    hooks = events.Events(lambda event: notified.append(("first", event)))
    hooks.add(lambda event: notified.append(("second", event)))
    event = events.AdapterUnknown("sql")
    hooks.emit(event)
    assert notified == [("first", event), ("second", event)]
