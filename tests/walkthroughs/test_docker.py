"""The pages on images: the Dockerfile's steps run in a root of their own, and then the command of `docker run` serves.

There is no Docker here: `docker` is a stand-in (tests/walkthroughs/docker.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed.bed import Bed
from testbed.hub import local_hub
from testbed.server import SMALL_ENGINE, reserved_port
from tests.e2e.servers import ENVIRONMENT
from tests.walkthroughs import docker
from tests.walkthroughs.reader import ROOT, Do, Reader, Step, Walk, index_variables, left_out, reading
from tests.walkthroughs.small_server import PORT, tokens

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0 or not docker.is_possible(), reason="needs root, and mount namespaces"),
]

HUB_ADAPTER = "jeeejeee/llama32-3b-text2sql-spider"
SERVE = "docker run --rm --gpus all --shm-size 8g -p 127.0.0.1:8000:8000 \\"
READABLE = (
    "chmod -R a+rX adapters          # for the image's user 2000: trainers write weights that only their owner reads"
)
ASK_IMAGE = "curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\"
ASK = "curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' \\"
NO_COMPOSE = "no Docker Compose here; tests/test_manifests.py reads the compose files"
COMMON = {
    "make wheel": (
        f"python {ROOT}/tools/build_wheel.py --dist dist --no-build-isolation --levels x86-64-v3",
        "the set-up is done, and a compiler for aarch64 may be missing",
    ),
    "localhost:8000": PORT,
}
IMAGE = Walk(
    "docs/get-started/image.md",
    [Step("make wheel"), Step(SERVE, Do.SERVE), Step(ASK_IMAGE)],
    {**COMMON, "meta-llama/Llama-3.2-3B-Instruct": ("{base}", "two cores and no network: a tiny Llama")},
)
DOCKER = Walk(
    "docs/guides/docker.md",
    [
        Step("make wheel                                    # dist/lora_plugins-*.whl"),
        Step(READABLE, Do.SERVE, before="export ADMIN_KEY=$(openssl rand -hex 24)"),
        Step(ASK),
        left_out("export COMPOSE_FILE=examples/docker/compose.yaml", NO_COMPOSE, "5b2f72a6"),
        left_out("docker compose exec vllm lora-plugins doctor", NO_COMPOSE, "2de7f7fb"),
    ],
    {**COMMON, ":0.32.0 BASE": (":0.32.0 {base}", "two cores and no network: a tiny Llama")},
)


@contextmanager
def reads(walk: Walk, folder: Path, bed: Bed, env: dict[str, str], **of_container: str) -> Iterator[Reader]:
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "engine").mkdir()
    base = Path(shutil.copytree(bed.base, folder / "base"))
    for file in base.iterdir():
        file.chmod(0o644)  # for the image's user
    docker.install(folder / "bin", sys.executable)
    own = {**index_variables(), **env, "PATH": f"{folder / 'bin'}:{env['PATH']}", "ENGINE": str(folder / "engine")}
    with reserved_port() as port:
        host = {
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **ENVIRONMENT, **of_container},
            "volumes": [f"{base}:/base:ro"],  # in the place of a model of the Hub
            "arguments": [*SMALL_ENGINE, "--host", "127.0.0.1", "--port", str(port)],
        }
        (folder / "engine" / "given.json").write_text(json.dumps(host))
        values = {"port": str(port), "base": "/base"}
        with reading(walk, folder, env=own, values=values, url=f"http://127.0.0.1:{port}") as reader:
            yield reader


def test_the_image_serves_an_adapter_of_the_hub(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    with local_hub() as hub:
        hub.commit(HUB_ADAPTER, {file.name: file.read_bytes() for file in (bed.adapters / "sql").iterdir()})
        with reads(IMAGE, tmp_path, bed, env, **hub.env(Path("/home/lora/.cache/huggingface"))) as reader:
            assert json.loads(reader.printed[ASK_IMAGE])["model"] == HUB_ADAPTER
            assert tokens(reader.url, HUB_ADAPTER) == ("", bed.answers["sql"])


def test_the_image_serves_a_directory_as_its_own_user(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    shutil.copytree(bed.adapters / "sql", tmp_path / "adapters" / "team" / "sql")
    with reads(DOCKER, tmp_path, bed, env, HF_HUB_OFFLINE="1") as reader:
        assert json.loads(reader.printed[ASK])["model"] == "team/sql"
        assert tokens(reader.url, "team/sql") == ("", bed.answers["sql"])
        stored = list((tmp_path / "engine" / "volumes" / "lora-store").glob("?" * 64))
        assert [file.stat().st_uid for file in stored] == [2000]
