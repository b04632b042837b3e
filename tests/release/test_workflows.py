"""What the host of this repository runs and shows: each file is parsed, and names only what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PINNED = re.compile(r"uses: ([\w./-]+)@([0-9a-f]{40})  # (v\d+\.\d+\.\d+)$", re.MULTILINE)
MAKE, PROGRAM = re.compile(r"\bmake ([a-z][a-z0-9-]*)"), re.compile(r"\b((?:tools|tests|benchmarks)/[\w/.-]+\.\w+)")


def jobs(workflow: Path) -> dict[str, Any]:
    found = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    assert isinstance(found, dict)
    return found


def commands(workflow: Path) -> str:
    return "\n".join(step.get("run", "") for job in jobs(workflow).values() for step in job["steps"])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_only_what_exists(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = commands(workflow)
    assert set(MAKE.findall(text)) <= targets
    assert [file for file in PROGRAM.findall(text) if not (ROOT / file).exists()] == []
    names = jobs(workflow).keys()
    needed = [job.get("needs", []) for job in jobs(workflow).values()]
    assert {name for each in needed for name in ([each] if isinstance(each, str) else each)} <= names


def test_the_workflows_call_something() -> None:
    assert MAKE.search(commands(GITHUB / "workflows" / "release.yml"))
    assert PROGRAM.search(commands(GITHUB / "workflows" / "ci.yml"))


def test_each_action_is_pinned_by_one_commit() -> None:
    text = "\n".join(workflow.read_text(encoding="utf-8") for workflow in WORKFLOWS)
    found = PINNED.findall(text)
    assert len(found) == text.count("uses: ") > 20
    pins = {(re.sub(r"^([^/]+/[^/]+).*", r"\1", action), commit, tag) for action, commit, tag in found}
    assert len({repository for repository, _, _ in pins}) == len(pins)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_rights_to_write_are_a_jobs_own(workflow: Path) -> None:
    rights = yaml.safe_load(workflow.read_text(encoding="utf-8"))["permissions"]
    assert set(rights.values()) <= {"read"}


def test_publishing_runs_no_code_of_ours_and_no_token() -> None:
    text = (GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"secrets\.\w+|password:", text)) == set()
    of_release = jobs(GITHUB / "workflows" / "release.yml")
    for name in ("index", "test-index"):
        job = of_release[name]
        assert job["permissions"] == {"id-token": "write"}
        assert job["environment"] == name
        assert {"build", "install"} <= set(job["needs"])
        assert not any("checkout" in step.get("uses", "") for step in job["steps"])
        assert [step["with"]["attestations"] for step in job["steps"] if "pypi-publish" in step.get("uses", "")] == [
            True
        ]


def test_a_report_asks_for_the_doctors_answer() -> None:
    forms = {
        path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml")
    }
    assert {"bug.yml", "wish.yml", "config.yml"} == forms.keys()
    (doctor,) = [part for part in forms["bug.yml"]["body"] if part.get("id") == "doctor"]
    assert doctor["attributes"]["label"] == "lora-plugins doctor --json"
    assert doctor["validations"]["required"] is True
    assert "SECURITY.md" in str(forms["bug.yml"])
    assert "lora-plugins doctor --json" in (GITHUB / "pull_request_template.md").read_text(encoding="utf-8")


def test_the_ledgers_job_reads_each_known_release() -> None:
    from tools.write_support_doc import proofs, releases

    assert jobs(GITHUB / "workflows" / "ci.yml")["ledger"]["strategy"]["matrix"]["vllm"] == releases()
    assert [release for release in releases() if "all tests" in proofs(release)] == ["0.32"]
    assert proofs("0.29") == "nothing"
