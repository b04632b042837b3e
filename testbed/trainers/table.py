"""Which trainer writes what, by the file of its code that writes: a row for each trainer and kind of adapter.

Of PEFT 0.18.0, torchtune, Tinker, SkyRL, verl, NeMo AutoModel, ART and xtuner the functions themselves were run, in the
versions of the table, and made these names, shapes and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testbed.trainers import forms, shapes
from testbed.trainers.adapters import Adapter, Files
from testbed.trainers.forms import CONFIG, WEIGHTS, Form, changed, few_keys, only, peft, renamed, with_
from testbed.trainers.shapes import Shape

_NO_WEIGHTS, _NO_CONFIG = r"L002.*adapter_model.safetensors", r"L002.*adapter_config.json"
_WRAPPED = "state dict of the wrapped model"
_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 12345\n"
_PICKLE = b"PK\x03\x04" + bytes(60)


@dataclass(frozen=True)
class Case:
    """A kind of adapter in another form than its trainer's usual one; `refused` None is the kind's own verdict."""

    shape: Shape
    form: Form
    how: str = ""
    refused: str | None = None


@dataclass(frozen=True)
class Trainer:
    """A program that writes adapters: its version, the file that writes, its usual form."""

    name: str
    version: str
    source: str
    form: Form
    writes: tuple[Shape | Case, ...]


@dataclass(frozen=True)
class Row:
    """One adapter of one trainer; `refused` is a pattern of our refusal, empty where it is served as trained."""

    trainer: Trainer
    shape: Shape
    how: str
    form: Form
    refused: str

    @property
    def what(self) -> str:
        return f"{self.shape.what}; {self.how}" if self.how else self.shape.what

    @property
    def name(self) -> str:
        """The adapter's name: letters, digits and dashes."""
        words = f"{self.trainer.name} {self.trainer.version} {self.what}".lower()
        return "-".join("".join(one if one.isascii() and one.isalnum() else " " for one in words).split())[:120]

    def right(self) -> Adapter:
        """What was trained, in PEFT's form."""
        return self.shape.make()

    def write(self, directory: Path) -> Path:
        """Write the trainer's files into a directory of the adapter's name, and return that."""
        return write(self.form(self.right()), directory / self.name)


def write(files: Files, directory: Path) -> Path:
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def rows() -> Iterator[Row]:
    """All, in the order of the table."""
    for trainer in TRAINERS:
        for one in trainer.writes:
            case = one if isinstance(one, Case) else Case(one, trainer.form)
            refused = case.shape.refused if case.refused is None else case.refused
            yield Row(trainer, case.shape, case.how, case.form, refused)


