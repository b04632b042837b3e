"""Connectors of KV caches and encoder caches that write down what vLLM's scheduler says, as users' own would."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class KVRecorder(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Attributes: heard: requests that came, and that ended with a status, in this order."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.heard: list[tuple[str, ...]] = []

    def on_new_request(self, request: Any) -> None:
        self.heard.append(("came", request.request_id))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.heard.append(("ended", request.request_id, request.status.name))
        return False, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def _nothing(self, *arguments: Any, **more: Any) -> None: ...

    update_state_after_alloc = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing


class ECRecorder(ECConnectorBase):  # type: ignore[misc]
    """Attributes: heard: requests that ended with a status, in this order; arrivals are unknown to these."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.heard: list[tuple[str, ...]] = []

    def request_finished(self, request: Any) -> tuple[bool, None]:
        self.heard.append(("ended", request.request_id, request.status.name))
        return False, None

    def has_cache_item(self, *arguments: Any, **more: Any) -> bool:
        return False

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        return ECConnectorMetadata()

    def _nothing(self, *arguments: Any, **more: Any) -> None: ...

    update_state_after_alloc = start_load_caches = save_caches = ensure_cache_available = _nothing


class SubclassOfExample(ExampleConnector):  # type: ignore[misc]
    """A user's own, with vLLM's example's keys."""
