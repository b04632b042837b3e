"""A whole adapter directory: served, or refused by code, file, and what was found and expected."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from lora_plugins.adapter.config import CONFIG_FILE, MAX_CONFIG_BYTES
from lora_plugins.adapter.verify import verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, InvalidAdapter, SourceUnavailable
from lora_plugins.settings import Settings
from tests.adapter.verdicts import refused, verified
from tests.make import LAYER, adapter_files, config_bytes, pair, put, safetensors, weights


def test_a_good_adapter_is_verified(adapter):
    result = verified(adapter)
    assert result.config.rank == 4
    assert len(result.weights.pairs) == 4
    assert result.size_bytes == sum(file.stat().st_size for file in adapter.iterdir())
    assert result.notes == ()


# --- the configuration


@pytest.mark.parametrize(
    ("file", "data", "kind", "says"),
    [
        (CONFIG_FILE, None, AdapterNotFound, ""),
        (WEIGHTS_FILE, None, AdapterNotFound, ""),
        (CONFIG_FILE, b'{"r": 4,', InvalidAdapter, "stops being JSON"),
        (CONFIG_FILE, config_bytes(lora_alpha=...), InvalidAdapter, "lora_alpha"),
        (CONFIG_FILE, config_bytes(use_qalora=True), IncompatibleAdapter, "use_qalora"),
        (CONFIG_FILE, b" " * (MAX_CONFIG_BYTES + 1), InvalidAdapter, "bytes"),
        (WEIGHTS_FILE, b'\x08\0\0\0\0\0\0\0{"a":1,}', InvalidAdapter, ""),
        (WEIGHTS_FILE, safetensors(dict([*weights().items()][:-1])), InvalidAdapter, "alone"),
    ],
    ids=range(8),
)
def test_what_a_reader_refuses_is_said_with_its_file(adapter, file, data, kind, says):
    (adapter / file).unlink() if data is None else (adapter / file).write_bytes(data)
    assert says in refused(kind, adapter, file).found


# --- the weights


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_system_that_fails_shows_no_missing_weights(adapter, monkeypatch, code):
    lstat = os.lstat

    def fail(path, *arguments, **options):
        if str(path).endswith(WEIGHTS_FILE):
            raise OSError(code, os.strerror(code), path)
        return lstat(path, *arguments, **options)

    monkeypatch.setattr(os, "lstat", fail)
    with pytest.raises(SourceUnavailable, match=WEIGHTS_FILE):
        verify_adapter(adapter, None, Settings())


def test_the_size_limit_counts_all_files(adapter):
    size = sum(file.stat().st_size for file in adapter.iterdir())
    assert verified(adapter, max_adapter_bytes=size)
    error = refused(InvalidAdapter, adapter, WEIGHTS_FILE, max_adapter_bytes=size - 1)
    assert "LORA_PLUGINS_MAX_ADAPTER_BYTES" in error.remedy


@pytest.mark.timeout(120)
def test_the_size_limit_is_held_before_anything_is_read(adapter):
    # A sparse file of a terabyte: reading it would take for ever.
    with open(adapter / WEIGHTS_FILE, "r+b") as file:
        file.truncate(1 << 40)
    refused(InvalidAdapter, adapter, WEIGHTS_FILE)


# --- the served model


def test_a_rank_above_the_servers_is_refused(adapter):
    put(adapter, adapter_files(weights(32), r=32))
    error = refused(IncompatibleAdapter, adapter, WEIGHTS_FILE)
    assert (error.found, error.remedy) == ("rank 32", "restart the server with --max-lora-rank 32")


def test_a_rank_pattern_counts_where_a_module_has_it(adapter):
    put(adapter, adapter_files(pair(LAYER.format(0, "q_proj"), 17, 8, 8), rank_pattern={"q_proj": 17}))
    assert refused(IncompatibleAdapter, adapter, WEIGHTS_FILE).found == "rank 17"
    put(adapter, adapter_files(rank_pattern={"k_proj": 17}))
    assert verified(adapter)


def test_another_base_model_is_refused_by_its_shapes(adapter):
    tensors = {**pair(LAYER.format(0, "q_proj"), 4, 16, 16)}
    put(adapter, adapter_files(tensors, base_model_name_or_path="other/model"))
    error = refused(IncompatibleAdapter, adapter, WEIGHTS_FILE)
    assert "16 inputs and 16 outputs" in error.found
    assert "other/model" in error.found
    assert error.expected == "8 inputs and 8 outputs"


# --- the values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_a_value_that_is_not_finite_is_refused(adapter, value, place):
    tensors = weights()
    name = list(tensors)[place]
    tensors[name].flat[place] = value
    (adapter / WEIGHTS_FILE).write_bytes(safetensors(tensors))
    assert name in refused(InvalidAdapter, adapter, WEIGHTS_FILE).found
    assert verified(adapter, check_finite=False)


# --- what only looks like a file


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_symlinked_file_is_read(adapter, name):
    (adapter / name).rename(adapter.parent / "shared")
    (adapter / name).symlink_to("../shared")
    assert verified(adapter).config.rank == 4
