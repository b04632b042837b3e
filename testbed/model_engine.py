"""One tiny model in this process: made with Transformers and PEFT, then served by vLLM's engine with our plugins.

Everything that `testbed.forked_engines` lets a test call; what it returns can be pickled.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from lora_plugins.adapter.model_modules import ModelModules
from testbed import speech
from testbed.architectures import Architecture
from testbed.loads_whole import loads_whole
from testbed.model_builder import MAX_TOKENS, PROMPT, STANDARD_DEVIATION, build, build_from_description
from testbed.model_kinds import ask_in_this_process

MAX_RANK = 16
PLUGINS = "lora_filesystem_resolver,lora_lru_manager,lora_kernels"


class ModelEngine:
    """Its base model lies in `directory / "base"`, the adapters, by their kind, in `directory / "adapters"`."""

    def __init__(self, architecture: Architecture, directory: Path, *, with_plugins: bool) -> None:
        self.architecture = architecture
        self.directory = directory
        self.base = directory / "base"
        self.adapters = directory / "adapters"
        self.adapters.mkdir(parents=True, exist_ok=True)
        self.with_plugins = with_plugins
        self._llm: Any = None
        self._worker_manager: Any = None
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()

    def build(self) -> dict[str, list[float] | str]:
        """See `testbed.model_builder.build`."""
        return build(self.architecture, self.base, self.adapters)

    def build_from_description(self, plain: Mapping[str, Any]) -> list[str]:
        """See `testbed.model_builder.build_from_description`."""
        return build_from_description(self.architecture, self.base, self.adapters, ModelModules.of_plain(plain))

    def start(self) -> dict[str, Any]:
        """Make the engine; what it says of its modules, as plain values."""
        self._set_up()
        if self.architecture.only:
            _compute_experts_without_triton()
        from vllm import LLM

        self._llm = LLM(**self._arguments(), disable_log_stats=True)
        worker = self._llm.llm_engine.model_executor.driver_worker.worker
        self._worker_manager = worker.model_runner.lora_manager
        return self._describe()

    def make(self, **lora: Any) -> dict[str, Any]:
        """Make the model with vLLM's manager of adapters, and no engine; what it says of its modules.

        Args:
            lora: further fields of vLLM's `LoRAConfig`.
        """
        self._set_up()
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
        from vllm.model_executor.model_loader import get_model

        arguments = {**self._arguments(), **lora, "lora_target_modules": None, "load_format": "dummy"}
        config = EngineArgs(**arguments).create_engine_config()
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(1, 0, f"file://{self.directory / 'rendezvous'}", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
            model = get_model(vllm_config=config)
            embeddings = getattr(model, "embedding_modules", {})
            self._worker_manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), embeddings)
            self._worker_manager.create_lora_manager(model, config)
        return self._describe()

    def _set_up(self) -> None:
        os.environ["VLLM_PLUGINS"] = PLUGINS if self.with_plugins else ""
        os.environ["VLLM_LORA_RESOLVER_CACHE_DIR"] = str(self.adapters)
        os.environ["LORA_PLUGINS_STORE_DIR"] = str(self.directory / "store")
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        _without_torchvision()
        ask_in_this_process()
        if not self.architecture.has_peft:
            _random_weights()
        from vllm.plugins import load_general_plugins

        load_general_plugins()

    def _arguments(self) -> dict[str, Any]:
        """Of vLLM's `EngineArgs`."""
        return {
            "model": str(self.base),
            "enable_lora": True,
            "max_loras": 8,
            "max_cpu_loras": 16,
            "max_lora_rank": MAX_RANK,
            "lora_target_modules": list(self.architecture.only) or None,
            "dtype": self.architecture.dtype,
            "runner": "pooling" if self.architecture.pooled else "generate",
            "language_model_only": self.architecture.is_wrapper,
            "load_format": "auto" if self.architecture.has_peft else "dummy",
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048
            if self.architecture.hears
            else 256,  # the audios of all requests in one step
            "enable_tower_connector_lora": self.architecture.hears,
            "kv_cache_memory_bytes": 32 << 20,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": self.architecture.pooled in ("", "labels") and not self.architecture.hears,
            "distributed_executor_backend": "uni",
            # On processors with AMX vLLM 0.32 takes a backend that has no float32.
            **({"attention_backend": "CPU_MLA"} if "kv_lora_rank" in self.architecture.config else {}),
        }

    def _describe(self) -> dict[str, Any]:
        from lora_plugins.worker.model_description import describe

        return describe(self._worker_manager._adapter_manager).plain()

    def answers(self, names: Sequence[str]) -> dict[str, list[float] | str]:
        """Greedy tokens of the base model ("") and of each adapter, all in one batch; or the error of a name.

        Of a model that generates nothing: its numbers.
        """
        requests = self._requests(names)
        good = {name: request for name, request in requests.items() if not isinstance(request, str)}
        found: dict[str, list[float] | str] = {name: request for name, request in requests.items() if name not in good}
        return found | dict(zip(("", *good), self._asked([None, *good.values()]), strict=True))

    def _asked(self, requests: Sequence[Any]) -> list[list[float] | str]:
        from vllm import SamplingParams

        prompt = speech.prompt(speech.inputs(self.base)[1]) if self.architecture.hears else {"prompt_token_ids": PROMPT}
        prompts, pooled = [prompt] * len(requests), self.architecture.pooled
        if pooled == "labels":
            return [one.outputs.probs for one in self._llm.classify(prompts, lora_request=requests, use_tqdm=False)]
        if pooled:
            return [one.outputs.embedding for one in self._llm.embed(prompts, lora_request=requests, use_tqdm=False)]
        parameters = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate(prompts, parameters, lora_request=requests, use_tqdm=False)
        return [list(one.outputs[0].token_ids) or str(one.outputs[0].stop_reason) for one in outputs]

    def prompt_logprobs(self, names: Sequence[str]) -> list[list[float]]:
        """Of each token of the prompt but the first: of the base model, then of each adapter, alone in its batch."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        found = []
        for request in (None, *self._requests(names).values()):
            prompt = {"prompt_token_ids": PROMPT}
            (output,) = self._llm.generate(prompt, parameters, lora_request=request, use_tqdm=False)
            given = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
            found.append([one[token].logprob for one, token in given])
        return found

    def never_called(self) -> list[str]:
        """Which of the modules that vLLM has wrapped a request does not call, neither in its prompt nor in decode."""
        modules = self._worker_manager._adapter_manager.modules
        called: set[str] = set()
        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name)) for name, module in modules.items()
        ]
        self.answers([])
        for hook in hooks:
            hook.remove()
        return sorted(modules.keys() - called)

    def verdict(self, name: str) -> tuple[str, str, str]:
        """Texts, empty where all is well: our error for this adapter, why vLLM's own loading does not take it whole,

        and why it does not take what our resolver made of it.
        """
        (answer,) = self._requests([name]).values()
        vllm = loads_whole(self._worker_manager, self.adapters / name)
        if isinstance(answer, str):
            return answer, vllm, ""
        stored = Path(answer.lora_path)
        return "", vllm, loads_whole(self._worker_manager, stored, is_3d=answer.is_3d_lora_weight)

    def verdict_of(self, shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> tuple[str, str, str]:
        """As `verdict`, of an adapter of zeros with tensors of these names and shapes."""
        import torch
        from safetensors.torch import save_file

        directory = self.adapters / f"generated-{next(self._numbers)}"
        directory.mkdir()
        tensors = {name: torch.zeros(*shape) for name, shape in shapes.items()}
        save_file(tensors, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text(json.dumps(config))
        return self.verdict(directory.name)

    def _requests(self, names: Sequence[str]) -> dict[str, Any]:
        """What a server would give its engine for each name: through our resolver where the plugins are there."""
        from vllm.lora.request import LoRARequest

        if not self.with_plugins:
            return {name: LoRARequest(name, number, str(self.adapters / name)) for number, name in enumerate(names, 1)}
        return self._loop.run_until_complete(self._resolved(names))

    async def _resolved(self, names: Sequence[str]) -> dict[str, Any]:
        import msgspec

        found: dict[str, Any] = {}
        for name in names:
            try:
                request = await self._resolver.resolve_lora(str(self.base), name)
            except Exception as error:
                found[name] = str(error)
                continue
            found[name] = msgspec.structs.replace(request, lora_int_id=next(self._numbers))
        return found

    @functools.cached_property
    def _resolver(self) -> Any:
        """The one that our plugin has registered, bound as a server binds it."""
        from vllm.lora.resolver import LoRAResolverRegistry

        from lora_plugins.process import this_process
        from lora_plugins.vllm_patches.api_server.lora_resolver import REGISTRY_NAME, begin_serving

        async def collective_rpc(method: str) -> list[Any]:
            return self._llm.collective_rpc(method) if self._llm else [self._describe()]

        lora_config = self._worker_manager.lora_config
        client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=lora_config), collective_rpc=collective_rpc)
        model_config = SimpleNamespace(model=str(self.base))
        resolver = LoRAResolverRegistry.get_resolver(REGISTRY_NAME)
        served = SimpleNamespace(engine_client=client, model_config=model_config, base_model_paths=[])
        begin_serving(served, this_process())
        return resolver


def _without_torchvision() -> None:
    """Have classes that also see images imported where torchvision, which they need for images, is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__getattr__ = lambda _: None  # type: ignore[method-assign]
        sys.modules[name] = module


def _compute_experts_without_triton() -> None:
    """Have vLLM choose kernels for experts that no adapter is for, which its CPU build has."""
    from vllm.model_executor.layers.fused_moe import layer

    original = layer.FusedMoEConfig
    layer.FusedMoEConfig = lambda **values: original(**{**values, "is_lora_enabled": False})


def _random_weights() -> None:
    """Have `--load-format dummy` give every parameter values that only its name decides."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    def initialise(model: Any, *_: Any, **__: Any) -> None:
        for name, parameter in model.named_parameters():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
            if not parameter.is_floating_point():  # of a quantised model
                with torch.no_grad():
                    parameter.random_(-100, 101, generator=torch.Generator().manual_seed(seed))
            elif "scale" in name:
                parameter.data.fill_(STANDARD_DEVIATION / 58)  # the standard deviation of these integers
            elif parameter.dim() > 1:
                with torch.no_grad():
                    parameter.normal_(0.0, STANDARD_DEVIATION, generator=torch.Generator().manual_seed(seed))
            elif name.endswith("weight"):
                parameter.data.fill_(1.0)
            else:
                parameter.data.zero_()

    dummy_loader.initialize_dummy_weights = initialise
