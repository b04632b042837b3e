"""Slots written beside a graph, on simulated streams: the waits are needed, and the product has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import streams
from benchmarks.gpu.session import Result, Session
from lora_plugins.kernels.triton_ops import operators
from tests.benchmarks.gpu.simulated_streams import WithStreams

SHAPE = streams.Shape(layers=1, n_in=16, widths=(16,), rows=9, steps=3, beside=1, sleep_us=50.0)


@pytest.mark.slow
def test_writes_beside_a_graph_change_nothing_and_controls_fail(
    session: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = WithStreams()
    monkeypatch.setattr(streams, "BUSY", 2)
    shape = replace(SHAPE, steps=2)
    result = Result(tmp_path, "streams", {}, rehearsal=True)
    assert streams.proved(shape, session(gpu), result)
    differ = {row["run"]: row["differ"] for row in result.rows}
    assert [count > 0 for count in differ.values()] == [False, False, False, True, True]


def test_streams_are_not_proved_where_a_wait_is_missing(
    session: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_plugins.worker.slot_stream import SlotStream

    def compute(world: streams.World) -> None:
        """Any sum over the slots of the batch: the interpreter takes long for the operator."""
        if world.batch.chunks._sorted.max() < streams.BUSY:
            world.y.fill_(1.0)
            return
        world.y.copy_(reserved_sum(world))

    def cut(batch: operators.Batch, slots: torch.Tensor, *_: object, **__: object) -> None:
        batch.chunks._sorted.copy_(slots)

    monkeypatch.setattr(streams.World, "_compute", compute)
    monkeypatch.setattr(operators.Batch, "cut", cut)
    gpu = WithStreams()
    result = Result(tmp_path, "streams", {}, rehearsal=True)
    assert streams.proved(SHAPE, session(gpu), result)
    monkeypatch.setattr(SlotStream, "wait_for", lambda self, event: None)
    assert not streams.proved(SHAPE, session(gpu), result)


def reserved_sum(world: streams.World) -> torch.Tensor:
    reserved = world.layers[0].lora_a_stacked[0][streams.BUSY :].float()
    return reserved.sum().to(torch.bfloat16).expand_as(world.y)
