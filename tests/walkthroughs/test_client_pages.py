"""Pages whose commands ask one running server and the sources: what they print is what the pages show."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from testbed.bed import Bed, prepare
from testbed.hub import Hub, local_hub
from testbed.models import edit_config
from testbed.pages import Block
from testbed.server import Server
from tests.e2e.servers import admin_server
from tests.walkthroughs import debian
from tests.walkthroughs.reader import ROOT, Do, Reader, Step, Walk, left_out

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(None in map(shutil.which, ("curl", "jq")), reason="the pages use them"),
]

HOME = "a folder of this test"
SERVER = ("{url}", "other servers run beside this one")
PLUGINS = "export VLLM_PLUGINS=lora_filesystem_resolver,lora_lru_manager"
FRESH = "rm -rf $LORA_PLUGINS_STORE_DIR && mkdir $LORA_PLUGINS_STORE_DIR && cp -r $LISTED $LORA_PLUGINS_STORE_DIR"
AT = "export LORA_PLUGINS_URL=$SERVER"

LISTING = f"{AT}; lora-plugins load sql; {FRESH}"  # at its first name, the server lists the modules

COMMAND_LINE = Walk(
    "docs/guides/command-line.md",
    [
        Step("$ lora-plugins doctor", before=f"{PLUGINS},lora_s3_resolver,lora_kernel", exits=1),
        Step(
            "$ lora-plugins why team/sql",
            before=f"{PLUGINS}; {AT}; lora-plugins load team/sql && lora-plugins pause team/sql",
            exits=4,
        ),
        Step(
            "$ lora-plugins ls --server --url http://localhost:8000",
            before="lora-plugins unload '*'; lora-plugins load team/poet team/sql; lora-plugins pin team/sql",
        ),
        Step("$ lora-plugins compare sql --peft adapters/sql"),
    ],
    {
        "http://localhost:8000": SERVER,
        " adapters/sql": (" {adapters}/sql", HOME),
    },
)

TRUE_OR_7 = "7: whole, and compared with no base model, as the page on the command line says"
ANSWERS = "lora-plugins doctor                 # what is on, off or broken in this environment, and why"
WHY = "$ lora-plugins why team/SQL"
TROUBLESHOOTING = Walk(
    "docs/operate/troubleshooting.md",
    [
        Step(ANSWERS, before=f"{PLUGINS}; {AT}"),
        Step(WHY, before=f"{PLUGINS},lora_hf_hub_resolver VLLM_LORA_RESOLVER_HF_REPO_LIST=team/x", exits=3),
    ],
    {
        "lora-plugins inspect /path/to/sql ": ("lora-plugins inspect {adapters}/sql || [ $? = 7 ]", TRUE_OR_7),
        "http://127.0.0.1:8000": SERVER,
    },
)

BY_HAND = "$ curl -s localhost:8000/v1/loras -H 'Content-Type: application/json' \\"
LOG_LINE = "Adapter 'team/sql' from filesystem (file:///adapters/team/sql): rank 8, 0.2 MB, located in 0.7 ms, found in the store in"  # noqa: E501 - as the page has it
DEMO = Walk(
    "docs/get-started/demo.md",
    [
        left_out("make demo", "a check of its own"),
        Step(BY_HAND, before=f"{AT}; lora-plugins unload '*'; lora-plugins load team/sql"),
        left_out(LOG_LINE, "a line of the log, which the test of this page looks for", "60c8ccde"),
    ],
    {
        "file:///adapters": ("file://{adapters}", HOME),
        " /adapters": (" {adapters}", HOME),
        "localhost:8000": ("{address}", "other servers run beside this one"),
    },
)

COUNT = "curl -s localhost:8000/metrics | grep -c '^lora_plugins_'     # not 0: the plugins run in this server"
CHECK_RULES = "promtool check rules examples/prometheus/alerts.yml"
RUNBOOKS = (
    "sed -i 's|runbook_url: docs/operate/monitoring.md|runbook_url: https://wiki.example.com/operate/monitoring/|' \\"
)
MONITORING = Walk(
    "docs/operate/monitoring.md",
    [
        Step("scrape_configs:                      # prometheus.yml", Do.WRITE, "prometheus.yml"),
        Step(COUNT),
        Step(
            CHECK_RULES,
            before=f"mkdir -p examples && cp -r {ROOT}/examples/prometheus {ROOT}/examples/kubernetes examples",
        ),
        Step(RUNBOOKS),
    ],
    {"localhost:8000": ("{address}", "other servers run beside this one")},
)

NOTE = "python -m pip show lora-plugins vllm | grep -E '^(Name|Version)'      # what runs now: write it down"
UPGRADE = Walk(
    "docs/operate/upgrade.md",
    [
        Step(NOTE, before=f"mkdir lora-plugins; {AT}"),
        left_out(
            "pip list --format=freeze --exclude lora-plugins > installed.txt",
            "tests/installation/test_recipes.py::test_recipe_upgrades_and_goes_back_at_one_version_number",
            "620b834d",
        ),
    ],
    {"/etc/": ("", HOME)},
)

STORE = Walk(
    "docs/operate/store.md",
    [
        left_out(
            "<root>/<digest>/adapter_config.json          what engines read: known keys only",
            "a list of files",
            "8642c0d2",
        )
    ],
    {},
)

CHECK = "$ BASE_MODEL=acme/base-8b MAX_LORA_RANK=64 ./check_adapters.sh adapters"
CI = Walk(
    "docs/guides/ci.md",
    [
        Step(CHECK, before=f"cp {ROOT}/examples/ci/check_adapters.sh .", exits=1),
        Step("lora-plugins inspect adapters/team/sql --base-model acme/base-8b --max-lora-rank 64", before=LISTING),
    ],
    {"--base-model acme/base-8b": ("--base-model {base}", "a tiny Llama, which a server of this test has listed")},
)


SOURCES = Walk(
    "docs/guides/sources.md",
    [
        Step('[project.entry-points."lora_plugins.sources"]', Do.WRITE, "pyproject.toml"),
    ],
    {},
)


@dataclass(frozen=True)
class Home:
    """A server, the root of its adapters, and what a reader's shell has set."""

    server: Server
    hub: Hub
    folder: Path
    bed: Bed

    @property
    def adapters(self) -> Path:
        return self.folder / "adapters"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    bed, folder = prepare(), tmp_path_factory.mktemp("client")
    for name, original in (("sql", "chat"), ("team/poet", "team/poet"), ("wide", "wide"), ("team/sql", "sql")):
        shutil.copytree(bed.adapters / original, folder / "adapters" / name)
    weights = (bed.adapters / "chat" / "adapter_model.safetensors").read_bytes()
    shutil.copytree(bed.adapters / "chat", folder / "adapters" / "cut")
    (folder / "adapters" / "cut" / "adapter_model.safetensors").write_bytes(weights[:-1000])
    allowed = f"file://{folder / 'adapters'}"
    with (
        local_hub() as hub,
        admin_server(bed, folder, "--served-model-name", "base", LORA_PLUGINS_ALLOWED_URIS=allowed) as server,
    ):
        yield Home(server, hub, folder, bed)


