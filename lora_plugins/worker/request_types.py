"""vLLM's `LoRARequest`, and the classes that frameworks put in its place or derive from it.

API server, engine core and workers ask here what kind of request they were given.

Touches: vllm.lora.request: LoRARequest{lora_name, lora_int_id, lora_path, load_inplace}
Why: a request of another class may hold weights, which only its own _load_adapter knows to take.
"""

from __future__ import annotations

from typing import Any


def lora_request(name: str, engine_id: int, path: str) -> Any:
    """Return a request that names an adapter by its name, engine id and path, and nothing else."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=engine_id, lora_path=path)


def is_vllms(request: Any) -> bool:
    """Whether the request's class is vLLM's: then the path has everything that there is to load."""
    return type(request).__module__ == "vllm.lora.request"


def is_inplace(request: Any) -> bool:
    """Whether the request replaces the adapter of its id; other classes may lack the field."""
    return bool(getattr(request, "load_inplace", False))
