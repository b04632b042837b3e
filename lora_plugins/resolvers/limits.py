"""What may be fetched at all: decided by names and sizes, before the first byte."""

from __future__ import annotations

from dataclasses import replace

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.verify import PICKLE_FILES, WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, InvalidAdapter
from lora_plugins.resolvers.sources.source import RemoteAdapter
from lora_plugins.settings import Settings


def admit(located: RemoteAdapter, settings: Settings) -> RemoteAdapter:
    """The same adapter with only the files that will be read.

    Raises:
        AdapterNotFound: it has no weights.
        InvalidAdapter: its weights are a pickle, which is not allowed, or its files are too large together.
    """
    names = {file.name for file in located.files}
    weights = next((name for name in (WEIGHTS_FILE, *PICKLE_FILES) if name in names), None)
    if weights is None:
        raise AdapterNotFound(
            "no such file",
            expected="the adapter's weights",
            remedy="save the adapter again with PEFT",
            file=WEIGHTS_FILE,
        )
    if weights != WEIGHTS_FILE and not settings.allow_pickle:
        raise InvalidAdapter(
            "a pickle, which can run code when it is loaded",
            expected=WEIGHTS_FILE,
            remedy="save it with safetensors, or set LORA_PLUGINS_ALLOW_PICKLE=1 if you trust its source",
            file=weights,
        )
    files = tuple(file for file in located.files if file.name in (CONFIG_FILE, weights))
    size_bytes = sum(file.size_bytes for file in files)
    if size_bytes > settings.max_adapter_bytes:
        raise InvalidAdapter(
            f"{size_bytes} bytes",
            expected=f"at most {settings.max_adapter_bytes}",
            remedy="raise LORA_PLUGINS_MAX_ADAPTER_BYTES",
            file=weights,
        )
    return replace(located, files=files)