@dataclass(frozen=True)
class Pages:
    """Reads pages in a folder of the test's own, beside the one server."""

    home: Home
    folder: Path
    env: dict[str, str]

    def read(self, walk: Walk) -> Reader:
        server, adapters = self.home.server, str(self.home.adapters)
        values = {"url": server.url, "address": server.url.removeprefix("http://"), "base": str(self.home.bed.base)}
        reader = Reader(walk, self.folder, self.env, values | {"adapters": adapters}, server.url)
        reader.read()
        return reader


@pytest.fixture
def pages(home: Home, tmp_path: Path, env: dict[str, str]) -> Pages:
    own = {name: value for name, value in env.items() if name != "HF_HUB_OFFLINE"}
    own |= home.hub.env(tmp_path / "hub") | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(home.adapters),
        "LORA_PLUGINS_STORE_DIR": str(tmp_path / "store"),
        "LORA_PLUGINS_STORE_MAX_BYTES": "20GB",
        "SERVER": home.server.url,
        "LISTED": str(home.folder / "store" / ".models"),
    }
    return Pages(home, tmp_path, own)


def lines(text: str, home: Home, folder: Path) -> list[str]:
    """Sorted, without digests, sizes, times, numbers, widths, and this test's paths."""
    for found, written in (
        (str(home.adapters), "/tmp/adapters"), (str(folder / "store"), "/tmp/store"),
        (str(home.bed.base), "/tmp/base-500m"), (home.server.url, "http://127.0.0.1:8000"),
    ):  # fmt: skip
        text = text.replace(found, written)
    text = text.replace("localhost", "127.0.0.1").replace("/tmp/adapters", "/adapters")
    text = text.replace("host slot", "host")  # which of the loaded have slots, depends on what was asked for before
    text = re.sub(r"\b(?:HF|HUGGING_FACE)_\w+, ", "", text)  # of this test's Hub
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "#", text)
    text = re.sub(r"\d[\d.,e-]* ?(?:[kMG]?B|ms|s)\b", "0", text)
    text = re.sub(r"\d[\d.,e-]*", "0", text)
    return sorted(" ".join(line.split()) for line in text.splitlines() if line.strip())


