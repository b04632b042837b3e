"""Parses `adapter_config.json`, and refuses configurations that vLLM 0.30 to 0.33 cannot serve.

`parse_config` runs wherever an adapter is read: in the reading process (`lora_plugins/verification`), in
`lora-plugins inspect`, and in workers, which read the canonical file in the store (`canonical.py`). In go the bytes of
the file; out comes an `AdapterConfig`, or the error that refuses the adapter. The bytes are untrusted: every length,
number and text is bounded here. AdaLoRA and IA3 are read as LoRA, and `AdapterConfig.beside` says which of them it is.

Source: `vllm/lora/peft_helper.py` of vLLM 0.32 and 0.33 (identical), `peft/tuners/lora/config.py` of PEFT 0.21.
"""

from __future__ import annotations

import codecs
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lora_plugins.adapter.files import parse_json
from lora_plugins.adapter.patterns import PatternBudget, SuffixPatterns
from lora_plugins.adapter.writers import FROM_MERGEKIT, foreign_bytes, foreign_config
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
ORIGINAL_CONFIG_FILE = "adapter_config.original.json"  # in the store: the source's own file (adapter/canonical.py)
MAX_CONFIG_BYTES = 16 << 20  # a list of every expert of Qwen3-235B takes more than 1 MiB
MAX_RANK = 1 << 16

# Initialisations that leave the base model's weights unchanged, as listed in vLLM's PEFTHelper.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
CLASSIFIER_HEADS = frozenset({"classifier", "score"})

# Beside `target_modules`: keys that leave modules out of the training, although `target_modules` names the modules.
_LEAVE_OUT = ("exclude_modules", "layers_to_transform")
# PEFT writes all its keys, `target_parameters` since 0.17 and its version since 0.18. A file without both of these keys
# is another program's, and a PEFT version in it says nothing of the layout of experts: NeMo Automodel 0.7 writes a few
# keys of PEFT, for either layout.
_KEYS_OF_PEFT = frozenset({"auto_mapping", "target_parameters"})
# The release that first wrote a key, latest release first.
_KEYS_SINCE = {"velora_config": (0, 19, 1), "use_bdlora": (0, 19, 0), "target_parameters": (0, 17, 0)}
_PEFT_VERSION = re.compile(r"(?!0\.19\.1\.dev)([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?")
# NeMo Automodel's key for the layout, in a file of its own; in `adapter_config.json`, the word of the adapter's owner.
LAYOUT_KEY = "paramwrapper_layout"
OUR_KEY = "lora_plugins"  # of the canonical configuration: `AdapterConfig.beside`, whose keys vLLM would refuse
ADALORA, IA3 = "peft_type ADALORA", "peft_type IA3"  # in `AdapterConfig.beside`
_MAX_KINDS = 256  # kinds of modules, and characters of a name
_MAX_TOKENS = 1 << 14  # far above what a slot holds; bounds the message of a reading process

# PEFT features that change an adapter's computation and that vLLM lacks: vLLM refuses or ignores each. An empty
# value is off, as PEFT reads these keys.
_UNSUPPORTED = {
    "alora_invocation_tokens": "Activated LoRA (alora_invocation_tokens)",
    "layer_replication": "layer replication (layer_replication)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "use_qalora": "QALoRA (use_qalora)",
    "arrow_config": "Arrow routing (arrow_config)",
    "kasa_config": "KaSA (kasa_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
}

