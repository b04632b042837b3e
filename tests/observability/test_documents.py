"""The page, the dashboard and the alerts name the metrics that exist; vLLM's own are those of a recorded scrape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from lora_plugins.observability.adapter_labels import AdapterLabels
from lora_plugins.observability.engine_metrics import families
from lora_plugins.observability.event_metrics import CountEvents
from lora_plugins.observability.scrape import MetricsCollector, Reports, StoreUsage
from tests.observability.test_engine_metrics import engine

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = Path(__file__).with_name("recorded") / "metrics.txt"
# What Prometheus itself puts on every series, in Kubernetes too, and on buckets.
EVERYWHERE = {"instance", "job", "namespace", "pod", "le"}


def all_families() -> Iterator[Metric]:
    """Every metric that there can be, with a series for those from the engines and the store."""
    registry = CollectorRegistry()
    CountEvents(registry, 3)
    yield from registry.collect()
    full = engine(("sql", True, False), host_max_bytes=1, refused={"L001": 1})
    yield from families("llama", {0: full}, AdapterLabels(10))
    figures = MetricsCollector(None, None, 10)
    figures._engines.answer, figures._engines.answered_at = Reports("llama", {}), 0.0
    figures._store.answer = StoreUsage(1, 2, 3)
    known = {family.name for family in families("llama", {}, AdapterLabels(10))}
    yield from (family for family in figures.collect() if family.name not in known)


def labels_of(hook: CountEvents) -> dict[str, tuple[str, ...]]:
    return {metric._name: metric._labelnames for metric in hook.metrics.values()}


def metrics() -> dict[str, tuple[str, set[str]]]:
    """Type and labels by name, as Prometheus stores them."""
    counted = labels_of(CountEvents(CollectorRegistry(), 3))
    known = {}
    for family in all_families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = counted.get(family.name)
        if labels is None:
            labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        known[name] = (family.type, set(labels))
    return known


METRICS = metrics()


def of_vllm() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of vLLM's own metrics, from the page of a real server."""
    known = {}
    for family in text_string_to_metric_families(RECORDED.read_text()):
        if family.name.startswith("vllm:"):
            labels = {label for sample in family.samples for label in sample.labels if label != "le"}
            known[f"{family.name}_total" if family.type == "counter" else family.name] = (family.type, labels)
    return known


KNOWN = of_vllm() | METRICS
# Counted only where lora_lru_manager plans: all that the engines say, and in the API server what the page on metrics
# names.
OF_THE_MANAGER = (
    {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families("llama", {}, AdapterLabels(10))
    }
    | {"lora_plugins_figures_age_seconds", "lora_plugins_requests_total", "lora_plugins_swaps_total"}
    | {"lora_plugins_swap_load_seconds", "lora_plugins_unloads_total", "lora_plugins_drain_seconds"}
    | {"lora_plugins_drain_aborted_requests_total"}
)


def test_each_metric_name_says_its_unit():
    assert len(METRICS) > 35
    for name, (kind, _) in METRICS.items():
        assert (kind == "counter") == name.endswith("_total"), name
        assert (kind == "histogram") <= name.endswith("_seconds"), name


def test_table_in_the_docs_lists_every_metric():
    rows = {}
    for line in (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines():
        if line.startswith("| `"):
            name, kind, labels, meaning = (part.strip() for part in line.split("|")[1:5])
            assert meaning, name
            rows[name.strip("`")] = (kind, set(re.findall(r"`(\w+)`", labels)))
    assert rows == METRICS


QUERIED = re.compile(r"\b(?:vllm:|lora_plugins_)\w+")


def dashboard() -> dict:
    return json.loads((ROOT / "examples" / "grafana" / "lora-plugins.json").read_text())


def alerts() -> list[dict]:
    (group,) = yaml.safe_load((ROOT / "examples" / "prometheus" / "alerts.yml").read_text())["groups"]
    return group["rules"]


def metric_of(series: str) -> str:
    return series if series in KNOWN else re.sub("_(bucket|sum|count)$", "", series)


def expressions() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return [*panels, *(rule["expr"] for rule in alerts())]


@pytest.mark.parametrize("expression", expressions())
def test_queried_metrics_and_labels_exist(expression):
    names = QUERIED.findall(expression)
    assert names
    labels = set(EVERYWHERE)
    for name in names:
        metric = metric_of(name)
        assert metric in KNOWN, name
        kind, own = KNOWN[metric]
        assert (metric != name) == (kind == "histogram"), f"{name} is a {kind}"
        assert (kind == "gauge") or re.search(rf"\b(rate|increase)\({re.escape(name)}\b", expression), name
        labels |= own
    used = [label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")]
    used += re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", expression)
    assert set(used) <= labels, expression
    assert "histogram_quantile" not in expression or re.search(r"by \((\w+, )*le[,)]", expression), "without buckets"


def test_dashboard_can_be_imported():
    board = dashboard()
    assert board["schemaVersion"] >= 38  # Grafana 10
    assert "id" not in board  # Grafana gives one
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, f"{panel['title']} lies over another"
        cells |= own
        if panel["type"] != "row":
            assert panel["title"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    names = {variable["name"] for variable in board["templating"]["list"]}
    assert names == {"datasource", "namespace", "model", "pod", "instance", "adapter"}
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(board)))
    assert used == names


def test_variables_ask_for_series_and_labels_that_exist():
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            series, wanted = re.fullmatch(
                r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", variable["definition"]
            ).groups()
            labels = KNOWN[series][1] | EVERYWHERE
            assert wanted in labels, variable["name"]
            assert set(re.findall(r"(\w+)=~", variable["definition"])) <= labels, variable["name"]
            assert variable["query"]["query"] == variable["definition"]


def test_panels_say_whether_they_need_the_manager():
    without = 0
    for panel in dashboard()["panels"]:
        series = {metric_of(name) for target in panel.get("targets", ()) for name in QUERIED.findall(target["expr"])}
        if series:
            (needs,) = {name in OF_THE_MANAGER for name in series}
            assert needs == panel["description"].startswith("Needs lora_lru_manager. "), panel["title"]
            assert needs == (panel["fieldConfig"]["defaults"].get("noValue") == "needs lora_lru_manager")
            without += not needs
    assert without > 5


def test_panels_are_narrowed_by_every_variable_that_fits():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            for name, chosen in re.findall(r"((?:vllm:|lora_plugins_)\w+)\{([^}]*)\}", target["expr"]):
                labels = KNOWN[metric_of(name)][1]
                fits = {"namespace", "pod", "instance"} | ({"model_name"} & labels)
                assert fits <= set(re.findall(r"(\w+)=~", chosen)), (panel["title"], name)


def test_every_alert_has_a_severity_and_a_description():
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        kept = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        (first, *_) = re.findall(r"by \(([^)]*)\)", rule["expr"])
        assert kept <= {label.strip() for label in first.split(",")}, rule["alert"]
