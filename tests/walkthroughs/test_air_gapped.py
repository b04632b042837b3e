"""Somebody who serves without a network: adapters are carried in, looked at, and served by name and by URI."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testbed.bed import Bed
from tests.e2e.digests import of_files
from tests.walkthroughs.reader import Do, Step, Walk, left_out
from tests.walkthroughs.small_server import PORT, folder_of_adapters, reads, small, tokens

CARRY = "lora-plugins inspect ./sql || [ $? = 7 ]       # 7: whole, and compared with no base model"
ASK = (
    "curl localhost:8000/v1/completions -H 'Content-Type: application/json' "
    """-d '{"model": "sql", "prompt": "SELECT"}'"""
)
INSTALLING = "tests/installation/test_recipes.py::test_carried_wheels_install_without_an_index runs it"

AIR_GAPPED = Walk(
    "docs/get-started/air-gapped.md",
    [
        left_out("""pip wheel -w wheels "lora-plugins @ git+$REPOSITORY"    # 'vllm>=0.30,<0.34' too, if missing""",
                 INSTALLING),
        left_out("pip install --no-index --find-links wheels lora-plugins", INSTALLING),
        Step(CARRY),
        Step("export HF_HUB_OFFLINE=1                        # nothing asks the Hub: base model, tokenizer, adapters",
             Do.SERVE),
        Step(ASK),
    ],
    {
        **small("/models/base"),
        "/media/sql": ("./sql", "one machine is both"),
        " /adapters/": (" {adapters}/", "a folder of this test"),
        **folder_of_adapters("/adapters"),
        "file:///adapters": ("file://{adapters}", "a folder of this test"),
        "localhost:8000": PORT,
    },
)  # fmt: skip


@pytest.mark.timeout(1200)
def test_adapters_are_served_by_name_and_by_uri(tmp_path: Path, bed: Bed, env: dict[str, str]) -> None:
    (tmp_path / "adapters").mkdir()
    shutil.copytree(bed.adapters / "sql", tmp_path / "sql")
    with reads(AIR_GAPPED, tmp_path, bed.base, env) as reader:
        assert "whole, and not compared" in reader.printed[CARRY]
        by_name, at = json.JSONDecoder().raw_decode(reader.printed[ASK])
        assert by_name["model"] == "sql"
        assert by_name["choices"][0]["text"]
        by_uri = json.loads(reader.printed[ASK][at:])
        assert by_uri["lora_name"] == "by-uri"
        assert by_uri["digest"] == of_files(bed.adapters / "sql")
        for name in ("sql", "by-uri"):
            assert tokens(reader.url, name) == ("", bed.answers["sql"])
