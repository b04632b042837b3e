"""Ray Serve's app as a front end: which test of it asks what a case of test_front_ends.py asks, and why none does."""

from __future__ import annotations

import inspect

from tests.front_ends import test_front_ends
from tests.ray import test_real_engine

ONE = "the ingress passes the call on; each replica is a vllm serve of its own, the front end of one API server"
BY_REPLICA = "each replica answers for itself: rows of an answer, series, counts of shares"

ASKED = {
    "test_there_are_as_many_servers_as_asked_for": "test_every_replica_says_what_it_serves",
    "test_an_unknown_name_is_served_in_the_same_version": "test_answers_are_those_of_peft_and_adapters_stay",
    "test_a_name_that_no_source_has_is_vllms_404": "test_unknown_name_is_refused_as_by_one_server",
    "test_a_broken_adapter_is_refused_until_it_is_repaired": "test_a_broken_adapter_is_refused_until_it_is_repaired",
    "test_every_server_lists_the_same": "test_every_replica_says_what_it_serves",
    "test_after_a_swap_every_server_answers_with_the_new_version": (
        "test_after_a_swap_every_replica_answers_with_the_new_version"
    ),
    "test_a_push_a_pin_and_a_rollback_reach_every_server": "test_a_push_and_a_rollback_reach_every_replica",
    "test_what_is_unloaded_or_blocked_is_so_on_every_server": "test_what_is_blocked_is_blocked_at_every_replica",
    "test_a_pause_holds_requests_of_every_server_until_a_resume": (
        "test_a_pause_holds_requests_of_every_replica_until_a_resume"
    ),
    "test_after_a_kill_all_end_and_the_restart_forgets_nothing": "test_answers_are_right_while_a_replica_is_replaced",
}
NOT_ASKED = {
    "test_a_wrong_name_is_refused_alike": ONE,
    "test_a_cold_adapter_asked_for_everywhere_is_loaded_once": "each replica loads what it is asked for",
    "test_an_older_version_is_served_by_its_digest": ONE,
    "test_a_chat_without_copy_and_source_is_answered_from_memory": ONE,
    "test_every_route_says_the_version": ONE,
    "test_routes_that_do_not_generate_know_names_too": ONE,
    "test_pages_go_on_at_whichever_server_is_asked": BY_REPLICA,
    "test_metrics_are_of_all_servers": BY_REPLICA,
    "test_answers_during_swaps_are_of_the_version_in_the_header": "replicas swap one after the other, until the answer",
    "test_requests_that_a_swap_overtakes_end_on_their_version": ONE,
    "test_a_broken_update_leaves_the_old_version_serving": ONE,
    "test_a_change_of_an_unexpected_version_is_refused": ONE,
    "test_a_push_that_is_no_adapter_changes_nothing": ONE,
    "test_a_stalled_push_stops_no_other": ONE,
    "test_a_uri_is_loaded_and_a_refused_one_leaves_nothing": ONE,
    "test_prefetch_brings_an_adapter_into_host_memory": ONE,
    "test_an_unload_with_a_deadline_ends_requests_everywhere": ONE,
    "test_callers_that_leave_leave_nothing_in_flight": ONE,
    "test_vllms_own_endpoints_reach_every_server": ONE,
    "test_a_pause_stops_what_every_server_runs": ONE,
    "test_a_pause_waits_for_beams_whichever_engine_gets_them": ONE,
    "test_an_abort_ends_beams_whichever_engine_gets_them": ONE,
    "test_a_tenant_sees_its_own_adapters_only": ONE,
    "test_only_administrators_administer_at_every_server": ONE,
    "test_a_tenant_has_one_share_of_all_servers": BY_REPLICA,
    "test_a_killed_follower_leaves_the_others_serving": ONE,
    "test_all_that_ran_has_broken_nothing": "each case is followed by another at the same replicas",
}


def test_each_case_is_asked_or_has_a_reason() -> None:
    every = {name for name, _ in inspect.getmembers(test_front_ends, inspect.isfunction) if name.startswith("test_")}
    assert sorted([*ASKED, *NOT_ASKED]) == sorted(every)
    assert all(hasattr(test_real_engine, name) for name in ASKED.values())
