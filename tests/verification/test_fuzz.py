"""Whatever bytes an adapter is made of, a process that reads it answers or is replaced, and this one goes on."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_plugins.adapter.config import CONFIG_FILE, parse_config
from lora_plugins.adapter.weight_files import INDEX_FILE, WEIGHTS_FILE
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.settings import Settings
from lora_plugins.verification.children import Children
from tests.make import adapter_files, config, header_of, put, sharded, weights, with_header
from tests.repetitions import times

GOOD = adapter_files()
SHARDED = sharded(GOOD)
MOST_MEMORY_BYTES = 20 << 20

_WORDS = st.sampled_from(["(", ")", "{1000}", "{2,}", "a+", "q_proj", "|", ".*", "\\d", "[a-z]", "(?R)", "(?i)", "$"])
PATTERNS = st.lists(_WORDS, max_size=12).map("".join) | st.text(string.printable, max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | PATTERNS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
LONG = st.sampled_from([b"[]," * 50_000, b"[" * 5_000, b'{"a":' * 500, b'"x"' * 50_000, b"9" * 50_000, b"\xff"])


def _spoilt(data: bytes) -> st.SearchStrategy[bytes]:
    """The same with a stretch replaced."""
    place = st.integers(0, len(data))
    return st.builds(lambda a, b, new: data[: min(a, b)] + new + data[max(a, b) :], place, place, st.binary() | LONG)


CONFIGS = st.dictionaries(st.sampled_from([*config(), "rank_pattern", "use_rslora", "bias", "unknown"]), JSON).map(
    lambda changes: json.dumps({**config(), **changes}).encode()
)
RANKS = st.dictionaries(PATTERNS, st.integers(1, 8), max_size=4).map(
    lambda patterns: json.dumps(config(rank_pattern=patterns, alpha_pattern=patterns)).encode()
)
HEADERS = st.dictionaries(st.sampled_from([*header_of(weights()), "__metadata__", "x"]), JSON, max_size=3).map(
    lambda changes: with_header({**header_of(weights()), **changes}, bytes(100))
)
ADAPTERS = st.one_of(
    (CONFIGS | RANKS | _spoilt(GOOD[CONFIG_FILE])).map(lambda data: {**GOOD, CONFIG_FILE: data}),
    (HEADERS | _spoilt(GOOD[WEIGHTS_FILE])).map(lambda data: {**GOOD, WEIGHTS_FILE: data}),
    (JSON.map(lambda value: json.dumps({"weight_map": value}).encode()) | _spoilt(SHARDED[INDEX_FILE])).map(
        lambda data: {**SHARDED, INDEX_FILE: data}
    ),
)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end()


def test_any_adapter_is_read_or_refused(children: Children, tmp_path: Path) -> None:
    read_before = children.read(put(tmp_path / "good", GOOD), Settings()).result(60)

    @settings(
        max_examples=times(20_000, short=150), deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(ADAPTERS)
    def read(files: dict[str, bytes]) -> None:
        directory = put(tmp_path / "any", files)
        for path in directory.iterdir():
            if path.name not in files:
                path.unlink()
        try:
            found = children.read(directory, replace(Settings(), allow_pickle=True)).result(120)
        except SourceUnavailable:
            raise  # a mistake of ours
        except LoRAPluginsError as error:
            for limit in ("ends the process", "to read"):
                assert limit not in str(error)  # noqa: PT017
            assert error.expected  # noqa: PT017
            assert error.remedy  # noqa: PT017
        else:
            assert parse_config(found.canonical) == replace(
                found.adapter.config, targets=parse_config(found.canonical).targets
            )

    read()
    before = psutil.Process().memory_info().rss  # Hypothesis itself remembers what it has tried
    for number in range(200):
        any_more = children.read(put(tmp_path / "any", {**GOOD, CONFIG_FILE: b"[" * 5_000 * number}), Settings())
        assert isinstance(any_more.exception(60), LoRAPluginsError)
    assert psutil.Process().memory_info().rss - before < MOST_MEMORY_BYTES
    assert children.read(tmp_path / "good", Settings()).result(60) == read_before
