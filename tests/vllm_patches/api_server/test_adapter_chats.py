"""vLLM's own renderer and input processor, with what adapters of the store bring for chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from lora_plugins.adapter.chat import AddedToken, Chat, read_chat
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.lifecycle.principal_limits import Share
from lora_plugins.lifecycle.response import Response
from lora_plugins.process import Process
from lora_plugins.settings import AdapterChat, Settings
from lora_plugins.vllm_patches.api_server import adapter_chats
from lora_plugins.vllm_patches.api_server.adapter_tokenizers import served_chat, tokenizer_of
from testbed.models import build_base, write_tokenizer
from tests.make import config_bytes, put

DIGEST, OTHER = "a1" * 32, "b2" * 32
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a template."""
    directory = build_base(tmp_path_factory.mktemp("chats") / "base")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    assert "chat_template" not in json.loads((directory / "tokenizer_config.json").read_text())
    return directory


@pytest.fixture(scope="module")
def vllm_config(model: Path) -> Any:
    return EngineArgs(model=str(model), enable_lora=True, max_lora_rank=8).create_engine_config()


@pytest.fixture
def store(process: Process, tmp_path: Path) -> Path:
    process.settings = Settings(store_dir=tmp_path / "store")
    adapter_chats.patch()
    return process.resolver.store.layout.root


@pytest.fixture
def processor(vllm_config: Any, store: Path) -> InputProcessor:
    return InputProcessor(vllm_config)


class Table:
    """vLLM's table of models, as far as it is looked at."""

    engine_client: Any = None
    lora_plugins_lifecycle: Any

    def __init__(self, **paths: str) -> None:
        self.lora_requests = {name: LoRARequest(name, i, path) for i, (name, path) in enumerate(paths.items(), 1)}


def write(directory: Path, template: str | None = None, eos_ids: object = None, eos: str | None = None) -> str:
    put(directory, {CONFIG_FILE: config_bytes()})  # what a version of the store always has
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if eos is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "bos_token": "<s>"}))
    if eos_ids is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    return str(directory)


def ids_of(processor: InputProcessor, path: str, **params: Any) -> SamplingParams:
    prompt = {"type": "token", "prompt_token_ids": [5, 6]}
    request = LoRARequest("sql", 1, path) if path else None
    made = processor.process_inputs("1", prompt, SamplingParams(**params), ("generate",), lora_request=request)
    assert made.sampling_params is not None
    return made.sampling_params


def rendered(
    process: Process, processor: InputProcessor, name: str, of_operator: str | None = None, **body: Any
) -> list[int]:
    renderer = OnlineRenderer(
        processor.model_config,
        processor.renderer,
        request_logger=None,
        chat_template=of_operator,
        chat_template_content_format="auto",
    )
    messages = [{"role": "user", "content": "quick"}]
    _, (made,) = asyncio.run(renderer.render_chat(ChatCompletionRequest(model=name, messages=messages, **body)))
    return list(made["prompt_token_ids"])


def test_a_chat_whose_copy_has_gone_is_fetched_again(process: Process, processor: InputProcessor, store: Path) -> None:
    """As in an API server that has not verified the version itself, and whose store has made room."""

    class Copies:
        @asynccontextmanager
        async def using(self, request: LoRARequest, _: Share) -> AsyncIterator[LoRARequest]:
            write(Path(request.lora_path), TEMPLATE)
            yield request

    table = Table(gone=str(store / DIGEST), there=write(store / OTHER, TEMPLATE))
    table.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(lora_config="there"))
    process.models = lambda: table
    with pytest.raises(HTTPException, match=DIGEST[:12]):
        rendered(process, processor, "gone")
    table.lora_plugins_lifecycle = SimpleNamespace(copies=Copies())
    process.is_manager_patched = True
    assert rendered(process, processor, "gone") == rendered(process, processor, "there")


def test_end_tokens_are_added_to_those_of_the_base_model(processor: InputProcessor, store: Path) -> None:
    stock = ids_of(processor, "")
    found = ids_of(processor, write(store / DIGEST, eos_ids=[3, 9], eos="<s>"), stop_token_ids=[4])
    assert stock.stop_token_ids == []
    assert set(found.stop_token_ids or ()) == {0, 3, 4, 9}
    assert found.all_stop_token_ids == {0, 3, 4, 9} | stock.all_stop_token_ids
    assert found.eos_token_id == stock.eos_token_id


def test_ends_outside_of_the_vocabulary_reach_no_engine(processor: InputProcessor, store: Path) -> None:
    found = ids_of(processor, write(store / DIGEST, eos_ids=[2**31 - 1, 3], eos="<|unknown|>"), min_tokens=2)
    assert found.stop_token_ids == [3]
    assert max(found.all_stop_token_ids) < processor.model_config.get_vocab_size()


def test_a_client_that_ignores_ends_meets_none(processor: InputProcessor, store: Path) -> None:
    assert ids_of(processor, write(store / DIGEST, eos_ids=3), ignore_eos=True).stop_token_ids == []


