"""Where answers are out, `compare` names what is at fault; PEFT answers in the place of a server."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lora_plugins.cli.at_fault import ByPeft, Trained, at_fault
from testbed.models import ATTENTION, MLP, AdapterSpec, build_adapter, build_base
from testbed.mutants import FAULTS, LAYERS, Adapter, dropped, read, write

PROMPTS = ("The quick brown fox jumps over", "SELECT name FROM orders")
RIGHT = 1e-4  # of float32
World = tuple[Path, ByPeft, list[Trained]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    home = tmp_path_factory.mktemp("at-fault")
    base = build_base(home / "base", hidden=64, layers=LAYERS)
    directory = build_adapter(base, home, AdapterSpec("all", 4, (*ATTENTION, *MLP)))
    model = ByPeft(directory, None)
    return directory, model, [*map(model.trained, PROMPTS)]


def said(world: World, changed: Adapter | None, directory: Path) -> str:
    _, model, trained = world
    assert changed is not None
    # Else PEFT gives what is missing in the file the random weights of `init_lora_weights: false`.
    write(Adapter(changed.tensors, {**changed.config, "init_lora_weights": True}), directory)
    faulty = ByPeft(directory, None)
    return at_fault(trained, [faulty.logprobs(one.token_ids) for one in trained], RIGHT, model)


@pytest.mark.parametrize("leaf", ["q_proj", "up_proj"])
def test_a_projection_that_is_missing_is_named(world: World, tmp_path: Path, leaf: str) -> None:
    changed = dropped(leaf)(read(world[0]), random.Random(0))
    assert said(world, changed, tmp_path / "x") == f"at fault: served as if missing: `{leaf}` of all layers"


@pytest.mark.parametrize(("gone", "text"), [((1,), "layer 1"), ((1, 2, 3), "the last 3 layers")])
def test_layers_that_are_missing_are_named(world: World, tmp_path: Path, gone: tuple[int, ...], text: str) -> None:
    adapter = read(world[0])
    parts = [f".layers.{layer}." for layer in gone]
    tensors = {name: one for name, one in adapter.tensors.items() if not any(part in name for part in parts)}
    changed = Adapter(tensors, adapter.config)
    assert said(world, changed, tmp_path / "x") == f"at fault: served as if missing: {text}"


def test_one_module_that_is_missing_is_named(world: World, tmp_path: Path) -> None:
    adapter = read(world[0])
    tensors = {name: one for name, one in adapter.tensors.items() if "layers.3.mlp.down_proj" not in name}
    line = "at fault: served as if missing: `model.layers.3.mlp.down_proj`"
    assert said(world, Adapter(tensors, adapter.config), tmp_path / "x") == line


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("alpha doubled", "alpha were doubled"),
        ("alpha of the wrong sign", "alpha had the other sign"),
        ("rsLoRA flipped", "alpha were doubled"),  # which is the same at rank 4
        ("B zero in all modules", "the whole adapter were missing"),
    ],
)
def test_a_scaling_of_all_is_named(world: World, tmp_path: Path, fault: str, text: str) -> None:
    changed = FAULTS[fault](read(world[0]), random.Random(0))
    assert said(world, changed, tmp_path / "x") == f"at fault: served as if {text}"


def test_what_no_omission_explains_is_not_called_missing(world: World, tmp_path: Path) -> None:
    line = said(world, FAULTS["layers permuted"](read(world[0]), random.Random(0)), tmp_path / "x")
    assert "missing" not in line


def test_answers_that_are_not_finite_are_said(world: World) -> None:
    _, model, trained = world
    served = [[float("nan")] * (len(one.token_ids) - 1) for one in trained]
    assert at_fault(trained, served, RIGHT, model) == "at fault: the server's answers are not finite"


def test_the_model_answers_as_before_afterwards(world: World) -> None:
    _, model, trained = world
    with model.scaled(dict.fromkeys(model.ranks, 0.0)):
        assert model.logprobs(trained[0].token_ids) == pytest.approx(trained[0].base_logprobs, abs=RIGHT)
    assert model.logprobs(trained[0].token_ids) == trained[0].logprobs
