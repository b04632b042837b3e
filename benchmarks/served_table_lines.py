"""What a served table would take away and add, in lines of code: for `benchmarks/served_table.py`.

Lines that go and lines of the trial are counted; lines that the trial does not have are estimates, with reasons.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT

PRODUCT = ROOT / "lora_plugins"
TRIAL = ROOT / "benchmarks" / "served_table_rows.py"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# What goes of a module of which the rest stays: functions and classes by name.
WHOLE = None
GOES: dict[str, tuple[str, ...] | None] = {
    "server/leader.py": WHOLE,
    "server/follower.py": WHOLE,
    "server/carrying.py": WHOLE,
    "server/shared_copies.py": WHOLE,
    "vllm_patches/api_server/roles.py": (
        *("take_role", "listen", "resolved_by_leader", "_leader", "_follower", "_is_ending", "_resolve"),
        "_exception_of",
    ),
    "vllm_patches/api_server/serve_command.py": ("_above", "_FirstProcess"),
    "vllm_patches/api_server/lifecycle.py": ("_copies_of",),
    "server/limits.py": ("FollowedRates",),
    "server/served_file.py": ("write", "read", "pieces", "ServedWriter", "_by_lines", "_of_document", "_adapters"),
    "server/reconciler.py": ("_what_is_served",),
    "store/blocks.py": (),
}
# By hand: branches for a role in process.py, endpoint_plugin.py, app.py, openai_serving_models.py and lifecycle.py,
# and imports of modules of which a part goes.
BRANCHES = 40
MISSING: tuple[tuple[str, int], ...] = (
    ("versions, earlier versions, last error, pause, place and warnings of a row, read by another process", 45),
    ("leases of versions that another process has swapped away, without a request: a watch of the stamp", 20),
    ("room in the store: ask all processes to end idle leases, and wait for them", 30),
    ("end requests of other processes after a drain, in the engine", 12),
    ("notice a dead process, end its requests, and retire engine ids that no row names", 30),
    ("a push that moves requests: note it before the engine moves, and finish it after a death", 30),
    ("the name's lock: both locks, in a thread, with a limit of time", 12),
    ("commits away from the event loop where vLLM's own code writes the table", 12),
    ("who is elected serves the declared set and the adapters of the start; the others wait", 15),
    ("shares and rates divided by the number of processes", 6),
    ("errors of SQLite as ours; which journal a file system needs", 20),
)


def code_lines(path: Path, names: tuple[str, ...] | None = None) -> int:
    """Lines with code, without docstrings and comments; with `names`, those of these functions and classes only."""
    source, left_out, wanted = path.read_text(encoding="utf-8"), set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            left_out.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        if names is not None and getattr(node, "name", None) in names:
            begins = min([node.lineno, *(it.lineno for it in node.decorator_list)])  # type: ignore[union-attr]
            wanted.update(range(begins, (node.end_lineno or begins) + 1))  # type: ignore[union-attr]
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len((lines - left_out) & wanted if names is not None else lines - left_out)


def account() -> dict[str, Any]:
    """Lines by module: how many there are, and how many of them would go; and what is new."""
    modules = {}
    for module, names in GOES.items():
        has = code_lines(PRODUCT / module)
        modules[module] = {"has": has, "goes": has if names is WHOLE else code_lines(PRODUCT / module, names)}
    goes = sum(it["goes"] for it in modules.values()) + BRANCHES
    trial = code_lines(TRIAL) - code_lines(TRIAL, ("DataVersion",))
    missing = sum(lines for _, lines in MISSING)
    return {
        "modules": modules,
        "branches": BRANCHES,
        "goes": goes,
        "trial": trial,
        "missing": dict(MISSING),
        "missing_sum": missing,
        "net": trial + missing - goes,
    }
