"""Adapters with vectors (DoRA, IA3, biases) answer as PEFT does, beside others and the base, however they come."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from lora_plugins.client import push
from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, complete_all, connect
from testbed.models import PROMPT
from testbed.reference import Reference
from testbed.vectors import with_biases, with_factors, with_magnitudes
from tests.e2e.servers import admin_server
from tests.e2e.test_offline import said_by

PLAIN = {"dora": "sql", "biases": "chat", "ia3": "sql"}


@dataclass(frozen=True)
class Vectors:
    """Adapters with vectors, and what PEFT answers with them."""

    adapters: Path
    answers: dict[str | None, list[int]]


@pytest.fixture(scope="module")
def vectors(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Vectors:
    root, reference = tmp_path_factory.mktemp("vectors") / "adapters", Reference(bed.base)
    shutil.copytree(bed.adapters, root)
    with_magnitudes(root / PLAIN["dora"], root / "dora", bed.base)
    with_biases(root / PLAIN["biases"], root / "biases")
    with_factors(root / PLAIN["ia3"], root / "ia3", bed.base)
    prompt, answers = reference.prompt_ids(PROMPT), dict(bed.answers)
    for name, plain in PLAIN.items():
        answers[name] = reference.generate(root / name, prompt, MAX_TOKENS)
        assert answers[name] != answers[plain]
    return Vectors(root, answers)


def test_vectors_equal_peft_in_batches_and_pushed(bed: Bed, vectors: Vectors, tmp_path: Path) -> None:
    """With two slots: slots change hands between adapters with vectors and without."""
    shutil.copytree(vectors.adapters, tmp_path / "adapters")
    with admin_server(bed, tmp_path, "--max-loras", "2", LORA_PLUGINS_ADMIN_KEY="key") as server:
        names = [*PLAIN, "sql", "chat", "stable", str(bed.base)] * 4
        found = asyncio.run(complete_all(server, names, PROMPT, MAX_TOKENS))
        for name, ids in zip(names, found, strict=True):
            assert ids == vectors.answers[None if name == str(bed.base) else name], name
        for name in ("dora", "stable", "ia3", "biases"):
            folder = vectors.adapters / name
            config = json.loads((folder / "adapter_config.json").read_text())
            push("pushed", load_file(folder / "adapter_model.safetensors"), config, servers=[server.url], key="key")
            answer = complete(connect(server), "pushed", PROMPT, MAX_TOKENS)
            assert list(answer.token_ids) == vectors.answers[name], name


def test_offline_paths_with_vectors_equal_peft(bed: Bed, vectors: Vectors, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = [(name, str(vectors.adapters / name)) for name in (*PLAIN, "sql")]
    said = said_by("offline", bed, tmp_path, 0, [*asked, ("", None)])
    for (name, _), output in itertools.zip_longest([*asked, ("", None)], said["outputs"]):
        assert output[2] == vectors.answers[name or None], output


def test_vllms_kernels_refuse_vectors_by_name(bed: Bed, vectors: Vectors, tmp_path: Path) -> None:
    shutil.copytree(vectors.adapters, tmp_path / "adapters")
    with admin_server(bed, tmp_path, LORA_PLUGINS_KERNELS="vllm") as server:
        answer = complete(connect(server), "dora", PROMPT, 1)
        assert answer.status == 400
        assert "(use_dora); expected A and B alone" in answer.error
        assert "lora_kernels" in answer.error
