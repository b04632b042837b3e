"""vLLM's own Triton operators on a machine where vLLM is not installed, from the files that `prepare` carries.

`python -m benchmarks.gpu prepare SOURCES` fills the folder that travels, `.cache/gpu`. SOURCES is an unpacked wheel of
vLLM 0.33 for CUDA. Its Python files are taken, an empty module for the compiled one that they import, pyzmq, which they
import too and that machine lacks, and the commit of this checkout, for a machine without git. Run it again after every
commit: results say which sources they are of. docs/explanation/kernels-gpu.md has the rest.

vLLM's compiled parts are not among them; `vllm/platforms/cuda.py` imports one of them, which an empty module replaces.
An import that fails ends the run: a comparison that is left out looks like one that was won.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import carry_commit

CARRIED = Path(__file__).resolve().parents[2] / ".cache" / "gpu"
EMPTY_MODULE = "_C_stable_libtorch"  # of vllm; see vllm/platforms/cuda.py, 0.33
MOST_BYTES = 56 << 20  # of the 64 MiB that travel; the rest of the tree is 5 MiB
PYZMQ = "pyzmq==27.3.0"


class Vllm:
    """What the benchmarks call of vLLM 0.33.

    Attributes:
        shrink, expand: vllm/lora/ops/triton_ops. meta: `LoRAKernelMeta`, what they know of a batch.
    """

    def __init__(self, ops: Any, version: str) -> None:
        self.shrink, self.expand, self.meta = ops.lora_shrink, ops.lora_expand, ops.LoRAKernelMeta
        self.version = version

    @staticmethod
    def captured_counts(slots: int) -> list[int]:
        """Active adapters, base rows counted as one, that `specialize_active_lora` captures graphs for.

        vllm/lora/utils.py, get_captured_lora_counts, 0.33: powers of two, and all.
        """
        return [n for n in range(1, slots + 2) if n & (n - 1) == 0 or n == slots + 1]

    @staticmethod
    def forget() -> None:
        """Empty vLLM's tables of addresses, which would hold for other weights that come to lie there."""
        from vllm.lora.ops.triton_ops import utils

        utils._LORA_A_PTR_DICT.clear()
        utils._LORA_B_PTR_DICT.clear()


def load(*, rehearse: bool, carried: Path = CARRIED) -> Vllm:
    """Import vLLM's operators.

    Raises:
        SystemExit: they cannot be imported, or vLLM does not see the GPU.
    """
    if (carried / "vllm").is_dir() and str(carried) not in sys.path:
        sys.path.insert(0, str(carried))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        if rehearse:
            _pretend_a_gpu()
        from importlib import metadata

        from vllm.lora.ops import triton_ops
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON

        version = metadata.version("vllm")
    except Exception as error:
        raise SystemExit(
            f"vLLM's operators cannot be imported: {type(error).__name__}: {error}\n"
            f"Run `python -m benchmarks.gpu prepare SOURCES` again, and carry {carried}."
        ) from error
    if not current_platform.is_cuda():
        raise SystemExit(f"vLLM sees {current_platform.device_name or 'no device'}, not the GPU: NVML did not answer")
    if not HAS_TRITON:
        raise SystemExit("vLLM has disabled Triton: it wants exactly one active driver")
    if rehearse:
        _compute_on_the_cpu()
    return Vllm(triton_ops, version)


def _pretend_a_gpu() -> None:
    """For a rehearsal: NVML as on a machine with one H100."""
    os.environ["VLLM_LORA_DISABLE_PDL"] = "1"  # the interpreter has no such instruction
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else vLLM disables Triton, which has no driver
    import vllm.third_party.pynvml as nvml

    nvml.nvmlInit = nvml.nvmlShutdown = lambda *_: None
    nvml.nvmlDeviceGetCount = lambda: 1
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    nvml.nvmlDeviceGetName = lambda handle: "a rehearsal"


def _compute_on_the_cpu() -> None:
    """For a rehearsal: the operators for CPU tensors too, and no pinned memory."""
    import torch
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils

    library = torch.library.Library("vllm", "IMPL")
    library.impl("lora_shrink", lora_shrink_op._lora_shrink, "CPU")
    library.impl("lora_expand", lora_expand_op._lora_expand, "CPU")
    _libraries.append(library)
    configs = lora_shrink_op.get_lora_op_configs  # 64 parts of the sum take the interpreter minutes
    lora_shrink_op.get_lora_op_configs = lambda *args, **kwargs: {**configs(*args, **kwargs), "split_k": 1}
    utils.async_tensor_h2d = lambda data, dtype, device: torch.tensor(data, dtype=dtype)


_libraries: list[Any] = []


def prepare(sources: Path, into: Path = CARRIED) -> None:
    """Fill the folder.

    Raises:
        SystemExit: `sources` is no wheel of vLLM, or too much is to travel.
    """
    copy_vllm(sources, into)
    add_packages(into)
    carry_commit(into / "commit.json")
    size = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
    print(f"{into}: {size / 2**20:.0f} MiB")
    if size > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES >> 20} MiB do not travel")


def copy_vllm(sources: Path, into: Path) -> None:
    """vLLM's Python files, less what its LoRA operators do not need; a table in there for this GPU is kept."""
    if not (sources / "vllm" / "lora").is_dir():
        raise SystemExit(f"{sources} holds no vllm/lora; it should be an unpacked wheel of vLLM")
    for old in ("vllm", *(path.name for path in into.glob("vllm-*.dist-info"))):
        shutil.rmtree(into / old, ignore_errors=True)
    for path in sorted(sources.rglob("*")):
        relative = path.relative_to(sources)
        if not relative.parts[0].startswith("vllm") or not path.is_file():
            continue
        if path.suffix == ".py" or ".dist-info" in relative.parts[0]:
            target = into / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for folder in sorted((into / "vllm").rglob("models")):  # a third of it, and never imported
        if folder.is_dir() and folder.parent.name != "lora":
            shutil.rmtree(folder)
    (into / "vllm" / f"{EMPTY_MODULE}.py").write_text('"""Empty: in place of a compiled module of vLLM."""\n')


def add_packages(into: Path) -> None:
    """What vLLM imports, and a machine with PyTorch and transformers lacks."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 26, 17)]
    target = ["--target", str(into), "--python-version", "3.12", "--only-binary=:all:", "--no-deps", "--upgrade"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *target, *platforms, PYZMQ], check=True)
