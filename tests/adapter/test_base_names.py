"""Which names of base models differ in family, size or variant; most of all, which do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter.base_names import differences, last_part, read_name, shown

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SAME = [
    ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"),
    ("unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
    ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama/Llama-3.1-8B-Instruct"),
    ("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "meta-llama/Llama-3.1-8B-Instruct"),
    ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "meta-llama/Llama-3.3-70B-Instruct"),
    ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "meta-llama/Llama-3.3-70B-Instruct"),
    ("NousResearch/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
    ("TheBloke/Llama-2-7B-Chat-GPTQ", "meta-llama/Llama-2-7b-chat-hf"),
    ("/models/meta-llama_Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ("/models/Llama-3_1-8B", "meta-llama/Llama-3.1-8B"),
    ("/models/llama3.1-8b", "meta-llama/Llama-3.1-8B"),
    (f"/cache/models--meta-llama--Llama-3.1-8B/snapshots/{COMMIT}", "meta-llama/Meta-Llama-3.1-8B"),
    ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct"),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
    ("unsloth/Qwen2.5-0.5B-bnb-4bit", "Qwen/Qwen2.5-0.5B"),
    ("Qwen/Qwen2.5-7B-Instruct-GGUF/qwen2.5-7b-instruct-q4_k_m.gguf", "Qwen/Qwen2.5-7B-Instruct"),
    ("/data/Qwen2_5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B"),
    ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
    ("unsloth/gemma-2-9b-it-bnb-4bit", "google/gemma-2-9b-it"),
    ("google/gemma-3-4b-pt", "unsloth/gemma-3-4b"),
    ("gaunernst/gemma-3-12b-it-int4-awq", "google/gemma-3-12b-it"),
    ("unsloth/mistral-7b-instruct-v0.3-bnb-4bit", "mistralai/Mistral-7B-Instruct-v0.3"),
    ("mistralai/Mixtral-8x7B-v0.1", "TheBloke/mixtral-8x7b-v0.1-AWQ"),
    ("unsloth/Phi-3-mini-4k-instruct-bnb-4bit", "microsoft/Phi-3-mini-4k-instruct"),
    ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b"),
    ("lmsys/gpt-oss-20b-bf16", "openai/gpt-oss-20b"),
    ("zai-org/GLM-4.5-Air-FP8", "zai-org/GLM-4.5-Air"),
    ("unsloth/DeepSeek-R1-Distill-Qwen-7B-unsloth-bnb-4bit", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    ("openai-community/gpt2", "gpt2"),
    ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507-FP8"),
]
DIFFERENT = [
    ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "variant (plain, not instruct)"),
    ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Llama-3.1-8B", "family (llama-3, not llama-3.1)"),
    ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "size (1b, not 3b)"),
    ("meta-llama/Llama-2-7b-hf", "codellama/CodeLlama-7b-hf", "family (llama-2, not code-llama)"),
    ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-Coder-7B", "variant (plain, not coder)"),
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Math-7B-Instruct", "variant (instruct, not instruct-math)"),
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "variant (instruct, not instruct-vision)"),
    ("Qwen/Qwen2-7B", "Qwen/Qwen2.5-7B", "family (qwen-2, not qwen-2.5)"),
    ("Qwen/Qwen2-57B-A14B", "Qwen/Qwen2-7B", "size (57b, not 7b)"),
    ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "size (0.5b, not 1.5b)"),
    ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Base", "variant (plain, not base)"),
    ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507", "variant (thinking, not instruct)"),
    ("google/gemma-2-9b-it", "google/gemma-2-9b", "variant (instruct, not plain)"),
    ("google/gemma-2b", "google/gemma-2-2b", "family (gemma, not gemma-2)"),
    ("google/gemma-3-4b-it", "google/gemma-3n-E4B-it", "family (gemma-3, not gemma-3n)"),
    ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3", "version (v0.1, not v0.3)"),
    ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1", "size (8x7b, not 8x22b)"),
    ("mistralai/Mistral-7B-v0.1", "meta-llama/Llama-2-7b-hf", "family (mistral, not llama-2)"),
    ("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3-mini-128k-instruct", "context (4k, not 128k)"),
    ("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3-medium-4k-instruct", "size (mini, not medium)"),
    ("zai-org/GLM-4.5", "zai-org/GLM-4.5-Air", "size (plain, not air)"),
    ("Qwen/Qwen2.5-7B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "family (qwen-2.5, not deepseek-r1-distill-qwen)"),
    ("meta-llama/Llama-3.1-8B", "NousResearch/Hermes-3-Llama-3.1-8B", "variant (plain, not hermes)"),
    ("acme/Llama-3.1-8B-Instruct-law", "meta-llama/Llama-3.1-8B", "variant (instruct, not plain)"),
    ("openai/gpt-oss-20b", "openai/gpt-oss-120b", "size (20b, not 120b)"),
]
UNKNOWN = [
    "/checkpoints/step-500",
    "/data/out/checkpoint-1200",
    "model",
    "/models/base",
    "base",
    "org/tiny",
    "acme/base-8b",
    "",
    "///",
    "..",
    "/srv/opt",  # a directory, and a family of models
    "mistral",
    "falcon",
    "llama",  # no version and no size
    COMMIT,
    "llama-3.1-8b-" + "x" * 300,
    "acme/Llama-3.1-Mistral-7B-merge",  # of two families
]
TOO_LITTLE = [
    ("org/llama-8b", "meta-llama/Llama-3.1-8B"),  # of any version
    ("/models/llama-3.1", "meta-llama/Llama-3.1-8B"),  # of any size
    ("/out/llama-3.1-8b-merged", "meta-llama/Llama-3.1-8B-Instruct"),  # merged of what?
    ("acme/qwen2.5-7b-law", "Qwen/Qwen2.5-7B-Instruct"),
    ("Qwen/Qwen3-30B-A3B", "acme/Qwen3-30B"),
    ("mistralai/Mistral-7B-Instruct-v0.2", "acme/Mistral-7B-Instruct"),
    ("org/my-own-7b", "meta-llama/Llama-2-7b-hf"),
]


@pytest.mark.parametrize(("one", "other"), [*SAME, *TOO_LITTLE])
def test_names_of_one_model_do_not_differ(one: str, other: str) -> None:
    assert differences(one, other) == differences(other, one) == ()


@pytest.mark.parametrize(("one", "other"), SAME)
def test_both_names_of_one_model_are_known(one: str, other: str) -> None:
    first, second = read_name(one), read_name(other)
    assert first is not None
    assert second is not None
    assert (first.family, first.numbers.get("size")) == (second.family, second.numbers.get("size"))
    assert not first.has_more


@pytest.mark.parametrize(("one", "other", "how"), DIFFERENT)
def test_names_of_two_models_differ(one: str, other: str, how: str) -> None:
    assert f"another {how}" in differences(one, other)
    assert len(differences(one, other)) == len(differences(other, one)) > 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_says_nothing_differs_from_none(name: str) -> None:
    assert read_name(name) is None
    assert differences(name, "meta-llama/Llama-3.1-8B-Instruct") == ()


@pytest.mark.parametrize("name", sorted({name for pair in (*SAME, *DIFFERENT) for name in pair[:2]}))
@pytest.mark.parametrize(
    "stored", ["-bnb-4bit", "-AWQ", "-GPTQ-Int8", "-FP8", "-FP8-Dynamic", "-W8A8", "-GGUF", "-bf16"]
)
def test_how_weights_are_stored_is_no_difference(name: str, stored: str) -> None:
    assert differences(name + stored, name) == differences(name.upper() + stored, name.replace("-", "_")) == ()


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_two_names_are_compared_both_ways(one: str, other: str) -> None:
    assert bool(differences(one, other)) == bool(differences(other, one))
    assert differences(one, one) == ()


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