# Features that PEFT 0.21 cannot merge; layers that are replicated share their weights, which would get every delta.
_NEVER_MERGED = ("alora_invocation_tokens", "layer_replication", "use_qalora", "arrow_config")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of an adapter's configuration that defines how its tensors are read.

    Attributes:
        rank: `r`, of modules for which `rank_pattern` has no other rank. alpha: `lora_alpha`, in the same way.
        targets: module names (a set), a regular expression (a string), or None where the file leaves targets open, or
            has further keys that leave modules out. Only for finding lost modules: vLLM reads the weights alone.
        base_model: `base_model_name_or_path`, or None without the key.
        trained: the plain names of modules in `targets`, all of which must have tensors; empty where unknown.
        peft_version: a version of PEFT with the layout that stacked experts have here, not always the version that
            wrote the file; None where unknown.
        token_ids: `trainable_token_indices`, the ids of rows in order, by the end of a module's name; `""` stands for
            the model's embedding.
        beside: keys that give modules more than A and B: `use_dora`, `lora_bias`, `bias`, `ADALORA`; or `IA3`, which
            gives modules factors without A and B, and has rank 1 for an engine that asks for a rank.
    """

    rank: int
    alpha: float
    targets: frozenset[str] | str | None
    base_model: str | None = None
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()
    peft_version: tuple[int, ...] | None = None
    token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()

    @property
    def max_rank(self) -> int:
        """The largest rank of any module; vLLM compares `max_rank` with `--max-lora-rank`."""
        return max([self.rank, *self.rank_pattern.values()])

    def ranks(self) -> Callable[[str, PatternBudget], int]:
        """A function from a module's name in the checkpoint, without `base_model.model.`, to its rank."""
        return SuffixPatterns(self.rank_pattern, "rank_pattern", self.rank).value

    def alphas(self) -> Callable[[str, PatternBudget], float]:
        """A function from a module's name in the checkpoint, without `base_model.model.`, to its alpha."""
        return SuffixPatterns(self.alpha_pattern, "alpha_pattern", self.alpha).value

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Return the ids of the trained tokens of a module, by the module's name in the checkpoint."""
        # `""` stands for the embedding, and matches every module: PEFT then trains tokens of the embedding alone.
        named = (ids for name, ids in self.token_ids.items() if f".{module}".endswith(f".{name}" if name else ""))
        return next(named, ())

    def check_patterns(self) -> None:
        """Refuse patterns that do not compile within their time.

        Raises:
            InvalidAdapter: see `PatternBudget.matches`.
        """
        budget = PatternBudget()
        # No module has the empty name: the calls only have every pattern compiled and matched.
        self.ranks()("", budget)
        self.alphas()("", budget)

    def scaling(self, rank: int, alpha: float) -> float:
        """Return the factor of B's product (rsLoRA: arXiv 2312.03732)."""
        return alpha / self._divisor(rank)

    def alpha_for(self, new_rank: int, rank: int, alpha: float) -> float:
        """Return the alpha by which a pair of `new_rank` is scaled as a pair of this rank and alpha."""
        return alpha * (self._divisor(new_rank) / self._divisor(rank))

    def _divisor(self, rank: int) -> float:
        """Return the number by which alpha is divided: the rank, or its square root with rsLoRA."""
        return math.sqrt(rank) if self.use_rslora else rank


def parse_config(data: bytes) -> AdapterConfig:
    """Read the bytes of an `adapter_config.json`.

    Raises:
        InvalidAdapter: not JSON, a key missing, or a value of the wrong kind.
        IncompatibleAdapter: a PEFT method or feature that vLLM does not serve.
    """
    # The length bounds the memory of everything below: no parser has seen the bytes so far.
    if len(data) > MAX_CONFIG_BYTES:
        raise malformed(f"more than {MAX_CONFIG_BYTES} bytes", f"at most {MAX_CONFIG_BYTES}")
    data = data.removeprefix(codecs.BOM_UTF8)  # as Windows editors and PowerShell write
    if (foreign := foreign_bytes(data)) is not None:
        raise foreign
    raw = _json_object(data)
    # Before the checks of PEFT's keys: another program's file should be named as such.
    if (foreign_keys := foreign_config(raw)) is not None:
        raise foreign_keys
    kind = raw.get("peft_type") or "LORA"  # vLLM does not read the key
    # For each known method: the function that gives the keys of an equal LoRA.
    as_lora = _AS_LORA.get(kind.upper()) if isinstance(kind, str) else None
    if as_lora is None:
        raise IncompatibleAdapter(
            f"peft_type {_short(kind)}", expected="LORA, ADALORA or IA3", remedy="train or convert it with PEFT's LoRA"
        )
    raw = as_lora(raw)
    _refuse_unsupported(raw)
    rank = _rank("r", _whole(_required(raw, "r")))
    targets = _required(raw, "target_modules")
    if targets is not None and not isinstance(targets, str):
        targets = frozenset(_text_list("target_modules", targets))
    # With one of these keys a target may lack tensors on purpose, so targets say nothing about completeness.
    if any(raw.get(key) is not None for key in _LEAVE_OUT):
        targets = None
    config = AdapterConfig(
        rank=rank,
        alpha=_alpha("lora_alpha", _required(raw, "lora_alpha")),
        targets=targets,
        base_model=_base_model(raw),
        use_rslora=bool(_of_kind(raw, "use_rslora", bool, "true or false")),
        rank_pattern=_by_module(raw, "rank_pattern", _rank),
        alpha_pattern=_by_module(raw, "alpha_pattern", _alpha),
        modules_to_save=frozenset(_text_list("modules_to_save", raw.get("modules_to_save") or [])),
        trained=_plain_names(targets),
        peft_version=_peft_version(raw),
        token_ids=_token_ids(raw.get("trainable_token_indices") or {}),
        beside=_beside(raw),
    )
    if config.alpha == 0 and not any(config.alpha_pattern.values()):
        raise without_effect(f"lora_alpha {config.alpha:g}")
    unservable = sorted(config.modules_to_save - CLASSIFIER_HEADS)
    if unservable:
        raise IncompatibleAdapter(
            f"modules_to_save {', '.join(unservable)[:200]}",
            expected="none, or classifier or score",
            remedy=f"train without modules_to_save, or merge those modules into the base model; {FROM_MERGEKIT}",
        )
    return config


