"""A stand-in for Docker that builds and runs the image of this tree: its steps, in a root of their own.

The root is this machine's own below an overlay, in a mount namespace of each command. An image is what its steps have
changed. `FROM` gives this machine's vLLM, in /opt/vllm. `ENGINE/given.json` has what is given to the container besides
the command: environment, volumes and arguments. Network and processes are the machine's. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ENGINE = Path(os.environ.get("ENGINE", "."))
ROOT = ENGINE / "root"
PYTHON_OF_IMAGE = Path("/opt/vllm")
PATH = f"{PYTHON_OF_IMAGE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VLLM = """import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""


@dataclass
class Image:
    """What a Dockerfile says about the processes of its containers."""

    user: str = "0"
    env: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entrypoint: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)


def install(directory: Path, python: str) -> None:
    """Put `docker` into a directory of the reader's PATH."""
    directory.mkdir()
    (directory / "docker").write_text(f'#!/bin/sh\nexec unshare -m {python} -m tests.walkthroughs.docker "$@"\n')
    (directory / "docker").chmod(0o755)


def is_possible() -> bool:
    """Whether this machine lets us have a mount namespace."""
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-m", "true"], check=False).returncode == 0


def build(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("docker build")
    parser.add_argument("-f", dest="file", required=True)
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("-t", dest="tag", required=True)
    parser.add_argument("context", type=Path)
    given = parser.parse_args(arguments)
    variables: dict[str, str] = {}
    chosen = dict(text.split("=", 1) for text in given.build_arg)
    image = Image()
    _mount_root()
    for instruction, text in _instructions(Path(given.file).read_text()):
        if instruction == "ARG":
            name, _, value = text.partition("=")
            variables[name] = chosen.pop(name, value)
        elif instruction == "FROM":
            base = re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], text)
            assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+", base), base
            _from_vllm()
        elif instruction == "COPY":
            *sources, target = text.split()
            _copy([path for source in sources for path in sorted(given.context.glob(source))], target)
        elif instruction == "RUN":
            _in_root(image, [*image.shell, text])
        elif instruction == "ENV":
            image.env |= dict(word.split("=", 1) for word in shlex.split(text))
        elif instruction == "USER":
            image.user = text
        elif instruction == "EXPOSE":
            image.ports.append(text)
        elif instruction == "SHELL":
            image.shell = json.loads(text)
        elif instruction == "ENTRYPOINT":
            image.entrypoint = json.loads(text)
        else:
            raise SystemExit(f"this stand-in does not know {instruction}")
    assert not chosen, f"no such ARG: {chosen}"
    folder = ENGINE / "images" / given.tag
    folder.mkdir(parents=True)
    (folder / "image.json").write_text(json.dumps(vars(image)))
    subprocess.run(["tar", "--xattrs", "-C", ENGINE / "layers" / "upper", "-cf", folder / "layer.tar", "."], check=True)


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("docker run", allow_abbrev=False)
    parser.add_argument("--rm", action="store_true")
    parser.add_argument("--gpus", choices=["all"])
    parser.add_argument("--shm-size")
    parser.add_argument("-p", dest="ports", action="append", default=[])
    parser.add_argument("-v", dest="volumes", action="append", default=[])
    parser.add_argument("-e", dest="env", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    folder = ENGINE / "images" / given.image
    image = Image(**json.loads((folder / "image.json").read_text()))
    host = json.loads((ENGINE / "given.json").read_text())
    assert given.ports == [f"127.0.0.1:{port}:{port}" for port in image.ports], "to this machine only"
    _mount_root(folder / "layer.tar")
    for volume in (*given.volumes, *host["volumes"]):
        _mount_volume(*volume.split(":"))
    named = {name: value for name, is_set, value in (text.partition("=") for text in given.env) if is_set}
    passed = {name: os.environ[name] for name in given.env if name in os.environ}
    image.env |= host["env"] | passed | named
    command = [*image.entrypoint, *given.arguments, *host["arguments"]]
    os.execvpe("chroot", _chrooted(image, command), _environment(image))


def _instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE))
    for line in filter(str.strip, text.splitlines()):
        instruction, _, rest = line.partition(" ")
        yield instruction, rest.strip()


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _mount_root(layer: Path | None = None) -> None:
    layers = ENGINE / "layers"  # on a file system of their own: an overlay's layers may not be in each other
    for folder in (layers, ROOT):
        folder.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "tmpfs", layers)
    for folder in (layers / "upper", layers / "work"):
        folder.mkdir()
    if layer:
        subprocess.run(["tar", "--xattrs", "-C", layers / "upper", "-xpf", layer], check=True)
    _mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={layers}/upper,workdir={layers}/work", ROOT)
    for name in ("proc", "dev", "sys"):
        _mount("--rbind", f"/{name}", ROOT / name)
    _mount("-t", "tmpfs", "tmpfs", ROOT / "tmp")


def _mount_volume(source: str, target: str, mode: str = "rw") -> None:
    place = ROOT / target.lstrip("/")
    if "/" not in source:  # a named volume takes the owner of the image's folder, if there is any
        owner = place.stat() if place.exists() else None
        source = str(ENGINE / "volumes" / source)
        Path(source).mkdir(parents=True)
        if owner:
            os.chown(source, owner.st_uid, owner.st_gid)
    assert Path(source).is_dir(), source
    place.mkdir(parents=True, exist_ok=True)
    _mount("--bind", source, place)
    _mount("-o", f"remount,bind,{mode}", place)


def _from_vllm() -> None:
    """A Python with this machine's vLLM and what vLLM brings, where the image's `python3` and `vllm` are."""
    from tests.walkthroughs.test_installing import Environment

    (ROOT / "root").chmod(0o755)  # this machine's Python may be there
    Environment(ROOT / PYTHON_OF_IMAGE.relative_to("/")).make(PYTHON_OF_IMAGE)
    program = ROOT / PYTHON_OF_IMAGE.relative_to("/") / "bin" / "vllm"
    program.write_text(f"#!{PYTHON_OF_IMAGE}/bin/python3\n{VLLM}")
    program.chmod(0o755)


def _copy(sources: Sequence[Path], target: str) -> None:
    assert sources, f"nothing to copy to {target}"
    place = ROOT / target.lstrip("/")
    (place if target.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
    for source in sources:
        shutil.copy(source, place)


def _chrooted(image: Image, command: Sequence[str]) -> list[str]:
    return ["chroot", f"--userspec={image.user}:{image.user}", str(ROOT), *command]


def _environment(image: Image) -> dict[str, str]:
    from tests.walkthroughs.reader import index_variables

    return {**index_variables(), "PATH": PATH, "HOME": "/root" if image.user == "0" else "/home/lora", **image.env}


def _in_root(image: Image, command: Sequence[str]) -> None:
    subprocess.run(_chrooted(image, command), env=_environment(image), check=True)


VERBS = {"build": build, "run": run}

if __name__ == "__main__":
    VERBS[sys.argv[1]](sys.argv[2:])
