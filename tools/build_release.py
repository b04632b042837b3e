"""Build what a release publishes: the sources, a wheel for each architecture with objects, and a wheel without any.

    python tools/build_release.py [--dist DIRECTORY] [--architectures x86_64 aarch64]

All wheels are made of the source distribution, so it lacks nothing. pip takes the wheel of its own architecture, and
elsewhere the pure wheel (`py3-none-any`), whose kernels are compiled at first use. The objects need nothing of a C
library but `memcpy` and the like (`build_wheel.check_object`), so the oldest platform that pip still knows will do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lora_plugins.kernels.compiled import prebuilt
from tools.build_wheel import PACKAGES, ROOT, BuildError, make_tree, pack

ARCHITECTURES = tuple(PACKAGES)
PLATFORM = "manylinux_2_17_{}"


def build_sdist(tree: Path, dist: Path) -> Path:
    """The source distribution, by the setuptools of this environment."""
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    dist.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", build, dist], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (made,) = dist.glob("*.tar.gz")
    return made


def build(dist: Path, architectures: Sequence[str] = ARCHITECTURES) -> list[Path]:
    """Fill `dist`, and return the files: the sources, the pure wheel, and one wheel for each architecture."""
    # The time of the commit, so that a second build of the same commit gives the same wheels.
    log = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    os.environ.setdefault("SOURCE_DATE_EPOCH", log.stdout.strip() or "1767225600")
    for left in dist.glob("lora_plugins-*"):
        left.unlink()
    with tempfile.TemporaryDirectory(prefix="lora-plugins-release-") as name:
        make_tree(tree := Path(name) / "tree")
        made = [sources := build_sdist(tree, dist)]
        for architecture in (None, *architectures):
            with tempfile.TemporaryDirectory(dir=name) as folder, tarfile.open(sources) as archive:
                archive.extractall(folder, filter="data")
                (unpacked,) = Path(folder).iterdir()
                levels = [level.name for level in prebuilt.LEVELS if level.architecture == architecture]
                platform = [f"--config-settings=--build-option=--plat-name={PLATFORM.format(architecture)}"]
                options = ["--no-build-isolation", *(platform if architecture else ())]
                made.append(pack(unpacked, dist, levels, options))
    return made


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dist", type=Path, default=ROOT / "dist")
    arguments.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    options = arguments.parse_args()
    try:
        print(*build(options.dist, options.architectures), sep="\n")
    except (BuildError, subprocess.CalledProcessError) as error:
        print(f"build_release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
