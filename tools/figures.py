"""Print how large the package is and how many steps a request takes through it: a report, never a reason to fail.

    python tools/figures.py                  # all figures; the two resolves need vLLM and take half a minute
    python tools/figures.py --static         # only those that are counted in the files
    python tools/figures.py --since COMMIT   # the prose and the comments of files changed since COMMIT, too
    python tools/figures.py --pages          # the prose of each page, worst first

A resolve is traced in a process of its own, from vLLM's registry of resolvers to the answer: one adapter in a
directory, a store that is open and empty. Counted are functions of `lora_plugins` that run in that process, each once.

Pointing words (`POINTING`) are counted in 100 words of prose, code in backticks left out. The prose of a module is its
docstrings and comments. The prose of a page is all but blocks of code, headings, addresses of links, and cells of fewer
than six words. A sentence ends at a full stop, and at the end of a paragraph, list item or cell; code in backticks is
one of its words.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lora_plugins"
POINTING = frozenset(("it", "that", "this", "those", "one", "what", "which", "them", "such"))
MAX_POINTING, MAX_WORDS = 4.0, 15.0  # the goals of a page: in 100 words, in a sentence
_FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)[^`].*?\1", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_WORD = re.compile(r"[A-Za-z0-9][\w.,/'’@%+-]*")
_CELL_WORDS = 6  # shorter cells are labels


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


def prose(paths: list[Path]) -> str:
    """The docstrings of modules, those of attributes too, then the comments for a reader."""
    found = []
    for path in paths:
        found += [
            node.value.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        with tokenize.open(path) as file:
            found += [
                token.string.lstrip("# ")
                for token in tokenize.generate_tokens(file.readline)
                if token.type == tokenize.COMMENT and _is_for_readers(token.string)
            ]
    return "\n".join(found)


def words(text: str) -> list[str]:
    """The words of a text; code in backticks is one."""
    return _WORD.findall(_CODE.sub(" Code ", text))


def pointing(text: str) -> int:
    """How many words of a text point at something in the place of its name."""
    return sum(word.rstrip(".,").lower() in POINTING for word in words(text))


def pointing_in_hundred(text: str) -> float:
    """Pointing words in 100 words of a text without its code."""
    return 100 * pointing(text) / max(len(words(_CODE.sub(" ", text))), 1)


def sentences(page: str) -> list[str]:
    """The sentences of a Markdown page; a heading is none."""
    text = _LINK.sub(r"\1", _FENCE.sub("\n\n", page))
    lines = []
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell for cell in re.split(r"(?<!\\)\|", line) if len(words(_CODE.sub("", cell))) >= _CELL_WORDS]
            lines += ["", *(part for cell in cells for part in (cell, ""))]
        elif line.startswith("#"):
            lines.append("")
        elif re.match(r" *([-*]|\d+\.) ", line):
            lines += ["", re.sub(r"^ *([-*]|\d+\.) ", "", line)]
        else:
            lines.append(line.lstrip("> "))
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    parts = (
        part for block in blocks for part in re.split(r"(?<=[.!?])[*)\"]*\s+(?=[^a-z\s])", _CODE.sub("`Code`", block))
    )
    return [part for part in parts if words(part)]


def pages(root: Path) -> list[Path]:
    """The pages that users read, generated ones among them."""
    return [
        *(root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted(root.glob("docs/**/*.md")),
    ]


def of_pages(paths: list[Path]) -> tuple[float, float]:
    """Pointing words in 100 words, and words in a sentence."""
    found = [sentence for path in paths for sentence in sentences(path.read_text(encoding="utf-8"))]
    count = sum(len(words(sentence)) for sentence in found)
    return pointing_in_hundred("\n".join(found)), count / max(len(found), 1)


def git(root: Path, *arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def changed(root: Path, commit: str) -> list[Path]:
    """The package's files that differ from those of a commit, new ones among them."""
    names = git(root, "diff", "--name-only", "--diff-filter=d", commit, "--", PACKAGE)
    names += git(root, "ls-files", "--others", "--exclude-standard", "--", PACKAGE)
    return sorted({root / name for name in names.splitlines() if name.endswith(".py")})


def of_prose(paths: list[Path]) -> str:
    """Pointing words in 100 words of docstrings and comments, and the share of lines with a comment."""
    comments, total = comment_lines(paths), max(lines(paths), 1)
    return f"{pointing_in_hundred(prose(paths)):.1f} in 100; {comments:,} of {total:,} ({comments / total:.1%})"


def _is_for_readers(comment: str) -> bool:
    text = comment.lstrip("# ")
    if not text.startswith(("noqa", "type: ignore", "fmt:")):
        return True
    return " - " in text or "  # " in text  # the rule, then why


def shared_class_names(paths: list[Path]) -> list[str]:
    """Names that more than one class has; a private class has the name of its public twin."""
    names = Counter(
        node.name.removeprefix("_")
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


def each_page(root: Path) -> Iterator[tuple[str, str]]:
    """The prose of each page; those furthest from the goals first."""
    counted = {path: of_pages([path]) for path in pages(root)}
    for path in sorted(counted, key=lambda path: -max(counted[path][0] / MAX_POINTING, counted[path][1] / MAX_WORDS)):
        in_hundred, in_sentence = counted[path]
        misses = "" if in_hundred <= MAX_POINTING and in_sentence <= MAX_WORDS else "  over a goal"
        yield path.relative_to(root).as_posix(), f"{in_hundred:4.1f} in 100, {in_sentence:4.1f}{misses}"


def static(root: Path, since: str | None = None) -> Iterator[tuple[str, str]]:
    """What files say."""
    paths = modules(root)
    total = lines(paths)
    shared = shared_class_names(paths)
    missing, count = without_their_test(root)
    tests = sorted((root / "tests").rglob("*.py"))
    yield "product lines, files", f"{total:,}, {len(paths)}"
    yield "pointing words; lines with a comment", of_prose(paths)
    if since is not None:
        paths_since = changed(root, since)
        yield f"  of {len(paths_since)} files changed since {since[:12]}", of_prose(paths_since)
    yield "pages: pointing words, words in a sentence", "{:.1f} in 100, {:.1f}".format(*of_pages(pages(root)))
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
    parser.add_argument("--since", metavar="COMMIT", help="count the files that changed since COMMIT apart, too")
    parser.add_argument("--pages", action="store_true", help="only the prose of each page, worst first")
    parser.add_argument("--trace", metavar="ADAPTER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        trace(options.trace)
    if options.pages:
        figures = [*each_page(ROOT)]
    else:
        figures = [*static(ROOT, options.since), *(() if options.static else traced(ROOT))]
    for what, figure in figures:
        print(f"{what:46}{figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
