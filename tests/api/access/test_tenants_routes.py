"""Each route of the installed vLLM is a tenant's or an administrator's, as the tables of the docs say."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.api.access.open_routes import is_open
from lora_plugins.api.routes import router as ours

PAGE = Path(__file__).parents[3] / "docs/guides/access.md"
# Of processes beside the API server: the supervisor of several, and the one that answers while vLLM is imported.
OF_OTHER_SERVERS = {"launchers/dp_supervisor.py", "cli/preload.py"}
VERBS = {"get", "post", "put", "delete", "patch", "websocket", "mount"}
TASKS = (
    ("generate", "transcription", "realtime", "render"),
    ("embed", "token_embed", "classify", "token_classify", "score"),
)


def of_the_application(options: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Those of vLLM's own application, development mode and runtime loading on."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    level = logging.root.level
    for tasks in TASKS:
        for route in build_app(arguments, tasks).routes:
            path: Any = getattr(route, "path", None)
            kind = "WEBSOCKET" if "WebSocket" in type(route).__name__ else "GET"
            for method in getattr(route, "methods", None) or {kind}:
                yield method, path
    logging.root.setLevel(level)  # a library of SageMaker's that vLLM imports here sets it


def of_the_sources() -> Iterator[tuple[str, str]]:
    """Those whose decorator is anywhere in vLLM: some need an option, a package or an environment of their own."""
    import vllm.entrypoints

    home = Path(vllm.entrypoints.__path__[0])
    for file in home.rglob("*.py"):
        text = file.read_text()
        if str(file.relative_to(home)) in OF_OTHER_SERVERS or ("router" not in text and "app." not in text):
            continue
        for call in ast.walk(ast.parse(text)):
            match call:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=of), attr=verb), args=[ast.Constant(value=str(path)), *_]
                ) if of == "app" or of.endswith("router"):
                    if verb in VERBS:
                        yield {"mount": "GET"}.get(verb, verb.upper()), path
                    elif verb in {"api_route", "add_api_route", "add_route"}:
                        yield "POST", path


def classified() -> dict[str, bool]:
    """Whether tenants reach each route, by the tables of the docs."""
    found: dict[str, bool] = {}
    tenant = 0
    for line in PAGE.read_text().splitlines():
        routes, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        if "tenant" in cells:
            tenant = cells.index("tenant")
        for route in re.findall(r"`([A-Z]+ /[^`]*)`", routes) if line.startswith("| `") else ():
            assert route not in found, f"{route} stands in two rows"
            found[route] = cells[tenant] != "403"
    return found


def assert_classified(routes: list[tuple[str, str]], at_least: int) -> None:
    assert len(routes) >= at_least, "the routes are no longer found"
    of_the_docs = classified()
    for method, path in sorted(set(routes)):
        route = f"{'GET' if method == 'HEAD' else method} {path}"
        assert route in of_the_docs, (
            f"{route}: if tenants may call it, put it into lora_plugins/api/access/open_routes.py. In any case put "
            f"it into a table of {PAGE.name}, by tests/e2e/access_table.py if that server has it"
        )
        assert is_open(method, path + "/x" if path == "/static" else path, has_policy=True) == of_the_docs[route], route


def test_each_route_of_the_application_is_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (
        [],
        ["--enable-scale-out", "--enable-tokenizer-info-endpoint", "--enable-offline-docs", "--enable-fault-tolerance"],
    )
    assert_classified([route for some in options for route in of_the_application(some, monkeypatch)], at_least=150)


def test_each_route_of_the_sources_is_classified() -> None:
    assert_classified(list(of_the_sources()), at_least=70)


def test_no_route_of_ours_is_every_keys() -> None:
    for route in ours.routes:
        path, methods = route.path, route.methods  # type: ignore[attr-defined]
        assert not [method for method in methods if is_open(method, path, has_policy=True)], path
