"""`lora-plugins compare` on a stock `vllm serve`, none of our plugins in it: which adapter is it that is served?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.cli.compare import OK, OUT
from testbed.bed import Bed
from testbed.server import Server
from tests.cli.common import Done, outside
from tests.e2e.servers import lora_server


@pytest.fixture(scope="module")
def stock(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("compare")
    modules = [f"{name}={bed.adapters / name}" for name in ("sql", "chat")]
    with lora_server(bed, home, "--max-loras", "2", "--lora-modules", *modules, plugins=()) as server:
        yield server


def compared(server: Server, name: str, directory: Path, *options: str) -> Done:
    return outside("compare", name, "--peft", directory, "--url", server.url, *options, env={})


def verdicts(done: Done) -> set[str]:
    said: dict[str, Any] = json.loads(done.out)
    assert len(said["prompts"]) == 4
    return {row["verdict"] for row in said["prompts"]}


@pytest.mark.parametrize("name", ["sql", pytest.param("chat", marks=pytest.mark.nightly)])
def test_an_adapter_against_its_own_directory_is_right(stock: Server, bed: Bed, name: str) -> None:
    done = compared(stock, name, bed.adapters / name, "--json")
    assert (done.code, verdicts(done)) == (0, {OK}), done.out


@pytest.mark.parametrize(("name", "other"), [("sql", "chat"), pytest.param("chat", "sql", marks=pytest.mark.nightly)])
def test_an_adapter_against_anothers_directory_is_out(stock: Server, bed: Bed, name: str, other: str) -> None:
    done = compared(stock, name, bed.adapters / other, "--json")
    assert (done.code, verdicts(done)) == (1, {OUT}), done.out


def test_the_base_model_in_an_adapters_place_is_named(stock: Server, bed: Bed) -> None:
    done = compared(stock, str(bed.base), bed.adapters / "sql")
    assert done.code == 1
    assert done.out.count("answers as the base model") == 4