def shows(walk: Walk, reader: Reader, home: Home) -> None:
    """Each console of the page shows what was printed, and `…` stands for lines that are left out."""
    differences = []
    for block, step in zip(walk.blocks(), walk.steps, strict=True):
        if block.language != "console" or step.do is not Do.RUN:
            continue
        shown = lines(block.shown(), home, reader.folder)
        printed = lines(reader.printed[step.first], home, reader.folder)
        if "…" in shown:
            shown.remove("…")
            printed = [line for line in printed if line in shown]
        if printed != shown:
            differences += [*difflib.unified_diff(shown, printed, step.first, "printed", lineterm="", n=0)]
            differences.append(reader.printed[step.first])
    assert not differences, "\n".join(differences)


def test_the_command_line_prints_what_its_page_shows(home: Home, pages: Pages) -> None:
    shows(COMMAND_LINE, pages.read(COMMAND_LINE), home)


def test_a_name_in_capitals_is_looked_for(home: Home, pages: Pages) -> None:
    reader = pages.read(TROUBLESHOOTING)
    shows(TROUBLESHOOTING, reader, home)
    assert "whole, and not compared" in reader.printed[ANSWERS]


def test_an_adapter_is_loaded_swapped_and_unloaded_by_hand(home: Home, pages: Pages, tmp_path: Path) -> None:
    shutil.copytree(home.bed.adapters / "stable", tmp_path / "new-version")
    reader = pages.read(DEMO)
    shows(DEMO, reader, home)
    log = " ".join(lines(home.server.log(), home, tmp_path))
    block = next(block for block in DEMO.blocks() if block.first == LOG_LINE)
    (line,) = lines(" ".join(block.text.split()), home, tmp_path)
    assert line.partition(" rank")[0] in log


def test_metrics_are_scraped_as_the_page_says(pages: Pages, tmp_path: Path) -> None:
    path = f"{pages.env['PATH']}:{debian.folder_of(*debian.PROMTOOL)}"
    reader = replace(pages, env={**pages.env, "PATH": path}).read(MONITORING)
    assert re.search(r"SUCCESS: \d+ rules found", reader.printed[CHECK_RULES])
    linked = reader.run(Block("", f"promtool check config prometheus.yml && {CHECK_RULES}\n", 0))
    assert (linked.count("SUCCESS"), linked.count("rules found")) == (2, 1)
    assert int(reader.printed[COUNT]) > 0
    (scrape,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"][0]["targets"]
    assert "metrics_path" not in scrape, "/metrics, by default"
    assert "runbook_url: docs/" not in (tmp_path / "examples/prometheus/alerts.yml").read_text()


def test_what_runs_before_an_upgrade_is_noted(pages: Pages, tmp_path: Path) -> None:
    reader = pages.read(UPGRADE)
    assert re.findall(r"^Name: (.*)", reader.printed[NOTE], re.MULTILINE) == ["lora-plugins", "vllm"]
    assert (tmp_path / "lora-plugins.before").is_dir()
    assert "loras" in json.loads((tmp_path / "loras.before.json").read_text())


def test_files_in_the_store_are_those_of_the_page(home: Home, tmp_path: Path) -> None:
    (block,) = STORE.blocks()
    named = set(re.findall(r"/(\w[\w.]+)", block.text))
    for digest in (home.folder / "store").glob("?" * 64):
        assert {file.name for file in digest.iterdir()} - named <= set()


def test_a_cut_adapter_fails_the_check_of_the_page(home: Home, pages: Pages, tmp_path: Path) -> None:
    for name in ("cut", "team/sql"):
        shutil.copytree(home.adapters / name, tmp_path / "adapters" / name)
        edit_config(tmp_path / "adapters" / name, base_model_name_or_path="acme/base-8b")
    shows(CI, pages.read(CI), home)


def test_a_package_with_the_pages_source_serves_archives(home: Home, pages: Pages, tmp_path: Path) -> None:
    """The package is installed as pip leaves it: its modules, and the entry points of its metadata."""
    reader = pages.read(SOURCES)
    (tmp_path / "my_package").mkdir()
    shutil.copy(ROOT / "examples" / "archives.py", tmp_path / "my_package")
    declared = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "my_package-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    ((group, points),) = declared.items()
    entries = "".join(f"{name} = {target}\n" for name, target in points.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entries}")
    (tmp_path / "archives" / "team").mkdir(parents=True)
    shutil.make_archive(str(tmp_path / "archives" / "team" / "sql"), "zip", home.adapters / "team" / "sql")
    ask = "PYTHONPATH=$PYTHONPATH:$PWD VLLM_PLUGINS=lora_sources LORA_ARCHIVES=$PWD/archives lora-plugins pull team/sql"
    assert f"zip://{tmp_path}/archives/team/sql.zip" in reader.run(Block("", f"{ask}\n", 0))
