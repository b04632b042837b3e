"""Weights in one file, in several with an index, or in a pickle."""

from __future__ import annotations

import codecs
import json
import shutil

import pytest

from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.weight_files import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    MAX_SHARDS,
    PICKLE_FILES,
    WEIGHTS_FILE,
    read_index,
    shards_of,
)
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter
from tests.adapter.verdicts import refused, verified
from tests.make import adapter_files, config_bytes, put, sharded


@pytest.fixture
def several(tmp_path):
    return put(tmp_path / "several", sharded(adapter_files()))


FIRST, SECOND = (f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2))


def test_weights_in_several_files_are_read_as_one_adapters(several, adapter):
    one, other = verified(adapter), verified(several)
    assert {(pair.module, pair.a.shape) for pair in one.weights.pairs} == {
        (pair.module, pair.a.shape) for pair in other.weights.pairs
    }
    assert other.conversion.changes == ("2 files of weights joined into one",)
    sizes = [(several / name).stat().st_size for name in (CONFIG_FILE, FIRST, SECOND)]
    assert other.size_bytes == sum(sizes)


def test_one_file_is_read_where_both_are(several, adapter):
    shutil.copy(adapter / WEIGHTS_FILE, several)
    (several / FIRST).write_bytes(b"")
    assert verified(several).conversion is None


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"{}",
        b"[]",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../adapter_model-00001-of-00002.safetensors"}}',
        b'{"weight_map": {"a": "adapter_model.bin"}}',
        b"[" * 100_000,
        b" " * (MAX_INDEX_BYTES + 1),
    ],
    ids=range(9),
)
def test_an_index_that_is_none_is_refused(several, index):
    (several / INDEX_FILE).write_bytes(index)
    refused(InvalidAdapter, several, INDEX_FILE)


def test_a_missing_file_of_several_is_named(several):
    (several / SECOND).unlink()
    refused(AdapterNotFound, several, SECOND)


def test_another_saves_file_among_several_is_refused(several):
    (several / SECOND).write_bytes((several / FIRST).read_bytes())
    assert "other than" in refused(InvalidAdapter, several, SECOND).found


def test_nan_in_the_last_of_several_files_is_refused(several):
    data = bytearray((several / SECOND).read_bytes())
    data[-4:] = b"\xff" * 4
    (several / SECOND).write_bytes(data)
    with pytest.raises(InvalidAdapter, match="NaN"):
        verified(several)


def test_the_size_of_several_files_counts_together(several):
    limit = (several / FIRST).stat().st_size + 10
    with pytest.raises(InvalidAdapter, match="LORA_PLUGINS_MAX_ADAPTER_BYTES"):
        verified(several, max_adapter_bytes=limit)


@pytest.mark.parametrize("name", PICKLE_FILES)
def test_a_pickle_is_refused_unless_allowed(adapter, name):
    (adapter / WEIGHTS_FILE).rename(adapter / name)
    assert "LORA_PLUGINS_ALLOW_PICKLE" in refused(InvalidAdapter, adapter, name).remedy
    allowed = verified(adapter, allow_pickle=True)
    assert allowed.weights is None
    assert any("not verified" in note for note in allowed.notes)


def test_a_pickle_beside_safetensors_is_never_served(adapter):
    (adapter / PICKLE_FILES[0]).write_bytes(b"x")
    assert verified(adapter, allow_pickle=True).weights is not None


def test_an_allowed_pickle_must_still_name_the_base_model(adapter):
    (adapter / WEIGHTS_FILE).rename(adapter / PICKLE_FILES[0])
    (adapter / CONFIG_FILE).write_bytes(config_bytes(base_model_name_or_path="other/model"))
    error = refused(IncompatibleAdapter, adapter, CONFIG_FILE, allow_pickle=True)
    assert "modules that cannot be compared" in error.found


def index(count: int) -> bytes:
    files = {f"t{n}": f"adapter_model-{n:05}-of-{count:05}.safetensors" for n in range(count)}
    return json.dumps({"weight_map": files}).encode()


def test_an_indexs_files_are_found_without_parsing_it(monkeypatch):
    wanted = sorted(set(read_index(index(MAX_SHARDS)).values()))
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("it is parsed"))
    assert shards_of(index(MAX_SHARDS)) == wanted
    padding = b" " * 100_000
    spread = index(MAX_SHARDS).replace(b", ", b"," + padding[:50_000])
    assert shards_of(spread) == wanted, "also where one lies between two pieces"


def test_an_index_with_a_byte_order_mark_is_read():
    assert read_index(codecs.BOM_UTF8 + index(2)) == read_index(index(2))
    assert shards_of(codecs.BOM_UTF8 + index(2)) == shards_of(index(2))


@pytest.mark.parametrize("read", [shards_of, read_index])
def test_too_many_files_and_too_long_an_index_are_refused(read):
    with pytest.raises(InvalidAdapter, match=f"{MAX_SHARDS + 1} files of weights"):
        read(index(MAX_SHARDS + 1))
    with pytest.raises(InvalidAdapter, match=f"more than {MAX_INDEX_BYTES} bytes"):
        read(index(2) + b" " * MAX_INDEX_BYTES)
    with pytest.raises(InvalidAdapter, match="no weight_map"):
        read(b"{}") if read is shards_of else read(b'{"weight_map": {}}')
