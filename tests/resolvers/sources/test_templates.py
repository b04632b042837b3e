"""Templates read backwards: which adapter lies at a URL."""

from __future__ import annotations

import pytest

from lora_plugins.adapter.names import AdapterName
from lora_plugins.resolvers.sources.templates import Template

PLAIN = "s3://b/loras/{lora_name}"
OF_BASE = "s3://b/{base_model_name}/{lora_name}"
VERSIONED = "s3://b/{lora_name}/versions/{revision}"
TWICE = "s3://b/{lora_name}/{lora_name}"


@pytest.mark.parametrize(
    ("template", "text", "base", "name"),
    [
        (PLAIN, "s3://b/loras/team/sql", "", "team/sql"),
        (PLAIN, "s3://b/loras/sql@v2", "", "sql@v2"),
        (PLAIN, "s3://b/other/sql", "", None),
        (PLAIN, "s3://b/loras/.hidden", "", None),
        (PLAIN, "s3://b/loras/", "", None),
        (OF_BASE, "s3://b/org/llama/sql", "org/llama", "sql"),
        (OF_BASE, "s3://b/org/other/sql", "org/llama", None),
        (OF_BASE, "s3://b/llama/sql", "", None),
        (VERSIONED, "s3://b/team/sql/versions/main", "", "team/sql"),
        (VERSIONED, "s3://b/team/sql/versions/v3", "", "team/sql@v3"),
        (TWICE, "s3://b/team/sql/team/sql", "", "team/sql"),
        (TWICE, "s3://b/team/sql/team/poet", "", None),
    ],
)
def test_the_name_whose_place_a_url_is(template, text, base, name):
    found = Template(template, "S3_PATH_TEMPLATE").read(text, base)
    assert found == (None if name is None else AdapterName.parse(name))
