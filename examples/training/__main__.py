"""Trains adapters into `examples/adapters`, or all that are named; each with `training.json`, which says how.

python -m examples.training [NAME …]
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from examples.training import with_llama_factory, with_peft, with_trl
from examples.training.recipes import BY_NAME, Recipe
from testbed.real_model import CACHE, real_model

ADAPTERS = Path(__file__).resolve().parent.parent / "adapters"
_LOOPS = {"peft": with_peft.train, "trl": with_trl.train, "llamafactory": with_llama_factory.train}
_BESIDE = {"trl": with_trl.PACKAGES, "llamafactory": with_llama_factory.PACKAGES}


def train(recipe: Recipe, base: Path, made: Path) -> None:
    """Train one adapter, and write its directory with `training.json`."""
    shutil.rmtree(made, ignore_errors=True)
    started = time.monotonic()
    losses = _LOOPS[recipe.trainer](recipe, base, made, lambda step, loss: print(f"{step}: {loss:.3f}", flush=True))
    _store_in_bfloat16(made / "adapter_model.safetensors")
    told = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "peft", recipe.trainer)},
        "pairs": len(recipe.pairs()),
        "seconds": round(time.monotonic() - started),
        "losses": [round(loss, 3) for loss in losses],
    }
    (made / "training.json").write_text(json.dumps(told, indent=1) + "\n")
    (made / "README.md").unlink(missing_ok=True)  # PEFT's, a form to fill in


def _store_in_bfloat16(file: Path) -> None:
    """In half of the bytes; PEFT and vLLM compute with what is stored."""
    import torch
    from safetensors.torch import load_file, save_file

    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    file.chmod(0o644)


def _train_beside(recipe: Recipe) -> None:
    """Run this program once more with the recipe's trainer, whose packages go beside the project's."""
    packages = CACHE / recipe.trainer
    if not packages.exists():
        install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages)
        subprocess.run([*install, *_BESIDE[recipe.trainer]], check=True)
        shutil.rmtree(packages / with_llama_factory.LEFT_OUT, ignore_errors=True)
    path = os.pathsep.join((str(ADAPTERS.parent.parent), str(packages)))
    command = (sys.executable, "-m", "examples.training", recipe.name)
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)


def main(names: list[str]) -> None:
    base = real_model(print)
    for name in names or BY_NAME:
        recipe = BY_NAME[name]
        if importlib.util.find_spec(recipe.trainer) is None:
            _train_beside(recipe)
        else:
            print(f"{name}: the losses of at most {recipe.steps} steps")
            train(recipe, base, ADAPTERS / name)


if __name__ == "__main__":
    main(sys.argv[1:])
