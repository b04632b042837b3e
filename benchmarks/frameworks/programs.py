"""Programs beside the frameworks' packages (`testbed.frameworks.packages`), for `make test-trainers`.

    python -m benchmarks.frameworks.programs FUNCTION ARGUMENT…

Each is a process of its own, and prints a line of JSON; arguments are JSON where they are no paths and no URLs.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
import time
import typing
import uuid
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}

# --- two versions, the second handed over beside rollouts ---


def art(url: str, base: str, first: str, second: str, folder: str, prompt: list[int], tokens: int) -> None:
    """ART's service loads a step and prunes the step before, beside rollouts of it.

    The service of art/unsloth/service.py, whose vLLM is the server at URL: it is asked neither to start one nor to
    train.
    """
    from art.unsloth.service import UnslothService

    service = UnslothService("policy", base, {"rollout_weights_mode": "lora"}, folder)
    service._vllm_port = urlsplit(url).port

    async def rollout(step: int) -> Any:
        body = {"model": f"policy@{step}", "prompt": prompt, "max_tokens": tokens, **GREEDY}
        async with httpx.AsyncClient(timeout=300) as client:
            answer = await client.post(f"{url}/v1/completions", json=body)
        return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.text[:300]

    async def run() -> dict[str, Any]:
        await service.register_lora_for_step(1, first)
        running = [asyncio.create_task(rollout(1)) for _ in range(10)]
        await asyncio.sleep(1)
        await service.register_lora_for_step(2, second)
        began, error = time.perf_counter(), ""
        try:
            await service.prune_loaded_adapters(retain_steps={2})
        except httpx.HTTPError as raised:  # its own limit is 30 s
            error = repr(raised)
        prune_s, were_running = time.perf_counter() - began, sum(not one.done() for one in running)
        said = {"1": await asyncio.gather(*running), "2": [await rollout(2)], "1, pruned": [await rollout(1)]}
        return {"said": said, "unload_s": round(prune_s, 4), "error": error, "running": were_running}

    print(json.dumps(asyncio.run(run())))


def skyrl(url: str, base: str, first: str, second: str, folder: str, prompt: list[int], tokens: int) -> None:
    """SkyRL's client hands over two versions at one path, the second beside rollouts.

    As its workers do (workers/fsdp/fsdp_worker.py), and its asynchronous trainer, between a pause with `keep` and a
    resume.
    """
    _allow_typed_dicts()
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    client = RemoteInferenceClient(url, [url], 1, base, uses_lora_weight_sync=True)

    async def hand_over(version: str) -> None:
        await client.pause_generation()
        shutil.copytree(version, folder, dirs_exist_ok=True)
        await client.load_lora_adapter("skyrl-lora", folder)
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.resume_generation()

    async def rollout(count: int) -> Any:
        body = {"model": "skyrl-lora", "prompt": prompt, "max_tokens": count, **GREEDY}
        try:
            answer = await client.completion({"json": body})
        except Exception as error:
            return repr(error)[:300]
        return answer["choices"][0]["token_ids"]

    async def run() -> None:
        await hand_over(first)
        said = {"1": [await rollout(16)]}
        running = [asyncio.create_task(rollout(tokens)) for _ in range(4)]
        await asyncio.sleep(1)
        await hand_over(second)
        said |= {"2": [await rollout(16)], "running": await asyncio.gather(*running)}
        began = time.perf_counter()
        await client.unload_lora_adapter("skyrl-lora")
        unload_s = round(time.perf_counter() - began, 4)
        said["unloaded"] = [await rollout(16)]
        print(json.dumps({"said": said, "unload_s": unload_s}))
        await client.teardown()

    asyncio.run(run())


def skyrl_server() -> None:
    """`vllm serve` with the routes of SkyRL's own server; takes the arguments of `vllm`.

    SkyRL 0.3.0's own start imports a module that vLLM 0.32 has moved; its routes are the ones it would add.
    """
    _allow_typed_dicts()
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.entrypoints.launchers.api_server import entry

    from testbed.frameworks.packages import FOLDER

    sys.path.insert(0, str(FOLDER))
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

    original: Any = entry.build_app

    def build_app(*args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)

        def reset_prefix_cache(**more: Any) -> Any:
            return app.state.engine_client.reset_prefix_cache(**more)  # which the app has later than its routes

        engine = SimpleNamespace(reset_prefix_cache=reset_prefix_cache)
        VLLMServerActor._add_custom_endpoints(app, engine, SimpleNamespace(enable_lora=True))
        return app

    entry.build_app = build_app
    vllm_main()


def _allow_typed_dicts() -> None:
    """Pydantic wants Python 3.12 of SkyRL's typed dictionaries else."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


# --- TRL ---


