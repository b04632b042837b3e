"""Paths, modules, commands, settings and symbols that the prose names in backticks are in this repository.

The tests read the pages, and docstrings and comments of the code. A path counts from the repository, from
`lora_plugins/`, from the folder of the page, or from a folder that holds the module. In blocks of code the tests read
commands and settings only.
"""

from __future__ import annotations

import ast
import builtins
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lora_plugins import plugin_names
from lora_plugins.cli.commands import EXAMPLES
from lora_plugins.resolvers.sources.configured import ENTRY_POINTS
from lora_plugins.settings import VARIABLES
from tools import ledger
from tools.check_links import FENCE

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lora_plugins"
OURS = ("lora_plugins", "tests", "testbed", "benchmarks", "soak", "examples", "tools")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = sorted(path for folder in OURS if folder != "tests" for path in (ROOT / folder).rglob("*.py"))
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
IN_PROCESS = r"\| (all|API server|offline|engine core|worker) \| `\w+\.py`"
# Pages about the code itself: every identifier on them is a name of our code, of vLLM's, or of Python's.
CODE_PAGES = ("CONTRIBUTING.md", "docs/explanation/architecture.md")

SPAN = re.compile(r"(?<![`\[])`([^`]+)`(?!`)")  # not the text of a link, whose target tools/check_links.py looks at
FILE = re.compile(r"(?:[\w.@*/-]|<[\w ]+>)+\.(?:py|md|toml|ya?ml|jsonl?|c|sh|svg|txt)(?:::\w+)?")
FOLDER = re.compile(r"(?:[\w.-]+/)+")
MODULE = re.compile(rf"(?:{'|'.join(OURS)})(?:\.\w+)+")
CLASS = re.compile(r"(?:[A-Z][a-z0-9]+){2,}")
CLASS_OF_MODULE = re.compile(r"[a-z_]+(?:\.[a-z_]+)*\.[A-Z]\w*[a-z]\w*")
SETTING = re.compile(r"\b_?LORA_PLUGINS_[A-Z0-9_]*[A-Z0-9]")
BEGIN = r"(?:^|[|&(;$] ?|-- |sudo |exec )"  # of a command on a line
TARGET = re.compile(rf"{BEGIN}make ([a-z][a-z0-9-]*)", re.MULTILINE)
COMMAND = re.compile(rf"{BEGIN}lora-plugins (?:--?\w[\w-]* )*([a-z][a-z-]*)", re.MULTILINE)
RUN_MODULE = re.compile(rf"python -m ((?:{'|'.join(OURS)})(?:\.\w+)*)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:\(\))?")

OTHERS = ("vllm.", "subprocess.", "package.")  # modules that are not ours

# Files that are not in this repository, with who makes them.
ELSEWHERE = {
    r"adapters?\.(txt|yaml)|policy\.toml|compose\.ya?ml|role\.yaml": "a user writes it",
    r"(.*/)?adapter_(config\.json|model\.(safetensors|bin))|.*\.safetensors\.index\.json": "a file of an adapter",
    r"(tokenizer|generation|processor)_config\.json": "a file of an adapter, or of a model",
    r"(special_tokens_map|added_tokens|chat_template)\.json": "a file of an adapter, or of a model",
    r"(.*/)?config\.json|tokenizer\.json": "a file of a model",
    r"vllm/.*|peft/.*": "a file of vLLM or PEFT",
    r"(.*/)?(manifest|parts)\.json": "the store writes it",
    r"training\.json": "examples/training writes it beside an adapter",
    r"objects\.json": "the build of a wheel writes it",
    r"sm_90\.json|(check|streams|kernels_gpu)\.json": "the programs for a GPU write them",
}
# Of systemd, S3, Transformers, PEFT, Ray, and of vLLM where nothing of ours touches them.
NAMES_ELSEWHERE = frozenset(
    [
        "EnvironmentFile",
        "GetObject",
        "ListObjectsV2",
        "AutoModel",
        "AutoTokenizer",
        "LoraConfig",
        "ParamWrapper",
        "RequestRouterConfig",
        "EngineDeadError",
        "EngineArgs",
        "AuthenticationMiddleware",
    ]
)
CONNECTOR = re.compile(r"\w+Connector(V1)?")  # of vLLM's KV cache: `test_every_connector_of_vllm_is_judged` has them
MARKERS = ("e2e", "slow", "nightly")  # of pytest
ELSEWHERE_ON = {
    "docs/guides/clients.md": (r"(litellm|open_webui)/.*\.py|(main|env)\.py", "files of LiteLLM and Open WebUI"),
    "docs/explanation/frameworks.md": (r".*\.py", "files of the frameworks"),
    "docs/reference/deployments.md": (r"events\.jsonl", "the soak writes it"),
}


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def known_settings() -> frozenset[str]:
    """Every variable of ours that the product's code names in full."""
    return frozenset(re.findall(r"\"(_?LORA_PLUGINS_\w+)\"", "\n".join(path.read_text() for path in MODULES)))


