"""The model, adapters that were trained for it and as many others as asked for, and servers of both arms."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.manager.bed import Arm, servers
from benchmarks.record import ROOT, bfloat16_instructions
from lora_plugins.kernels.processor import this_processor
from testbed.models import edit_config
from testbed.server import plugged

NAME = "SmolLM2-135M-Instruct"
SHIPPED = ROOT / "examples" / "adapters"
# In this order they are dealt to streams; the first is the case of one adapter.
TRAINED = ("pirate", "haiku", "json", "french", "sql", "librarian", "thinker", "verdict")
MAX_RANK = 32
SMALL = ("pirate", "librarian", "verdict", "french")  # ranks 4 and 8 on q_proj and v_proj, 0.5 to 0.7 MB
SMALL_RANK = 8
STREAMS = 16
OURS, STOCK, STOCK_LOADS = "ours", "stock", "stock, our kernels"
PLUGINS = {
    OURS: "lora_filesystem_resolver,lora_lru_manager,lora_kernels,lora_admin",
    STOCK: "stock_filesystem_resolver",
    STOCK_LOADS: "stock_filesystem_resolver,lora_kernels",
}


@dataclass(frozen=True)
class Bed:
    """Of one part: where its files are, how long it may measure, and whether it only shows that it works."""

    base: Path
    home: Path
    seconds: float
    is_quick: bool

    @property
    def root(self) -> Path:
        """The directory that the servers' resolvers look into."""
        return self.home / "adapters"

    def rounds(self, at_most: int = 1000) -> Iterator[int]:
        """Numbers of rounds, while another one as long as the longest ends within the part's seconds."""
        began, longest_s = time.monotonic(), 0.0
        for number in range(at_most):
            round_began = time.monotonic()
            yield number
            longest_s = max(longest_s, time.monotonic() - round_began)
            if self.is_quick or time.monotonic() - began + longest_s > self.seconds:
                return

    def adapters(self, count: int, sources: Sequence[str] = TRAINED) -> list[Path]:
        """So many adapters of different bytes: the trained ones first, then others of their shapes."""
        made = []
        for number in range(count):
            source = SHIPPED / sources[number % len(sources)]
            directory = self.root / (source.name if number < len(sources) else f"{source.name}-{number}")
            if number < len(sources):
                shutil.copytree(source, directory)
            else:
                perturb(source, directory, number)
            # vLLM's own resolver finds only adapters of the name that the server was started with, a path.
            edit_config(directory, base_model_name_or_path=str(self.base))
            made.append(directory)
        return made

    def servers(self, arms: Sequence[str], *arguments: str) -> AbstractContextManager[list[Arm]]:
        """Servers that find adapters by name; no prefix is computed once for two requests."""
        self.root.mkdir(exist_ok=True)
        own = ("--served-model-name", NAME, "--no-enable-prefix-caching")
        return servers(arms, self.base, self.home, (*own, *arguments), self._environment)

    def _environment(self, arm: str) -> Mapping[str, str]:
        path = [str(stock_resolver(self.home))] if arm in (STOCK, STOCK_LOADS) else []
        return {
            **plugged(PLUGINS[arm], self.home / f"store of {arm}", self.root),
            "PYTHONPATH": os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")])),
            "VLLM_LOGGING_LEVEL": "WARNING",
        }


def dtypes(rows: list[dict]) -> Iterator[str]:
    """The dtypes to measure; notes in `rows` where this processor does not multiply bfloat16."""
    yield "float32"
    if bfloat16_instructions(this_processor()) is None:
        rows.append({"dtype": "bfloat16", "left_out": "no AVX-512 BF16 and no AMX here"})
    else:
        yield "bfloat16"


def perturb(source: Path, directory: Path, seed: int) -> None:
    """Write an adapter of the same shape, each weight changed by some percent: other bytes to every cache."""
    import torch
    from safetensors.torch import load_file, save_file

    random = torch.Generator().manual_seed(seed)
    changed = {
        name: (tensor * (1 + 0.02 * torch.randn(tensor.shape, generator=random))).to(tensor.dtype)
        for name, tensor in load_file(source / "adapter_model.safetensors").items()
    }
    directory.mkdir(parents=True)
    save_file(changed, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "adapter_config.json", directory)


def stock_resolver(home: Path) -> Path:
    """A folder for PYTHONPATH: vLLM's own resolver under a name of its own, as our plugin of its name replaces it."""
    folder = home / "stock-plugin"
    about = folder / "stock_filesystem_resolver-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stock-filesystem-resolver\nVersion: 0\n")
    target = "vllm.plugins.lora_resolvers.filesystem_resolver:register_filesystem_resolver"
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGINS[STOCK]} = {target}\n")
    return folder


@dataclass(frozen=True)
class Figure:
    """A line of the table."""

    what: str
    value: str
    spread: str = ""
    goal: str = ""
    is_met: bool | None = None

    @classmethod
    def of_each(cls, what: str, values: Sequence[float], form: str, unit: str = "") -> Figure:
        """The median of values, with the least and the largest."""
        least, largest = (format(value, form) for value in (min(values), max(values)))
        return cls(what, f"{statistics.median(values):{form}}{unit}", f"{least} to {largest}{unit}, n={len(values)}")

    @classmethod
    def of_ratios(
        cls, what: str, ratios: Sequence[float], *, at_least: float | None = None, at_most: float | None = None
    ) -> Figure:
        """The median of ratios of rounds, with the least and the largest."""
        middle = statistics.median(ratios)
        goal = "" if at_least is at_most is None else f"≥ {at_least:g}" if at_most is None else f"≤ {at_most:g}"
        is_met = None if not goal else middle >= at_least if at_least is not None else middle <= (at_most or 0.0)
        return replace(cls.of_each(what, ratios, ".3f"), goal=goal, is_met=is_met)
