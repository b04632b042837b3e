"""Adapters in another layout than the engine's, converted when they enter the store, answer as PEFT does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lora_plugins.store.manifest import Manifest
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import PROMPT, AdapterSpec, build_adapter, edit_config
from testbed.reference import Reference
from testbed.server import Server
from tests.e2e.servers import RESOLVER, admin_server, lora_server

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Layouts:
    """A running server, and what it serves."""

    server: Server
    client: openai.OpenAI
    base: Path
    targets: tuple[str, ...]
    root: Path
    store: Path

    def all_linear(self, name: str, **extra: Any) -> Path:
        """An adapter for every linear module of the model, as PEFT names and fuses them."""
        return build_adapter(self.base, self.root, AdapterSpec(name, 8, self.targets, extra))

    def expected(self, adapter: Path) -> list[int]:
        reference = Reference(self.base)
        return reference.generate(adapter, reference.prompt_ids(PROMPT), MAX_TOKENS)

    def answer(self, name: str) -> list[int]:
        answer = complete(self.client, name, PROMPT, MAX_TOKENS)
        assert answer.status == 200, answer.error
        return list(answer.token_ids)

    def admin(self, path: str, **body: str) -> None:
        """`POST /v1/loras/…`."""
        answer = httpx.post(f"{self.server.url}/v1/loras/{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    def manifest(self, name: str) -> Manifest:
        """Of the version that the server has for this name."""
        served = {model.id: model.root for model in self.client.models.list()}
        return Manifest.read(Path(served[name]))


def build(bed: Bed, directory: Path, kind: str, **settings: Any) -> Path:
    """A small random model of another architecture, with the test bed's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **settings)
    getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (bed.base / file).exists():
            shutil.copy(bed.base / file, directory)
    return directory


def rewrite(source: Path, target: Path, change: Any, **config: Any) -> Path:
    """A copy of an adapter with other tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = change(load_file(target / "adapter_model.safetensors"))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target / "adapter_model.safetensors"
    )
    edit_config(target, **config)
    return target


def rename(old: str, new: str) -> Any:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def glm4(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layouts]:
    """With the resolver alone, as vLLM loads; its engine has `gate_up_proj` in parts, PEFT as one module."""
    home = tmp_path_factory.mktemp("glm4")
    base = build(bed, home / "base", "Glm4", head_dim=32)
    (home / "adapters").mkdir()
    with lora_server(replace(bed, base=base), home, plugins=(RESOLVER,)) as server:
        targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
        yield Layouts(server, connect(server), base, targets, home / "adapters", home / "store")


@pytest.fixture(scope="module")
def phi3(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layouts]:
    """With everything; its engine and PEFT have `qkv_proj` and `gate_up_proj` as one module each."""
    home = tmp_path_factory.mktemp("phi3")
    base = build(bed, home / "base", "Phi3")
    (home / "adapters").mkdir()
    with admin_server(replace(bed, base=base), home) as server:
        targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        yield Layouts(server, connect(server), base, targets, home / "adapters", home / "store")


@pytest.mark.parametrize("extra", [{}, {"use_rslora": True}, {"alpha_pattern": {"gate_up_proj": 4}}], ids=str)
def test_every_linear_module_of_glm4_equals_peft(glm4: Layouts, extra: Mapping[str, Any]) -> None:
    """vLLM itself refuses it."""
    name = f"all-linear-{len(str(extra))}"
    adapter = glm4.all_linear(name, **extra)
    assert glm4.answer(name) == glm4.expected(adapter)
    converted = glm4.manifest(name).converted
    assert converted.changes == ("gate_up_proj split into gate_proj, up_proj (4 modules)",)
    assert (glm4.store / converted.original_digest).is_dir()


def test_what_the_engine_has_as_peft_is_not_converted(phi3: Layouts) -> None:
    adapter = phi3.all_linear("as-it-is")
    assert phi3.answer("as-it-is") == phi3.expected(adapter)
    assert phi3.manifest("as-it-is").converted is None


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("name-in-keys", ".weight", ".default.weight"),
        ("no-prefix", "base_model.model.", ""),
        ("prefix-twice", "base_model.model.", "base_model.model.base_model.model."),
    ],
)
def test_keys_of_other_tools_equal_peft(phi3: Layouts, name: str, old: str, new: str) -> None:
    adapter = phi3.all_linear(f"{name}-original")
    rewrite(adapter, phi3.root / name, rename(old, new))
    assert phi3.answer(name) == phi3.expected(adapter)


def test_weights_in_several_files_equal_peft(phi3: Layouts) -> None:
    from safetensors.torch import load_file, save_file

    adapter = phi3.all_linear("one-file")
    several = phi3.root / "several-files"
    shutil.copytree(adapter, several)
    tensors = load_file(several / "adapter_model.safetensors")
    (several / "adapter_model.safetensors").unlink()
    files = [f"adapter_model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        save_file({name: tensors[name] for name in list(tensors)[number::3]}, several / file)
    index = {name: files[number % 3] for number, name in enumerate(tensors)}
    (several / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert phi3.answer("several-files") == phi3.expected(adapter)
    assert phi3.manifest("several-files").converted.changes == ("3 files of weights joined into one",)


def test_parts_of_a_fused_module_equal_peft(phi3: Layouts) -> None:
    """Phi-3 in parts; PEFT's answer is that of the fused adapter which computes the same."""
    import torch

    sizes = {"qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32}, "gate_up_proj": {"gate_proj": 96, "up_proj": 96}}
    generator = torch.Generator().manual_seed(3)
    parts: dict[str, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for layer in range(2):
        for fused, outputs in sizes.items():
            parent = f"base_model.model.model.layers.{layer}." + ("self_attn" if fused == "qkv_proj" else "mlp")
            taken = {part: size for part, size in outputs.items() if part != "k_proj"}  # as attention-only ones often
            block = torch.zeros(sum(outputs.values()), 4 * len(taken))
            for index, part in enumerate(taken):
                a, b = (torch.randn(*shape, generator=generator) * 0.3 for shape in ((4, 64), (outputs[part], 4)))
                parts[f"{parent}.{part}.lora_A.weight"], parts[f"{parent}.{part}.lora_B.weight"] = a, b
                row = sum(size for other, size in list(outputs.items())[: list(outputs).index(part)])
                block[row : row + outputs[part], 4 * index : 4 * index + 4] = b
            whole[f"{parent}.{fused}.lora_A.weight"] = torch.cat(
                [parts[f"{parent}.{part}.lora_A.weight"] for part in taken]
            )
            whole[f"{parent}.{fused}.lora_B.weight"] = block
    model = phi3.all_linear("model-for-parts")
    ranks = {"r": 8, "lora_alpha": 16, "target_modules": ["qkv_proj", "gate_up_proj"]}
    expected = phi3.expected(rewrite(model, phi3.root / "whole", lambda _: whole, **ranks))
    assert phi3.answer("whole") == expected
    rewrite(model, phi3.root / "parts", lambda _: parts, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    assert phi3.answer("parts") == expected
    changes = phi3.manifest("parts").converted.changes
    assert changes == (
        "gate_proj, up_proj joined into gate_up_proj (2 modules)",
        "q_proj, v_proj joined into qkv_proj (2 modules)",
    )
