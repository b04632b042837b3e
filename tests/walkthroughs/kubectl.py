"""A stand-in for kubectl and a cluster of one pod: what the page on Kubernetes asks of them, with real manifests.

The container is a process of this machine, with the command, arguments and environment of the rendered Deployment; the
paths of its volumes are folders below `POD`. `POD/given.json` has what stands for the cluster: the folder of each
claim, and the environment and arguments that are added (a role's credentials, a port, sizes for two cores).
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools import check_manifests

POD = Path(os.environ.get("POD", "."))
ROLLOUT_S = 600


@dataclass(frozen=True)
class Pod:
    """The stand-in's folder, as a test sees it."""

    folder: Path

    def give(self, **given: Any) -> None:
        """What stands for the cluster: `claims`, `env`, `arguments` and `url`."""
        self.folder.mkdir()
        (self.folder / "given.json").write_text(json.dumps(given))

    def install(self, directory: Path, python: str) -> None:
        """Put `kubectl` into a directory of the reader's PATH."""
        directory.mkdir()
        (directory / "kubectl").write_text(f'#!/bin/sh\nexec {python} -m tests.walkthroughs.kubectl "$@"\n')
        (directory / "kubectl").chmod(0o755)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def pid(self) -> int | None:
        """Of the container's process, which leads a process group; None before `apply`."""
        file = self.folder / "running.json"
        return int(json.loads(file.read_text())["pid"]) if file.exists() else None

    def end(self) -> None:
        """End the container's process and all its children, kindly first."""
        for number, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            deadline = time.monotonic() + patience_s
            try:
                if self.pid is not None:
                    os.killpg(self.pid, number)
                while self.pid is not None and time.monotonic() < deadline:
                    os.killpg(self.pid, 0)
                    time.sleep(0.2)
            except ProcessLookupError:
                return


def kustomize(directory: str) -> str:
    return yaml.safe_dump_all(check_manifests.render(Path(directory)), sort_keys=False)


def create(secret: str, generic: str, name: str, literal: str) -> str:
    assert (secret, generic) == ("secret", "generic")
    key, _, value = literal.removeprefix("--from-literal=").partition("=")
    (POD / "secrets" / name).mkdir(parents=True)
    (POD / "secrets" / name / key).write_text(value)
    return f"secret/{name} created\n"


def apply(flag: str, directory: str) -> str:
    assert flag == "-k"
    objects = check_manifests.render(Path(directory))
    for one in objects:
        check_manifests.validate(one)
    maps = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    (deployment,) = [one for one in objects if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    accounts = [one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"]
    assert pod["serviceAccountName"] in accounts
    (container,) = pod["containers"]
    given = json.loads((POD / "given.json").read_text())
    places = _mount(pod["volumes"], container["volumeMounts"], maps, given["claims"])
    env = {**given["env"], **{key: _placed(value, places) for key, value in _environment(container, maps).items()}}
    command = [*container["command"], *(_placed(text, places) for text in container["args"]), *given["arguments"]]
    with (POD / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, cwd=POD, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    running = {"pid": process.pid, "env": env, "container": container, "name": deployment["metadata"]["name"]}
    (POD / "running.json").write_text(json.dumps(running))
    return "".join(f"{one['kind'].lower()}/{one['metadata']['name']} created\n" for one in objects)


def rollout(status: str, name: str, *_: str) -> str:
    """Wait as the kubelet does: startup, then readiness, each at the path and port that the manifest names."""
    assert status == "status"
    container = _running(name)["container"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    given = json.loads((POD / "given.json").read_text())
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert ports[asked["port"]] == 8000, "the page forwards 8000"
        _wait_for(f"{given['url']}{asked['path']}")
    return f"{name} successfully rolled out\n"


def port_forward(name: str, port: str) -> str:
    assert _running(name)["container"]["ports"] == [{"name": "http", "containerPort": int(port)}]
    return ""  # the page's localhost:8000 is read as the address of the process


def get(secret: str, name: str, flag: str, path: str) -> str:
    assert (secret, flag) == ("secret", "-o")
    key = re.fullmatch(r"jsonpath=\{\.data\.(\w+)\}", path)
    return base64.b64encode((POD / "secrets" / name / key[1]).read_bytes()).decode()


def logs(name: str) -> str:
    assert _running(name)
    return (POD / "log").read_text(errors="replace")


def execute(name: str, dashes: str, *command: str) -> str:
    assert dashes == "--"
    done = subprocess.run(command, env=_running(name)["env"], cwd=POD, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.stdout.write(done.stdout)
        raise SystemExit(done.returncode)
    return done.stdout


def _running(name: str) -> dict[str, Any]:
    running = json.loads((POD / "running.json").read_text())
    assert name == f"deployment/{running['name']}"
    return dict(running)


def _environment(container: dict[str, Any], maps: dict[str, dict[str, str]]) -> dict[str, str]:
    env: dict[str, str] = {}
    for source in container["envFrom"]:
        env |= maps[source["configMapRef"]["name"]]
    for one in container["env"]:
        secret = one.get("valueFrom", {}).get("secretKeyRef")
        file = POD / "secrets" / secret["name"] / secret["key"] if secret else None
        env[one["name"]] = file.read_text() if file else one["value"]
    return env


def _mount(
    volumes: list[dict[str, Any]], mounts: list[dict[str, Any]], maps: dict[str, Any], claims: dict[str, str]
) -> dict[str, Path]:
    """The folder of each mounted path."""
    folders = {}
    for volume in volumes:
        folder = POD / "volumes" / volume["name"]
        if claim := volume.get("persistentVolumeClaim"):
            folder = Path(claims[claim["claimName"]])
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in maps.get(volume.get("configMap", {}).get("name"), {}).items():
            (folder / name).write_text(text)
        folders[volume["name"]] = folder
    return {mount["mountPath"]: folders[mount["name"]] for mount in mounts}


def _placed(text: str, places: dict[str, Path]) -> str:
    for path, folder in places.items():
        if text == path or text.startswith(f"{path}/"):
            return f"{folder}{text.removeprefix(path)}"
    return text


def _wait_for(url: str) -> None:
    pid = json.loads((POD / "running.json").read_text())["pid"]
    deadline = time.monotonic() + ROLLOUT_S
    while time.monotonic() < deadline:
        os.kill(pid, 0)
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"{url} does not answer:\n{logs_tail()}")


def logs_tail() -> str:
    return (POD / "log").read_text(errors="replace")[-4000:]


VERBS = {
    "kustomize": kustomize, "create": create, "apply": apply, "rollout": rollout, "port-forward": port_forward,
    "get": get, "logs": logs, "exec": execute,
}  # fmt: skip

if __name__ == "__main__":
    sys.stdout.write(VERBS[sys.argv[1]](*sys.argv[2:]))
