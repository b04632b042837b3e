"""What is read off the server: the served model's names, and the largest rank."""

from __future__ import annotations

from types import SimpleNamespace

from lora_plugins.adapter.fit import BaseModel
from lora_plugins.server.base_model import describe_base
from lora_plugins.settings import Settings


def served(lora_config: object) -> SimpleNamespace:
    """What `describe_base` reads off vLLM's OpenAIServingModels."""
    return SimpleNamespace(
        engine_client=SimpleNamespace(vllm_config=SimpleNamespace(lora_config=lora_config)),
        model_config=SimpleNamespace(model="org/tiny"),
        base_model_paths=[SimpleNamespace(name="tiny"), SimpleNamespace(name="tiny-2")],
    )


def test_the_base_model_is_read_off_the_server():
    base = describe_base(served(SimpleNamespace(max_lora_rank=64)), Settings(base_aliases=("alias",)))
    assert (base.path, base.served_names, base.aliases) == ("org/tiny", ("tiny", "tiny-2"), ("alias",))
    assert (base.max_rank, base.lora_enabled) == (64, True)
    assert base.model is None, "the engine has not been asked"


def test_a_server_without_lora_is_seen():
    base = describe_base(served(None), Settings())
    assert isinstance(base, BaseModel)
    assert (base.max_rank, base.lora_enabled) == (None, False)
