"""Check the links of every Markdown page: each leads to a file of this repository, and to a heading where it names one.

    python tools/check_links.py

Web addresses are not asked. Every page below docs/ has a place in the navigation of mkdocs.yml, and every place there
has a page. Prints what is wrong; exits 1 if there is anything. tools/site_hooks.py builds the site with the same rules.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
HOME = "README.md"  # the site's index.md
# [text](path#heading), ![text](path), and src="path" in HTML. Web addresses have a colon.
LINK = re.compile(r"(?P<before>\]\(|\bsrc=\")(?P<path>[^)\s#:\"]*)(?P<anchor>#[^)\s\"]+)?(?P<after>[)\"])")
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub names it; the site is told to do the same."""
    plain = re.sub(r"<[^>]+>|\]\([^)]*\)", "", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def without_code(text: str) -> str:
    """The text with as many lines, and nothing in those of code."""
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)


@cache
def anchors(page: Path) -> frozenset[str]:
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(map(slug, headings))


def target(page: str, path: str) -> str:
    """The path in the repository that a link on `page` leads to; a folder's is that of its README."""
    found = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
    return f"{found}/README.md" if (ROOT / found / "README.md").is_file() else found


def wrong_links(page: str) -> Iterator[str]:
    lines = without_code((ROOT / page).read_text(encoding="utf-8")).splitlines()
    for number, line in enumerate(lines, 1):
        for link in LINK.finditer(line):
            where, found = f"{page}:{number}: {link['path']}{link['anchor'] or ''}", ROOT / target(page, link["path"])
            if not found.is_relative_to(ROOT) or not found.exists():
                yield f"{where}: there is no such file"
            elif found.is_dir():
                yield f"{where}: a folder; link to a file of it"
            elif link["anchor"] and found.suffix == ".md" and link["anchor"][1:] not in anchors(found):
                yield f"{where}: no such heading; there are {', '.join(sorted(anchors(found)))}"


def navigation(part: Any = None) -> Iterator[str]:
    """The pages that mkdocs.yml names, in its order."""
    match yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"] if part is None else part:
        case str(page):
            yield page
        case list(parts):
            for each in parts:
                yield from navigation(each)
        case dict(parts):
            for each in parts.values():
                yield from navigation(each)


def wrong_places() -> Iterator[str]:
    listed, pages = list(navigation()), {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    yield from (f"mkdocs.yml: {page} stands there twice" for page in sorted(set(listed)) if listed.count(page) > 1)
    yield from (f"mkdocs.yml: there is no docs/{page}" for page in sorted({*listed} - pages - {"index.md"}))
    yield from (f"docs/{page}: has no place in the nav of mkdocs.yml" for page in sorted(pages - {*listed}))


def pages() -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(page for page in listed if (ROOT / page).is_file())


def main() -> int:
    wrong = [*wrong_places(), *(line for page in pages() for line in wrong_links(page))]
    print("\n".join(wrong), end="\n" * bool(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
