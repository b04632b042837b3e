"""Three adapters of one shape, as a trainer's steps leave them, with PEFT's answers; made once, cached in `.cache/`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from testbed.bed import CACHE, Bed
from testbed.models import ATTENTION, MLP, AdapterSpec, build_adapter
from testbed.reference import Reference

NAMES = ("v1", "v2", "other")
RANK = 8
PROMPT = [3 + 37 * place % 500 for place in range(100)]  # longer than several blocks of the prefix cache
MAX_TOKENS = 16
LONG = 300  # of an answer during which weights change
_DIFFERENT_FROM = 4  # the first so many tokens of two answers differ


@dataclass(frozen=True)
class Versions:
    """A base model, a folder with an adapter for each of `NAMES`, and PEFT's answers to `PROMPT`, "base" too."""

    base: Path
    root: Path
    answers: dict[str, list[int]]


def prepare_versions(bed: Bed) -> Versions:
    """Return the versions, making them on the first call of a checkout (about 20 s)."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + str(bed.base).encode()).hexdigest()[:16]
    home = CACHE / f"frameworks-{digest}"
    with FileLock(CACHE / "lock"):
        if not home.exists():
            _build(bed.base, home)
    return Versions(bed.base, home, json.loads((home / "answers.json").read_text()))


def _build(base: Path, home: Path) -> None:
    unfinished = home.with_name(f"{home.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    reference = Reference(base)
    answers = {"base": reference.generate(None, PROMPT, MAX_TOKENS)}
    for name in NAMES:
        adapter = build_adapter(base, unfinished, AdapterSpec(name, RANK, ATTENTION + MLP))
        answers[name] = reference.generate(adapter, PROMPT, LONG if name in {"v1", "v2"} else MAX_TOKENS)
    if len({tuple(ids[:_DIFFERENT_FROM]) for ids in answers.values()}) != len(answers):
        raise AssertionError("two versions begin alike, so one might be taken for the other: change the names")
    (unfinished / "answers.json").write_text(json.dumps(answers))
    os.replace(unfinished, home)


def whose(said: list[int] | str, answers: dict[str, list[int]]) -> str:
    """Which version gave this answer; "none" where none did, "error" where there are no tokens."""
    if isinstance(said, str):
        return "hangs" if said == "hangs" else "error"
    if not said:
        return "error"
    return next((name for name, ids in answers.items() if said == ids[: len(said)]), "none")


class Files:
    """The folders of one form: versions that stay as they are, and those that a trainer writes to."""

    def __init__(self, versions: Path, home: Path) -> None:
        self._versions = versions
        self._home = home

    def of(self, version: str) -> str:
        """A folder of its own, which stays as it is."""
        return str(self._versions / version)

    def write(self, version: str, folder: str = "policy") -> str:
        """Write a version's files over those that are in a folder, as saving them again does."""
        target = self._home / folder
        target.mkdir(parents=True, exist_ok=True)
        for file in (self._versions / version).iterdir():
            shutil.copyfile(file, target / file.name)
        return str(target)

    def delete(self, folder: str = "policy") -> None:
        shutil.rmtree(self._home / folder)
