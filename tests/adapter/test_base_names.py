"""Which names of base models differ in name or size; most of all, which do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter.base_names import differences, last_part, shown

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SAME = [
    ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"),
    ("unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
    ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama/Llama-3.1-8B-Instruct"),
    ("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "meta-llama/Llama-3.1-8B-Instruct"),
    ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"),
    ("TheBloke/Llama-2-7B-Chat-GPTQ", "meta-llama/Llama-2-7b-chat-hf"),
    ("/models/mistralai_Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.3"),
    ("/models/Llama-3_1-8B", "meta-llama/Llama-3.1-8B"),
    ("/models/llama3.1-8b", "meta-llama/Llama-3.1-8B"),
    (f"/cache/models--meta-llama--Llama-3.1-8B/snapshots/{COMMIT}", "meta-llama/Meta-Llama-3.1-8B"),
    ("Qwen/Qwen2.5-7B-Instruct-GGUF/qwen2.5-7b-instruct-q4_k_m.gguf", "Qwen/Qwen2.5-7B-Instruct"),
    ("C:\\models\\Qwen2_5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("/hub/Qwen/Qwen2___5-0___5B-Instruct", "Qwen/Qwen2.5-500M-Instruct"),
    ("Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B"),
    ("mistralai/Mixtral-8x7B-v0.1", "TheBloke/mixtral-8x7b-v0.1-AWQ"),
    ("unsloth/Phi-3-mini-4k-instruct-bnb-4bit", "microsoft/Phi-3-mini-4k-instruct"),
    ("openai-community/gpt2", "gpt2"),
    # One of the two leaves a number out:
    ("org/llama-8b", "meta-llama/Llama-3.1-8B"),
    ("/models/llama-3.1", "meta-llama/Llama-3.1-8B"),
    ("Qwen/Qwen3-30B-A3B", "acme/Qwen3-30B"),
    ("mistralai/Mistral-7B-Instruct-v0.2", "acme/Mistral-7B-Instruct"),
]
DIFFERENT = [
    ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "name (plain, not instruct)"),
    ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Llama-3.1-8B", "name (3, not 3.1)"),
    ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf", "size (7b, not 13b)"),
    ("meta-llama/Llama-2-7b-hf", "codellama/CodeLlama-7b-hf", "name (llama-2, not codellama)"),
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "name (plain, not vl)"),
    ("Qwen/Qwen2-57B-A14B", "Qwen/Qwen2-7B", "size (57b, not 7b)"),
    ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A6B", "name (a3b, not a6b)"),
    ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "size (0.5b, not 1.5b)"),
    ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Base", "name (plain, not base)"),
    ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507", "name (thinking, not instruct)"),
    ("google/gemma-3-4b-it", "google/gemma-3n-E4B-it", "name (3, not 3n-e4b)"),
    ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3", "name (v0.1, not v0.3)"),
    ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1", "size (8x7b, not 8x22b)"),
    ("HuggingFaceH4/zephyr-7b-beta", "mistralai/Mistral-7B-v0.1", "name (zephyr-beta, not mistral-v0.1)"),
    ("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3-mini-128k-instruct", "name (4k, not 128k)"),
    ("zai-org/GLM-4.5", "zai-org/GLM-4.5-Air", "name (plain, not air)"),
    ("meta-llama/Llama-3.1-8B", "NousResearch/Hermes-3-Llama-3.1-8B", "name (plain, not hermes-3)"),
    ("acme/qwen2.5-7b-law", "Qwen/Qwen2.5-7B-Instruct", "name (law, not instruct)"),
]
UNKNOWN = [
    *[
        "/checkpoints/step-500",
        "/data/out/checkpoint-1200",
        "model",
        "/models/base",
        "base",
        "org/tiny",
        "acme/base-8b",
    ],
    *["", ".", "///", "..", "/srv/opt", "mistral", "llama", "gpt-4", "/mnt/disk-1/prod-v3", COMMIT],
    "llama-3.1-8b-" + "x" * 300,
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_names_of_one_model_do_not_differ(one: str, other: str) -> None:
    assert differences(one, other) == differences(other, one) == ()


@pytest.mark.parametrize(("one", "other", "how"), DIFFERENT)
def test_names_of_two_models_differ(one: str, other: str, how: str) -> None:
    assert f"another {how}" in (differences(one, other) or ())
    assert len(differences(one, other) or ()) == len(differences(other, one) or ())


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_says_nothing_is_not_compared(name: str) -> None:
    assert differences(name, "meta-llama/Llama-3.1-8B-Instruct") is None


@pytest.mark.parametrize("name", sorted({pair[1] for pair in (*SAME, *DIFFERENT)}))
@pytest.mark.parametrize(
    "stored", ["-bnb-4bit", "-AWQ", "-GPTQ-Int8", "-FP8", "-FP8-Dynamic", "-W8A8", "-GGUF", "-bf16"]
)
def test_how_weights_are_stored_is_no_difference(name: str, stored: str) -> None:
    assert differences(name + stored, name) == differences(name.upper() + stored, name.replace("-", "_")) == ()


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_two_names_are_compared_both_ways(one: str, other: str) -> None:
    assert bool(differences(one, other)) == bool(differences(other, one))
    assert not differences(one, one)


@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        ("org/name", "name", "org/name"),
        ("/home/someone/secret/Llama-3.1-8B/", "Llama-3.1-8B", "Llama-3.1-8B"),
        (f"/cache/models--org--name/snapshots/{COMMIT}", "name", "name"),
        ("a/b/c", "c", "c"),
        ("C:\\Users\\jane\\models\\Llama-3.1-8B\\", "Llama-3.1-8B", "Llama-3.1-8B"),
        ("C:/Users/jane/Llama-3.1-8B", "Llama-3.1-8B", "Llama-3.1-8B"),
        ("jane\\Llama-3.1-8B", "Llama-3.1-8B", "Llama-3.1-8B"),
        (f"C:\\Users\\jane\\models--org--name\\snapshots\\{COMMIT}", "name", "name"),
        ("/root/.cache/modelscope/Qwen/Qwen2___5-0___5B", "Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("name", "name", "name"),
    ],
)
def test_paths_of_a_machine_are_not_shown(name: str, part: str, said: str) -> None:
    assert (last_part(name), shown(name)) == (part, said)