def test_files_outside_of_the_store_count_for_nothing(processor: InputProcessor, tmp_path: Path) -> None:
    assert ids_of(processor, write(tmp_path / "elsewhere", eos_ids=3)).stop_token_ids == []


def test_settings_can_keep_the_chats_of_the_base_model(process: Process, vllm_config: Any, tmp_path: Path) -> None:
    process.settings = Settings(store_dir=tmp_path / "store", adapter_chat=AdapterChat.BASE)
    adapter_chats.patch()
    path = write(process.resolver.store.layout.adapter(DIGEST), eos_ids=3)
    assert ids_of(InputProcessor(vllm_config), path).stop_token_ids == []


@pytest.mark.parametrize(
    ("brings", "named"),
    [
        ({"template": TEMPLATE}, "chat template 'default'"),
        ({"eos_ids": [1, 9]}, r"end tokens \[9\]"),
        ({"eos_ids": -1}, r"an unusable eos_token_id of generation_config\.json \(-1"),
        ({"eos": "</s>", "eos_ids": 1}, None),
        ({}, None),
    ],
)
def test_strict_refuses_chats_that_the_base_model_lacks(
    process: Process, vllm_config: Any, tmp_path: Path, brings: dict[str, Any], named: str | None
) -> None:
    process.settings = Settings(store_dir=tmp_path / "store", adapter_chat=AdapterChat.STRICT)
    adapter_chats.patch()
    processor = InputProcessor(vllm_config)
    path = write(process.resolver.store.layout.adapter(DIGEST), **brings)
    if named is None:
        (Path(path) / "processor_config.json").write_text("{}")  # as every processor saves one
        assert ids_of(processor, path).all_stop_token_ids == ids_of(processor, "").all_stop_token_ids
        return
    with pytest.raises(VLLMClientError, match=rf"\[L003\].*{named}.*LORA_PLUGINS_ADAPTER_CHAT=strict"):
        ids_of(processor, path)
    process.models = lambda: Table(sql=path)
    # The base model has none, and the adapter's does not run.
    with pytest.raises(Exception, match="chat template"):
        rendered(process, processor, "sql")


def test_a_base_without_a_template_serves_chats_of_an_adapter(
    process: Process, processor: InputProcessor, store: Path
) -> None:
    table = Table(sql=write(store / DIGEST, TEMPLATE), plain=write(store / OTHER))
    process.models = lambda: table
    with pytest.raises(Exception, match="chat template"):
        rendered(process, processor, "plain")
    tokenizer = processor.tokenizer
    assert tokenizer is not None
    assert rendered(process, processor, "sql") == tokenizer.encode("<s>quick", add_special_tokens=False)
    own = tokenizer.encode("</s>quick", add_special_tokens=False)
    assert rendered(process, processor, "sql", chat_template_kwargs={"bos_token": "</s>"}) == own