def trl_client(url: str, directory: str, idle: int, in_use: int) -> None:
    """TRL's own VLLMClient unloads adapters beside eight streams.

    So many names are loaded and unloaded that nobody uses, then so many with a rollout that has begun.
    """
    import requests
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState(cpu=True)
    client, mark, has_ended = VLLMClient(url), f"unloads-{time.time_ns()}", threading.Event()
    whole = (48, "length")  # of a rollout: its tokens, and why it ends

    def rollout(model: str, tokens: int, on_first: Any = lambda: None) -> tuple[int, str | None]:
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
        count, reason = 0, None
        with requests.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, stream=True) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "choices" not in chunk:
                        return count, line.decode()[:200]
                    (choice,) = chunk["choices"]
                    count += len(choice["token_ids"] or ())
                    reason = choice["finish_reason"] or reason
                    on_first()
        on_first()
        return count, reason

    def stream() -> None:
        while not has_ended.is_set():
            rollout(f"{mark}-streams", 64)

    def unload_s(name: str) -> float:
        began = time.perf_counter()
        client.unload_lora_adapter(name)
        return round(time.perf_counter() - began, 5)

    client.load_lora_adapter(f"{mark}-streams", directory)
    streams = [threading.Thread(target=stream) for _ in range(8)]
    for one in streams:
        one.start()
    rows: dict[str, list[Any]] = {"idle_s": [], "in_use_s": [], "faults": []}
    for number in range(idle):
        client.load_lora_adapter(f"{mark}-{number}", directory)
        rows["idle_s"].append(unload_s(f"{mark}-{number}"))
    for number in range(in_use):
        name, has_begun, ended = f"{mark}-used-{number}", threading.Event(), []
        client.load_lora_adapter(name, directory)
        asked = threading.Thread(target=lambda: ended.append(rollout(name, whole[0], has_begun.set)))  # noqa: B023
        asked.start()
        has_begun.wait()
        rows["in_use_s"].append(unload_s(name))
        asked.join()
        rows["faults"] += [one for one in ended if one != whole]
    has_ended.set()
    for one in streams:
        one.join()
    client.unload_lora_adapter(f"{mark}-streams")
    print(json.dumps(rows))


PROMPTS = (
    "Tell a long story of a ship and its crew.", "Write down all that you know of trees.", "What is the sea?",
    "Describe a town in winter, house by house.", "Name ten birds, and say where each lives.", "Explain bread.",
    "Tell me about the moon, and about every planet.", "Write a long letter to a friend.",
)  # fmt: skip
ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}


def trl_trainer(url: str, base: str, folder: str, steps: int, staleness: int, tokens: int) -> None:
    """TRL's AsyncGRPOTrainer with nothing of it changed but its GPU kernel.

    What is not TRL's: attention over packed sequences, for which TRL has a CUDA kernel only (FlashAttention), in torch;
    the peak FLOPS of a device, which CPUs lack; and a fingerprint of the data set, as datasets 5.2.0 cannot pickle it
    here. The tokenizer has a response template, which TRL asks its users for where it does not know a chat template.
    """
    import datasets.arrow_dataset
    import torch
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    torch.set_num_threads(1)
    datasets.arrow_dataset.generate_fingerprint = lambda *_, **__: uuid.uuid4().hex
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.response_template = ANSWER
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    arguments = AsyncGRPOConfig(
        folder, vllm_server_base_url=url, max_steps=steps, max_staleness=staleness, max_completion_length=tokens,
        per_device_train_batch_size=4, num_generations=4, max_inflight_tasks=8, token_budget=600, learning_rate=3e-3,
        gradient_accumulation_steps=1, gradient_checkpointing=False, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", logging_steps=1, seed=steps,
    )  # fmt: skip
    AsyncGRPOTrainer(
        base, _reward, arguments, datasets.Dataset.from_list(rows), processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    ).train()  # fmt: skip


def _reward(completions: list[Any], **_: Any) -> list[float]:
    return [sum(letter == "e" for letter in one[0]["content"]) / (1 + len(one[0]["content"])) for one in completions]


def _attention(
    queries: Any, keys: Any, values: Any, starts: Any, key_starts: Any, longest: int, longest_keys: int,
    softmax_scale: float | None = None, **_: Any,
) -> Any:  # fmt: skip
    """FlashAttention's `flash_attn_varlen_func` for causal attention."""
    import torch

    answers, repeats = [], queries.shape[1] // keys.shape[1]
    for begin, end, key_begin, key_end in zip(starts[:-1], starts[1:], key_starts[:-1], key_starts[1:], strict=True):
        query = queries[begin:end].transpose(0, 1)
        key, value = (it[key_begin:key_end].transpose(0, 1).repeat_interleave(repeats, 0) for it in (keys, values))
        rows, columns = query.shape[1], key.shape[1]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        of_one = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale)
        answers.append(of_one.transpose(0, 1))
    return torch.cat(answers)


def _read(argument: str) -> Any:
    return json.loads(argument) if argument[0] in "[0123456789" else argument


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(_read, sys.argv[2:]))