def without_effect(why: str) -> InvalidAdapter:
    """Return the error for an adapter that adds nothing, and would answer as the base model does."""
    return InvalidAdapter(
        f"an adapter without effect: {why}", expected="an alpha other than 0", remedy="correct lora_alpha"
    )


def malformed(found: str, expected: str) -> InvalidAdapter:
    """Return the error for content that PEFT would not have written."""
    return InvalidAdapter(found, expected=expected, remedy="save the adapter again with PEFT")


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        raw = parse_json(data)
    except ValueError as error:
        raise malformed(str(error), "JSON with the few keys that PEFT writes") from None
    if not isinstance(raw, dict):
        kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
        raise malformed(f"a JSON {kinds.get(type(raw), 'number')}", "a JSON object")
    return raw


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for key, feature in _UNSUPPORTED.items():
        if raw.get(key):
            raise IncompatibleAdapter(
                feature,
                expected="plain LoRA, which is what vLLM serves",
                remedy=f"train it again without {key}, with which PEFT cannot merge it"
                if key in _NEVER_MERGED
                else "merge it into the base model",
            )
    if raw.get("bias", "none") not in ("none", "all", "lora_only", None):
        raise IncompatibleAdapter(
            f"bias {_short(raw['bias'])}", expected="'none', 'all' or 'lora_only'", remedy="train with bias='none'"
        )
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise IncompatibleAdapter(
            f"init_lora_weights {_short(init)}, which changes the base model's weights",
            expected="an initialisation that leaves the base model alone",
            remedy="save it again with PEFT's path_initial_model_for_weight_conversion",
        )


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if key not in raw:
        raise malformed(f"no key '{key}'", f"the key '{key}'")
    return raw[key]


def _whole(value: Any) -> Any:
    """Return 4 for 4.0, which vLLM takes as `r`, and any other value as it is, for `_rank` to refuse.

    In `rank_pattern` vLLM takes whole numbers only, so its values do not come here.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rank(key: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK:
        return value
    raise malformed(f"{key} {_short(value)}", f"a whole number from 1 to {MAX_RANK}")


def _alpha(key: str, value: Any) -> float:
    # Below 0 as well: a negative alpha takes the trained part away, as in PEFT and vLLM. The comparison refuses NaN,
    # infinity, and whole numbers that no float can hold.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise malformed(f"{key} {_short(value)}", "a number")


def _of_kind(raw: Mapping[str, Any], key: str, kind: type[T], expected: str) -> T | None:
    """Return the value of a key, which must be of this kind; None where the key is missing or null."""
    value = raw.get(key)
    if value is None or isinstance(value, kind):
        return value
    raise malformed(f"{key} {_short(value)}", expected)


def _by_module(raw: Mapping[str, Any], key: str, number: Callable[[str, Any], T]) -> dict[str, T]:
    values = _of_kind(raw, key, dict, "an object from module names to numbers") or {}
    return {name: number(f"{key}[{name!r}]", value) for name, value in values.items()}


def _of_adalora(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a LoRA that scales as AdaLoRA does, by alpha / (init_r + 0.00001) whatever rank is left.

    AdaLoRA begins with `init_r` ranks in each module and prunes some; `rank_pattern` says which are left. An alpha of
    0 or less stands for the rank that is left.

    Source: `SVDLinear` and `AdaLoraModel.resize_modules_by_rank_pattern` in peft/tuners/adalora, PEFT 0.21.
    """
    # In PEFT's file, a module's ranks are a list with true for each rank that is left.
    kept = _by_module(raw, "rank_pattern", lambda _, ranks: sum(map(bool, ranks)) if isinstance(ranks, list) else ranks)
    ranks = {name.removeprefix("base_model.model.").removesuffix(".lora_E"): rank for name, rank in kept.items()}
    rank, alpha = _rank("init_r", _whole(_required(raw, "init_r"))), _alpha("lora_alpha", _required(raw, "lora_alpha"))
    if empty := next((name for name, of in ranks.items() if of == 0), None):
        raise IncompatibleAdapter(
            f"AdaLoRA that has pruned {_short(empty)} to rank 0",
            expected="at least rank 1 in each module",
            remedy="merge the adapter into the base model, or train it again with a larger target_r",
        )
    ranks = {name: _rank(f"rank_pattern[{name!r}]", of) for name, of in ranks.items()}
    # The alpha that, divided by the rank that is left as LoRA does, gives AdaLoRA's scaling.
    scaled = {of: (alpha if alpha > 0 else of) * of / (rank + 1e-5) for of in {rank, *ranks.values()}}
    return raw | {
        "r": rank,
        "lora_alpha": scaled[rank],
        "use_rslora": False,
        "rank_pattern": ranks,
        "alpha_pattern": {name: scaled[of] for name, of in ranks.items()},
        OUR_KEY: [ADALORA],
    }