_UNSLOTH = r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mixer|mlp).*?(?:q_proj|k_proj|v_proj|o_proj).*?)"
_SWIFT = r"^(model(?=\.).*\.(q_proj|k_proj|v_proj|o_proj))$"
_FULL_NAMES = [f"model.layers.{n}.self_attn.{one}_proj" for n in range(2) for one in "qkvo"]
_OF_MLX = {"fine_tune_type": "lora", "num_layers": 16, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0}}
# The keys of `asdict(LoraConfig)`, which SkyRL saves; `LoraConfig.to_dict` leaves the last out.
_ASDICT = {"runtime_config": {"ephemeral_gpu_offload": False}}
# PEFT 0.18 lacks the keys of later releases.
_SINCE_0_19 = ("kasa_config", "lora_ga_config", "monteclora_config", "use_bdlora", "velora_config")
_OF_0_18: dict[str, object] = {"peft_version": "0.18.0", **dict.fromkeys(_SINCE_0_19, ...)}
_TINKER = ("peft_type", "base_model_name_or_path", "r", "lora_alpha")
_BRIDGE = (
    *(*_TINKER, "auto_mapping", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_dropout"),
    *("modules_to_save", "rank_pattern", "alpha_pattern", "target_modules", "task_type"),
)
_OF_VERL: dict[str, object] = {"base_model_name_or_path": None, "inference_mode": False, "task_type": None}
_EXTRA = {"additional_config.json": b'{"lora_dtype": null}', "args.json": b"{}"}

TRAINERS = (
    Trainer(
        "PEFT",
        "0.21.2",
        "peft/utils/save_and_load.py",
        peft,
        (
            *(shapes.IN_ATTENTION, shapes.IN_QV, shapes.ALL_LINEAR, shapes.RSLORA, shapes.PATTERNS, shapes.HEAD),
            *(shapes.WORDS, shapes.LAST_LAYER, shapes.DORA, shapes.SAVED, shapes.PISSA, shapes.BIAS, shapes.TOKENS),
            *(shapes.B_BIAS, shapes.IA3, shapes.GROWN, shapes.CLASSIFIER, shapes.BESIDE_EXPERTS, shapes.STACKED),
            shapes.GATE_UP,
            *(shapes.ONE_BY_ONE, shapes.BELOW, shapes.TEXT_ALONE, shapes.VISION),
            Case(shapes.IN_ATTENTION, lambda one: {CONFIG: peft(one)[CONFIG], "adapter_model.bin": _PICKLE},
                 "safe_serialization=False", r"L005.*a pickle.*LORA_PLUGINS_ALLOW_PICKLE"),
        ),
    ),
    Trainer(
        "PEFT",
        "0.18.0",
        "peft/tuners/lora/layer.py (ParamWrapper)",
        with_(**_OF_0_18),
        (
            shapes.IN_ATTENTION,
            Case(shapes.STACKED, changed(forms.turned, **_OF_0_18), "A and B exchanged"),
            Case(shapes.GATE_UP, changed(forms.turned, **_OF_0_18), "A and B exchanged"),
        ),
    ),
    Trainer(
        "TRL",
        "1.16.0",
        "trl/trainer/sft_trainer.py",
        peft,
        (
            Case(shapes.ALL_LINEAR, with_(target_modules="all-linear"), "its default"),
            *(shapes.IN_QV, shapes.RSLORA, shapes.STACKED, shapes.CLASSIFIER, shapes.SAVED),
        ),
    ),
    Trainer(
        "Unsloth",
        "2026.10.9",
        "unsloth/models/llama.py, unsloth_zoo/peft_utils.py",
        with_(base_model_name_or_path="unsloth/tiny-bnb-4bit"),
        (
            *(shapes.ALL_LINEAR, shapes.RSLORA, shapes.SAVED, shapes.STACKED),
            Case(shapes.BELOW, with_(target_modules=_UNSLOTH, dtype="BF16"), "targets by pattern"),
            Case(shapes.IN_ATTENTION, with_(dtype="F16"), "float16"),
        ),
    ),
    Trainer(
        "Axolotl",
        "0.19.0",
        "axolotl/train.py, axolotl/integrations/expert_parallel/shard.py",
        peft,
        (
            *(shapes.ALL_LINEAR, shapes.PATTERNS, shapes.DORA, shapes.SAVED, shapes.STACKED, shapes.LAST_LAYER),
            Case(shapes.IN_ATTENTION, forms.sharded, "merged from FSDP's shards in two files"),
            Case(shapes.ALL_LINEAR, with_(dtype="BF16"), "FSDP2, gathered"),
        ),
    ),
    Trainer(
        "LLaMA-Factory",
        "0.9.5",
        "llamafactory/model/adapter.py, llamafactory/train/callbacks.py",
        peft,
        (
            *(shapes.ALL_LINEAR, shapes.RSLORA, shapes.DORA, shapes.PISSA, shapes.SAVED, shapes.GROWN, shapes.BELOW),
            Case(shapes.IN_ATTENTION, with_(beside={"value_head.safetensors": b""}), "a value head in its own file"),
        ),
    ),
    Trainer(
        "ms-swift",
        "4.6.0",
        "swift/tuners/peft.py, swift/utils/transformers_utils.py",
        with_(beside=_EXTRA),
        (
            Case(shapes.IN_ATTENTION, with_(beside=_EXTRA, target_modules=_SWIFT, dtype="BF16"), "targets by pattern"),
            *(shapes.ALL_LINEAR, shapes.RSLORA, shapes.CLASSIFIER, shapes.STACKED, shapes.VISION, shapes.BELOW),
            Case(shapes.IN_ATTENTION, lambda one: {f"default/{name}": data for name, data in peft(one).items()},
                 "SwiftModel's folder for each adapter", _NO_CONFIG + r".*default/"),
        ),
    ),
    Trainer(
        "OpenRLHF",
        "0.11.2",
        "openrlhf/models/actor.py",
        with_(dtype="BF16"),
        (shapes.ALL_LINEAR, shapes.IN_QV, shapes.BESIDE_EXPERTS, shapes.CLASSIFIER),
    ),
    Trainer(
        "torchtune",
        "0.6.1",
        "torchtune/models/convert_weights.py, torchtune/training/checkpointing/_checkpointer.py",
        few_keys("r", "lora_alpha", "target_modules", "peft_type", "base_model_name_or_path"),
        (
            *(shapes.IN_ATTENTION, shapes.ALL_LINEAR),
            Case(shapes.HEAD, lambda one: few_keys("r", "lora_alpha", "target_modules", "peft_type")(
                Adapter({name: its for name, its in one.tensors.items() if ".base_layer." not in name}, one.config))),
            Case(shapes.DORA, few_keys("r", "lora_alpha", "target_modules", "peft_type"), "without use_dora",
                 r"L003.*without use_dora in adapter_config.json.*give the configuration its use_dora again"),
            Case(shapes.IN_ATTENTION, lambda one: {CONFIG: peft(one)[CONFIG], "adapter_0.pt": _PICKLE},
                 "adapter_0.pt alone", _NO_WEIGHTS + r".*torchtune's form.*FullModelHFCheckpointer"),
            Case(shapes.IN_ATTENTION, changed(forms.torchtune), "its own names in safetensors",
                 r"L003.*torchtune's form.*FullModelHFCheckpointer"),
        ),
    ),
    Trainer(
        "Tinker",
        "tinker-cookbook 0.6.1",
        "tinker_cookbook/weights/_adapter.py",
        few_keys(*_TINKER, "target_modules"),
        (
            Case(shapes.ALL_LINEAR, few_keys(*_TINKER, target_modules="all-linear"), "raw"),
            Case(shapes.HEAD, lambda one: few_keys(*_TINKER, target_modules="all-linear")(
                Adapter({name.replace(".lm_head.", ".model.unembed_tokens."): its
                         for name, its in one.tensors.items() if ".base_layer." not in name}, one.config)), "raw"),
            Case(shapes.SHARING, lambda one: few_keys(*_TINKER, target_modules="all-linear")(
                Adapter(forms.shared(one.tensors), one.config)), "raw"),
            Case(shapes.ALL_LINEAR, few_keys(*_BRIDGE), "by build_lora_adapter"),
            Case(shapes.ONE_BY_ONE, few_keys(*_BRIDGE), "by build_lora_adapter"),
        ),
    ),
    Trainer(
        "SkyRL",
        "0.3.0",
        "skyrl/backends/skyrl_train/distributed/fsdp_strategy.py, skyrl/tx/utils/models.py",
        with_(**_ASDICT),
        (
            *(shapes.IN_ATTENTION, shapes.ALL_LINEAR, shapes.STACKED),
            Case(shapes.STACKED, few_keys(*_BRIDGE, target_modules=["experts", "q_proj"]), "Megatron, for vLLM"),
            Case(shapes.ALL_LINEAR, with_(target_modules=None), "JAX, no targets"),
            Case(shapes.ONE_BY_ONE, changed(forms.without_weight, target_modules=None), "JAX, names without .weight"),
        ),
    ),
    Trainer(
        "verl",
        "0.9.1",
        "verl/model_merger/base_model_merger.py, verl/utils/checkpoint/megatron_checkpoint_manager.py",
        with_(**_OF_VERL),
        (
            *(shapes.IN_ATTENTION, shapes.ALL_LINEAR, shapes.BESIDE_EXPERTS),
            Case(shapes.ALL_LINEAR, with_(lora_alpha=0, **_OF_VERL), "merged without lora_train_meta.json",
                 r"L005.*without effect: lora_alpha 0.*correct lora_alpha"),
            Case(shapes.STACKED, changed(forms.grouped), "Megatron, save_hf_adapter"),
        ),
    ),
    Trainer(
        "Megatron-Bridge",
        "0.3.1",
        "megatron/bridge/models/conversion/peft_bridge.py",
        few_keys(*_BRIDGE),
        (
            *(shapes.IN_ATTENTION, shapes.ALL_LINEAR, shapes.ONE_BY_ONE),
            Case(shapes.STACKED, lambda one: few_keys(*_BRIDGE)(Adapter(forms.grouped(one.tensors), one.config)),
                 "grouped, in three dimensions"),
        ),
    ),
    Trainer(
        "NeMo AutoModel",
        "0.7.0",
        "nemo_automodel/components/checkpoint/addons.py, stateful_wrappers.py",
        few_keys("task_type", "peft_type", "r", "lora_alpha", "use_dora", "target_modules", "bias",
                 "base_model_name_or_path"),
        (
            Case(shapes.IN_ATTENTION, with_(target_modules=_FULL_NAMES, beside={"automodel_peft_config.json": b"{}"}),
                 "targets by their whole names"),
            *(shapes.ALL_LINEAR, shapes.DORA, shapes.ONE_BY_ONE),
            Case(shapes.STACKED, peft, "target_parameters"),
            Case(shapes.STACKED, changed(forms.turned, peft_version=...), "legacy_paramwrapper_layout"),
            Case(shapes.IN_ATTENTION, renamed(r"^base_model\.model\.model\.", "base_model.model."), "of an encoder"),
        ),
    ),
    Trainer(
        "ART",
        "0.5.18",
        "art/megatron/model_support/handlers/qwen3_moe.py",
        peft,
        (shapes.ALL_LINEAR, Case(shapes.ONE_BY_ONE, peft, "published for vLLM")),
    ),
    Trainer(
        "mlx-lm",
        "0.32.2",
        "mlx_lm/lora.py, mlx_lm/tuner/lora.py",
        only({"adapters.safetensors": None, "0000100_adapters.safetensors": None}, _OF_MLX),
        (
            Case(shapes.ALL_LINEAR, only({"adapters.safetensors": None}, _OF_MLX), "",
                 r"L00[23].*MLX's form.*mlx_lm.fuse"),
            Case(shapes.ALL_LINEAR, changed(forms.mlx), "under PEFT's file names", r"L003.*MLX's form.*mlx_lm.fuse"),
            Case(shapes.IN_ATTENTION, only({"adapters.npz": b""}), "adapters.npz", _NO_CONFIG + r".*MLX's form"),
        ),
    ),
    Trainer(
        "Unsloth on MLX",
        "unsloth_zoo 2026.10.9",
        "unsloth_zoo/mlx/peft_interop.py",
        few_keys("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "rank_pattern",
                 "alpha_pattern", "base_model_name_or_path", "bias", "task_type"),
        (shapes.ALL_LINEAR, shapes.PATTERNS),
    ),
    Trainer(
        "mistral-finetune",
        "20704b22",
        "finetune/checkpointing.py",
        only({"lora.safetensors": None, "params.json": b"{}"}),
        (
            Case(shapes.IN_ATTENTION, only({"lora.safetensors": None, "params.json": b"{}"}), "",
                 _NO_CONFIG + r".*mistral-finetune's form.*merge_lora\.py"),
            Case(shapes.IN_ATTENTION, changed(forms.mistral), "under PEFT's file names",
                 r"L003.*mistral-finetune's form.*merge_lora\.py"),
        ),
    ),
    Trainer(
        "LitGPT",
        "0.5.13",
        "litgpt/finetune/lora.py",
        only({"lit_model.pth.lora": _PICKLE, "hyperparameters.yaml": b""}),
        (
            Case(shapes.IN_ATTENTION, only({"lit_model.pth.lora": _PICKLE, "hyperparameters.yaml": b""}), "",
                 _NO_CONFIG + r".*LitGPT's form.*convert_from_litgpt"),
            Case(shapes.IN_ATTENTION, changed(forms.litgpt), "under PEFT's file names",
                 r"L003.*LitGPT's form.*convert_from_litgpt"),
        ),
    ),
    Trainer(
        "xtuner",
        "0.2.0",
        "xtuner/model/sft.py, xtuner/model/utils.py",
        with_(dtype="F16", beside={"xtuner_config.py": b""}),
        (
            *(shapes.ALL_LINEAR, shapes.IN_ATTENTION),
            Case(shapes.IN_ATTENTION, only({"iter_500.pth": _PICKLE}), "a checkpoint of its trainer",
                 _NO_CONFIG + r".*pth_to_hf"),
            Case(shapes.IN_ATTENTION, renamed(r"\.weight$", ".default.weight"), "its state dict"),
        ),
    ),
    Trainer(
        "torch.compile",
        "torch 2.13.0",
        "torch/_dynamo/eval_frame.py",
        peft,
        (
            Case(shapes.ALL_LINEAR, renamed("^", "_orig_mod."), "around PEFT's model"),
            Case(shapes.ALL_LINEAR, renamed(f"^{'base_model.model.'}", "base_model.model._orig_mod."), "within it"),
            Case(shapes.IN_ATTENTION, renamed(r"self_attn\.", "self_attn._orig_mod."), "around each attention"),
        ),
    ),
    Trainer(
        "PyTorch FSDP",
        "torch 2.13.0",
        "torch/distributed/fsdp/_common_utils.py",
        peft,
        (
            Case(shapes.ALL_LINEAR, renamed(r"^base_model\.model\.model\.layers",
                 "_fsdp_wrapped_module.base_model.model._fsdp_wrapped_module.model.layers"), _WRAPPED),
            Case(shapes.ALL_LINEAR, renamed(r"(layers\.\d+)\.", r"\1._checkpoint_wrapped_module."),
                 "checkpoint_wrapper around each layer"),
            Case(shapes.IN_ATTENTION, renamed(r"\.weight$", ".default.weight"), "PEFT's own names of the adapter"),
            Case(shapes.IN_ATTENTION, only({"pytorch_model_fsdp_0/.metadata": b""}), "its shards",
                 _NO_CONFIG + r".*merge-weights"),
        ),
    ),
    Trainer(
        "DeepSpeed, DDP",
        "DeepSpeed 0.19.8",
        "deepspeed/runtime/engine.py",
        peft,
        (
            Case(shapes.ALL_LINEAR, renamed("^", "module."), _WRAPPED),
            Case(shapes.IN_ATTENTION, renamed(r"^base_model\.model\.", "module."), "of a model that PEFT did not save"),
            Case(shapes.ALL_LINEAR, changed(forms.empty), "ZeRO-3, not gathered", r"L005.*ZeRO-3.*gather"),
        ),
    ),
    Trainer(
        "AutoModel",
        "Transformers 5.19.0",
        "transformers/models/auto/modeling_auto.py",
        renamed(r"^base_model\.model\.model\.", "base_model.model."),
        (shapes.ALL_LINEAR, shapes.IN_ATTENTION),
    ),
    Trainer(
        "Copies",
        "·",
        "Git LFS 3, huggingface_hub, llama.cpp",
        peft,
        (
            Case(shapes.IN_ATTENTION, lambda one: peft(one) | {WEIGHTS: _LFS}, "a Git LFS pointer",
                 r"L005.*a Git LFS pointer.*git lfs pull"),
            Case(shapes.IN_ATTENTION, lambda one: peft(one) | {WEIGHTS: b"<!DOCTYPE html><html>"}, "a web page",
                 r"L005.*a web page.*download the file itself"),
            Case(shapes.IN_ATTENTION, lambda one: peft(one) | {WEIGHTS: _PICKLE}, "a pickle renamed",
                 r"L005.*a file of torch\.save.*save it with safetensors"),
            Case(shapes.IN_ATTENTION, only({"tiny-lora-f16.gguf": b"GGUF"}), "GGUF", _NO_CONFIG + r".*GGUF"),
            Case(shapes.IN_ATTENTION, lambda one: peft(one) | {WEIGHTS: peft(one)[WEIGHTS][:-100]}, "half a download",
                 r"L005"),
            Case(shapes.IN_ATTENTION, lambda one: {WEIGHTS: peft(one)[WEIGHTS]}, "without configuration", _NO_CONFIG),
        ),
    ),
)  # fmt: skip
