"""Write docs/settings.md from the declarations in `lora_plugins.settings`.

    python tools/write_settings_doc.py [--check]

With `--check` nothing is written; the exit code is 1 where the file is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from lora_plugins.settings import VARIABLES
from lora_plugins.variables import Variable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """\
<!-- Written by tools/write_settings_doc.py from lora_plugins/settings.py: change it there. -->
# Settings

Read at startup from the environment. Startup fails with L007 where a value cannot be right, or where a `LORA_PLUGINS_*`
variable does not exist. What ends in `_S` is in seconds; what ends in `_BYTES` takes the units `KiB MiB GiB KB MB GB`,
and is in bytes without one.
"""


def default_of(variable: Variable) -> str:
    return f"`{variable.default}`" if variable.default else variable.kind.none


def table(variables: Iterable[Variable]) -> str:
    rows = [f"| `{each.name}` | {default_of(each)} | {each.meaning} |" for each in variables]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows]) + "\n"


def page() -> str:
    vllms = table(each for each in VARIABLES.values() if not each.is_ours)
    ours = table(each for each in VARIABLES.values() if each.is_ours)
    return f"{HEAD}\n## vLLM's own, with vLLM's meaning\n{vllms}\n## Ours\n{ours}"


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"docs/{PAGE.name} is stale: run python tools/write_settings_doc.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
