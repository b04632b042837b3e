"""Verifies an adapter directory before an engine sees it: files, configuration, header, values, and the base model.

`verify_adapter` and `verify_config` run in the reading process (`lora_plugins/verification`), under limits, without a
base model; `lora-plugins inspect` calls `verify_adapter` in its own process. `fit_adapter` runs in a thread of the API
server (or of a worker that resolves a missing path) and compares what was read with the served model. In goes a
directory with untrusted files; out comes a `VerifiedAdapter`, or the error that refuses the adapter.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lora_plugins.adapter.canonical import with_exact_patterns
from lora_plugins.adapter.chat import Chat, read_chat
from lora_plugins.adapter.config import CONFIG_FILE, MAX_CONFIG_BYTES, ORIGINAL_CONFIG_FILE, AdapterConfig, parse_config
from lora_plugins.adapter.embedding_copies import unlike_base
from lora_plugins.adapter.files import open_regular, size_at
from lora_plugins.adapter.finite import check_finite, check_magnitudes
from lora_plugins.adapter.fit import BaseModel, check_base, warnings_of
from lora_plugins.adapter.layouts.conversion_plan import Conversion, plan_conversion
from lora_plugins.adapter.weight_files import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    PICKLE_FILES,
    WEIGHTS_FILE,
    open_weights,
    read_index,
)
from lora_plugins.adapter.weights import Weights, pair_weights
from lora_plugins.adapter.writers import DEFAULT, name_format
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, describing
from lora_plugins.settings import Settings


@dataclass(frozen=True, slots=True)
class VerifiedAdapter:
    """An adapter that this server can serve, once converted to the engine's form.

    Attributes:
        config, weights: the adapter's own content, with patterns of names only (`with_exact_patterns`). For a pickle,
            which is not read here, weights are None and the patterns are the adapter's own.
        size_bytes: of configuration and weights at the source.
        notes: tolerated differences.
        warnings: another base model in training, by the names of both, and copies of embeddings that are not the
            base model's; clients may see warnings.
        chat: empty where the settings keep to the base model's.
        conversion: into the engine's form; None where no conversion is needed, or the engine's modules are unknown.
    """

    config: AdapterConfig
    weights: Weights | None
    size_bytes: int
    notes: tuple[str, ...] = ()
    conversion: Conversion | None = None
    warnings: tuple[str, ...] = ()
    chat: Chat = field(default_factory=Chat)

    @property
    def is_3d(self) -> bool:
        """Whether a layer's experts are stacked in two pairs, as PEFT adapts stacked parameters.

        False for a pickle, which is not read here.
        """
        pairs = self.weights.pairs if self.weights else ()
        return any(pair.is_experts and pair.module.endswith(".base_layer") for pair in pairs)


def verify_adapter(directory: Path, base: BaseModel | None, settings: Settings) -> VerifiedAdapter:
    """Verify the adapter in `directory`, also against the served base model unless `base` is None.

    Raises:
        AdapterNotFound: the configuration or the weights are missing.
        InvalidAdapter: a file is unreadable, malformed, too large, not finite or not allowed.
        IncompatibleAdapter: well-formed, but not for this server.
        SourceUnavailable: the file system does not answer or denies.
    """
    try:
        config, config_bytes = _read_config(directory)
        # The size is the source's: in the store, our canonical configuration stands under the plain name.
        if (original_bytes := size_at(directory / ORIGINAL_CONFIG_FILE)) is not None:
            config_bytes = original_bytes
        of_weights = (WEIGHTS_FILE, INDEX_FILE, *PICKLE_FILES)
        name = choose_weights([name for name in of_weights if size_at(directory / name) is not None], settings)
    except AdapterNotFound as error:
        with suppress(OSError):
            below = [DEFAULT] if os.path.isfile(directory / DEFAULT) else []
            name_format(error, [*os.listdir(directory), *below])
        raise
    chat = read_chat(directory) if settings.adapter_chat.reads_files else Chat()
    # Loading a pickle runs code, so only size and configuration are checked.
    if name in PICKLE_FILES:
        with open_regular(directory / name) as (_, weights_bytes):
            check_size(config_bytes + weights_bytes, settings)
        # vLLM will match the patterns of a pickle's configuration in the engine, so the patterns must at least compile.
        config.check_patterns()
        note = f"{name} is a pickle; weights not verified"
        read = VerifiedAdapter(config, None, config_bytes + weights_bytes, (note,), chat=chat)
        return read if base is None else fit_adapter(read, base, settings, directory)
    with open_weights(directory, name) as opened, describing(file=name):
        size_bytes = config_bytes + sum(weights_bytes for _, weights_bytes, _ in opened)
        check_size(size_bytes, settings)
        # The files stay open from the header to the values: a file replaced in between would escape the checks.
        weights = pair_weights((tensor for _, _, tensors in opened for tensor in tensors), config)
        verified = VerifiedAdapter(with_exact_patterns(config, weights.pairs), weights, size_bytes, chat=chat)
        if base is not None:
            verified = fit_adapter(verified, base, settings, directory)
        if settings.check_finite:
            largest: dict[str, float] = {}
            for file, _, tensors in opened:
                largest |= check_finite(file, tensors)
            check_magnitudes(weights, config, largest)
    return verified


def verify_config(directory: Path, settings: Settings) -> VerifiedAdapter:
    """Verify the small files in `directory`, before the weights are there; without weights and exact patterns.

    Raises:
        As `verify_adapter`, without a base model.
    """
    config, config_bytes = _read_config(directory)
    chat = read_chat(directory) if settings.adapter_chat.reads_files else Chat()
    if size_at(directory / INDEX_FILE) is not None:
        with describing(file=INDEX_FILE), open_regular(directory / INDEX_FILE) as (file, _):
            read_index(file.read(MAX_INDEX_BYTES + 1))
    return VerifiedAdapter(config, None, config_bytes, chat=chat)


def fit_adapter(verified: VerifiedAdapter, base: BaseModel, settings: Settings, directory: Path) -> VerifiedAdapter:
    """Compare an adapter that `verify_adapter` has read without a base model with `base`.

    Of the files in `directory` only copies of the base model's embeddings are read.

    Raises:
        IncompatibleAdapter: the adapter is not for this server.
    """
    conversion = None
    with describing(file=CONFIG_FILE if verified.weights is None else WEIGHTS_FILE):
        if base.model is not None and verified.weights is not None:
            planned = plan_conversion(verified.weights, verified.config, base.model)
            conversion = planned if planned.changes else None
        config, weights = (conversion or verified).config, (conversion or verified).weights
        refuses = settings.unmatched == "refuse"
        notes = check_base(config, weights, base, settings.base_match, refuse_unmatched=refuses)
    copies = unlike_base(directory, verified.weights, base.path)
    warnings = (*warnings_of(verified.config, base, settings.base_match), *copies)
    return replace(verified, notes=(*notes, *verified.notes), conversion=conversion, warnings=warnings)


def choose_weights(names: Collection[str], settings: Settings) -> str:
    """Return the file of weights to read, from the files' names; the index for several files of weights.

    Raises:
        AdapterNotFound: there are no weights.
        InvalidAdapter: the weights are a pickle, which is not allowed.
    """
    if WEIGHTS_FILE in names:
        return WEIGHTS_FILE
    if INDEX_FILE in names:
        return INDEX_FILE
    pickle = next((name for name in PICKLE_FILES if name in names), None)
    if pickle is None:
        raise AdapterNotFound(
            "no weights",
            expected="the adapter's weights",
            remedy="wait for the copy or upload to end, or save the adapter again with PEFT",
            file=WEIGHTS_FILE,
        )
    if not settings.allow_pickle:
        raise InvalidAdapter(
            "a pickle, which can run code when it is loaded",
            expected=WEIGHTS_FILE,
            remedy="save it with safetensors, or set LORA_PLUGINS_ALLOW_PICKLE=1 if you trust its source",
            file=pickle,
        )
    return pickle


def check_size(size_bytes: int, settings: Settings) -> None:
    """Refuse configuration and weights that together exceed `max_adapter_bytes`.

    Raises:
        InvalidAdapter: both together are larger.
    """
    if size_bytes > settings.max_adapter_bytes:
        raise InvalidAdapter(
            f"{size_bytes} bytes",
            expected=f"at most {settings.max_adapter_bytes}",
            remedy="raise LORA_PLUGINS_MAX_ADAPTER_BYTES",
        )


def _read_config(directory: Path) -> tuple[AdapterConfig, int]:
    with open_regular(directory / CONFIG_FILE) as (file, config_bytes):
        return parse_config(file.read(MAX_CONFIG_BYTES + 1)), config_bytes