def _of_ia3(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that PEFT's `IA3Config` reads, with rank and alpha 1, which no pair uses."""
    kept = {key: raw[key] for key in _KEYS_OF_IA3 if key in raw}
    return {**kept, "r": 1, "lora_alpha": 1, OUR_KEY: [IA3]}


_KEYS_OF_IA3 = ("target_modules", "exclude_modules", "base_model_name_or_path", "modules_to_save")
# By `peft_type`: the keys of an equal LoRA, which the rest of the parser reads.
_AS_LORA: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "LORA": dict,
    "ADALORA": _of_adalora,
    "IA3": _of_ia3,
}


def _beside(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that give modules more than A and B, see `AdapterConfig.beside`."""
    keys = {key for key in ("use_dora", "lora_bias") if _of_kind(raw, key, bool, "true or false")}
    if {"use_dora", "lora_bias"} <= keys:
        raise malformed("use_dora with lora_bias", "one of both, as PEFT takes no other")
    keys |= {"bias"} if raw.get("bias") in ("all", "lora_only") else set()
    return frozenset([*keys, *_text_list(OUR_KEY, raw.get(OUR_KEY) or [])])


def _plain_names(targets: frozenset[str] | str | None) -> frozenset[str]:
    """Return the targets that are the last part of a module's name, such as `q_proj`.

    A model has few kinds of modules: more targets than `_MAX_KINDS` are names of single modules, and none is returned.
    """
    if not isinstance(targets, frozenset) or len(targets) > _MAX_KINDS:
        return frozenset()
    return frozenset(name for name in targets if name and "." not in name and len(name) <= _MAX_KINDS)


def _text_list(key: str, value: Any) -> list[str]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise malformed(f"{key} {_short(value)}", "a list of module names")


def _token_ids(value: Any) -> dict[str, tuple[int, ...]]:
    """Return the ids of trained tokens by module; PEFT takes a list without a module for the embedding (`""` here)."""
    by_module = value if isinstance(value, dict) else {"": value}
    for ids in by_module.values():
        # By `type`: true and false are whole numbers to `isinstance`.
        is_list = isinstance(ids, list) and 0 < len(ids) <= _MAX_TOKENS
        if not is_list or not all(type(one) is int and 0 <= one < 1 << 31 for one in ids) or len({*ids}) < len(ids):
            raise malformed(
                f"trainable_token_indices {_short(ids)}",
                f"the ids of 1 to {_MAX_TOKENS} tokens, whole numbers from 0, each once",
            )
    return {module: tuple(ids) for module, ids in by_module.items()}


def _peft_version(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the version of PEFT that wrote the weights, as far as experts show; None where the file leaves it open."""
    # What the owner or our canonical file says about the layout wins over what PEFT's keys show.
    said = _version(str(raw.get(LAYOUT_KEY, "")).removeprefix("peft-"))
    if said is not None or not raw.keys() >= _KEYS_OF_PEFT:
        return said
    since = next(version for key, version in _KEYS_SINCE.items() if key in raw)  # at least this one has written it
    named = _version(str(raw.get("peft_version")))
    if named is None:
        return None if since == (0, 19, 0) else since  # 0.19.0 and 0.19.1 lay experts out differently
    # A later PEFT that loads and saves an adapter leaves the old `peft_version` in the file, but lays experts out in
    # its own way. So a version older than the keys of the file says nothing of the layout.
    return named if named >= since else None


def _version(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a version; None for any other text, and for 0.19.1.dev, which may have either layout."""
    match = _PEFT_VERSION.match(text)
    return match and tuple(int(number or 0) for number in match.groups())


def _base_model(raw: Mapping[str, Any]) -> str | None:
    name = _of_kind(raw, "base_model_name_or_path", str, "text") or None
    # Compared as a path, and quoted in logs and errors: no NUL, no line break, no half of a surrogate pair.
    if name and (len(name) > 4096 or any(unicodedata.category(character) in ("Cc", "Cs") for character in name)):
        raise malformed(f"base_model_name_or_path {_short(name)}", "the name or path of a model")
    return name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
