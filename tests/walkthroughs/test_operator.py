"""An operator of 300 adapters in S3 on Kubernetes, who reads the page from its first block to its last.

There is no cluster here: `kubectl` is a stand-in (tests/walkthroughs/kubectl.py) that starts the rendered Deployment's
command, arguments and environment as a process.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from safetensors.torch import load_file, save_file

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete
from testbed.models import PROMPT, edit_config
from testbed.pages import Block, blocks
from testbed.reference import Reference
from testbed.s3 import Bucket, s3_server
from testbed.server import SMALL_ENGINE, reserved_port
from tests.e2e.servers import BLOCKS
from tests.walkthroughs.kubectl import Pod
from tests.walkthroughs.reader import ROOT, Do, Reader, Step, Walk, left_out

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(None in map(shutil.which, ("curl", "git", "jq", "openssl")), reason="the page uses them"),
]

ADAPTERS = 300
APPLY = "kubectl kustomize my-overlay | less"
ASK = "kubectl port-forward deployment/lora-plugins 8000 &"
DIAGNOSE = (
    "kubectl logs deployment/lora-plugins | grep 'No adapter'        # every place that was asked, and its answer"
)
WRONG_NAME = (
    "curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' "
    """-d '{"model": "nobody", "prompt": "SELECT"}'"""
)

KUBERNETES = Walk(
    "docs/guides/kubernetes.md",
    [
        left_out('{"Version": "2012-10-17", "Statement": [', "needs AWS; tests/test_guides.py reads it", "63f9d0cb"),
        Step('git clone --depth 1 "$REPOSITORY" lora-plugins'),
        Step("# my-overlay/kustomization.yaml", Do.WRITE, "my-overlay/kustomization.yaml"),
        Step("# my-overlay/deployment.yaml", Do.WRITE, "my-overlay/deployment.yaml"),
        Step("# my-overlay/adapters.yaml", Do.WRITE, "my-overlay/adapters.yaml"),
        Step("# my-overlay/role.yaml", Do.WRITE, "my-overlay/role.yaml"),
        left_out("components:", "for another cluster; tests/test_manifests.py renders the combination", "92bcdf7d"),
        Step(APPLY),
        left_out(
            'kubectl patch deployment "$GATEWAY" \\',
            "needs a gateway; tests/test_manifests.py compares the label with the policy",
            "162cb3a6",
        ),
        Step(ASK),
        Step(DIAGNOSE, before=WRONG_NAME),  # for a reader whose request got 404
        left_out(
            "kubectl apply -k lora-plugins/examples/kubernetes/overlays/monitoring",
            "needs the Prometheus operator; tests/test_manifests.py renders the objects",
        ),
    ],
    {
        "localhost:8000": ("127.0.0.1:{port}", "other servers run beside this one"),
        "--base-model /models/base": ("--base-model {base}", "the pod of this test mounts nothing at /models"),
    },
)
# What the Deployment's container is given besides what the manifests say.
ADDED_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, of a machine that has few
    "HF_HUB_OFFLINE": "1",  # no network
}
# Two cores, and other servers beside this one.
ADDED_ARGUMENTS = (*SMALL_ENGINE, *BLOCKS, "--host", "127.0.0.1", "--port")


def fill(bucket: Bucket, bed: Bed, folder: Path) -> dict[str, Path]:
    """300 adapters of one file of weights and as many scales: 298 of any name, and the two that the page declares."""
    names = {f"tenant-{number}/sql": f"tenant-{number}/sql" for number in range(ADAPTERS - 2)}
    names |= {"team/sql": "team/sql", "support": "support/v3"}
    weights = (bed.adapters / "sql" / "adapter_model.safetensors").read_bytes()
    kept = {}
    for number, (name, key) in enumerate(names.items(), 1):
        kept[name] = Path(shutil.copytree(bed.adapters / "sql", folder / key))
        edit_config(kept[name], lora_alpha=number / 4)
        config = (kept[name] / "adapter_config.json").read_bytes()
        bucket.put_many(key, {"adapter_config.json": config, "adapter_model.safetensors": weights})
    return kept


def published(folder: Path) -> str:
    """The address of a git repository with the manifests of this tree, which a reader can clone."""
    shutil.copytree(ROOT / "examples" / "kubernetes", folder / "examples" / "kubernetes")
    git = ["git", "-C", str(folder), "-c", "user.name=tests", "-c", "user.email=tests@example.invalid"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "Publish the manifests"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    return folder.as_uri()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """The pod's /tmp is below it, in which vLLM makes sockets: their paths have 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:
        yield Path(folder)


