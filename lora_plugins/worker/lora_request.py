"""vLLM's `LoRARequest`, and the classes that frameworks put in its place or derive from it."""

from __future__ import annotations

from typing import Any

from lora_plugins.ledger import Patch


def lora_request(name: str, engine_id: int, path: str, *, is_3d: bool = False) -> Any:
    """One that names an adapter by these, and nothing else."""
    from vllm.lora.request import LoRARequest

    request = LoRARequest(lora_name=name, lora_int_id=engine_id, lora_path=path)
    if is_3d:  # a class of Unsloth's, which may stand in the place of vLLM's, has no such field
        request.is_3d_lora_weight = True
    return request


def is_vllms(request: Any) -> bool:
    """Whether its class is vLLM's: all that there is to load is at its path then."""
    return type(request).__module__ == "vllm.lora.request"


def is_inplace(request: Any) -> bool:
    """Whether it has an adapter loaded again, in the place of what its id has stood for; not every class can say so."""
    return bool(getattr(request, "load_inplace", False))


LEDGER = (
    Patch(
        """
        vllm.lora.request:
            LoRARequest{lora_name, lora_int_id, lora_path, load_inplace, is_3d_lora_weight}
        """,
        what="made, and told from the classes of others by its module",
        why="a request of another class may hold weights, which only its own _load_adapter knows to take",
    ),
)
