"""An adapter whose numbers overflow, which the check of values has let through: nobody else's answers change.

The server has few KV blocks and no prefix cache, so that a healthy request has the blocks of the one before at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testbed.bed import MAX_TOKENS, Bed
from testbed.client import complete, connect
from testbed.models import PROMPT, edit_config
from testbed.server import Server
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER, lora_server
from tests.repetitions import IS_LONG

HEALTHY = ("sql", "chat", "stable")
LONG_PROMPT = PROMPT * 15  # half of all blocks
HUGE = tuple(f"huge-{number}" for number in range(3))


@pytest.fixture(scope="module")
def server(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("finite")
    shutil.copytree(bed.adapters, home / "adapters")
    for number, name in enumerate(HUGE):
        edit_config(shutil.copytree(bed.adapters / "sql", home / "adapters" / name), lora_alpha=1e30 * (number + 1))
    with lora_server(
        bed, home, "--max-loras", "4", "--max-cpu-loras", "8", "--max-model-len", "128",
        "--block-size", "32", "--num-gpu-blocks-override", "9", "--no-enable-prefix-caching",
        plugins=(RESOLVER, MANAGER, KERNELS, ADMIN), LORA_PLUGINS_CHECK_FINITE="0", LORA_PLUGINS_REFRESH_S="0",
    ) as server:  # fmt: skip
        yield server


def test_nobody_has_what_an_adapter_without_numbers_left(server: Server, bed: Bed) -> None:
    client = connect(server)
    names = {str(bed.base): bed.answers[None], **{name: bed.answers[name] for name in HEALTHY}}
    for huge in HUGE:
        for ended in range(3):
            refused = complete(client, huge, LONG_PROMPT, 1)
            assert (refused.status, refused.token_ids) == (400, ())
            assert ("2 answers" if ended == 2 else "an answer") in refused.error, refused.error
            with ThreadPoolExecutor() as threads:
                answers = list(threads.map(lambda name: complete(client, name, PROMPT, MAX_TOKENS), names))
            assert [list(answer.token_ids) for answer in answers] == list(names.values())


@pytest.mark.skipif(not IS_LONG, reason="float16 is slow on the CPU; `make test-long` runs it")
def test_what_overflows_in_float16_only_is_found_while_it_runs(bed: Bed, tmp_path: Path) -> None:
    shutil.copytree(bed.adapters, tmp_path / "adapters")
    edit_config(shutil.copytree(bed.adapters / "sql", tmp_path / "adapters" / "large"), lora_alpha=1e5)
    with lora_server(
        bed, tmp_path, "--dtype", "float16", "--max-loras", "4", "--max-cpu-loras", "8", "--max-model-len", "128",
        "--block-size", "32", "--num-gpu-blocks-override", "9", "--no-enable-prefix-caching",
        plugins=(RESOLVER, MANAGER, KERNELS, ADMIN), LORA_PLUGINS_REFRESH_S="0",
    ) as server:  # fmt: skip
        client = connect(server)
        before = [complete(client, name, PROMPT, MAX_TOKENS) for name in (str(bed.base), *HEALTHY)]
        for _ in range(3):
            refused = complete(client, "large", LONG_PROMPT, 1)
            assert (refused.status, "NaN" in refused.error) == (400, True), refused
        after = [complete(client, name, PROMPT, MAX_TOKENS) for name in (str(bed.base), *HEALTHY)]
        assert [one.token_ids for one in after] == [one.token_ids for one in before]
