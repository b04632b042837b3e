"""Files of other programs than PEFT, and what vLLM cannot compute, are refused by the name of what they are."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.model_modules import ModuleKind, ModulePlace
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter
from lora_plugins.settings import Settings
from tests.adapter.layouts.converted import base_of, convert, delta
from tests.adapter.verdicts import refusal, refused, verified
from tests.make import LAYER, MODULES, PEFT, config_bytes, pair, put, safetensors, weights, with_header

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 12345\n"


@pytest.mark.parametrize(
    ("data", "named", "remedy"),
    [
        (b"GGUF\x03\0\0\0" + bytes(64), "GGUF", "convert_lora_to_gguf.py"),
        (POINTER, "a Git LFS pointer", "git lfs pull"),
        (b"PK\x03\x04\0\0\x08\x08" + bytes(64), "a file of torch.save", "renaming does not convert it"),
        (b"<!DOCTYPE html><html>404</html>", "a web page", "download the file itself"),
    ],
    ids=["GGUF", "Git LFS", "torch.save", "HTML"],
)
@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE])
def test_a_file_of_another_format_is_named(adapter, file, data, named, remedy):
    (adapter / file).write_bytes(data)
    error = refused(InvalidAdapter, adapter, file)
    assert error.found.startswith(named)
    assert remedy in error.remedy


def keys(*ends):
    return {f"model.layers.0.self_attn.q_proj{end}": np.ones((4, 8), "float32") for end in ends}


MISTRAL = {
    f"layers.0.attention.wq.lora_{side}.weight": np.ones(shape, "float32")
    for side, shape in (("A", (4, 8)), ("B", (8, 4)))
}


@pytest.mark.parametrize(
    ("tensors", "named", "remedy"),
    [
        (keys(".lora_a", ".lora_b"), "MLX's form", "mlx_lm.fuse"),
        (keys(".lora_a.weight", ".lora_b.weight"), "torchtune's form", "FullModelHFCheckpointer"),
        (MISTRAL, "mistral-finetune's form", "utils/merge_lora.py"),
    ],
    ids=["MLX", "torchtune", "mistral-finetune"],
)
def test_tensors_of_another_writer_are_named(adapter, tensors, named, remedy):
    """What they are like: mlx_lm/tuner/lora.py of mlx-lm (200af25d); torchtune/models/convert_weights.py; the keys of
    `get_lora_states` in finetune/checkpointing.py of mistral-finetune (20704b22).
    """
    (adapter / WEIGHTS_FILE).write_bytes(safetensors(tensors))
    error = refused(IncompatibleAdapter, adapter, WEIGHTS_FILE)
    assert named in error.found
    assert remedy in error.remedy


def test_a_configuration_of_mlx_is_named(adapter):
    raw = {"fine_tune_type": "lora", "num_layers": 16, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0}}
    (adapter / CONFIG_FILE).write_text(json.dumps(raw))
    error = refused(IncompatibleAdapter, adapter, CONFIG_FILE)
    assert "MLX's form (mlx-lm), by the keys fine_tune_type, lora_parameters" in error.found


@pytest.mark.parametrize(
    ("name", "with_config", "writer"),
    [
        ("adapters.safetensors", True, "MLX"),
        ("0000100_adapters.safetensors", True, "MLX"),
        ("lora.safetensors", False, "mistral-finetune"),
        ("adapter_0.pt", True, "torchtune"),
        ("sql-q8.gguf", False, "GGUF"),
    ],
)
def test_a_directory_of_another_writers_files_is_named(tmp_path, name, with_config, writer):
    directory = put(tmp_path, {name: b"", **({CONFIG_FILE: config_bytes()} if with_config else {})})
    error = refused(AdapterNotFound, directory, WEIGHTS_FILE if with_config else CONFIG_FILE)
    assert f"but '{name}', which is of {writer}" in error.found


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8"])
def test_quantised_tensors_are_told_what_to_do(adapter, dtype):
    header = {"a.lora_A.weight": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}
    (adapter / WEIGHTS_FILE).write_bytes(with_header(header, bytes(8)))
    error = refused(InvalidAdapter, adapter, WEIGHTS_FILE)
    assert f"dtype {dtype}" in error.found
    assert "multiply them by their scales" in error.remedy
    assert "BF16" in error.remedy


# --- towers, which a server of the text model does not have


@pytest.mark.parametrize(
    "module",
    [
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear",  # Gemma 4: each layer is inside a clipping one
        "model.audio_tower.layers.0.self_attn.q_proj.linear",
        "model.visual.blocks.0.attn.qkv",
        "model.embed_vision.embedding_projection",
    ],
)
@pytest.mark.parametrize("beside", [{}, weights()], ids=["alone", "beside the text model"])
def test_a_tower_is_named_with_its_trainers_option(tmp_path, module, beside):
    """`FastVisionModel.get_peft_model` of Unsloth trains towers unless it is told not to."""
    error = refusal(tmp_path, beside | pair(module, 4, 8, 8), says="a tower or connector of a multimodal model")
    assert f"'{module}'" in error.found
    for text in ("finetune_vision_layers=False", "--enable-tower-connector-lora"):
        assert text in error.remedy


# --- tensors that a trainer has spread over its processes and not gathered


def spread(part):
    """The tensors of a whole adapter as a process of FSDP or ZeRO-3 holds them."""
    return {name: part(name, np.ascontiguousarray(tensor)) for name, tensor in weights().items()}


NOT_GATHERED = {
    "flat": spread(lambda _, tensor: tensor.reshape(-1)),
    "half of flat": spread(lambda _, tensor: tensor.reshape(-1)[: tensor.size // 2]),
    "experts, flat": {
        f"{PEFT}model.layers.0.mlp.experts.0.up_proj.lora_{side}.weight": np.ones(32, "float32") for side in "AB"
    },
    "half of A's rows": spread(lambda name, tensor: tensor[:2] if ".lora_A." in name else tensor),
    "half of all rows": spread(lambda _, tensor: tensor[: len(tensor) // 2]),
    "no tensor at all": {},
    "tensors of another process": spread(lambda _, tensor: tensor[:0]),
}


@pytest.mark.parametrize("case", NOT_GATHERED)
def test_tensors_that_were_not_gathered_are_named(tmp_path, case):
    """As `get_peft_model_state_dict` meets them under `summon_full_params` or `GatheredParameters` left out."""
    error = refusal(tmp_path, NOT_GATHERED[case])
    for text in ("gather", "stage3_gather_16bit_weights_on_model_save", "FULL_STATE_DICT"):
        assert text in error.remedy


@pytest.mark.parametrize("shape", [(4, 8, 3), (3, 8)], ids=["a convolution", "weights of two trainings"])
def test_other_shapes_are_not_said_to_be_spread(tmp_path, shape):
    name = next(name for name in weights() if ".lora_A." in name)
    assert "gather" not in refusal(tmp_path, weights() | {name: np.ones(shape, "float32")}).remedy


# --- a vocabulary with words added in training


@pytest.mark.parametrize(
    ("name", "place", "ends"),
    [
        (
            "lm_head",
            ModulePlace("lm_head", ModuleKind.HEAD, 8, 32, max_out_features=True),
            (".lora_A.weight", ".lora_B.weight"),
        ),
        ("model.embed_tokens", ModulePlace("model.embed_tokens", ModuleKind.EMBEDDING, 32, 8), None),
    ],
)
def test_words_added_in_training_are_counted(tmp_path, name, place, ends):
    wide, high = (8, 36) if ends else (36, 8)
    tensors = pair(name, 4, wide, high)
    if not ends:
        tensors = {key.replace("lora_", "lora_embedding_").removesuffix(".weight"): a for key, a in tensors.items()}
    error = refusal(tmp_path, weights() | tensors, base_of({**MODULES.places, name: place}))
    assert "4 words more than the base model's vocabulary" in error.found
    assert "merge the adapter into the model with these words" in error.remedy


def test_whole_embeddings_of_peft_are_named(adapter):
    """`save_embedding_layers="auto"` in peft/utils/save_and_load.py, 0.21, saves them where the vocabulary grew."""
    whole = {f"{PEFT}model.embed_tokens.weight": np.ones((36, 8), "float32")}
    (adapter / WEIGHTS_FILE).write_bytes(safetensors(weights() | whole))
    error = refused(IncompatibleAdapter, adapter, WEIGHTS_FILE)
    assert "a whole embedding" in error.found
    assert "save_embedding_layers=False" in error.remedy


@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head", "norm", "input_layernorm"], []])
@pytest.mark.parametrize("module", ["embed_tokens", "norm", "layers.0.input_layernorm"])
def test_mergekits_whole_modules_are_named_with_its_options(adapter, module, saved):
    """`plan_extraction` in mergekit/scripts/extract_lora.py, 0.1.5; or with the configuration emptied by hand."""
    (adapter / CONFIG_FILE).write_bytes(config_bytes(modules_to_save=saved))
    whole = {f"{PEFT}model.{module}.weight": np.ones((36, 8), "float32")}
    (adapter / WEIGHTS_FILE).write_bytes(safetensors(weights() | whole))
    error = refused(IncompatibleAdapter, adapter, CONFIG_FILE if saved else WEIGHTS_FILE)
    assert "mergekit-extract-lora" in error.remedy
    assert "--embed-lora --skip-undecomposable" in error.remedy
    assert module.rpartition(".")[2] in error.found


# --- alpha


@pytest.mark.parametrize("changes", [{"lora_alpha": 0}, {"lora_alpha": -0.0}, {"alpha_pattern": {"[qv]_proj": 0}}])
def test_an_adapter_without_effect_is_refused(adapter, changes):
    """VLLM loads it (`PEFTHelper` in vllm/lora/peft_helper.py, 0.32) and answers as the base model does."""
    (adapter / CONFIG_FILE).write_bytes(config_bytes(**changes))
    with pytest.raises(InvalidAdapter, match="an adapter without effect: lora_alpha"):
        verified(adapter)


def test_one_module_without_effect_is_served(adapter):
    (adapter / CONFIG_FILE).write_bytes(config_bytes(lora_alpha=0, alpha_pattern={"q_proj": 8}))
    assert {pair.alpha for pair in verified(adapter).weights.pairs} == {0, 8}


def test_an_alpha_below_zero_is_served_as_vllm_does(adapter):
    """It takes away what was trained, in PEFT as well (`scaling` in peft/tuners/lora/layer.py, 0.21)."""
    from vllm.lora.peft_helper import PEFTHelper

    (adapter / CONFIG_FILE).write_bytes(config_bytes(lora_alpha=-8))
    (found,) = {pair.alpha for pair in verified(adapter).weights.pairs}
    assert (
        verified(adapter).config.scaling(4, found)
        == PEFTHelper.from_local_dir(str(adapter), None).vllm_lora_scaling_factor
    )


def test_an_alpha_below_zero_survives_conversion(tmp_path):
    tensors = {f"_orig_mod.{name}": array for name, array in weights().items()}
    _, made, target = convert(tmp_path, tensors, base_of(MODULES.places), lora_alpha=-8)
    module = LAYER.format(0, "q_proj")
    a, b = (made[f"{PEFT}{module}.lora_{side}.weight"].astype("float64") for side in "AB")
    assert np.array_equal(delta(made, module, target / CONFIG_FILE), b @ a * -2)


def test_inspect_shows_the_writer_that_it_recognised(adapter):
    from lora_plugins.cli.inspect import _look, _result

    def lines() -> list[str]:
        return [str(one) for one in _result(adapter, None, _look(adapter, Settings(), None), None).shown]

    assert not any(one.startswith("recognised") for one in lines())
    (adapter / WEIGHTS_FILE).write_bytes(safetensors(keys(".lora_a", ".lora_b")))
    assert "recognised   MLX's form (mlx-lm)" in lines()
