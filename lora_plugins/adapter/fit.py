"""Whether an adapter fits the served base model: by the model's name, the server's largest rank, and the modules.

Runs in the API server when a name is resolved, in a worker that resolves a missing path itself, and in the command
line. In go a verified adapter's configuration and weights (names and shapes, no values) and the `BaseModel`; out come
notes on tolerated differences and warnings for clients, or the error that refuses the adapter.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from lora_plugins.adapter.base_names import differences, is_hub_id, is_same_model, other_type, shown
from lora_plugins.adapter.complete import lost, lost_modules
from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.files import open_regular
from lora_plugins.adapter.landing import Model, check_landing, landed
from lora_plugins.adapter.trained_token_places import token_rows
from lora_plugins.adapter.vector_places import vectors_of
from lora_plugins.adapter.weights import Weights
from lora_plugins.errors import IncompatibleAdapter, LoRAPluginsError
from lora_plugins.settings import BaseMatch

# Values that vLLM allows for --max-lora-rank (`MaxLoRARanks` in vllm/config/lora.py, 0.32 and 0.33).
_SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MODEL_CONFIG, _MAX_CONFIG_BYTES = "config.json", 1 << 20


@dataclass(frozen=True)
class BaseModel:
    """The served base model.

    Attributes:
        path: the model's path or Hub id, as given to `vllm serve`.
        served_names: the model's names in requests; the first stands in `/v1/models` as `parent`.
        aliases: further names of the model in adapters (a setting).
        max_rank: `--max-lora-rank`; None where unknown.
        lora_enabled: whether the server runs with `--enable-lora`.
        model: the engine's description of its modules; None before the engine was asked.
        original_name: `_name_or_path` of a local model's `config.json`; empty without the key.
    """

    path: str
    served_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    max_rank: int | None = None
    lora_enabled: bool = True
    model: Model | None = None
    original_name: str = ""

    @property
    def in_words(self) -> str:
        """The model's name in errors: a path in quotes, and never alone where clients know another name."""
        path = _quoted(self.path)
        name = self.served_names[0] if self.served_names else self.path
        return path if name == self.path else f"{name} ({path})"

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, each once; the path comes first."""
        return tuple(dict.fromkeys((self.path, *self.served_names, *self.aliases)))

    def matches(self, name: str) -> bool:
        """Whether `name` means this model, also in another spelling: a snapshot in the Hub's cache, a local copy."""
        return name in self.names or any(is_same_model(name, own) for own in self.names)


def check_base(
    config: AdapterConfig, weights: Weights | None, base: BaseModel, mode: BaseMatch, *, refuse_unmatched: bool = True
) -> tuple[str, ...]:
    """Check an adapter against the served model; return notes on tolerated differences.

    `weights` is None where only torch could read the weights; then only names and ranks are compared. For
    `refuse_unmatched` see `check_landing`.

    Raises:
        IncompatibleAdapter: rank, base model or modules do not fit.
    """
    named = check_config(config, base, mode)
    # The modules are compared wherever both sides are known, whatever the names say.
    notes: tuple[str, ...] = ()
    if weights is not None and base.model is not None:
        about = f"base model {_named(config)}, served is {base.in_words}"
        notes = check_landing(weights, base.model, about, refuse_unmatched=refuse_unmatched)
        # The rows and vectors themselves are for the worker: here only the errors count.
        token_rows(weights.beside, config, base.model.modules, base.model.read)
        tuple(vectors_of(weights.beside, base.model.modules, base.model.read))
        missing = lost_modules(config, landed(weights, base.model), base.model.modules)
        if missing and refuse_unmatched:
            raise lost(missing, f" ({about})")
        if missing:
            notes = (*notes, f"served with {lost(missing, '').found}")
    elif not named and mode is BaseMatch.COMPATIBLE:
        raise IncompatibleAdapter(
            f"base model {_named(config)}, and modules that cannot be compared with the model's",
            expected=f"base model {base.in_words}",
            remedy="set LORA_PLUGINS_BASE_ALIASES to the name that the adapter uses, or LORA_PLUGINS_BASE_MATCH=off"
            + ("" if weights is None else ", or start a server of this model with this store once"),
        )
    # A warning of another model says more than the note that the names differ.
    if named or warnings_of(config, base, mode):
        return notes
    note = f"names base model '{config.base_model}'" if config.base_model else "names no base model"
    return (*notes, f"{note}, served is '{base.path}'; accepted because {'the rest' if notes else 'every shape'} fits")