@pytest.mark.timeout(1500)
def test_300_adapters_in_s3_are_served_by_name(tmp_path: Path, short_path: Path, bed: Bed, env: dict[str, str]) -> None:
    pod = Pod(short_path / "pod")
    repository = published(tmp_path / "published")
    with s3_server() as s3, reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        bucket = s3.bucket("adapters")
        adapters = fill(bucket, bed, tmp_path / "bucket")
        assert len(adapters) == ADAPTERS
        own = {name: value for name, value in env.items() if name != "LORA_PLUGINS_STORE_DIR"}
        pod.give(
            claims={"base-model": str(bed.base)},
            env={**own, **ADDED_ENVIRONMENT, **s3.env()},  # the role: its credentials, and the endpoint of this S3
            arguments=[*ADDED_ARGUMENTS, str(port)],
            url=url,
        )
        pod.install(tmp_path / "bin", sys.executable)
        shell = {**own, "PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "POD": str(pod.folder), "REPOSITORY": repository}
        reader = Reader(KUBERNETES, tmp_path, shell, {"port": str(port), "base": str(bed.base)}, url)
        try:
            reader.read()
            what_the_page_shows(reader)
            reference = Reference(bed.base)
            answers_are_those_of_peft(url, adapters, reference)
            what_monitoring_reads(reader)
            new_weights_are_served(reader, url, bucket, adapters["team/sql"], reference)
        finally:
            pod.end()


def what_the_page_shows(reader: Reader) -> None:
    assert "successfully rolled out" in reader.printed[APPLY]
    asked = reader.printed[ASK]
    decoder = json.JSONDecoder()
    completion, at = decoder.raw_decode(asked)
    assert (completion["model"], completion["object"]) == ("team/sql", "text_completion")
    objects = re.findall(r'^\{\n  "lora_name".*?^\}', asked[at:], re.MULTILINE | re.DOTALL)
    views = [json.loads(text) for text in objects]
    assert {view["lora_name"]: view["state"] for view in views} == {"team/sql": "serving", "support": "serving"}
    assert re.search(r"Adapter 'team/sql' from .*s3", asked[at:])
    assert "team/sql" in reader.printed[DIAGNOSE]


def answers_are_those_of_peft(url: str, adapters: dict[str, Path], reference: Reference) -> None:
    prompt = reference.prompt_ids(PROMPT)
    client = client_of(url)
    expected = {}
    for name in ("team/sql", "support", "tenant-7/sql", "tenant-60/sql", "tenant-297/sql"):
        expected[name] = reference.generate(adapters[name], prompt, MAX_TOKENS)
        answer = complete(client, name, PROMPT, MAX_TOKENS)
        assert (name, answer.error, list(answer.token_ids)) == (name, "", expected[name])
    assert len({tuple(ids) for ids in expected.values()}) > 1
    assert complete(client, "tenant-300/sql", PROMPT, MAX_TOKENS).status == 404


def what_monitoring_reads(reader: Reader) -> None:
    """The check of the page on monitoring, and the metrics that the alerts name."""
    page = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
    (count,) = [block for block in blocks(page) if block.first.startswith("curl -s localhost:8000/metrics")]
    assert int(reader.run(count)) > 0
    everything = reader.run(Block("", count.text.partition("|")[0] + "\n", count.line))
    rules = (ROOT / "examples" / "prometheus" / "alerts.yml").read_text()
    named = set(re.findall(r"\b(lora_plugins_\w+?)(?:_bucket|_count|_total)?\b[{)\[]", rules))
    families = set(re.findall(r"^# TYPE (lora_plugins_\w+?)(?:_total)? ", everything, re.MULTILINE))
    assert len(named) > 4
    assert named <= families


def new_weights_are_served(reader: Reader, url: str, bucket: Bucket, adapter: Path, reference: Reference) -> None:
    """ "Publish a new version": overwrite the weights file, and have it at once."""
    (command,) = re.findall(r"(?:`|-- )(lora-plugins\s+refresh\s+team/sql)`", (ROOT / KUBERNETES.page).read_text())
    weights = adapter / "adapter_model.safetensors"
    tensors = {name: -tensor if "lora_B" in name else tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    bucket.put("team/sql/adapter_model.safetensors", weights.read_bytes())
    key = '$(kubectl get secret lora-plugins-admin -o jsonpath="{.data.key}" | base64 -d)'
    printed = reader.run(
        Block("", f'LORA_PLUGINS_URL={url} LORA_PLUGINS_ADMIN_KEY="{key}" {" ".join(command.split())}\n', 0)
    )
    assert "team/sql" in printed
    answer = complete(client_of(url), "team/sql", PROMPT, MAX_TOKENS)
    changed = Path(shutil.copytree(adapter, adapter.with_name("changed")))
    expected = reference.generate(changed, reference.prompt_ids(PROMPT), MAX_TOKENS)
    assert (answer.error, list(answer.token_ids)) == ("", expected)
    assert expected != reference.generate(adapter, reference.prompt_ids(PROMPT), MAX_TOKENS), "remembered: the old one"


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
