"""Write docs/reference/settings.md from the declarations in `lora_plugins.settings` and the docstrings below them.

    python tools/write_settings_doc.py [--check]

With `--check` nothing is written; the exit code is 1 where the file is stale.
"""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

from lora_plugins import settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "settings.md"
HEAD = """\
<!-- Written by tools/write_settings_doc.py from lora_plugins/settings.py: change it there. -->
# Settings

After this page you know every variable of the environment, with its default. A server reads the variables at startup.
Startup fails with L007 for a value that cannot be right, and for an unknown `LORA_PLUGINS_*` variable.

- `_S` at the end of a name: seconds.
- `_BYTES` at the end of a name: a number of bytes, or of a unit. `20Gi` and `20GiB` are 20 × 1024³ bytes, `20G` and
  `20GB` 20 × 1000³; so too with `K`, `M` and `T`.
"""


def meanings() -> dict[str, str]:
    """The docstring below each declaration in `lora_plugins.settings`, by the variable's name."""
    found = {}
    module = ast.parse(Path(settings.__file__).read_text(encoding="utf-8"))
    for scope in (module, *(each for each in module.body if isinstance(each, ast.ClassDef))):
        for declared, doc in itertools.pairwise(scope.body):
            match declared, doc:
                case (
                    ast.Assign(value=ast.Call(args=[ast.Constant(value=name), *_]))
                    | ast.AnnAssign(value=ast.Call(args=[ast.Constant(value=name), *_])),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split()).removesuffix(".")
    return found


def page() -> str:
    meaning = meanings()
    tables = {True: "", False: ""}
    for name, variable in settings.VARIABLES.items():
        default = f"`{variable.default}`" if variable.default else variable.kind.none
        tables[variable.is_ours] += f"| `{name}` | {default} | {meaning[name]} |\n"
    head = "| variable | default | meaning |\n|---|---|---|\n"
    return f"{HEAD}\n## vLLM's own, with vLLM's meaning\n{head}{tables[False]}\n## Ours\n{head}{tables[True]}"


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"docs/reference/{PAGE.name} is stale: run python tools/write_settings_doc.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