def check_config(config: AdapterConfig, base: BaseModel, mode: BaseMatch) -> bool:
    """Check what needs no weights; return whether the configuration names the served model, True where none is asked.

    Raises:
        IncompatibleAdapter: rank or base model do not fit.
    """
    if not base.lora_enabled:
        raise without_lora()
    if base.max_rank is not None and config.max_rank > base.max_rank:
        size = slot_rank(config.max_rank)
        raise IncompatibleAdapter(
            f"rank {config.max_rank}",
            expected=f"at most {base.max_rank}, the server's --max-lora-rank",
            remedy=f"restart the server with --max-lora-rank {size}"
            if size is not None
            else f"train with a lower rank; vLLM's slots take {_SLOT_RANKS[-1]} at most",
        )
    name = config.base_model
    if mode is BaseMatch.OFF:
        return True
    if mode is BaseMatch.COMPATIBLE:
        return name is not None and base.matches(name)
    if name not in base.names:
        raise IncompatibleAdapter(
            f"base model {_named(config)}",
            expected=" or ".join(map(_quoted, base.names)),
            remedy="correct base_model_name_or_path, add it to LORA_PLUGINS_BASE_ALIASES, "
            "or set LORA_PLUGINS_BASE_MATCH=compatible",
        )
    return True


def warnings_of(config: AdapterConfig, base: BaseModel, mode: BaseMatch) -> tuple[str, ...]:
    """Return a warning for an adapter that names another base model, or another size of it.

    Clients see the warning too: of a path on this machine only the last part is shown.
    """
    name = config.base_model
    if name is None or mode is BaseMatch.OFF or base.matches(name):
        return ()
    # A served name is free (`gpt-4`), and a Hub id among them names a model. Any equal name is the operator's word.
    ids = filter(is_hub_id, base.served_names)
    for names in ((base.path, *ids, *base.aliases), (base.original_name,)):
        # None: the names say too little to compare them; `()`: they agree.
        compared = {served: found for served in names if (found := differences(name, served)) is not None}
        if () in compared.values():
            return ()
        if compared:
            served, found = next(iter(compared.items()))
            return (f"trained on {shown(name)}, served on {shown(served)}: {', '.join(found)}",)
    model_type = "" if base.model is None else base.model.modules.model_type
    if found_type := other_type(name, model_type):
        served = shown(base.served_names[0] if base.served_names else base.path)
        return (f"trained on {shown(name)}, served on {served}: another model type ({found_type}, not {model_type})",)
    return ()


def original_name_of(path: str) -> str:
    """Return `_name_or_path` of the `config.json` in a directory; empty without a readable file."""
    try:
        with open_regular(Path(path) / _MODEL_CONFIG) as (file, _):
            raw = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError, LoRAPluginsError):
        return ""
    name = raw.get("_name_or_path") if isinstance(raw, dict) else None
    return name if isinstance(name, str) else ""


def without_lora() -> IncompatibleAdapter:
    """Return the error for any adapter on a server without LoRA."""
    return IncompatibleAdapter(
        "an adapter, on a server without LoRA",
        expected="one with LoRA",
        remedy="restart the server with --enable-lora",
    )


def _named(config: AdapterConfig) -> str:
    return _quoted(config.base_model or "not named")


def _quoted(name: str) -> str:
    # `api/http_errors.py` hides paths from clients, and a path may have spaces: the quotes show where it ends.
    return f"'{name}'" if os.path.isabs(name) or PureWindowsPath(name).drive else name


def slot_rank(rank: int) -> int | None:
    """The smallest `--max-lora-rank` that vLLM takes for an adapter of this rank; None beyond its largest."""
    return next((size for size in _SLOT_RANKS if size >= rank), None)
