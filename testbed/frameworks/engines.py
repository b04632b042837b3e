"""vLLM's engine with one set of calls, whether it is `LLM` in this process or `AsyncLLM` with one of its own."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from testbed.frameworks.versions import LONG, MAX_TOKENS, PROMPT, RANK

Said = list[int] | str  # an answer's token ids, or the text of an error
SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,  # three of the prompt are cached
    "max_model_len": 1000,
    "max_num_seqs": 16,
    "enable_lora": True,
    "max_lora_rank": RANK,
    "max_loras": 2,
    "max_cpu_loras": 4,
    "worker_extension_cls": "testbed.frameworks.workers.Workers",
}


class Engine(ABC):
    """A vLLM engine; `calls` has what was called and what it returned, or its error's text.

    Attributes:
        is_broken: it takes no more requests.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.calls: list[list[Any]] = []
        self.is_broken = False
        self._names = (f"request-{number}" for number in itertools.count())

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One of vLLM's own, such as `add_lora`; what it raises is noted and returned as text."""
        try:
            result = getattr(self.engine, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            result = text_of(error)
        self.calls.append([method, _plain(result)])
        return result

    async def workers(self, method: str, *args: Any) -> Any:
        """A method of every worker."""
        return await self.call("collective_rpc", method, args=args)

    async def ask(self, lora: Any, *, salt: str | None = None) -> Said:
        """The answer to the prompt that all are asked."""
        try:
            name = self._begin(lora, MAX_TOKENS, salt)
            return await self._end(name)
        except Exception as error:
            return text_of(error)

    async def begin(self, lora: Any) -> str:
        """Ask for a long answer, and return when it has begun."""
        name = self._begin(lora, LONG, None)
        await self._begun(name)
        return name

    async def end(self, name: str) -> Said:
        """The whole of an answer that was begun."""
        try:
            return await self._end(name)
        except Exception as error:
            return text_of(error)

    async def empty(self) -> None:
        """Remove what a form has left: adapters that nobody could load again keep their room."""
        listed = await self.call("list_loras")
        for number in listed if isinstance(listed, Collection) and not isinstance(listed, str) else ():
            await self.call("remove_lora", number)
        self.calls.clear()

    @abstractmethod
    def _begin(self, lora: Any, tokens: int, salt: str | None) -> str: ...
    @abstractmethod
    async def _begun(self, name: str) -> None: ...
    @abstractmethod
    async def _end(self, name: str) -> Said: ...


class Offline(Engine):
    """`LLM` with its engine in this process."""

    def __init__(self, **settings: Any) -> None:
        from vllm import LLM

        super().__init__(LLM(**settings).llm_engine)
        self._outputs: dict[str, Any] = {}

    def _begin(self, lora: Any, tokens: int, salt: str | None) -> str:
        name = next(self._names)
        self.engine.add_request(name, prompt_with(salt), sampling(tokens), lora_request=lora)
        return name

    async def _begun(self, name: str) -> None:
        while not self._has_ended(name) and (
            name not in self._outputs or len(self._outputs[name].outputs[0].token_ids) < 2
        ):
            self._step()

    async def _end(self, name: str) -> Said:
        while not self._has_ended(name):
            self._step()
        return said_in(self._outputs[name])

    def _has_ended(self, name: str) -> bool:
        return name in self._outputs and bool(self._outputs[name].finished)

    def _step(self) -> None:
        try:
            for output in self.engine.step():
                self._outputs[output.request_id] = output
        except Exception:
            self.is_broken = True
            raise


class Reading(Engine):
    """One whose answers are read in tasks; `_read` sets the event of its answer once that has begun."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._tasks: dict[str, asyncio.Task[Said]] = {}
        self._begins: dict[str, asyncio.Event] = {}

    def _begin(self, lora: Any, tokens: int, salt: str | None) -> str:
        name = next(self._names)
        self._begins[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._read(name, lora, tokens, salt))
        return name

    async def _begun(self, name: str) -> None:
        await self._begins[name].wait()

    async def _end(self, name: str) -> Said:
        return await self._tasks[name]

    @abstractmethod
    async def _read(self, name: str, lora: Any, tokens: int, salt: str | None) -> Said: ...


class Async(Reading):
    """`AsyncLLM`, its engine in a process of its own."""

    def __init__(self, **settings: Any) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        super().__init__(AsyncLLM.from_engine_args(AsyncEngineArgs(**settings)))

    async def _read(self, name: str, lora: Any, tokens: int, salt: str | None) -> Said:
        from vllm.v1.engine.exceptions import EngineDeadError

        last = None
        try:
            async for output in self.engine.generate(prompt_with(salt), sampling(tokens), name, lora_request=lora):
                last = output
                if len(output.outputs[0].token_ids) > 1:
                    self._begins[name].set()
        except EngineDeadError:
            self.is_broken = True
            raise
        finally:
            self._begins[name].set()
        return said_in(last)


def prompt_with(salt: str | None) -> Any:
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    if salt is not None:
        prompt["cache_salt"] = salt
    return prompt


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def said_in(output: Any) -> Said:
    """The tokens of an answer; of one that was refused, why."""
    one = output.outputs[0]
    return str(one.stop_reason) if one.finish_reason == "error" else list(one.token_ids)


def text_of(error: Exception) -> str:
    """What a caller sees of an error; vLLM's HTTP errors keep it in `detail`."""
    return f"{type(error).__name__}: {getattr(error, 'detail', error)}"[:300]


def _plain(result: Any) -> Any:
    """As JSON has it."""
    if isinstance(result, str) or not isinstance(result, Collection):
        return result if isinstance(result, bool | int | str | None) else str(result)
    values = [_plain(value) for value in result]
    return sorted(values) if isinstance(result, set | frozenset) else values
