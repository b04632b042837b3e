"""Build the wheel, with objects of the CPU kernels for several kinds of processors, so that its users need no compiler.

The wheel is for any platform (`py3-none-any`): where no object fits, the C source is compiled at the start, as from a
source distribution. The objects are linked with nothing: OpenMP is found in the process that loads them, and what
`FROM_THE_C_LIBRARY` names in its C library, of whatever version. Nothing is written into the source tree but the wheel.

With `REPOSITORY`, a URL, the wheel has links to the repository (`tools/index_page.py`).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_plugins.kernels.compiled import build, prebuilt  # noqa: E402
from tools.index_page import Addresses, page, project_urls  # noqa: E402

COMPILERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}
PACKAGES = {"x86_64": "gcc-x86-64-linux-gnu", "aarch64": "gcc-aarch64-linux-gnu"}
FROM_THE_C_LIBRARY = {"memcpy", "memmove", "memset", "__tls_get_addr"}
FROM_OPENMP = {"GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads"}


class BuildError(Exception):
    """One clear line for who builds."""


def compiler_for(architecture: str) -> str:
    candidates = [COMPILERS[architecture], *(build.COMPILERS if platform.machine() == architecture else ())]
    found = next(filter(None, map(shutil.which, candidates)), None)
    if found is None:
        raise BuildError(
            f"no compiler for {architecture}: install Debian's {PACKAGES[architecture]}, or name the levels to build "
            "(--levels)"
        )
    return found


def compile_objects(folder: Path, levels: list[str]) -> None:
    """Fill `folder` with the objects of each of these levels, and the list of them."""
    folder.mkdir()
    objects = {}
    for level in prebuilt.LEVELS:
        if level.name not in levels:
            continue
        compiler = compiler_for(level.architecture)
        for dtype in level.dtypes:
            file = folder / level.file_name(dtype)
            command = [compiler, *build.ANY_PROCESSOR, *level.compiler_flags, "-nostdlib", "-s"]
            element = f"-DELEMENT={build.ELEMENTS[dtype]}"
            subprocess.run([*command, element, prebuilt.SOURCE, "-o", file], check=True)
            file.chmod(0o644)
            check_object(file)
            objects[file.name] = prebuilt.digest_of(file)
    listed = {"source": prebuilt.digest_of_source(), "objects": objects}
    (folder / prebuilt.LIST).write_text(json.dumps(listed, indent=1) + "\n")


def check_object(file: Path) -> None:
    """Nothing is needed that a C library of any version, or a process without OpenMP, does not have."""
    text = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--dyn-syms", file], check=True, capture_output=True, text=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    undefined = re.findall(r"(\w+)\s+DEFAULT\s+UND (\S+)", text)
    strong = {name for binding, name in undefined if binding == "GLOBAL"}
    weak = {name for binding, name in undefined if binding == "WEAK"}
    if needed or not strong <= FROM_THE_C_LIBRARY or not weak <= FROM_OPENMP:
        raise BuildError(
            f"{file.name} needs {needed}, {sorted(strong - FROM_THE_C_LIBRARY)}, {sorted(weak - FROM_OPENMP)}"
        )


def make_tree(tree: Path) -> None:
    """What is packed: the package, its licence, and the metadata with the page for an index."""
    at = Addresses.of_environment()
    tree.mkdir()
    shutil.copy(ROOT / "LICENSE", tree)
    (tree / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + project_urls(at))
    (tree / "README.md").write_text(page((ROOT / "README.md").read_text(), at))
    ignored = shutil.ignore_patterns("__pycache__", prebuilt.FOLDER.name)
    shutil.copytree(ROOT / "lora_plugins", tree / "lora_plugins", ignore=ignored)


def pack(tree: Path, dist: Path, levels: list[str], pip_options: list[str]) -> Path:
    """Compile objects of these levels into the tree, and pack the tree as a wheel."""
    folder = tree / prebuilt.FOLDER.relative_to(ROOT)
    if levels:
        compile_objects(folder, levels)
    made = tree.with_name("made")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", *pip_options]
    subprocess.run([*pip, "-w", made, tree], check=True)
    (wheel,) = made.glob("*.whl")
    inside = {Path(file).name for file in zipfile.ZipFile(wheel).namelist()}
    if levels and not {file.name for file in folder.iterdir()} <= inside:
        raise BuildError("the wheel lacks objects that were compiled")
    dist.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, dist))


def build_wheel(dist: Path, levels: list[str], pip_options: list[str]) -> Path:
    with tempfile.TemporaryDirectory(prefix="lora-plugins-wheel-") as name:
        make_tree(tree := Path(name) / "tree")
        return pack(tree, dist, levels, pip_options)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [level.name for level in prebuilt.LEVELS]
    arguments.add_argument("--dist", type=Path, default=ROOT / "dist")
    arguments.add_argument("--levels", nargs="+", choices=names, default=names, help="all, if not named")
    arguments.add_argument("--no-build-isolation", action="store_true", help="with this environment's setuptools")
    options = arguments.parse_args()
    try:
        wheel = build_wheel(options.dist, options.levels, ["--no-build-isolation"] * options.no_build_isolation)
    except BuildError as error:
        print(f"build_wheel: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"build_wheel: {error}", file=sys.stderr)
        return 1
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
