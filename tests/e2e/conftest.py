"""The real servers that several files of tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from testbed.bed import Bed, prepare
from testbed.client import PLAIN_HTTP, connect
from testbed.hub import Hub, local_hub
from testbed.models import ATTENTION, AdapterSpec, build_adapter, build_base, edit_config
from testbed.proxy import FaultProxy, fault_proxy
from testbed.reference import Reference
from testbed.s3 import Bucket, s3_server
from testbed.server import Server
from tests.e2e.broken import break_all
from tests.e2e.servers import RESOLVER, admin_server, lora_server
from tests.e2e.standing_still import LONGEST_S


@dataclass(frozen=True)
class World:
    """The running server, its adapter root, and what its answers must be."""

    server: Server
    client: openai.OpenAI
    bed: Bed
    root: Path
    reference: Reference
    bucket: Bucket
    s3_proxy: FaultProxy
    hub: Hub
    store: Path

    @property
    def base(self) -> str:
        return str(self.bed.base)


@pytest.fixture(scope="session")
def bed() -> Bed:
    return prepare()


@pytest.fixture(scope="session")
def world(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("world")
    root = home / "adapters"
    shutil.copytree(bed.adapters, root)
    fill(root, bed, home)
    with s3_server() as s3, fault_proxy(s3.url) as s3_proxy, local_hub() as hub:
        bucket = s3.bucket("adapters")
        fill_remote(bucket, hub, bed)
        with lora_server(
            bed,
            home,
            *("--max-loras", "4", "--max-cpu-loras", "8", "--lora-modules", f"static={bed.adapters / 'sql'}"),
            plugins=(RESOLVER, "lora_s3_resolver", "lora_hf_hub_resolver"),
            **{
                "S3_PATH_TEMPLATE": "s3://adapters/loras/{lora_name}",
                "LOCAL_PATH_TEMPLATE": str(home / "links" / "{lora_name}"),
                "VLLM_LORA_RESOLVER_HF_REPO_LIST": "acme/*",
                "LORA_PLUGINS_ABSENT_TTL_S": "1",
                "LORA_PLUGINS_LIST": "all",
                "LORA_PLUGINS_FETCH_TIMEOUT_S": "60",
                **s3.env(s3_proxy.url),
                **hub.env(home / "hub-home"),
            },
        ) as server:
            yield World(server, connect(server), bed, root, Reference(bed.base), bucket, s3_proxy, hub, home / "store")


@dataclass(frozen=True)
class OneSlot:
    """A server with `--max-loras 1` and kernels that copy adapters into slots, and the root that it serves."""

    server: Server
    bed: Bed
    home: Path

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_S, verify=PLAIN_HTTP)

    def publish(self, name: str, original: str, number: int) -> Path:
        target = self.home / "adapters" / name
        shutil.copytree(self.bed.adapters / original, target)
        edit_config(target, revision=f"{number}")
        return target

    def leases(self, view: dict[str, Any]) -> list[Path]:
        return list((self.home / "store" / ".leases" / view["digest"]).glob("*"))


@pytest.fixture(scope="session")
def one_slot(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneSlot]:
    home = tmp_path_factory.mktemp("one-slot")
    shutil.copytree(bed.adapters, home / "adapters")
    with admin_server(
        bed, home, "--max-loras", "1", "--block-size", "32", "--num-gpu-blocks-override", "40",
        LORA_PLUGINS_HOST_MAX_BYTES="3000000",  # "wide" takes 2.1 MB of it, the others less than 0.6
        LORA_PLUGINS_KERNELS="reference",
    ) as server:  # fmt: skip
        yield OneSlot(server, bed, home)


def fill_remote(bucket: Bucket, hub: Hub, bed: Bed) -> None:
    """Adapters that lie only in S3, only on the Hub, or in both and on the filesystem too."""
    files = {
        name: {file.name: file.read_bytes() for file in (bed.adapters / name).iterdir()}
        for name in ("sql", "chat", "wide", "team/poet")
    }
    for key in ("cloud", "deep/er/cloud", "shared", "late"):
        bucket.put_many(f"loras/{key}", files["chat"])
    spoilt = {**files["chat"], "adapter_model.safetensors": files["chat"]["adapter_model.safetensors"][:-8]}
    bucket.put_many("loras/cloud-truncated", spoilt)
    bucket.put_many("loras/cloud-no-weights", {"adapter_config.json": files["chat"]["adapter_config.json"]})
    hub.commit("acme/poet", files["team/poet"])
    hub.tag("acme/poet", "v1")
    hub.commit("acme/poet", files["wide"])
    hub.commit("acme/many", {f"a/b/{name}": data for name, data in files["chat"].items()})


def fill(root: Path, bed: Bed, home: Path) -> None:
    """Add to the demo's adapters what only tests ask for."""
    good = bed.adapters / "sql"
    break_all(good, root)
    for copy in ("crowd", "vanishing", "sql@v3", "shared"):
        shutil.copytree(good, root / copy)
    build_adapter(bed.base, root, AdapterSpec("patterned", 8, ATTENTION, _PATTERNS))
    build_adapter(bed.base, root, AdapterSpec("regex", 8, ATTENTION, {}))
    build_adapter(bed.base, root, AdapterSpec("rank-128", 128))
    other = build_base(home / "other-base", hidden=128, layers=2)
    build_adapter(other, root, AdapterSpec("other-base", 8), base_name="someone/other-7b")
    build_adapter(bed.base, root, AdapterSpec("renamed-base", 8), base_name="someone/same-shapes")
    build_adapter(bed.base, root, AdapterSpec("nameless-base", 8))
    outside = home / "outside"
    shutil.copytree(good, outside / "secret")
    os.symlink(outside / "secret", root / "link-out")
    shutil.copytree(good, root / "link-file-out")
    (root / "link-file-out" / "adapter_model.safetensors").unlink()
    os.symlink(outside / "secret" / "adapter_model.safetensors", root / "link-file-out" / "adapter_model.safetensors")
    os.symlink(root / "team", root / "alias-inside")


_PATTERNS = {
    "rank_pattern": {"q_proj": 16, "layers.1.self_attn.v_proj": 4},
    "alpha_pattern": {"k_proj": 4, "o_proj": 32},
}
