"""What a worker tells: failures that the gate raises anew, and the three groups of figures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lora_plugins import errors
from lora_plugins.errors import IncompatibleAdapter, LoRAPluginsError, NoFreeSlot, SourceUnavailable
from lora_plugins.manager.host_tier import HostTier
from lora_plugins.manager.policies import Lru
from lora_plugins.manager.report import failure, report, slot_bytes
from lora_plugins.resolvers.object_errors import Transient
from lora_plugins.resolvers.source import VersionChanged


class Punica:
    pass


def manager_of(*index_to_id: int | None) -> SimpleNamespace:
    linear = SimpleNamespace(
        lora_a_stacked=(torch.zeros(2, 1, 4, 8),) * 2, lora_b_stacked=(torch.zeros(2, 1, 8, 4),) * 2
    )
    logits = SimpleNamespace(lora_a_stacked=torch.zeros(2, 1, 4, 8), lora_b_stacked=torch.zeros(2, 1, 64, 4))
    return SimpleNamespace(
        lora_index_to_id=list(index_to_id),
        lora_slots=len(index_to_id),
        capacity=5,
        modules={"a": linear, "b": logits, "c": SimpleNamespace()},
        punica_wrapper_mapping={"language_model": Punica()},
        copies_in_loop=2,
        copying_in_loop_s=0.5,
        flips=3,
        switching_s=1.0,
    )


def tier_of(max_bytes: int | None = None) -> HostTier:
    return HostTier(max_bytes, 5, Lru(), lambda _: None)


@pytest.mark.parametrize("kind", [IncompatibleAdapter, NoFreeSlot])
def test_a_failure_can_be_carried_and_raised_anew(kind: type[LoRAPluginsError]) -> None:
    error = kind("rank 99", expected="at most 64", remedy="train it anew", adapter="sql", file="adapter_config.json")
    carried = failure(error)
    assert carried["state"] == "failed"
    again = getattr(errors, carried["kind"])(**carried["fields"])
    assert type(again) is kind
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", [Transient, VersionChanged])
def test_a_failure_of_a_kind_that_only_sources_know_is_carried_as_what_it_is_to_a_client(
    kind: type[LoRAPluginsError],
) -> None:
    carried = failure(kind("no answer", adapter="sql"))
    again = getattr(errors, carried["kind"])(**carried["fields"])
    assert (type(again), again.http_status, again.retry_after_s) == (SourceUnavailable, 503, 5)


def test_the_figures() -> None:
    tier = tier_of(10_000_000)
    for adapter_id, size_bytes in ((1, 1_000_000), (2, 3_000_000)):
        entry = tier.reserve(adapter_id, "/x", size_bytes)
        tier.arrived(entry, "model", size_bytes, 0.25)
    tier.reserve(3, "/x", 4_000_000)  # on its way
    figures = report(tier, manager_of(2, -2, None, None), "cpu")
    assert figures == {
        "adapters": {"registered": 2, "active": 1, "capacity": 5, "slots": 4, "utilisation": 0.25},
        "memory": {
            "adapter_mb": {"1": 1.0, "2": 3.0, "3": 4.0},
            "host_mb": 8.0,
            "host_max_mb": 10.0,
            "slot_mb": pytest.approx(4 * (2 * 64 + 2 * 64 + 64 + 512) / 1e6),
            "device": "cpu",
            "efficiency": 3 / 8,
        },
        "performance": {
            "mean_activation_ms": 250.0,
            "mean_staging_ms": 250.0,
            "mean_switching_ms": 200.0,
            "copies_in_loop": 2,
            "flips": 3,
            "evictions": 0,
            "kernel_backend": "Punica",
        },
    }


def test_before_anything_has_happened() -> None:
    manager = manager_of(None)
    manager.copies_in_loop = manager.flips = 0
    manager.punica_wrapper_mapping = {}
    figures = report(tier_of(), manager, "cpu")
    assert figures["memory"]["host_max_mb"] is None
    assert figures["memory"]["efficiency"] == 0.0
    assert figures["performance"]["mean_switching_ms"] == figures["performance"]["mean_activation_ms"] == 0.0


def test_slots_of_every_kind_of_module_count() -> None:
    manager = manager_of(None)
    del manager.modules["b"]
    linear_only = slot_bytes(manager)
    assert linear_only == 4 * 2 * (2 * 4 * 8 + 2 * 8 * 4)
