"""KV connectors that find blocks by their tokens alone mix adapters: an engine with LoRA does not start with one.

`judge` runs as the configuration of an engine is made (`engine_args.py`). The KV blocks of a request depend on its
adapter, too, and vLLM's block hashes hold the adapter's name and path. A connector with keys of its own hands blocks
of one adapter, version or the base model to requests of others, and nobody notices. The modules of connectors below
were read in vLLM 0.30 to 0.33, LMCache 0.5.6 and FlexKV; an unknown connector gets a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from multiprocessing import parent_process
from typing import Any

from lora_plugins.errors import InvalidSettings
from lora_plugins.log import logger

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1."
_BY_TOKENS = (
    *(f"{_V1}{name}." for name in ("example_connector", "hf3fs", "lmcache_connector", "lmcache_mp_connector")),
    *(f"{_V1}flexkv_connector.", "flexkv.", "lmcache."),
)
_SAFE = tuple(
    f"{_V1}{name}."
    for name in (
        # By vLLM's block hashes.
        "offloading_connector", "simple_cpu_offload_connector", "mooncake.store", "umbp",
        # Blocks of one request, or none.
        "nixl", "moriio", "mooncake.mooncake_connector", "hisparse", "decode_bench_connector",
        "example_hidden_states_connector", "multi_connector",
    )
)  # fmt: skip


def is_known(kind: type) -> bool:
    """Return whether we have read how a class of connectors finds blocks, or a class that it is made of."""
    return _is_of(kind, _BY_TOKENS + _SAFE)


def judge(config: Any) -> None:
    """Raise where an engine with LoRA has a connector that finds blocks by their tokens alone.

    Touches:
        vllm.distributed.kv_transfer.kv_connector.factory:
            KVConnectorFactory.get_connector_class(cls, kv_transfer_config)
        vllm.config.kv_transfer: KVTransferConfig{kv_connector, kv_connector_extra_config}
        vllm.config.vllm: VllmConfig{lora_config, kv_transfer_config}
    Why: such a connector gives a request the blocks of another adapter (vllm-project/vllm#44250).
    Until: the keys of every connector of vLLM's hold the adapter.
    """
    if config.lora_config is None or config.kv_transfer_config is None:
        return
    kinds = list(_classes(config.kv_transfer_config))
    by_tokens = [kind.__name__ for kind in kinds if _is_of(kind, _BY_TOKENS)]
    if by_tokens:
        raise InvalidSettings(
            f"--enable-lora with the KV connector {', '.join(by_tokens)}, which finds blocks by their tokens alone: "
            "requests would go on from what another adapter, another version or the base model has computed",
            expected="a connector that finds blocks by vLLM's block hashes, or passes on the blocks of one request",
            remedy="name OffloadingConnector, SimpleCPUOffloadConnector or MooncakeStoreConnector, or leave "
            "--kv-transfer-config (--kv-offloading-backend lmcache) out",
        )
    for kind in kinds:
        if not is_known(kind) and parent_process() is None:
            _warn(f"{kind.__module__}.{kind.__qualname__}")


@functools.cache  # once for each name
def _warn(name: str) -> None:
    logger.warning(
        "The KV connector %s is unknown to lora-plugins. Where it shares blocks between requests, it must find them by "
        "vLLM's block hashes: by tokens alone it would mix adapters and their versions",
        name,
    )


def _classes(transfer: Any) -> Iterator[type]:
    """Yield the class of a connector, and those behind vLLM's MultiConnector."""
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if transfer.kv_connector is not None:
        yield KVConnectorFactory.get_connector_class(transfer)
    if transfer.kv_connector == "MultiConnector":
        for child in transfer.kv_connector_extra_config.get("connectors", ()):
            yield from _classes(KVTransferConfig(**child))


def _is_of(kind: type, modules: tuple[str, ...]) -> bool:
    return any(f"{one.__module__}.".startswith(modules) for one in kind.__mro__)
