"""Logging: one line per event, a rejection's warning once, and bounded memory for repeats."""

from __future__ import annotations

import logging

import pytest

from lora_plugins.errors import InvalidAdapter, SourceUnavailable
from lora_plugins.events import (
    AdapterFetched,
    AdapterLoaded,
    AdapterRejected,
    AdapterResolved,
    AdapterSwapped,
    AdapterUnknown,
    AdapterUnloaded,
    DeclaredFileInvalid,
    DeclaredSetReconciled,
    Events,
    FetchGoesOn,
    LookUpRefused,
    NotServed,
    RequestServed,
    SourceFailed,
)
from lora_plugins.log import logger
from lora_plugins.observability import logs
from lora_plugins.observability.logs import LogEvents


def resolved(**changes: object) -> AdapterResolved:
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
    return AdapterResolved(**{**facts, **changes})


def rejected(name="sql", found="x") -> AdapterRejected:
    return AdapterRejected(name, "filesystem", InvalidAdapter(found, adapter=name))


def levels(logged) -> list[int]:
    return [record.levelno for record in logged.records if record.name == "vllm.lora_plugins"]


def test_resolved_adapter_is_one_line_with_its_facts(logged):
    LogEvents()(resolved())
    assert levels(logged) == [logging.INFO]
    for fact in (
        "'sql'",
        "filesystem",
        "rank 8",
        "2.5 MB",
        "1.0 ms",
        "found in the store in 20.0 ms",
        "3.0 ms",
        "/adapters/sql",
    ):
        assert fact in logged.text


def test_fetch_is_logged_at_debug(logged):
    LogEvents()(AdapterFetched("sql", "s3", "s3://bucket/sql", 50_000_000, 0.5))
    assert levels(logged) == [logging.DEBUG]
    for fact in ("'sql'", "s3://bucket/sql", "50.0 MB", "0.50 s", "100 MB/s"):
        assert fact in logged.text


def test_a_slow_fetch_says_how_far_it_is(logged):
    LogEvents()(FetchGoesOn("sql", "s3", 35.2, 12_340_000, 400_000_000))
    assert logged.messages == ["Adapter 'sql' is still being fetched from s3 after 35 s: 12.3 of 400.0 MB are here"]


