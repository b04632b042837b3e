"""What crosses between the processes arrives as it was."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lora_plugins.adapter.chat import MAX_BYTES, TEMPLATE_FILE, TOKENIZER_FILE, VOCABULARY_FILE, read_chat
from lora_plugins.adapter.layouts.tensors import NewTensor, Part, Placed
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import PICKLE_FILES, WEIGHTS_FILE
from lora_plugins.errors import InvalidAdapter
from lora_plugins.settings import Settings
from lora_plugins.verification.children import Children
from lora_plugins.verification.protocol import Items, decode_request, encode
from tests.make import LAYER, PEFT, adapter_files, pair, put, weights
from tests.repetitions import times
from tests.verification.conftest import program, read

TRAITS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def test_weights_of_every_kind_cross(kept_children: Children, tmp_path: Path) -> None:
    rows = {f"{PEFT}model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((2, 8), "float32")}
    tensors = {**weights(), **pair(LAYER.format(1, "q_proj"), 16, 8, 8), **rows}
    changes = {"rank_pattern": {r"layers\.1\..*q_proj": 16}, "alpha_pattern": {"v_proj": 2.5}, "use_rslora": True}
    changes |= {"modules_to_save": ["score"], "trainable_token_indices": [3, 1]}
    many = put(tmp_path / "many", adapter_files(tensors, **changes))
    here = verify_adapter(many, None, Settings())
    found = read(kept_children, many).adapter
    assert found.weights == here.weights
    assert found.weights.beside
    assert found.config == replace(here.config, targets=None)
    assert dict(found.config.rank_pattern) == {r"model\.layers\.1\.self_attn\.q_proj": 16}
    (many / WEIGHTS_FILE).rename(many / PICKLE_FILES[0])
    assert read(kept_children, many, allow_pickle=True).adapter.weights is None


def test_the_largest_chat_crosses(kept_children: Children, tmp_path: Path) -> None:
    """In frames: templates of the most bytes, in characters of two bytes, and the most added tokens."""
    template = "\u00e9" * (MAX_BYTES[TEMPLATE_FILE] // 2)
    templates = [{"name": name, "template": template} for name in ("default", "tool_use")]
    tokens = {str(number): {"content": f"<{number}>{'x' * 44}", "special": True} for number in range(20_000)}
    config = json.dumps({"chat_template": templates, "added_tokens_decoder": tokens, "eos_token": "<1>"})
    directory = put(tmp_path / "sql", adapter_files() | {TOKENIZER_FILE: config.encode()})
    here = read_chat(directory)
    assert (len(here.added_tokens), here.templates["tool_use"]) == (20_000, template)
    for config_only in (False, True):
        assert kept_children.read(directory, Settings(), config_only=config_only).result(120).adapter.chat == here


def test_a_speech_models_tokens_cross_in_bounded_memory(children: Children, tmp_path: Path) -> None:
    """As beside Llasa's adapters: 65,800 tokens, told twice, before a vocabulary of 45 MB."""
    count = times(65_800, short=13_000)
    entries = [{"id": 128_000 + number, "content": f"<|s_{number}|>", **TRAITS} for number in range(count)]
    head = json.dumps({"version": "1.0", "added_tokens": entries, "post_processor": None}, indent=1).encode()
    vocabulary = b', "model": {"vocab": {%b}}}' % (b'"word": 1, ' * 4_500_000)[:-2]
    config = json.dumps({"added_tokens_decoder": {entry["id"]: entry for entry in entries}}, indent=1).encode()
    files = {VOCABULARY_FILE: head[:-1] + vocabulary, TOKENIZER_FILE: config}
    assert (len(files[VOCABULARY_FILE]) > 49e6, len(config) > 150 * count) == (True, True)
    found = read(children, put(tmp_path / "tts", adapter_files() | files)).adapter.chat
    assert [(token.id, token.text) for token in found.added_tokens] == [(it["id"], it["content"]) for it in entries]
    (child,) = children.pids()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{child}/status").read_text())
    assert peak is not None
    assert int(peak[1]) >> 10 < 256


@pytest.mark.parametrize(
    "said",
    ["b'x' * 100", "sent(b'\\x80')", "sent(encode(Returned()))", "(1 << 30).to_bytes(4, 'big')", "b''"],
)
def test_other_answers_are_none(children: Children, adapter: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    first = "import os; from lora_plugins.verification import child; from lora_plugins.verification.protocol import *"
    sent = "sent = lambda data: len(data).to_bytes(4, 'big') + data"
    program(monkeypatch, f"{first}\n{sent}\nchild._answer = lambda *_: (os.write(0, {said}), os._exit(0))")
    with pytest.raises(InvalidAdapter):
        read(children, adapter)


def test_every_move_crosses() -> None:
    array = np.arange(24, dtype="<u4").reshape(4, 6)
    for move in (
        Part(),
        Part(((1, 3, 1),)),
        Part(((1, 2, 1), (0, 4, 2)), (4, 3, 2), (2, 0, 1)),
        Placed((2, 3)),
        Placed((8, 12), (((0, 4, 1), (0, 6, 1)),)),
        Placed((4, 6, 2), (((0, 4, 1), (0, 6, 1), (1, 2, 1)),)),
    ):
        info = TensorInfo("a", "F32", (1, 1), 0, 4)
        sent = encode(Items(tensors=(NewTensor(info, (info,), move),)))
        (again,) = decode_request.decode(sent).tensors
        assert again.make == move
        assert np.array_equal(again.make([array]), move([array]))
