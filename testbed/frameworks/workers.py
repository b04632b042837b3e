"""What frameworks do inside vLLM's workers, by a worker extension: `--worker-extension-cls ...workers.Workers`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vllm.lora.request import LoRARequest

from testbed.frameworks.engines import Engine, Said
from testbed.frameworks.tensors import STUB_PATH, patch_loader, request_with_tensors
from testbed.frameworks.versions import Files

VERL_ID = 123
SWIFT_ID = 112


class Workers:
    """Methods of a worker, for `collective_rpc`."""

    add_lora: Any
    remove_lora: Any

    def __new__(cls, **_: Any) -> Any:
        patch_loader()  # before the worker has a manager, as verl does
        return super().__new__(cls)

    def frameworks_remove_and_add_tensors(self, number: int, directory: str) -> list[bool]:
        """As verl's: whatever has the id is removed, then the new tensors are added."""
        removed = bool(self.remove_lora(number))
        return [removed, bool(self.add_lora(request_with_tensors(str(number), number, directory)))]

    def frameworks_remove(self, number: int) -> bool:
        return bool(self.remove_lora(number))

    def frameworks_add_tensors_in_place(self, number: int, directory: str) -> bool:
        """As ms-swift's server does it."""
        return bool(self.add_lora(request_with_tensors("trained", number, directory, load_inplace=True)))

    def frameworks_reload_path(self, name: str, number: int, path: str) -> list[bool]:
        removed = bool(self.remove_lora(number))
        return [removed, bool(self.add_lora(LoRARequest(name, number, path)))]


async def verl(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Workers remove and add tensors; each request asks first whether the id is loaded, and names a stub path."""
    for version in ("v1", "v2"):
        await engine.workers("frameworks_remove_and_add_tensors", VERL_ID, files.of(version))
        await engine.call("reset_prefix_cache")
        yield version, await engine.ask(await _loaded(engine, str(VERL_ID), VERL_ID))


async def swift_server(engine: Engine, files: Files) -> AsyncIterator[tuple[str, Said]]:
    """Workers add tensors with `load_inplace`; each request asks first whether the id is loaded."""
    for version in ("v1", "v2"):
        await engine.workers("frameworks_add_tensors_in_place", SWIFT_ID, files.of(version))
        await engine.call("reset_prefix_cache")
        yield version, await engine.ask(await _loaded(engine, "trained", SWIFT_ID))


async def _loaded(engine: Engine, name: str, number: int) -> LoRARequest | None:
    """A request for it, if the engine has it; without an adapter otherwise, as the frameworks do."""
    listed = await engine.call("list_loras")
    return LoRARequest(name, number, STUB_PATH) if number in listed else None