def test_a_copy_of_the_base_models_template_leaves_the_operators(
    process: Process, processor: InputProcessor, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's has the adapter's special tokens; a template of the adapter's own comes before the operator's."""
    tokenizer = processor.renderer.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    table = Table(copy=write(store / DIGEST, f"{TEMPLATE}\n", eos="</s>"), own=write(store / OTHER, f"own{TEMPLATE}"))
    process.models = lambda: table

    def cut(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    assert rendered(process, processor, "copy", "operator's{{ bos_token }}") == cut("operator's<s>")
    assert rendered(process, processor, "copy") == cut("<s>quick")
    assert rendered(process, processor, "own", "operator's") == cut("own<s>quick")
    process.settings = replace(process.settings, adapter_chat=AdapterChat.TOKENS)
    assert rendered(process, processor, "own", "operator's") == cut("operator's")
    assert rendered(process, processor, "own") == cut("<s>quick")


def test_a_swap_during_the_rendering_renders_again(
    process: Process, processor: InputProcessor, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(sql=write(store / DIGEST, TEMPLATE))
    process.models = lambda: table
    new = write(store / OTHER, "new" + TEMPLATE)
    original, times = processor.renderer.render_chat_async, []

    async def swapping(*args: Any, **kwargs: Any) -> Any:
        times.append(1)
        table.lora_requests["sql"] = LoRARequest("sql", 2, new)
        return await original(*args, **kwargs)

    monkeypatch.setattr(processor.renderer, "render_chat_async", swapping)
    assert processor.tokenizer is not None
    assert rendered(process, processor, "sql") == processor.tokenizer.encode("new<s>quick", add_special_tokens=False)
    assert len(times) == 2


@pytest.mark.parametrize(
    ("added", "is_served"),
    [
        ({374: "<a>", 375: "<b>"}, True),
        ({}, True),
        ({375: "<b>"}, False),  # ids of a tokenizer have no gaps
        ({512: "<a>"}, False),  # beyond the model's rows
        ({374: "a"}, False),  # the base model has the text on another id
        ({0: "<renamed>"}, False),  # a word of the vocabulary is no added token
    ],
)
def test_tokens_that_the_tokenizer_cannot_take_in_are_named(
    added: dict[int, str], is_served: bool, processor: InputProcessor
) -> None:
    chat = Chat(added_tokens=tuple(AddedToken(*item) for item in added.items()))
    served = served_chat(processor.tokenizer, processor.model_config.get_vocab_size(), chat)
    assert (served.added_tokens, served.lost_tokens) == (
        (chat.added_tokens, ()) if is_served else ((), chat.added_tokens)
    )
    assert (served.warning is None) == is_served
    assert all(str(token) in (served.warning or "") for token in served.lost_tokens)


def test_tokens_that_a_leader_has_lost_stay_lost(processor: InputProcessor) -> None:
    """A follower gets what its leader serves, and asks again what its own tokenizer can take."""
    chat = Chat(added_tokens=(AddedToken(512, "<a>"),))
    of_leader = served_chat(processor.tokenizer, 512, chat)
    assert served_chat(processor.tokenizer, 512, of_leader) == of_leader
    assert of_leader.lost_tokens == chat.added_tokens


def test_a_speech_models_own_tokens_are_none_of_its_adapters(tmp_path: Path) -> None:
    """28,940 of them, saved again beside the adapter: only tokens that the base model lacks are counted."""
    write_tokenizer(tmp_path / "base", 512)
    base = AutoTokenizer.from_pretrained(tmp_path / "base")
    base.add_tokens([f"<speech_{number}>" for number in range(28_940)])
    base.save_pretrained(tmp_path / "same")
    own = AutoTokenizer.from_pretrained(tmp_path / "same")
    own.add_tokens(["<call>"])
    own.save_pretrained(tmp_path / "own")
    same, more = read_chat(tmp_path / "same"), read_chat(tmp_path / "own")
    assert (len(same.added_tokens), len(more.added_tokens)) == (28_942, 28_943)
    served = served_chat(base, len(base) + 9, same)
    assert (served.added_tokens, served.lost_tokens, served.warning) == ((), (), None)
    (added,) = served_chat(base, len(base) + 9, more).added_tokens
    assert (added.text, added.id) == ("<call>", len(base))
    many = tuple(AddedToken(len(base) + number, f"<{number}>") for number in range(20_001))
    assert served_chat(base, 1 << 20, Chat(added_tokens=many)).lost_tokens == many


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """A function from the post-processor of a tokenizer, or none, to the folder in which the tokenizer is saved."""

    @cache
    def save(single: str | None) -> Path:
        write_tokenizer(folder := tmp_path_factory.mktemp("tokenizer"), 512)
        processor = single and TemplateProcessing(
            single=single, pair=f"{single} $B:1", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        of_file = Tokenizer.from_file(str(folder / "tokenizer.json"))
        of_file.post_processor = processor
        of_file.save(str(folder / "tokenizer.json"))
        return folder

    return save


@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> $A </s>", None])
@pytest.mark.parametrize("of_base", ["$A", "<s> $A"])
def test_prompts_begin_and_end_as_the_adapters_tokenizer_says(
    saved: Callable[[str | None], Path], single: str | None, of_base: str
) -> None:
    """Transformers' `add_bos_token` becomes the post-processor that it saves; the judge is `AutoTokenizer`."""
    base, judge = (AutoTokenizer.from_pretrained(saved(it)) for it in (of_base, single))
    served = served_chat(base, 512, read_chat(saved(single)))
    assert single is None or bool(served.post_processor) == (single != of_base)
    ours = tokenizer_of(base, served)
    assert ours.encode("quick") == judge.encode("quick")
    assert ours.encode("quick", add_special_tokens=False) == base.encode("quick", add_special_tokens=False)
    assert served.warning is None


@pytest.mark.parametrize("token", [600, None])
def test_a_post_processor_that_cannot_be_taken_is_named(processor: InputProcessor, token: int | None) -> None:
    """One with an id beyond the model's rows, and one that `tokenizers` does not know."""
    made: dict[str, Any] = {"type": "Unknown"}
    if token is not None:
        single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        tokens = {"<s>": {"id": "<s>", "ids": [token], "tokens": ["<s>"]}}
        made = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    served = served_chat(processor.tokenizer, 512, Chat(post_processor=json.dumps(made)))
    assert "post_processor of tokenizer.json" in (served.warning or "")
    assert not served.post_processor


@pytest.mark.parametrize(
    ("brings", "said"),
    [
        ({"tokens": b'{"added_tokens": [{"id": 600, "content": "<far>"}]}'}, "'<far>' (600)"),
        ({"eos_ids": -1}, "eos_token_id of generation_config.json (-1;"),
    ],
)
def test_a_request_is_warned_of_what_is_not_used(
    process: Process, processor: InputProcessor, store: Path, response: Response, brings: dict[str, Any], said: str
) -> None:
    path = Path(write(store / DIGEST, TEMPLATE, eos_ids=brings.get("eos_ids")))
    (path / "tokenizer.json").write_bytes(brings.get("tokens", b"{}"))
    process.models = lambda: Table(sql=str(path))
    adapter_chats.know_tokenizer(process.resolver.chats, processor.renderer, processor.model_config)
    rendered(process, processor, "sql")
    assert said in "".join(response.warnings)
    assert ids_of(processor, str(path)).all_stop_token_ids == ids_of(processor, "").all_stop_token_ids
