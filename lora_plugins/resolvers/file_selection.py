"""Which of a located adapter's files are fetched: configuration, weights, and files for chats.

Runs on the event loop of an API server before each fetch, and in `lora-plugins pull --dry-run`. In goes an adapter as a
source lists it, with all its files; out come the names or the adapter with the files to fetch. No file is opened.
"""

from __future__ import annotations

from dataclasses import replace

from lora_plugins.adapter.chat import MAX_BYTES, chat_files
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.verify import check_size, choose_weights
from lora_plugins.adapter.weight_files import INDEX_FILE, check_shards, is_shard
from lora_plugins.adapter.writers import name_format
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, describing
from lora_plugins.resolvers.sources.source import RemoteAdapter
from lora_plugins.settings import AdapterChat, Settings


def select_files(adapter: RemoteAdapter, settings: Settings) -> RemoteAdapter:
    """The adapter with only the files to fetch.

    Raises:
        AdapterNotFound: the adapter has no weights.
        InvalidAdapter: the weights are a pickle, which is not allowed, there are too many or too large files, or with
            LORA_PLUGINS_ADAPTER_CHAT=strict a file for chats is too large.
    """
    names = {file.name for file in adapter.files}
    try:
        weights = choose_weights(names, settings)
    except AdapterNotFound as error:
        name_format(error, names)
        raise
    chosen = {CONFIG_FILE, weights}
    if weights == INDEX_FILE:
        shards = {name for name in names if is_shard(name)}
        check_shards(shards)
        chosen |= shards
    files = [file for file in adapter.files if file.name in chosen]
    with describing(file=weights):
        check_size(sum(file.size_bytes for file in files), settings)
    if settings.adapter_chat is AdapterChat.STRICT and (large := large_chat_files(adapter)):
        remedy = "save the tokenizer again, or set LORA_PLUGINS_ADAPTER_CHAT=adapter to leave the file out"
        expected = f"at most {MAX_BYTES[large[0]]} bytes, as LORA_PLUGINS_ADAPTER_CHAT=strict"
        raise InvalidAdapter("too large a file", expected=expected, remedy=remedy, file=large[0])
    of_chats = chat_files_to_fetch(adapter, settings)
    return replace(adapter, files=(*files, *(file for file in adapter.files if file.name in of_chats)))


def chat_files_to_fetch(adapter: RemoteAdapter, settings: Settings) -> tuple[str, ...]:
    """The names of the adapter's files for chats, without too large files; none where the server reads none."""
    if not settings.adapter_chat.reads_files:
        return ()
    large = large_chat_files(adapter)
    return chat_files(file.name for file in adapter.files if file.name not in large)


def large_chat_files(adapter: RemoteAdapter) -> list[str]:
    """The names of files for chats that are larger than the limit of their kind, and so are left out."""
    return [file.name for file in adapter.files if file.size_bytes > MAX_BYTES.get(file.name, file.size_bytes)]
