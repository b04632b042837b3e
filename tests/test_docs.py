"""The documentation: links, the places of pages in the site, and pages that scripts write."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import deployments, models
from testbed.architectures import ARCHITECTURES
from tools import build_wheel, check_links, write_cli_doc

ROOT = Path(__file__).resolve().parent.parent


def test_links_of_every_page_lead_somewhere():
    assert len(check_links.pages()) > 25
    assert [line for page in check_links.pages() for line in check_links.wrong_links(page)] == []


def test_every_page_has_one_place_in_the_site():
    assert list(check_links.wrong_places()) == []


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A page that links to another one, and a picture of it in HTML."""
    for name, text in {
        "README.md": 'See [a](docs/a.md#more-here) and <img src="docs/a.svg" alt="a">, or [web](https://x.test/y).',
        "docs/a.md": "# A\n## More, here\n[home](../README.md), [above](#a), [folder](..)\n",
        "docs/a.svg": "<svg/>",
        "mkdocs.yml": "nav: [index.md, {Part: [{A: a.md}]}]",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(check_links, "ROOT", tmp_path)
    return tmp_path


def test_right_links_and_places_pass(repository):
    assert [*check_links.wrong_links("README.md"), *check_links.wrong_links("docs/a.md")] == []
    assert list(check_links.wrong_places()) == []


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("[x](b.md)", "no such file"),
        ("[x](a.md#less)", "no such heading; there are a, more-here"),
        ("[x](#less)", "no such heading"),
        ("[x](../../out.md)", "no such file"),
        ("[x](../docs)", "a folder"),
        ('<img src="b.svg">', "no such file"),
        ("![x](b.svg)", "no such file"),
    ],
)
def test_a_wrong_link_is_found(repository, link, why):
    with (repository / "docs" / "a.md").open("a") as page:
        page.write(f"\n```\n[code](nowhere)\n```\n\n{link}\n")
    (found,) = check_links.wrong_links("docs/a.md")
    assert found.startswith("docs/a.md:9: ")
    assert why in found


def test_a_page_without_a_place_is_found(repository):
    (repository / "docs" / "b.md").write_text("# B")
    (repository / "mkdocs.yml").write_text("nav: [index.md, a.md, c.md, a.md]")
    assert list(check_links.wrong_places()) == [
        "mkdocs.yml: a.md stands there twice",
        "mkdocs.yml: there is no docs/c.md",
        "docs/b.md: has no place in the nav of mkdocs.yml",
    ]


def test_the_readme_of_the_wheel_needs_no_repository():
    readme = (check_links.ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 6 * 1024
    shown = build_wheel.without_relative_links(readme)
    assert [link["path"] for link in check_links.LINK.finditer(shown) if link["path"]] == []
    assert "](https://github.com/vllm-project/vllm)" in shown
    for kept in ("*The way of a request: ", "`lora_admin`", "Troubleshooting", "vllm serve meta-llama"):
        assert kept in shown
    assert "](" not in shown.replace("](https://", "")


def test_the_page_of_commands_is_what_help_says(tmp_path, monkeypatch, capsys):
    assert write_cli_doc.main(["--check"]) == 0
    page = write_cli_doc.PAGE.read_text()
    for said in ("## doctor\n", "lora-plugins resolve [OPTIONS]", "`--max-lora-rank <int range>`"):
        assert said in page
    monkeypatch.setattr(write_cli_doc, "PAGE", tmp_path / "cli.md")
    write_cli_doc.PAGE.write_text(page.replace("## doctor", "## doktor"))
    assert write_cli_doc.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err


def test_the_matrix_of_models_is_what_was_measured():
    result = json.loads(models.KEPT.read_text())
    assert models.PAGE.read_text() == models.page(result)
    assert "wrong" not in models.page(result)
    measured = {(row["architecture"], row["kind"]) for row in result["rows"]}
    assert measured == {(one.name, kind) for one in ARCHITECTURES for kind in ("", *one.kinds())}


def deployment(cell: str, **changes: object) -> dict[str, object]:
    part = deployments.Part(cell, "tested", "answers are right", "engine", {"tests/e2e/test_x.py::test_y": "passed"})
    return {**asdict(part), **changes, "is_broken": replace(part, **changes).is_broken}


def test_a_deployment_whose_test_fails_is_broken():
    failed = {"tests/e2e/test_x.py::test_y": "failed", "tests/e2e/test_x.py::test_z": "passed"}
    table = deployments.table([deployment("one worker"), deployment("tensor parallel", tests=failed)])
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    assert "| one worker | tested | real engine, 1 test, 0 s | answers are right |" in lines["one worker"]
    assert "**broken**" in lines["tensor parallel"]
    assert "**broken**" in lines["Ray"], "nothing carries it"
    assert deployment("Ray", tests={})["is_broken"]


def test_a_skipped_deployment_is_said_not_to_have_run():
    table = deployments.table([deployment("Ray", tests={"tests/e2e/test_x.py::test_y": "skipped: no Ray"})])
    assert "| Ray | not run here (skipped: no Ray) |" in table


def test_marks_of_deployments_name_cells_and_verdicts():
    marks = re.compile(r'mark\.deployment\(\s*"([^"]+)",\s*"([^"]+)"')
    found = [mark for file in (ROOT / "tests").rglob("test_*.py") for mark in marks.findall(file.read_text())]
    cells = {cell for of_part in deployments.CELLS.values() for cell in of_part}
    assert {cell for cell, _ in found} <= cells
    assert {verdict for _, verdict in found} == set(deployments.VERDICTS)


def test_the_matrix_of_deployments_is_what_was_run():
    if not deployments.KEPT.exists():
        pytest.skip("make matrix has not been run to its end")
    page = deployments.PAGE.read_text()
    assert page == deployments.page(page, json.loads(deployments.KEPT.read_text()))
    assert "**broken** |" not in page.partition(deployments.BEGIN)[2]


def test_the_page_on_rl_shows_the_example_that_runs():
    example = (ROOT / "examples" / "rl_loop.py").read_text()
    assert f"```python\n{example}```" in (ROOT / "docs" / "guides" / "rl.md").read_text()


def test_the_page_on_security_quotes_the_warning_of_vllm():
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    router = Path(vllm.origin).parent / "entrypoints" / "serve" / "lora" / "api_router.py"
    (warning,) = [
        node.args[0].value
        for node in ast.walk(ast.parse(router.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.warning"
    ]
    page = " ".join((ROOT / "docs" / "operate" / "security.md").read_text().replace("> ", "").split())
    assert warning in page
