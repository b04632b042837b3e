"""What people and programs see of each command, compared with golden files (`RENEW_GOLDEN=1` writes them again)."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.adapter.landing import Model
from lora_plugins.events import Events
from lora_plugins.resolvers.resolver import AdapterResolver
from lora_plugins.resolvers.sources.filesystem import FilesystemSource
from lora_plugins.settings import Settings
from lora_plugins.store.model_file import ModelFile
from lora_plugins.store.store import Store
from tests.cli.common import golden
from tests.make import MODULES, adapter_files, put, read_name, weights


@pytest.mark.parametrize("name", ["sql", "cut", "nobody", "team/Poet", "../outside", "user@corp.com/sql"])
@pytest.mark.parametrize("how", ["txt", "json"])
def test_why(cli, name, how):
    done = cli("why", name, *(["--json"] if how == "json" else []))
    golden(f"why-{name.replace('../', 'dots-').replace('/', '-')}.{how}", done, cli.root)


@pytest.mark.parametrize("name", ["sql", "cut"])
@pytest.mark.parametrize("how", ["txt", "json"])
def test_inspect(cli, name, how):
    done = cli("inspect", cli.adapters / name, *(["--json"] if how == "json" else []))
    golden(f"inspect-{name}.{how}", done, cli.root)


@pytest.mark.parametrize("how", ["txt", "json"])
def test_pull_then_ls_verify_and_gc(cli, how):
    more = ["--json"] if how == "json" else []
    golden(f"pull.{how}", cli("pull", "team/poet", *more), cli.root)
    golden(f"pull-again.{how}", cli("pull", "team/poet", *more), cli.root)
    golden(f"ls.{how}", cli("ls", *more), cli.root)
    golden(f"verify.{how}", cli("verify", *more), cli.root)
    golden(f"gc-dry-run.{how}", cli("gc", "--dry-run", "--max-bytes", "1kB", *more), cli.root)
    golden(f"gc.{how}", cli("gc", "--max-bytes", "1kB", *more), cli.root)
    golden(f"ls-empty.{how}", cli("ls", *more), cli.root)


@pytest.mark.parametrize("how", ["txt", "json"])
def test_doctor(cli, how):
    cli.env["LORA_PLUGINS_STORE_MAX_BYTES"] = "1MB"
    golden(f"doctor.{how}", cli("doctor", *(["--json"] if how == "json" else [])), cli.root)


def test_an_adapter_compared_with_a_base_model(cli):
    base = cli.root / "base"
    base.mkdir()
    golden("inspect-base-unknown.txt", cli("inspect", cli.adapters / "sql", "--base-model", base), cli.root)
    cli.store.mkdir(exist_ok=True)
    ModelFile(cli.store, str(base)).write(MODULES)  # as a server does once its engine runs
    golden("inspect-base.txt", cli("inspect", cli.adapters / "sql", "--base-model", base), cli.root)
    golden("why-base.txt", cli("why", "sql", "--base-model", base, "--max-lora-rank", "2"), cli.root)


def test_an_adapter_in_another_layout_before_and_after_conversion(cli):
    """As a server leaves it in the store."""
    base = cli.root / "base"
    base.mkdir()
    cli.store.mkdir(exist_ok=True)
    ModelFile(cli.store, str(base)).write(MODULES)
    tensors = {name.replace(".weight", ".default.weight"): array for name, array in weights().items()}
    directory = put(cli.adapters / "keys", adapter_files(tensors))
    golden("inspect-to-convert.txt", cli("inspect", directory, "--base-model", base), cli.root)
    resolver = AdapterResolver(Settings(), Events(), Store(cli.store), [FilesystemSource(cli.adapters)])
    resolver.base = BaseModel(str(base), model=Model(MODULES, read_name))
    resolved = asyncio.run(resolver.resolve("keys", str(base)))
    golden("inspect-converted.txt", cli("inspect", resolved.digest, "--base-model", base), cli.root)
