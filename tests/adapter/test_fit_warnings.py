"""An adapter that names another base model than the one that is served: accepted by its shapes, with a warning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.adapter.fit import BaseModel, check_base, original_name_of, warnings_of
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weights import Weights
from lora_plugins.api.http_errors import without_paths
from lora_plugins.errors import IncompatibleAdapter
from lora_plugins.settings import BaseMatch, Settings
from tests.adapter.test_fit import adapter, lora
from tests.make import BASE, adapter_files, put

INSTRUCT, PLAIN = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"
SAID = f"trained on {PLAIN}, served on {INSTRUCT}: another name (plain, not instruct)"


def warned(name: str | None, path: str, mode: BaseMatch = BaseMatch.COMPATIBLE, **changes: Any) -> tuple[str, ...]:
    return warnings_of(adapter(name), BaseModel(path, **changes), mode)


def test_another_name_is_said_with_both_names() -> None:
    assert warned(PLAIN, INSTRUCT) == (SAID,)
    assert warned(PLAIN, INSTRUCT, BaseMatch.OFF) == ()
    assert warned(INSTRUCT, INSTRUCT) == warned("unsloth/llama-3.1-8b-instruct-bnb-4bit", INSTRUCT) == ()


@pytest.mark.parametrize("name", [None, "", "/checkpoints/step-500", "model", "acme/own"])
def test_a_name_that_says_nothing_is_not_warned_of(name: str | None) -> None:
    assert warned(name or None, INSTRUCT) == ()


@pytest.mark.parametrize("path", ["/models/base", "org/tiny", "/models/step-500"])
def test_a_served_model_of_unknown_name_is_not_compared(path: str) -> None:
    assert warned(PLAIN, path) == warned(PLAIN, path, served_names=("gpt-4",)) == ()


def test_the_served_name_that_says_most_is_compared() -> None:
    assert warned(PLAIN, "/models/base", served_names=("default", INSTRUCT)) == (SAID,)
    assert warned(PLAIN, INSTRUCT, served_names=("llama", "llama-8b")) == (SAID,)


def test_an_original_name_counts_where_no_other_is_known() -> None:
    assert warned(PLAIN, "/models/base", original_name=INSTRUCT) == (SAID,)
    assert warned(PLAIN, "/models/Llama-3.1-8B-copy", original_name=INSTRUCT) == ()


def test_a_free_served_name_is_not_compared() -> None:
    for served in ("gpt-4", "llama-3.2-70b", "the-base"):
        assert warned(PLAIN, "/models/base", served_names=(served,)) == ()


def test_a_stored_copy_of_any_served_name_is_silent() -> None:
    assert warned("unsloth/llama-3.1-8b-bnb-4bit", "/models/prod-8b", served_names=(PLAIN,)) == ()
    assert "prod" in warned(INSTRUCT, "/models/prod-8b", served_names=(PLAIN,))[0]


def of_type(model_type: str) -> dict[str, Any]:
    assert BASE.model is not None
    modules = dataclasses.replace(BASE.model.modules, model_type=model_type)
    return {"model": dataclasses.replace(BASE.model, modules=modules), "served_names": ("the-base", "gpt-4")}


@pytest.mark.parametrize(
    ("name", "model_type", "found"),
    [
        ("mistralai/Mistral-7B-v0.1", "llama", "mistral"),
        (PLAIN, "mistral", "llama"),
        ("Qwen/Qwen2.5-7B", "llama", "qwen2"),
        ("C:\\Users\\jane\\gemma-2-9b-it", "llama", "gemma2"),
    ],
)
def test_a_model_without_a_name_is_compared_by_type(name: str, model_type: str, found: str) -> None:
    (said,) = warned(name, "/models/base", **of_type(model_type))
    assert said.endswith(f", served on the-base: another model type ({found}, not {model_type})")
    assert "jane" not in said
    assert warned(name, "/models/base", BaseMatch.OFF, **of_type(model_type)) == ()
    assert warned(name, "/models/base", aliases=(name,), **of_type(model_type)) == ()


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        (PLAIN, "llama"),
        ("meta-llama/Llama-3.2-11B-Vision", "mllama"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl"),
        ("google/gemma-3-1b-it", "gemma3_text"),
        ("microsoft/phi-4", "phi3"),
        ("mistralai/Mistral-Small-3.1-24B", "mistral3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2"),
        # Names of their own, and Llama's type:
        ("tiiuae/Falcon3-7B-Base", "llama"),
        ("HuggingFaceTB/SmolLM2-1.7B", "llama"),
        ("lmsys/vicuna-7b-v1.5", "llama"),
        ("deepseek-ai/deepseek-coder-6.7b-base", "llama"),
        ("acme/auto-7b", "llama"),
        ("/models/base", "llama"),
        ("///", "llama"),
        ("mistralai/Mistral-7B-v0.1", ""),
    ],
)
def test_a_name_of_no_other_type_is_not_warned_of(name: str, model_type: str) -> None:
    assert warned(name, "/models/base", **of_type(model_type)) == ()


def test_an_alias_is_believed() -> None:
    assert warned(PLAIN, INSTRUCT, aliases=(PLAIN,)) == ()
    assert warned("unsloth/llama-3.1-8b-bnb-4bit", INSTRUCT, aliases=(PLAIN,)) == ()
    assert warned("Qwen/Qwen2.5-7B", INSTRUCT, aliases=(PLAIN, "mine")) != ()


def test_directories_of_a_machine_are_not_shown() -> None:
    (said,) = warned("/home/someone/secret/Llama-3.1-8B", "/data/place/Llama-3.1-70B")
    assert said == "trained on Llama-3.1-8B, served on Llama-3.1-70B: another size (8b, not 70b)"


@pytest.mark.parametrize("mode", [BaseMatch.STRICT, BaseMatch.COMPATIBLE])
@pytest.mark.parametrize(
    "folder", ["C:\\Users\\jane smith\\models\\", "C:/Users/jane smith/models/", "/home/jane smith/models/"]
)
def test_no_error_shows_clients_a_machines_directories(folder: str, mode: BaseMatch) -> None:
    base = dataclasses.replace(BASE, path="/data/jane smith/served", served_names=("prod",))
    for weights in (None, Weights((lora(),)), Weights((lora("model.layers.99.self_attn.q_proj"),))):
        try:
            said = check_base(adapter(f"{folder}acme"), weights, base, mode)
        except IncompatibleAdapter as error:
            said = (str(error),)
        assert f"{folder}acme" in said[0], "administrators see the whole path"
        assert "jane" not in without_paths(said[0])
        assert "smith" not in without_paths(said[0])


@pytest.mark.parametrize(
    "name",
    ["/root/.cache/modelscope/Qwen/Qwen2___5-0___5B-Instruct", "Qwen/Qwen2___5-0___5B-Instruct"],
)
def test_a_folder_of_modelscope_is_its_model(name: str) -> None:
    hub_id = "Qwen/Qwen2.5-0.5B-Instruct"
    assert BaseModel(hub_id).matches(name)
    assert BaseModel(name).matches(hub_id)
    assert warned(name, hub_id) == warned(hub_id, name) == ()
    assert "another size" in warned(name, "Qwen/Qwen2.5-1.5B-Instruct")[0]


@pytest.mark.parametrize("name", ["C:\\Users\\jane\\Llama-3.1-8B-Instruct", "C:/Users/jane/Llama-3.1-8B-Instruct"])
def test_a_windows_copy_is_its_model(name: str) -> None:
    assert BaseModel(INSTRUCT).matches(name)
    assert "jane" not in warned(name, PLAIN)[0]


def test_a_warning_stands_in_the_place_of_the_note() -> None:
    base, weights = dataclasses.replace(BASE, path=INSTRUCT), Weights((lora(),))
    assert check_base(adapter(PLAIN), weights, base, BaseMatch.COMPATIBLE) == ()
    (note,) = check_base(adapter("acme/own"), weights, base, BaseMatch.COMPATIBLE)
    assert "names base model 'acme/own'" in note


def test_a_known_name_opens_nothing_that_was_refused() -> None:
    base = dataclasses.replace(BASE, path=INSTRUCT)
    with pytest.raises(IncompatibleAdapter, match="cannot be compared"):
        check_base(adapter("unsloth/llama-3.1-8b-instruct"), None, base, BaseMatch.COMPATIBLE)
    with pytest.raises(IncompatibleAdapter, match="cannot be compared"):
        check_base(adapter(PLAIN), None, base, BaseMatch.COMPATIBLE)
    with pytest.raises(IncompatibleAdapter, match="base model meta-llama"):
        check_base(adapter(PLAIN), None, base, BaseMatch.STRICT)


def test_verification_carries_the_warning(tmp_path: Path) -> None:
    put(tmp_path / "one", adapter_files(base_model_name_or_path=PLAIN))
    base = dataclasses.replace(BASE, path=INSTRUCT)
    verified = verify_adapter(tmp_path / "one", base, Settings())
    assert (verified.warnings, verified.notes) == ((SAID,), ())
    assert verify_adapter(tmp_path / "one", None, Settings()).warnings == ()
    with pytest.raises(IncompatibleAdapter):
        verify_adapter(tmp_path / "one", base, Settings(base_match=BaseMatch.STRICT))


@pytest.mark.parametrize("content", ["{}", '{"_name_or_path": 5}', "[]", "{", "[" * 100_000, "\0", None])
def test_a_model_without_an_original_name_has_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert original_name_of(str(tmp_path)) == ""


def test_the_original_name_is_read_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": INSTRUCT}))
    assert original_name_of(str(tmp_path)) == INSTRUCT
