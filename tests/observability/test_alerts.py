"""Each alert has a runbook and each runbook an alert; Prometheus itself can read the rules and every panel's query."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.observability.test_documents import ROOT, alerts, dashboard

PAGE = ROOT / "docs" / "operate" / "monitoring.md"
RULES = ROOT / "examples" / "prometheus" / "alerts.yml"
OF_THE_OPERATOR = ROOT / "examples" / "kubernetes" / "components" / "monitoring" / "prometheusrule.yaml"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")


def runbooks() -> dict[str, str]:
    _, _, text = PAGE.read_text().partition("## Runbooks\n")
    _, *parts = re.split(r"^### (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    assert set(runbooks()) == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("name", runbooks())
def test_a_runbook_says_who_sees_what_and_what_to_do(name):
    for part in ("**Clients see**", "**Look**", "**Do**"):
        assert part in runbooks()[name]


def test_links_of_alerts_lead_to_their_runbooks():
    for rule in alerts():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / page == PAGE
        assert anchor == rule["alert"].lower()


def test_the_command_of_the_page_makes_links_absolute(tmp_path):
    command = re.search(r"^sed -i '([^']+)'", PAGE.read_text(), re.MULTILINE).group(1)
    for original in (RULES, OF_THE_OPERATOR):
        done = subprocess.run(["sed", command, original], capture_output=True, text=True, check=True, timeout=60)
        links = re.findall(r"runbook_url: (\S+)", done.stdout)
        assert len(links) == len(alerts())
        assert all(link.startswith("https://wiki.example.com/operate/monitoring/#lora") for link in links)


def checked(path: Path) -> str:
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_reads_the_alerts():
    assert f"SUCCESS: {len(alerts())} rules found" in checked(RULES)


@needs_promtool
def test_prometheus_reads_every_query_of_the_dashboard(tmp_path):
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    plain = [re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "5m")) for query in queries]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(plain)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(queries)} rules found" in checked(path)


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


RISING, STANDING = "0+60x60", "1x60"  # a sample a minute
ERRORS, WAITED = "lora_plugins_errors_total", "lora_plugins_admission_wait_seconds"
FIRE = {
    "LoRASourceDoesNotAnswer": [series("lora_plugins_resolves_total", RISING, result="failed", source="s3")],
    "LoRAAdaptersRefused": [series(ERRORS, RISING, stage="resolve", code="L003")],
    "LoRANoRoom": [series(ERRORS, RISING, stage="load", code="L004")],
    "LoRAUpdateFails": [series(ERRORS, RISING, stage="update", code="L005")],
    "LoRADeclaredAdaptersFail": [series("lora_plugins_declared_adapters", STANDING, state="failed")],
    "LoRARequestsAreHeldForLong": [
        series(f"{WAITED}_bucket", "0x60", found="slot", le="5.0"),
        series(f"{WAITED}_bucket", RISING, found="slot", le="10.0"),
        series(f"{WAITED}_bucket", RISING, found="slot", le="+Inf"),
    ],
    "LoRAHostMemoryThrashes": [
        series(f"{WAITED}_count", RISING, found="store"),
        series(f"{WAITED}_count", RISING, found="slot"),
        series("lora_plugins_host_evictions_total", RISING),
    ],
    "LoRAUnknownNamesAreMany": [series("lora_plugins_resolves_total", "0+1200x60", result="absent", source="none")],
    "LoRAEnginesDoNotTell": [series("lora_plugins_figures_age_seconds", "0+60x60")],
}


@needs_promtool
@pytest.mark.parametrize("where", [{"instance": "host:8000"}, {"instance": "a:1", "pod": "p", "namespace": "n"}])
def test_each_alert_fires_on_what_it_is_about(tmp_path, where):
    assert set(FIRE) == {rule["alert"] for rule in alerts()}
    tests = []
    polls = [series("lora_plugins_polls_total", RISING, result="failed", source="s3")]
    for name, given in (*FIRE.items(), ("LoRASourceDoesNotAnswer", polls)):
        put = [{**one, "series": one["series"].replace("{", "{" + "".join(f'{k}="{v}",' for k, v in where.items()))}
               for one in given]  # fmt: skip
        expression = f'count(ALERTS{{alertname="{name}", alertstate="firing", instance="{where["instance"]}"}})'
        firing = {"expr": expression, "eval_time": "45m", "exp_samples": [{"labels": "{}", "value": 1}]}
        tests.append({"interval": "1m", "input_series": put, "promql_expr_test": [firing]})
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
