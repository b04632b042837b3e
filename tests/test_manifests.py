"""The files of examples/kubernetes and examples/docker: rendered, valid, and in step with the package."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import kubernetes_validate.utils
import pytest
import yaml

from lora_plugins.settings import OWN_VARIABLES, Settings
from testbed.forking_vllm import run_script
from testbed.hub import local_hub
from testbed.s3 import s3_server
from tests.installation.stub_wheels import Environment, stub_wheel
from tests.make import adapter_files
from tools import check_manifests

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "examples" / "kubernetes"
NAMES = [str(path.relative_to(KUBERNETES)) for path in check_manifests.directories()]
WITH_BASE = [name for name in NAMES if name not in ("overlays/monitoring", "overlays/sync-from-hub")]
# In the order in which the page lists them: the autoscaler's comes last.
COMPONENTS = ("s3-service-account", "s3-secret", "shared-store", "monitoring")
COMBINATIONS = [
    chosen
    for size in range(1, len(COMPONENTS) + 1)
    for chosen in itertools.combinations(COMPONENTS, size)
    if not {"s3-service-account", "s3-secret"} <= set(chosen)  # two ways to the same bucket
]
EACH_COMBINATION = [pytest.param(each, marks=pytest.mark.nightly if len(each) == 2 else []) for each in COMBINATIONS]


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """The library reads two files of a megabyte for each object."""
    with pytest.MonkeyPatch.context() as patch:
        utils = kubernetes_validate.utils
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@functools.cache
def rendered(name: str) -> dict[tuple[str, str], dict]:
    objects = check_manifests.render(KUBERNETES / name)
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@pytest.mark.parametrize("name", WITH_BASE)
def test_settings_are_those_of_the_package(name, tmp_path):
    objects = rendered(name)
    (data,) = [one["data"] for (kind, key), one in objects.items() if kind == "ConfigMap" and "settings" in key]
    assert {key for key in data if key.startswith("LORA_PLUGINS_")} <= OWN_VARIABLES
    (container,) = objects["Deployment", "lora-plugins"]["spec"]["template"]["spec"]["containers"]
    assert "LORA_PLUGINS_ADMIN_KEY" in {one["name"] for one in container["env"]}
    settings = Settings.from_env(data | {"LORA_PLUGINS_ADAPTERS_FILE": str(ROOT / "README.md")})
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert str(settings.store_dir) in mounts
    assert str(Path(data["LORA_PLUGINS_ADAPTERS_FILE"]).parent) in mounts
    volumes = {one["name"]: one for one in objects["Deployment", "lora-plugins"]["spec"]["template"]["spec"]["volumes"]}
    store = volumes["store"]
    if "emptyDir" in store:
        limit = int(store["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30
        assert settings.store_max_bytes < limit
        assert limit < int(container["resources"]["limits"]["ephemeral-storage"].removesuffix("Gi")) << 30


@pytest.mark.parametrize("name", WITH_BASE)
def test_no_source_is_named_whose_settings_are_missing(name):
    """The doctor, which the page has a reader run in the pod, would end with 1."""
    (data,) = [one["data"] for (kind, key), one in rendered(name).items() if kind == "ConfigMap" and "settings" in key]
    sources = {one for one in data["VLLM_PLUGINS"].split(",") if one.endswith("_resolver")}
    assert sources == {"lora_s3_resolver"}
    assert ("S3_PATH_TEMPLATE" in data) == name.startswith("overlays/s3-")


def combined(folder: Path, components: Sequence[str]) -> Path:
    """The reader's own kustomization: the base, and some components, beside a copy of examples/kubernetes."""
    shutil.copytree(KUBERNETES, folder / "kubernetes")
    own = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../kubernetes/base"],
        "components": [f"../kubernetes/components/{name}" for name in components],
    }
    (folder / "own").mkdir()
    (folder / "own" / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return folder / "own"


def by_plain_name(objects: Sequence[dict]) -> dict[tuple[str, str], str]:
    """Each object as text, with the hashes of generated names left out: kubectl hashes otherwise."""
    generated = r"(lora-plugins-settings|sync-from-hub)-[a-z0-9]{10}\b"
    texts = [re.sub(generated, r"\1", yaml.safe_dump(one, sort_keys=True)) for one in objects]
    return {(one["kind"], one["metadata"]["name"]): text for text in texts for one in [yaml.safe_load(text)]}


def test_components_are_those_that_are_combined_here():
    assert {path.name for path in (KUBERNETES / "components").iterdir()} == set(COMPONENTS)


@pytest.mark.parametrize(
    "components",
    EACH_COMBINATION,
    ids="+".join,
)
def test_every_combination_keeps_what_each_component_adds(tmp_path, components):
    objects = check_manifests.render(combined(tmp_path, components))
    for one in objects:
        check_manifests.validate(one)
    found = {one["kind"]: one for one in objects}
    (data,) = [one["data"] for one in objects if one["kind"] == "ConfigMap" and "settings" in one["metadata"]["name"]]
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert ("S3_PATH_TEMPLATE" in data) == any(name.startswith("s3-") for name in components)
    assert ("annotations" in found["ServiceAccount"]["metadata"]) == ("s3-service-account" in components)
    assert ("AWS_ACCESS_KEY_ID" in {one["name"] for one in container["env"]}) == ("s3-secret" in components)
    assert ("PersistentVolumeClaim" in found) == ("shared-store" in components)
    assert ("HorizontalPodAutoscaler" in found) == ("monitoring" in components)
    assert ("replicas" in found["Deployment"]["spec"]) == ("monitoring" not in components), "the autoscaler's"


def test_monitoring_changes_nothing_of_a_running_deployment():
    kinds = {kind for kind, _ in rendered("overlays/monitoring")}
    assert kinds == {"HorizontalPodAutoscaler", "PodMonitor", "PrometheusRule"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders what is compared")
@pytest.mark.parametrize("components", [*EACH_COMBINATION, None], ids=lambda chosen: "+".join(chosen or ["overlays"]))
def test_rendered_is_what_kubectl_renders(tmp_path, components):
    folders = check_manifests.directories() if components is None else [combined(tmp_path, components)]
    for folder in folders:
        done = subprocess.run(
            ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True, timeout=60
        )
        assert by_plain_name(check_manifests.render(folder)) == by_plain_name(list(yaml.safe_load_all(done.stdout)))


def test_alerts_are_those_of_examples_prometheus():
    rule = rendered("overlays/monitoring")["PrometheusRule", "lora-plugins"]
    plain = yaml.safe_load((ROOT / "examples" / "prometheus" / "alerts.yml").read_text())
    assert rule["spec"] == plain


GUIDE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()


def written_by_the_guide(folder: Path) -> Path:
    """The folder that a reader has after the guide's files, with a clone of the repository beside the overlay."""
    (folder / "my-overlay").mkdir()
    (folder / "lora-plugins" / "examples").mkdir(parents=True)
    shutil.copytree(KUBERNETES, folder / "lora-plugins" / "examples" / "kubernetes")
    for name, text in re.findall(r"^```yaml\n# (my-overlay/\S+)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text)
    return folder / "my-overlay"


def test_components_of_the_guide_go_with_its_overlay(tmp_path):
    overlay = written_by_the_guide(tmp_path)
    (listed,) = re.findall(r"^```yaml\n(components:\n.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    own = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    own["configMapGenerator"][0]["literals"].remove("LORA_PLUGINS_STORE_MAX_BYTES=80GiB")  # as the table says
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(own | yaml.safe_load(listed)))
    change = yaml.safe_load((overlay / "deployment.yaml").read_text())
    assert [volume["name"] for volume in change["spec"]["template"]["spec"].pop("volumes")] == ["store"]
    (overlay / "deployment.yaml").write_text(yaml.safe_dump(change))
    found = {one["kind"]: one for one in check_manifests.render(overlay)}
    assert {"PersistentVolumeClaim", "HorizontalPodAutoscaler"} <= set(found)
    (store,) = [one for one in found["Deployment"]["spec"]["template"]["spec"]["volumes"] if one["name"] == "store"]
    assert set(store) == {"name", "persistentVolumeClaim"}
    assert "replicas" not in found["Deployment"]["spec"]
    assert [name for name in re.findall(r"^\| `([\w-]+)` \|", GUIDE, re.MULTILINE) if name in COMPONENTS] == [
        *COMPONENTS
    ]


def test_labels_of_the_guide_are_those_of_the_policy():
    (change,) = re.findall(r"-p '(\{.*?\})'", GUIDE)
    role = json.loads(change)["spec"]["template"]["metadata"]["labels"]
    administrator, prometheus = (
        yaml.safe_load(text) for text in dict.fromkeys(re.findall(r"`([\w./-]+: (?:administrator|prometheus))`", GUIDE))
    )
    (rule,) = rendered("base")["NetworkPolicy", "lora-plugins"]["spec"]["ingress"]
    allowed = [one["podSelector"]["matchLabels"] for one in rule["from"]]
    assert allowed == [role, administrator, prometheus]
    (namespace,) = [one["namespaceSelector"]["matchLabels"] for one in rule["from"] if "namespaceSelector" in one]
    assert [f"the namespace `{name}`" in GUIDE for name in namespace.values()] == [True]


def test_overlay_of_the_guide_renders_as_it_says(tmp_path):
    objects = {one["kind"]: one for one in check_manifests.render(written_by_the_guide(tmp_path))}
    for one in objects.values():
        check_manifests.validate(one)
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry.example.com/lora-plugins-vllm:0.32.0"
    assert "--max-loras=16" in container["args"]
    (store,) = [volume for volume in pod["volumes"] if volume["name"] == "store"]
    assert store["emptyDir"]["sizeLimit"] == "100Gi"
    limits = container["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["ephemeral-storage"]) == ("1", "130Gi")
    (rank,) = re.findall(r"lora-plugins why .* (--max-lora-rank) (\d+)$", GUIDE, re.MULTILINE)
    assert "=".join(rank) in container["args"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_volumes_are_mounted_where_the_images_user_may_write(name):
    """Docker gives a named volume to root unless the image has the directory."""
    image = (ROOT / "examples" / "docker" / name).read_text()
    (made, given) = re.search(r"mkdir -p (.+?) && chown -R 2000:2000 (.+)$", image, re.MULTILINE).groups()
    services = yaml.safe_load((ROOT / "examples" / "docker" / "compose.yaml").read_text())["services"]
    for volume in services["vllm"]["volumes"]:
        target = volume.partition(":")[2]
        assert target in made.split()
        assert any(target.startswith(owned) for owned in given.split())


def test_compose_file_names_known_settings():
    services = yaml.safe_load((ROOT / "examples" / "docker" / "compose.yaml").read_text())["services"]
    assert {key for key in services["vllm"]["environment"] if key.startswith("LORA_PLUGINS_")} <= OWN_VARIABLES


class ComposeLoader(yaml.SafeLoader):
    """YAML with Compose's tag that takes away what an earlier file says."""


ComposeLoader.add_constructor("!reset", lambda loader, node: "reset")


def test_compose_gives_the_cuda_image_a_gpu_and_the_token():
    vllm = yaml.safe_load((ROOT / "examples" / "docker" / "compose.yaml").read_text())["services"]["vllm"]
    assert vllm["build"]["dockerfile"] == "examples/docker/Dockerfile"
    (device,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert vllm["environment"].get("HF_TOKEN", "") is None, "passed on where it is set"


def test_compose_for_a_cpu_asks_for_no_gpu():
    text = (ROOT / "examples" / "docker" / "compose.cpu.yaml").read_text()
    vllm = yaml.load(text, ComposeLoader)["services"]["vllm"]
    assert vllm == {"build": {"dockerfile": "examples/docker/Dockerfile.cpu"}, "deploy": "reset"}


def test_page_on_docker_names_compose_files_that_exist():
    page = (ROOT / "docs" / "guides" / "docker.md").read_text()
    named = {name for names in re.findall(r"COMPOSE_FILE=([\w./:-]+)", page) for name in names.split(":")}
    assert named == {f"examples/docker/{file.name}" for file in (ROOT / "examples" / "docker").glob("compose*.yaml")}
    assert "-f examples/docker/compose" not in page


def test_compose_commands_of_the_page_fit_the_compose_file():
    page = (ROOT / "docs" / "guides" / "docker.md").read_text()
    text = (ROOT / "examples" / "docker" / "compose.yaml").read_text()
    (block,) = re.findall(r"^export COMPOSE_FILE=.*?^```", page, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"\$\{(\w+):\?", text)) <= set(re.findall(r"\b([A-Z_]+)=", block))
    services = yaml.safe_load(text)["services"]
    used = re.findall(r"^docker compose (?:run --rm|exec|logs) (\w+)", page, re.MULTILINE)
    assert used
    assert set(used) <= set(services)
    assert services["vllm"]["ports"] == ["127.0.0.1:8000:8000"]


def synced(home: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = KUBERNETES / "overlays" / "sync-from-hub" / "sync_from_hub.py"
    return run_script(script.read_text(), "s3://adapters", *arguments, environment={**os.environ, **env}, home=home)


def test_sync_copies_what_is_new_and_verified(tmp_path):
    with s3_server() as s3, local_hub() as hub:
        bucket = s3.bucket("adapters")
        hub.commit("acme/sql", adapter_files())
        hub.commit("acme/broken", adapter_files() | {"adapter_model.safetensors": b"no safetensors"})
        env = {**s3.env(), **hub.env(tmp_path / "home"), "LORA_PLUGINS_STORE_DIR": str(tmp_path / "store")}
        first = synced(tmp_path, env, "acme/broken=broken", "acme/sql=team/sql")
        assert first.returncode == 1
        assert "broken: not copied" in first.stderr
        assert first.stdout.startswith("team/sql: copied")
        assert {key.rpartition("/")[2] for key in bucket.list("team/sql/")} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "lora-plugins-digest",
        }
        assert not bucket.list("broken")
        assert synced(tmp_path, env, "acme/sql=team/sql").stdout == "team/sql: is there already\n"
        hub.commit("acme/sql", adapter_files(lora_alpha=99))
        assert synced(tmp_path, env, "acme/sql=team/sql").stdout.startswith("team/sql: copied")


@pytest.fixture
def image(tmp_path) -> Environment:
    """An environment like that of vLLM's image: a vLLM, what it needs, and a conflict that was there before."""
    made = Environment(tmp_path / "env", tmp_path / "index")
    made.have_pip()
    made.have("vllm", "0.32.0", ("fsspec",))
    made.have("fsspec", "1.0")
    made.have("quarrel", "1.0", ("fsspec>=2",))
    made.offer("s3fs", "1.0", ("fsspec==1.0",))
    made.offer("s3fs", "2.0", ("fsspec==2.0",))
    made.offer("fsspec", "2.0")
    return made


@pytest.mark.parametrize(("needs", "is_refused"), [("fsspec", False), ("fsspec>=2", True)])
def test_image_installs_beside_what_is_there(tmp_path, image, needs, is_refused):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    stub_wheel(wheels, "lora-plugins", "0.1.0", (needs, 's3fs; extra == "s3"'))
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "docker" / "install.sh"), str(wheels)],
        env={
            "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(image.python),
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(image.index),
        },
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    after = image.installed()
    assert after["fsspec"] == "1.0"
    assert (done.returncode != 0) == is_refused, done.stderr
    assert after.get("s3fs") == (None if is_refused else "1.0")
