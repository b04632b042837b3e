"""Pages that start servers of their own: each command starts one, which answers for adapters as PEFT does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import openai
import pytest

from testbed.bed import Bed
from testbed.hub import local_hub
from tests.walkthroughs.reader import Do, Step, Walk, left_out
from tests.walkthroughs.small_server import BESIDE, PORT, folder_of_adapters, put, reads, small, tokens

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(None in map(shutil.which, ("curl", "jq", "openssl")), reason="the pages use them"),
]

INSTALLED = "needs an index of packages; tests/walkthroughs/test_installing.py installs from such an address"
CURL = "curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\"
HUB_ADAPTER = "jeeejeee/llama32-3b-text2sql-spider"
OF_SGLANG = "algoprog/fact-generation-llama-3.1-8b-instruct-lora"


CUDA_ENVIRONMENT = (
    "export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1          # without it vLLM asks nobody for a name that it does not know"
)
CUDA = Walk(
    "docs/get-started/cuda.md",
    [
        left_out("python3 -m venv serve && . serve/bin/activate", INSTALLED, "440f57a7"),
        Step(CUDA_ENVIRONMENT),
        Step(
            "vllm serve meta-llama/Llama-3.2-3B-Instruct --enable-lora --max-lora-rank 64 --max-loras 8 --max-cpu-loras 64",  # noqa: E501 - as the page has it
            Do.SERVE,
        ),
        Step(CURL),
    ],
    {
        **small("meta-llama/Llama-3.2-3B-Instruct"),
        **folder_of_adapters("/adapters"),
        "localhost:8000": PORT,
    },
)

TRY_TENANTS = (
    "ask() { curl -s -o /dev/null -w '%{http_code}\\n' localhost:8000/v1/completions -H \"Authorization: Bearer $1\" \\"
)
TENANTS = Walk(
    "docs/guides/tenants.md",
    [
        Step(
            "for name in team_a team_b operators; do printf '%s=%s\\n' $name \"$(openssl rand -hex 24)\"; done > keys.env"  # noqa: E501 - as the page has it
        ),
        Step("hash() { printf %s \"$1\" | sha256sum | cut -d' ' -f1; }"),
        Step(
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_LORA_RESOLVER_CACHE_DIR=/adapters \\",
            Do.SERVE,
            before="",
        ),
        Step(TRY_TENANTS),
    ],
    {**small("BASE"), **folder_of_adapters("/adapters"), "localhost:8000": PORT},
)

ACCESS = Walk(
    "docs/guides/access.md",
    [
        left_out(
            "[default]                 # requests with another key or with none; left out, they may use no adapter",
            "tests/api/access/test_policy.py::test_the_documented_policy_is_one reads it",
            "c6bdba23",
        )
    ],
    {},
)

ASKS = "tests/e2e/test_mixtures.py asks so, on one server with PEFT's sums beside"
MIXTURES = Walk(
    "docs/guides/mixtures.md",
    [
        left_out(CURL, ASKS, "c9045ed0"),
        left_out('"model": "style*0.30+sql*0.7"', "a picture of one request", "c805f85a"),
    ],
    {},
)

ADMIN_READS_A_DIGEST = "from openai import OpenAI"
ADMIN = Walk(
    "docs/guides/admin.md",
    [
        Step("export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_LORA_RESOLVER_CACHE_DIR=/adapters", Do.SERVE),
        left_out(
            '{"lora_versions": [["1f2e3d4c…", 0], ["9a8b7c6d…", 17]]}',
            "of requests that a swap overtakes; tests/e2e/test_in_flight.py has them",
        ),
        Step(ADMIN_READS_A_DIGEST),
        left_out(
            "adapters:",
            "needs S3 and the Hub; tests/test_guides.py::test_adapters_that_a_page_declares_can_be_followed reads it",
            "a3d591a0",
        ),
    ],
    {
        **small("BASE"),
        **folder_of_adapters("/adapters"),
        "file:///adapters": ("file://{adapters}", "a folder of this test"),
        "localhost:8000": PORT,
    },
)

STATIC = "vllm serve BASE --enable-lora --max-lora-rank 64 --max-loras 4 --max-cpu-loras 64 \\"
BY_NAME = "export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_PLUGINS=lora_plugins VLLM_LORA_RESOLVER_CACHE_DIR=/adapters"
NEW_DIRECTORY = "cp -r new-adapter /adapters/support"
LORAX = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 \\"
SGLANG = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_PLUGINS=lora_filesystem_resolver,lora_lru_manager,lora_admin \\"
NIM = SGLANG
MIGRATING = Walk(
    "docs/guides/migrating.md",
    [
        Step(STATIC, Do.SERVE, before="export VLLM_PLUGINS="),
        Step(BY_NAME, Do.SERVE),
        Step(NEW_DIRECTORY, before="cp -r $VLLM_LORA_RESOLVER_CACHE_DIR/sql new-adapter"),
        Step('pip install "lora-plugins @ git+$REPOSITORY"'),
        Step(LORAX, Do.SERVE, before="unset LORA_PLUGINS_PRELOAD LORA_PLUGINS_LIST"),
        Step("# /etc/lora/adapters.yaml, in the place of --lora-paths", Do.WRITE, "adapters.yaml"),
        Step(SGLANG, Do.SERVE),
        Step(NIM, Do.SERVE, before="unset LORA_PLUGINS_ADAPTERS_FILE"),
    ],
    {
        'pip install "lora-plugins @ git+$REPOSITORY"': ("true", INSTALLED),
        **small("BASE"),
        " /adapters/support": (" {adapters}/support", "a folder of this test"),
        "localhost:8000": PORT,
        **small("mistralai/Mistral-7B-Instruct-v0.1"),
        "--port 8080": ("", BESIDE),
        **small("meta-llama/Llama-3.1-8B-Instruct"),
        **folder_of_adapters("/data/adapters"),
        **folder_of_adapters("/adapters"),
        "/etc/lora/": ("", "a folder of this test"),
    },
)

INSTALL_RAY = 'pip install "lora-plugins[ray] @ git+$REPOSITORY"'

START_RAY = "needs Ray; tests/ray/test_application.py::test_the_command_of_the_page_is_understood reads its options"
SERVERS = [
    "vllm serve BASE --enable-lora --max-loras 8 --max-cpu-loras 64 --max-lora-rank 32 --tensor-parallel-size 2",
    "vllm serve BASE --enable-lora --max-loras 8 --max-cpu-loras 64 --max-lora-rank 32 --data-parallel-size 2",
    "vllm serve BASE --enable-lora --max-loras 8 --max-cpu-loras 64 --max-lora-rank 32 --api-server-count 4",
]
SEVERAL = Walk(
    "docs/guides/replicas.md",
    [
        Step("export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_LORA_RESOLVER_CACHE_DIR=/adapters"),
        *(Step(first, Do.SERVE) for first in SERVERS),
    ],
    {**small("BASE"), **folder_of_adapters("/adapters")},
)

ROUTING = Walk("docs/guides/routing.md", [left_out(INSTALL_RAY, START_RAY, "7320d34b")], {})


def test_the_page_on_gpus_serves_the_hub(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    (tmp_path / "adapters").mkdir()
    with local_hub() as hub:
        hub.commit(HUB_ADAPTER, {file.name: file.read_bytes() for file in (bed.adapters / "sql").iterdir()})
        with reads(CUDA, tmp_path, bed.base, env | hub.env(tmp_path / "hub")) as reader:
            assert "hub" in reader.printed[CUDA_ENVIRONMENT]
            answer = json.loads(reader.printed[CURL])
            assert (answer["model"], answer["usage"]["completion_tokens"]) == (HUB_ADAPTER, 16)
            assert tokens(reader.url, HUB_ADAPTER) == ("", bed.answers["sql"])


def test_each_team_uses_its_own_adapters_only(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    put(bed, tmp_path / "adapters", "team-a/sql", "team-b/sql", "shared/sql")
    with reads(TENANTS, tmp_path, bed.base, env) as reader:
        assert reader.printed[TRY_TENANTS].split() == ["200", "404", "401", "base", "team-a/sql", "403", "1"]


def test_an_answer_says_which_version_computed_it(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    put(bed, tmp_path / "adapters", "sql")
    with reads(ADMIN, tmp_path, bed.base, env) as reader:
        digest = reader.printed[ADMIN_READS_A_DIGEST].split()[0]
        client = openai.OpenAI(base_url=f"{reader.url}/v1", api_key="SECRET", max_retries=0, timeout=240)
        assert client.get("/loras/sql", cast_to=object)["digest"] == digest  # type: ignore[index]


def test_adapters_of_other_servers_keep_their_names(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    put(bed, tmp_path / "adapters", "sql", "team/chat", "team/sql")
    flags = ("sql", "team/chat")
    names = iter([flags, flags, ("acme/sql", "team/sql"), ("lora0", "team/sql"), ("team/sql",)])  # of each server

    def ask(first: str, url: str) -> None:
        for name in next(names):
            assert (first, name, *tokens(url, name)) == (first, name, "", bed.answers["sql"])

    with local_hub() as hub:
        for repository in ("acme/sql", OF_SGLANG):
            hub.commit(repository, {file.name: file.read_bytes() for file in (bed.adapters / "sql").iterdir()})
        own = {"VLLM_LORA_RESOLVER_CACHE_DIR": str(tmp_path / "adapters"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        own |= {"VLLM_PLUGINS": "lora_filesystem_resolver", "NIM_PEFT_SOURCE": str(tmp_path / "adapters")}
        with reads(MIGRATING, tmp_path, bed.base, env | own | hub.env(tmp_path / "hub"), ask) as reader:
            assert list(names) == []
            assert json.loads(reader.printed[NEW_DIRECTORY])["model"] == "support"


def test_every_way_to_more_processes_answers(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    put(bed, tmp_path / "adapters", "sql")
    asked = []

    def ask(first: str, url: str) -> None:
        asked.append(first)
        assert (first, *tokens(url, "sql")) == (first, "", bed.answers["sql"])

    with reads(SEVERAL, tmp_path, bed.base, env, ask):
        assert asked == SERVERS
