"""The programs: what each is installed from, and what is typed, as docs/guides/clients.md says."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clients.environments import Packages

HERE = Path(__file__).parent
_TASK = """
task: users
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/users.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<none>"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
_PROMPTFOO = """
prompts: ["How many {{{{what}}}}?"]
providers: {providers}
tests: [{{vars: {{what: users}}}}, {{vars: {{what: orders}}}}]
"""


@dataclass(frozen=True)
class Run:
    """One program on one server: `base` is a directory and the base model's name; `names` are two cold adapters."""

    url: str
    base: Path
    names: tuple[str, str]
    folder: Path
    bin: Path


Commands = Callable[[Run], list[list[str]]]


@dataclass(frozen=True)
class Program:
    """A program; `packages` is None for programs of vLLM's own."""

    name: str
    packages: Packages | None
    commands: Commands
    env: Callable[[Run], Mapping[str, str]] = field(default=lambda run: {})


def _of_library(name: str) -> Commands:
    # `-P`, as modules beside the script may be called like modules of a library.
    return lambda run: [[str(run.bin / "python"), "-P", str(HERE / "programs.py"), name, run.url, *run.names]]


def _bench(run: Run, *arguments: str) -> list[str]:
    shape = ("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "6")
    return [str(run.bin / "vllm"), "bench", "serve", "--base-url", run.url, *shape, "--disable-tqdm", *arguments]


def _bench_modules(run: Run) -> list[list[str]]:
    modules = ("--lora-modules", *run.names, "--lora-assignment", "round-robin")
    return [_bench(run, "--model", str(run.base), *modules)]


def _bench_model(run: Run) -> list[list[str]]:
    return [_bench(run, "--model", name, "--tokenizer", str(run.base)) for name in run.names]


def _lm_eval(run: Run) -> list[list[str]]:
    (run.folder / "users.yaml").write_text(_TASK.format(folder=run.folder))
    rows = [{"question": f"How many {what}?", "answer": "42"} for what in ("users", "orders")]
    (run.folder / "users.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return [
        [
            *(str(run.bin / "lm-eval"), "run", "--model", "local-completions", "--model_args"),
            f"model={name},base_url={run.url}/v1/completions,tokenizer={run.base},tokenizer_backend=huggingface",
            *("--tasks", "users", "--include_path", str(run.folder)),
        ]
        for name in run.names
    ]


def _guidellm(run: Run) -> list[list[str]]:
    return [
        [
            *(str(run.bin / "guidellm"), "run", "--backend", f"kind=openai_http,target={run.url},model={name}"),
            *("--tokenizer", f"kind=huggingface_auto,model={run.base}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3", "--disable-console"),
        ]
        for name in run.names
    ]


def _inspect(run: Run) -> list[list[str]]:
    task = Path(shutil.copy(HERE / "inspect_task.py", run.folder)).name  # the program takes relative paths alone
    options = ("--max-tokens", "8", "--display", "plain", "--log-dir", str(run.folder))
    return [
        [str(run.bin / "inspect"), "eval", task, "--model", f"openai-api/lora/{name}", *options] for name in run.names
    ]


def _promptfoo(run: Run) -> list[list[str]]:
    config = {"apiBaseUrl": f"{run.url}/v1", "apiKey": "none", "max_tokens": 8}
    providers = [{"id": f"openai:chat:{name}", "config": config} for name in run.names]
    (run.folder / "promptfooconfig.yaml").write_text(_PROMPTFOO.format(providers=json.dumps(providers)))
    return [[str(run.bin / "promptfoo"), "eval", "-c", "promptfooconfig.yaml", "--no-cache", "--no-write"]]


def _quiet_npm(run: Run) -> dict[str, str]:
    switches = ("TELEMETRY", "UPDATE", "SHARING", "REMOTE_GENERATION")
    return {f"PROMPTFOO_DISABLE_{it}": "1" for it in switches} | {"PROMPTFOO_CONFIG_DIR": str(run.folder)}


def _lora_service(run: Run) -> dict[str, str]:
    return {"LORA_API_KEY": "none", "LORA_BASE_URL": f"{run.url}/v1"}


LITELLM = Packages(("litellm[proxy]==1.108.7",))
PROGRAMS: Sequence[Program] = (
    Program("vllm-bench-modules", None, _bench_modules),
    Program("vllm-bench-model", None, _bench_model),
    Program("openai", Packages(("openai==3.3.0",)), _of_library("openai_sdk")),
    Program("anthropic", Packages(("anthropic==2.14.0",)), _of_library("anthropic_sdk")),
    Program("litellm", LITELLM, _of_library("litellm_sdk")),
    Program("litellm-proxy", LITELLM, _of_library("litellm_proxy")),
    Program("dspy", Packages(("dspy==3.4.1",)), _of_library("dspy_lm")),
    Program("openai-agents", Packages(("openai-agents==0.24.0",)), _of_library("openai_agents")),
    Program("pydantic-ai", Packages(("pydantic-ai-slim[openai]==2.68.0",)), _of_library("pydantic_agent")),
    Program("smolagents", Packages(("smolagents[openai]==1.26.0",)), _of_library("smolagents_model")),
    Program("inspect-ai", Packages(("inspect-ai==0.3.285", "openai==3.57.0")), _inspect, _lora_service),
    Program("lm-eval", Packages(("lm-eval[api]==0.4.13", "transformers==5.19.0")), _lm_eval),
    Program("langchain-openai", Packages(("langchain-openai==1.7.4",)), _of_library("langchain_openai_chat")),
    Program("llama-index", Packages(("llama-index-llms-openai-like==0.8.1",)), _of_library("llama_index_llm")),
    Program("promptfoo", Packages(("promptfoo@0.121.20",), is_npm=True), _promptfoo, _quiet_npm),
    Program("guidellm", Packages(("guidellm==0.8.1",)), _guidellm),
)
OF_VLLM = Path(sys.executable).parent
