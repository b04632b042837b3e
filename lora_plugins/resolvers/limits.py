"""What may be fetched at all: decided by names and sizes, before the first byte."""

from __future__ import annotations

from dataclasses import replace

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.verify import check_size, choose_weights
from lora_plugins.adapter.weight_files import INDEX_FILE, check_shards, is_shard
from lora_plugins.errors import describing
from lora_plugins.resolvers.sources.source import RemoteAdapter
from lora_plugins.settings import Settings


def select_files(adapter: RemoteAdapter, settings: Settings) -> RemoteAdapter:
    """The same adapter with only the files that will be read.

    Raises:
        AdapterNotFound: it has no weights.
        InvalidAdapter: its weights are a pickle, which is not allowed, or its files are too many or too large together.
    """
    weights = choose_weights({file.name for file in adapter.files}, settings)
    if weights == INDEX_FILE:
        check_shards(file.name for file in adapter.files if is_shard(file.name))
    files = tuple(
        file
        for file in adapter.files
        if file.name in (CONFIG_FILE, weights) or (weights == INDEX_FILE and is_shard(file.name))
    )
    with describing(file=weights):
        check_size(sum(file.size_bytes for file in files), settings)
    return replace(adapter, files=files)