@cache
def parsed(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


def names_in(module: Path) -> Iterator[str]:
    """Functions, classes, arguments, attributes and imported names of a module."""
    for node in ast.walk(parsed(module)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")
            case ast.Constant(value=str(name)) if name.startswith("lora_plugins_"):  # of an attribute that is set
                yield name


@cache
def our_names() -> frozenset[str]:
    return frozenset(name for path in PROGRAMS for name in names_in(path))


@cache
def our_classes() -> frozenset[str]:
    """Classes, constants and type aliases of the product, of its tools and of its tests."""
    found = set()
    for path in (*PROGRAMS, ROOT / "tests" / "resolvers" / "sources" / "contract.py"):
        for node in parsed(path).body:
            match node:
                case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
    return frozenset(found)


@cache
def names_of_vllm() -> frozenset[str]:
    """What the ledger says that vLLM has."""
    names = {part for symbol in ledger.symbols() for part in symbol.name.partition(":")[2].split(".")}
    return frozenset(names)


def is_path(text: str) -> bool:
    if text.startswith(("/", "~", "../", "./")) or "://" in text:
        return False
    folder = text.split("/", maxsplit=1)[0]
    return bool(
        FILE.fullmatch(text) or (FOLDER.fullmatch(text) and ((ROOT / folder).is_dir() or (PACKAGE / folder).is_dir()))
    )


def is_there(text: str, page: Path) -> bool:
    file, _, function = text.partition("::")
    name = page.relative_to(ROOT).as_posix()
    if any(re.fullmatch(pattern, file) for pattern in (*ELSEWHERE, *ELSEWHERE_ON.get(name, ())[:1])):
        return True
    pattern = re.sub(r"<[^>]*>", "*", file.removesuffix("/"))
    inside = [folder for folder in page.parents if PACKAGE in folder.parents]
    for folder in (ROOT, PACKAGE, page.parent, *inside):
        for found in folder.glob(pattern):
            if not function or f"def {function}(" in found.read_text():
                return True
    return False


def is_module(dotted: str, place: Path = ROOT) -> bool:
    """Whether the parts are folders and a module, perhaps followed by names in the module."""
    parts = dotted.split(".")
    for number, part in enumerate(parts):
        if (place / part).is_dir():
            place /= part
            continue
        module = place / f"{part}.py"
        rest = parts[number + 1 :] if module.is_file() else parts[number:]
        module = module if module.is_file() else place / "__init__.py"
        return module.is_file() and set(rest) <= set(names_in(module))
    return True


def is_name(dotted: str) -> bool:
    parts = dotted.removesuffix("()").split(".")
    if CONNECTOR.fullmatch(dotted):
        return True
    ours = our_classes() if parts[0][0].isupper() else our_names()  # a class or constant has a definition
    known = ours | NAMES_ELSEWHERE | set(dir(builtins)) | set(VARIABLES) | {*plugin_names.OURS, *MARKERS}
    return (parts[0] in known or parts[0] in names_of_vllm()) and set(parts[1:]) <= our_names() | names_of_vllm()


def is_setting(name: str) -> bool:
    return name in known_settings() or any(known.startswith(f"{name}_") for known in known_settings())


def wrong_in_code(code: str) -> Iterator[str]:
    """What a span or a block of code names that is not there."""
    for target in TARGET.findall(code):
        if target not in make_targets():
            yield f"make {target}"
    for command in COMMAND.findall(code):
        if command not in EXAMPLES:
            yield f"lora-plugins {command}"
    for module in RUN_MODULE.findall(code):
        if not is_module(module):
            yield f"python -m {module}"


def wrong_in_span(span: str, page: Path) -> Iterator[str]:
    """What a span of code names that is not there."""
    names = IDENTIFIER if page.relative_to(ROOT).as_posix() in CODE_PAGES else CLASS
    if is_path(span):
        if not is_there(span, page):
            yield span
    elif MODULE.fullmatch(span):
        if not is_module(span) and span != ENTRY_POINTS:
            yield span
    elif CLASS_OF_MODULE.fullmatch(span) and page.suffix == ".py":
        if not (span.startswith(OTHERS) or any(is_module(span, place) for place in (PACKAGE, page.parent))):
            yield span
    elif names.fullmatch(span) and not is_name(span):
        yield span
    yield from wrong_in_code(span)


def wrong_in_text(text: str, page: Path) -> Iterator[str]:
    blocks = [block[0] for block in FENCE.finditer(text)]
    for block in blocks:
        yield from wrong_in_code(block)
    if page == ARCHITECTURE:  # in these rows the process says the folder: the test of the tables reads them
        text = "\n".join(line for line in text.splitlines() if not re.match(IN_PROCESS, line))
    for span in SPAN.findall(FENCE.sub("", text)):
        yield from wrong_in_span(" ".join(span.split()), page)
    for name in SETTING.findall(text):
        if not is_setting(name):
            yield name


def prose_of(module: Path) -> str:
    """The docstrings of a module, those of attributes too, and its comments."""
    strings = [
        node.value.value
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    comments: list[str] = []
    if re.search("#.*(`|LORA_PLUGINS_)", module.read_text()):  # else there is nothing to look for
        with tokenize.open(module) as file:
            tokens = tokenize.generate_tokens(file.readline)
            comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return "\n\n".join([*strings, *comments])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_what_exists(page: Path) -> None:
    assert sorted(set(wrong_in_text(page.read_text(), page))) == []


def test_docstrings_and_comments_name_what_exists() -> None:
    found = {
        module.relative_to(ROOT).as_posix(): sorted(set(wrong_in_text(prose_of(module), module))) for module in PROGRAMS
    }
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


FOLDERS = {"all": "", "offline": "api_server/"}  # of the processes whose folder has another name


def rows(heads: str) -> list[list[str]]:
    """The cells of the tables of the page on architecture that begin with these heads."""
    found: list[list[str]] = []
    is_open = False
    for line in ARCHITECTURE.read_text().splitlines():
        if line.startswith(f"| {heads} |"):
            is_open = True
        elif not line.startswith("|"):
            is_open = False
        elif is_open and not line.startswith("|---"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_the_tables_of_patches_are_the_ledger() -> None:
    entries = ledger.entries()
    named: set[str] = set()
    for process, files, objects, _ in rows("process | file | object of vLLM"):
        folder = FOLDERS.get(process, f"{process.lower().replace(' ', '_')}/")
        paths = [f"vllm_patches/{folder}{file}" for file in SPAN.findall(files)]
        named.update(paths)
        _objects_are_in(objects, [entry for path in paths for entry in entries[path]])
    for files, objects, _ in rows("file | object of vLLM"):
        paths = SPAN.findall(files)
        named.update(paths)
        _objects_are_in(objects, [entry for path in paths for entry in entries[path]])
    assert named == set(entries)


def test_the_rows_of_patches_name_each_class_that_is_wrapped() -> None:
    rows_of = {
        f"{FOLDERS.get(process, process.lower().replace(' ', '_') + '/')}{file}": set(SPAN.findall(objects))
        for process, files, objects, _ in rows("process | file | object of vLLM")
        for file in SPAN.findall(files)
    }
    folder = ROOT / "lora_plugins" / "vllm_patches"
    wrapped = {
        path.relative_to(folder).as_posix(): owners
        for path in folder.rglob("*.py")
        if (owners := {*re.findall(r"^ +wrap\((?:\w+\.)?([A-Z]\w+),", path.read_text(), re.MULTILINE)})
    }
    assert len(wrapped) > 10
    lacking = {file: owners - rows_of[file] for file, owners in wrapped.items() if not owners <= rows_of[file]}
    assert lacking == {}


def _objects_are_in(objects: str, entries: list[ledger.Patch]) -> None:
    symbols = "\n".join(f"{[*entry.parsed()]}\n{entry.what}" for entry in entries)
    assert SPAN.findall(objects), objects
    for name in SPAN.findall(objects):
        assert re.search(rf"\b{re.escape(name)}\b", symbols), f"{name} is not in the ledger of its file"


def test_the_order_of_wrappers_is_of_patched_attributes() -> None:
    symbols = {symbol.name.partition(":")[2] for symbol in ledger.symbols()}
    attributes = [name for where, _ in rows("where | in this order") for name in SPAN.findall(where)]
    assert len(attributes) >= 5
    assert [name for name in attributes if name not in symbols] == []


def test_the_layers_are_those_that_are_checked() -> None:
    contract, *_ = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    block = ARCHITECTURE.read_text().partition("## Layers")[2].split("```")[1]
    shown = [re.split(r"  +", line)[0] for line in block.strip().splitlines()]
    assert [set(re.findall(r"\w+", line.replace(".py", ""))) for line in shown] == [
        set(re.findall(r"\w+", layer)) for layer in contract["layers"]
    ]
