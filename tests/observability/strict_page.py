"""A page of metrics, read more strictly than by any parser: what Go's refuses, it refuses whole.

`prometheus_client` reads pages that Go's refuses, and its strict parser reads OpenMetrics only. So what a page must
keep to is checked here: one `HELP` and one `TYPE` line for each name, before its samples, which stand together, none
twice, and buckets that add up. Where Prometheus' own `promtool` is installed (Debian: `prometheus`), it reads the page
too; CI passes without it.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from prometheus_client.parser import text_string_to_metric_families

_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
_LINE = re.compile(r"# (HELP|TYPE) (\S+) ?(.*)|([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})? (\S+)")


def check_page(page: str) -> dict[str, list[str]]:
    """Assert that every parser reads this page; returns the adapters that each family names, in its order."""
    kinds: dict[str, str] = {}
    helped, seen, ended = set(), set(), set()
    last = None
    for line in page.splitlines():
        match = _LINE.fullmatch(line)
        assert match, f"neither a comment that parsers know nor a sample: {line}"
        directive, name, kind, sample, labels, value = match.groups()
        if directive == "HELP":
            assert name not in helped, f"second HELP line of {name}"
            helped.add(name)
            continue
        if directive == "TYPE":
            assert name not in kinds, f"second TYPE line of {name}"
            assert name not in ended | {last}, f"TYPE of {name} after its samples"
            kinds[name] = kind
            continue
        float(value)
        family = _family_of(sample, kinds)
        if family != last:
            assert family not in ended, f"samples of {family} in two places"
            ended.add(last)
            last = family
        assert (sample, labels) not in seen, f"twice: {line}"
        seen.add((sample, labels))
    _check_with_promtool(page)
    return _adapters(page)


def _family_of(sample: str, kinds: dict[str, str]) -> str:
    for kind, suffixes in _SUFFIXES.items():
        for suffix in suffixes:
            name = sample.removesuffix(suffix)
            if name != sample and kinds.get(name) == kind:
                return name
    return sample


def _adapters(page: str) -> dict[str, list[str]]:
    """As `prometheus_client` reads them, which unescapes labels."""
    found: dict[str, list[str]] = {}
    for family in text_string_to_metric_families(page):
        names = found.setdefault(family.name, [])
        names += [sample.labels["adapter_name"] for sample in family.samples if "adapter_name" in sample.labels]
        if family.type == "histogram":
            _check_buckets(family)
    return found


def _check_buckets(family) -> None:
    """Cumulative, and the last one holds all."""
    counts: dict[tuple, list[float]] = {}
    totals: dict[tuple, float] = {}
    for sample in family.samples:
        key = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        if sample.name.endswith("_bucket"):
            counts.setdefault(key, []).append(sample.value)
        elif sample.name.endswith("_count"):
            totals[key] = sample.value
    assert set(counts) == set(totals), family.name
    for key, buckets in counts.items():
        assert buckets == sorted(buckets), (family.name, key)
        assert buckets[-1] == totals[key], (family.name, key)


_LINTED = 3  # it could be read, and promtool would have named something otherwise


def _check_with_promtool(page: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        return
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert checked.returncode in (0, _LINTED), checked.stderr
    ours = [line for line in checked.stderr.splitlines() if line.startswith("lora_plugins_")]
    assert ours == [], ours
