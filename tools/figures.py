"""Print how large the package is and how many steps a request takes through it: a report, never a reason to fail.

    python tools/figures.py            # all of it; the two resolves need vLLM and take half a minute
    python tools/figures.py --static   # what is counted in the files alone

A resolve is traced in a process of its own, from vLLM's registry of resolvers to the answer: one adapter in a
directory, a store that is open and empty. Counted are functions of `lora_plugins` that run in that process, each once.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lora_plugins"


def modules(root: Path) -> list[Path]:
    """The package's Python files."""
    return sorted((root / PACKAGE).rglob("*.py"))


def lines(paths: list[Path]) -> int:
    """All lines, empty ones among them."""
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def comment_lines(paths: list[Path]) -> int:
    """Lines with a comment that is for a reader: not for ruff or mypy alone."""
    count = 0
    for path in paths:
        with tokenize.open(path) as file:
            comments = {
                token.start[0]
                for token in tokenize.generate_tokens(file.readline)
                if token.type == tokenize.COMMENT and _is_for_readers(token.string)
            }
        count += len(comments)
    return count


def _is_for_readers(comment: str) -> bool:
    text = comment.lstrip("# ")
    if not text.startswith(("noqa", "type: ignore", "fmt:")):
        return True
    return " - " in text or "  # " in text  # the rule, then why


def shared_class_names(paths: list[Path]) -> list[str]:
    """Names that more than one class has."""
    names = Counter(
        node.name
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def without_their_test(root: Path) -> tuple[list[str], int]:
    """Modules that have no `tests/<same path>/test_<module>.py`, and how many modules there are."""
    named = [path for path in modules(root) if not path.stem.startswith("__")]
    missing = []
    for path in named:
        inside = path.relative_to(root / PACKAGE)
        if not (root / "tests" / inside.parent / f"test_{inside.name}").is_file():
            missing.append(inside.as_posix())
    return missing, len(named)


def static(root: Path) -> Iterator[tuple[str, str]]:
    """What files say."""
    paths = modules(root)
    total = lines(paths)
    comments = comment_lines(paths)
    shared = shared_class_names(paths)
    missing, count = without_their_test(root)
    tests = sorted((root / "tests").rglob("*.py"))
    yield "product lines, files", f"{total:,}, {len(paths)}"
    yield "lines with a comment", f"{comments:,} ({comments / total:.1%})"
    yield "class names that several have", f"{len(shared)}{': ' if shared else ''}{', '.join(shared)}"
    yield "modules whose test is found in one guess", f"{count - len(missing)} of {count}"
    yield "test lines, files", f"{lines(tests):,}, {len(tests)}"


def traced(root: Path) -> Iterator[tuple[str, str]]:
    """What a cold resolve of a local adapter runs, and the same name again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.insert(0, str(root))
        from tests.store.common import adapter_files

        directory = folder / "adapters" / "sql"
        directory.mkdir(parents=True)
        for file, content in adapter_files().items():
            (directory / file).write_bytes(content)
        env = {
            **os.environ,
            "PYTHONPATH": str(root),
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(folder / "adapters"),
            "LORA_PLUGINS_STORE_DIR": str(folder / "store"),
            "LORA_PLUGINS_BASE_MATCH": "off",  # there is no engine to compare with
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--trace", "sql"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        yield "a cold resolve", f"not traced: {done.stderr.strip().splitlines()[-1]}"
        return
    for what, (functions, files, threads) in json.loads(done.stdout.splitlines()[-1]).items():
        yield f"{what}: functions, files, threads", f"{functions}, {files}, {threads}"


def trace(adapter: str) -> None:
    """Resolve twice in this process, and print what ran as JSON."""
    import asyncio
    import threading

    ours = f"{os.sep}{PACKAGE}{os.sep}"
    seen: set[tuple[str, str, int]] = set()

    def note(frame: object, event: str, argument: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and ours in code.co_filename and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname, threading.get_ident()))

    from lora_plugins.plugin import register_filesystem_resolver

    register_filesystem_resolver()
    from vllm.lora.resolver import LoRAResolverRegistry

    (resolver,) = (LoRAResolverRegistry.get_resolver(name) for name in LoRAResolverRegistry.get_supported_resolvers())

    async def twice() -> dict[str, tuple[int, int, int]]:
        counted = {}
        assert await resolver.resolve_lora("base", "absent") is None  # opens the store
        for what in ("a cold resolve", "its repeat"):
            seen.clear()
            threading.setprofile(note)
            sys.setprofile(note)
            answer = await resolver.resolve_lora("base", adapter)
            sys.setprofile(None)
            threading.setprofile(None)
            assert answer is not None, "the adapter was not found"
            functions = {(file, name) for file, name, _ in seen}
            counted[what] = len(functions), len({file for file, _ in functions}), len({thread for *_, thread in seen})
        return counted

    print(json.dumps(asyncio.run(twice())), flush=True)
    os._exit(0)  # threads that wait for a source need not be waited for


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tools/figures.py")
    parser.add_argument("--static", action="store_true", help="only what is counted in the files")
    parser.add_argument("--trace", metavar="ADAPTER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        trace(options.trace)
    for what, figure in (*static(ROOT), *(() if options.static else traced(ROOT))):
        print(f"{what:46}{figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