def test_refused_look_ups_are_one_warning_a_minute(logged, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    hook = LogEvents()
    for number in range(100):
        hook(LookUpRefused(f"unknown-{number}", "s3", SourceUnavailable("too many", adapter=f"unknown-{number}")))
    hook(LookUpRefused("sql", "hub", SourceUnavailable("too many")))
    assert levels(logged).count(logging.WARNING) == 2
    assert "s3 is asked about" in logged.text
    assert "'unknown-0'" in logged.text
    now_s += 61
    hook(LookUpRefused("sql", "hub", SourceUnavailable("too many")))
    assert levels(logged).count(logging.WARNING) == 3


def test_fetch_that_went_on_says_what_it_brought(logged):
    LogEvents()(AdapterFetched("sql", "s3", "s3://bucket/sql", 50_000_000, 0.5, resumed_bytes=40_000_000))
    assert "10.0 MB of 50.0 MB, the rest by an earlier fetch, in 0.50 s (20 MB/s)" in logged.text


def ready(name="sql", path="/adapters/sql") -> AdapterLoaded:
    return AdapterLoaded(name, path, 2_500_000, 0.04)


def with_manager() -> LogEvents:
    hook = LogEvents()
    hook.waits_for_load = True
    return hook


def infos(logged) -> list[str]:
    return [record.getMessage() for record in logged.records if record.levelno >= logging.INFO]


def test_load_is_one_line_with_the_time_of_each_step(logged):
    hook = with_manager()
    hook(AdapterFetched("sql", "s3", "s3://bucket/sql", 2_500_000, 0.02))
    hook(resolved(source="s3", uri="s3://bucket/sql", fetched=True))
    assert infos(logged) == []
    hook(ready())
    hook(RequestServed("sql"))
    (line,) = infos(logged)
    for fact in ("'sql'", "s3", "s3://bucket/sql", "rank 8", "2.5 MB", "located in 1.0 ms", "fetched in 20.0 ms",
                 "checked in 3.0 ms", "loaded in 40.0 ms", "/adapters/sql"):  # fmt: skip
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


@pytest.mark.parametrize("stage", ["load", "request"])
def test_adapter_refused_by_the_engine_is_one_warning(logged, stage):
    hook = with_manager()
    hook(resolved())
    for _ in range(2):
        hook(NotServed(stage, "sql", InvalidAdapter("x", adapter="sql")))
    line, warning = infos(logged)
    assert "rank 8" in line
    assert "not loaded" in line
    assert "[L005]" in warning


def test_failed_load_and_its_request_are_one_warning(logged):
    hook, error = with_manager(), InvalidAdapter("x", adapter="sql")
    hook(NotServed("load", "sql", error))
    hook(NotServed("request", "sql", error))
    assert levels(logged) == [logging.WARNING, logging.DEBUG]


def test_swap_unload_and_failed_update_are_a_line_each(logged):
    hook = LogEvents()
    hook(AdapterSwapped("sql", "ab" * 32, "/by/hand", 0.5))
    hook(AdapterUnloaded("sql", 1.5, 2))
    hook(NotServed("update", "sql", InvalidAdapter("x", adapter="sql")))
    swapped, unloaded, failed = infos(logged)
    assert "'sql' swapped from abababababab to /by/hand, loaded in 0.50 s" in swapped
    assert "'sql' unloaded after 1.50 s; 2 requests were ended" in unloaded
    assert "goes on with its old version: [L005]" in failed


def test_declared_set_says_what_is_served_and_what_is_not(logged):
    hook = LogEvents()
    hook(DeclaredSetReconciled(declared=3, served=2, failed=1))
    hook(NotServed("declared", "sql", InvalidAdapter("x", adapter="sql")))
    hook(DeclaredFileInvalid(InvalidAdapter("no YAML")))
    reconciled, unserved, invalid = infos(logged)
    assert reconciled == "2 of 3 declared adapters are served"
    assert "Declared adapter 'sql' is not served as declared: [L005]" in unserved
    assert "What was declared before goes on: [L005] found no YAML" in invalid


def test_resolved_and_never_loaded_adapters_use_bounded_memory(logged, monkeypatch):
    monkeypatch.setattr(logs, "_REMEMBERED", 3)
    hook = with_manager()
    for number in range(100):
        hook(resolved(name=str(number)))
        hook(ready(str(number), "/elsewhere"))
    assert len(hook._resolved) == len(hook._loaded) == 3


def test_note_about_an_adapter_is_a_warning_once(logged):
    hook = LogEvents()
    for _ in range(2):
        hook(resolved(notes=("weights not verified",)))
    assert levels(logged) == [logging.INFO, logging.WARNING, logging.INFO, logging.DEBUG]
    assert "'sql': weights not verified" in logged.text


@pytest.mark.parametrize(
    ("event", "code"),
    [(rejected(), "L005"), (SourceFailed("sql", "filesystem", SourceUnavailable("x", adapter="sql")), "L006")],
)
def test_repeated_failure_is_one_warning_and_then_debug(logged, event, code):
    hook = LogEvents()
    for _ in range(3):
        hook(event)
    assert levels(logged) == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    for part in (f"[{code}]", "'sql'", "filesystem"):
        assert part in logged.records[0].getMessage()


def test_other_reason_or_adapter_is_another_warning(logged):
    hook = LogEvents()
    for event in (rejected(), rejected(found="y"), rejected(name="other")):
        hook(event)
    assert levels(logged) == [logging.WARNING] * 3


def test_unknown_name_is_one_line_that_forges_none(logged):
    hook = LogEvents()
    for _ in range(3):
        hook(AdapterUnknown("a\nWARNING forged\x1b[2J", "the character U+000A"))
    assert levels(logged) == [logging.INFO]
    (line,) = [record.getMessage() for record in logged.records]
    assert line == r"No adapter 'a\nWARNING forged\x1b[2J': the character U+000A; no source was asked"


def test_remembered_warnings_use_bounded_memory(logged, monkeypatch):
    monkeypatch.setattr(logs, "_REMEMBERED", 3)
    hook = LogEvents()
    for number in range(100):
        hook(rejected(name=str(number)))
    assert len(hook._warned) == 3
    hook(rejected(name="99"))  # remembered
    hook(rejected(name="0"))  # forgotten
    assert levels(logged)[-2:] == [logging.DEBUG, logging.WARNING]


def test_repeat_keeps_a_warning_remembered(logged, monkeypatch):
    monkeypatch.setattr(logs, "_REMEMBERED", 2)
    hook = LogEvents()
    for name in ("a", "b", "a", "c", "a"):
        hook(rejected(name=name))
    assert levels(logged) == [logging.WARNING, logging.WARNING, logging.DEBUG, logging.WARNING, logging.DEBUG]


def test_logger_is_a_child_of_vllms():
    # vLLM's handlers and level apply to it, without our touching logging's configuration.
    assert logger.parent.name.startswith("vllm") or logger.name.startswith("vllm.")
    assert logger.handlers == []


def test_every_hook_is_notified_in_order():
    notified = []
    events = Events(lambda event: notified.append(("first", event)))
    events.add(lambda event: notified.append(("second", event)))
    event = AdapterUnknown("sql")
    events.emit(event)
    assert notified == [("first", event), ("second", event)]
