"""The models, adapters and reference answers that demo and tests start from, made once and cached in `.cache/`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from testbed.models import DEMO_ADAPTERS, PROMPT, build_adapter, build_base
from testbed.reference import Reference

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "testbed"
MAX_TOKENS = 16


@dataclass(frozen=True)
class Bed:
    """A base model, a root of adapters by name, and PEFT's greedy answers to `PROMPT` (`None` is the base)."""

    base: Path
    adapters: Path
    answers: dict[str | None, list[int]]


def prepare(progress: Callable[[str], None] = lambda text: None) -> Bed:
    """Return the bed, building it on the first call of a checkout (about 10 s)."""
    home = CACHE / _key()
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):  # tests run in several processes
        if not home.exists():
            _build(home, progress)
    raw = json.loads((home / "answers.json").read_text())
    return Bed(home / "base", home / "adapters", {name or None: ids for name, ids in raw.items()})


def _build(home: Path, progress: Callable[[str], None]) -> None:
    unfinished = home.with_name(f"{home.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    _quieten()
    progress("building a tiny Llama")
    base = build_base(unfinished / "base")
    for spec in DEMO_ADAPTERS:
        progress(f"building adapter {spec.name} with PEFT")
        build_adapter(base, unfinished / "adapters", spec, base_name=str(home / "base"))
    progress("asking PEFT for the reference answers")
    reference = Reference(base)
    prompt = reference.prompt_ids(PROMPT)
    answers = {"": reference.generate(None, prompt, MAX_TOKENS)}
    for spec in DEMO_ADAPTERS:
        answers[spec.name] = reference.generate(unfinished / "adapters" / spec.name, prompt, MAX_TOKENS)
    if len({tuple(ids) for ids in answers.values()}) != len(answers):
        raise AssertionError("two adapters give the same answer, so a mix-up would not be seen: change the seed")
    (unfinished / "answers.json").write_text(json.dumps(answers))
    os.replace(unfinished, home)


def _quieten() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _key() -> str:
    digest = hashlib.sha256()
    for name in ("models.py", "reference.py", "bed.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    for package in ("torch", "transformers", "peft"):
        digest.update(metadata.version(package).encode())
    # Adapters name their base model by its path, so a moved checkout builds them again.
    digest.update(str(CACHE).encode())
    return digest.hexdigest()[:16]
