"""`LLM` and `AsyncLLM` as front ends: which cases of test_front_ends.py they can be asked, and why not the others."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest

from testbed.bed import Bed
from testbed.offline_front_end import CROWD, LONG
from tests.e2e.broken import BROKEN
from tests.e2e.test_offline import said_by
from tests.front_ends import test_front_ends

NO_NAMES = "a request names a path: no name is resolved, and none is listed"
NO_HTTP = "no route, and no header that says the version"
NO_ADMIN = "the admin API and vLLM's endpoints are the server's"
NO_POLICY = "a program of its own has no tenants"
NO_STATE = "the program that names the adapters ends with its engine"

ASKED = {
    "test_there_are_as_many_servers_as_asked_for": "base",
    "test_an_unknown_name_is_served_in_the_same_version": "names",
    "test_a_name_that_no_source_has_is_vllms_404": "unknown",
    "test_a_broken_adapter_is_refused_until_it_is_repaired": "broken",
    "test_a_cold_adapter_asked_for_everywhere_is_loaded_once": "cold",
    "test_after_a_swap_every_server_answers_with_the_new_version": "swap",
    "test_requests_that_a_swap_overtakes_end_on_their_version": "overtaken",
    "test_a_broken_update_leaves_the_old_version_serving": "broken update",
    "test_a_push_a_pin_and_a_rollback_reach_every_server": "pin",
    "test_prefetch_brings_an_adapter_into_host_memory": "prefetch",
    "test_what_is_unloaded_or_blocked_is_so_on_every_server": "unload",
    "test_callers_that_leave_leave_nothing_in_flight": "leave",
}
NOT_ASKED = {
    "test_a_wrong_name_is_refused_alike": NO_NAMES,
    "test_an_older_version_is_served_by_its_digest": NO_NAMES,
    "test_every_server_lists_the_same": NO_NAMES,
    "test_a_chat_without_copy_and_source_is_answered_from_memory": NO_NAMES,
    "test_every_route_says_the_version": NO_HTTP,
    "test_routes_that_do_not_generate_know_names_too": NO_HTTP,
    "test_metrics_are_of_all_servers": NO_HTTP,
    "test_answers_during_swaps_are_of_the_version_in_the_header": NO_HTTP,
    "test_pages_go_on_at_whichever_server_is_asked": NO_ADMIN,
    "test_a_change_of_an_unexpected_version_is_refused": NO_ADMIN,
    "test_a_push_that_is_no_adapter_changes_nothing": NO_ADMIN,
    "test_a_stalled_push_stops_no_other": NO_ADMIN,
    "test_a_uri_is_loaded_and_a_refused_one_leaves_nothing": NO_ADMIN,
    "test_an_unload_with_a_deadline_ends_requests_everywhere": NO_ADMIN,
    "test_vllms_own_endpoints_reach_every_server": NO_ADMIN,
    "test_a_pause_holds_requests_of_every_server_until_a_resume": NO_ADMIN,
    "test_a_pause_stops_what_every_server_runs": NO_ADMIN,
    "test_a_pause_waits_for_beams_whichever_engine_gets_them": NO_ADMIN,
    "test_an_abort_ends_beams_whichever_engine_gets_them": NO_ADMIN,
    "test_a_tenant_sees_its_own_adapters_only": NO_POLICY,
    "test_only_administrators_administer_at_every_server": NO_POLICY,
    "test_a_tenant_has_one_share_of_all_servers": NO_POLICY,
    "test_all_that_ran_has_broken_nothing": "each case is followed by another on the same engine",
    "test_a_killed_follower_leaves_the_others_serving": "no API server",
    "test_after_a_kill_all_end_and_the_restart_forgets_nothing": NO_STATE,
}
OF = f"{len(ASKED)} of the {len(ASKED) + len(NOT_ASKED)} tests of front ends"
NOTE = f"{OF}; the others ask for names, HTTP, the admin API or tenants"


def test_each_case_is_asked_or_has_a_reason() -> None:
    every = {name for name, _ in inspect.getmembers(test_front_ends, inspect.isfunction) if name.startswith("test_")}
    assert sorted([*ASKED, *NOT_ASKED]) == sorted(every)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "is_async",
    [
        pytest.param("0", id="LLM", marks=pytest.mark.deployment("offline LLM", "tested", NOTE)),
        pytest.param("1", id="AsyncLLM", marks=pytest.mark.deployment("AsyncLLM", "tested", NOTE)),
    ],
)
def test_engines_without_a_server_answer_what_applies(bed: Bed, tmp_path: Path, is_async: str) -> None:
    adapters = {name: str(bed.adapters / name) for name in ("sql", "chat")} | {"missing": str(tmp_path / "none")}
    for fault in ("truncated", "wrong-shapes"):
        shutil.copytree(bed.adapters / "sql", tmp_path / fault)
        next(case for case in BROKEN if case.name == fault).make(tmp_path / fault)
        adapters[fault] = str(tmp_path / fault)
    said = said_by("offline_front_end", bed, tmp_path, 1, [*adapters.items()], ASYNC=is_async)["said"]
    sql, chat, base = bed.answers["sql"], bed.answers["chat"], bed.answers[None]
    assert said["base"] == [base]
    assert said["names"] == [sql, chat, base]
    assert is_refused(said["unknown"], "[L002]", "missing")
    for fault, code in (("truncated", "[L005]"), ("wrong-shapes", "[L003]")):
        refused, repaired = said[fault]
        assert is_refused([refused], code, fault), refused
        assert repaired == sql
    assert said["cold"] == [chat] * CROWD
    assert (said["swapped"], said["swap"]) == ([sql, chat], "True")
    assert (said["overtaken"][: len(sql)], len(said["overtaken"])) == (sql, LONG)
    assert "[L005]" in said["broken update"]
    assert said["after a broken update"] == [chat]
    assert said["prefetched"] == [True, True, chat]
    assert said["pinned"] == [True, chat]
    assert said["unloaded"] == [True, False, sql]
    assert said["left"] == [True, sql]


def is_refused(answers: list[Any], *texts: str) -> bool:
    (answer,) = answers
    return isinstance(answer, str) and all(text in answer for text in texts)
