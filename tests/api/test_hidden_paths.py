"""No path of the server is in what a client of inference is told; all else is."""

from __future__ import annotations

import pytest

from lora_plugins.api.hidden_paths import for_clients, without_paths
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, SourceUnavailable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no directory at /adapters", "no directory at <path>"),
        ("no directory at '/my data/adapters'", "no directory at '<path>'"),
        ("base model /data/llama-3.1/8b, served is /models/llama.v2", "base model <path>, served is <path>"),
        ("base model tiny (/models/tiny)", "base model tiny (<path>)"),
        ("served is '/models/tiny'; accepted", "served is '<path>'; accepted"),
        ("files missing ([Errno 2] No such file: '/a b/c.json')", "files missing ([Errno 2] No such file: '<path>')"),
        ('File "/x y/z.py"', 'File "<path>"'),
        ("it is at /a/b/.", "it is at <path>."),
        ("it is at /a/b.", "it is at <path>."),
        ("file:///srv/a", "<path>"),
        ("at 'file:///srv/a b'", "at '<path>'"),
        ("path=/x/y;/z", "path=<path>;<path>"),
        ("/a/b", "<path>"),
    ],
)
def test_paths_are_hidden(text, shown):
    assert without_paths(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "base model someone/other-7b",
        "load it again with POST /v1/loras",
        "an input/output error",
        "s3://bucket/a/b and hf://acme/many and https://host/x",
        "lora_A and/or lora_B",
        "1 / 2",
        "no revision 'corp.com/sql' of an adapter 'user'",
        "tensor 'base_model.model.model.layers.0.q_proj.lora_A.weight'",
        "--max-lora-rank 128",
        "shape [8, 256]",
    ],
)
def test_what_is_no_path_stays(text):
    assert without_paths(text) == text


def test_the_adapters_name_stays_as_it_was_asked_for():
    error = AdapterNotFound("x", expected="/a", remedy="see /b", adapter="/sql", file="/c/d")
    assert for_clients(error) == "[L002] adapter '/sql', file '<path>': found x; expected <path>. To fix: see <path>."
    assert str(error).count("<path>") == 0
    assert for_clients(IncompatibleAdapter("x", adapter="team/sql")) == "[L003] adapter 'team/sql': found x."


def test_place_is_for_the_log_and_never_for_clients():
    error = SourceUnavailable("x", adapter="sql", place="s3://bucket/loras/sql/ on http://s3.test:9000")
    assert str(error) == "[L006] adapter 'sql': found x at s3://bucket/loras/sql/ on http://s3.test:9000."
    assert for_clients(error) == "[L006] adapter 'sql': found x."
