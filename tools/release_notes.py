"""Print the section of CHANGELOG.md for a tag, for the text of a release.

    python tools/release_notes.py v0.2.0

Exits with 1 where the tag is not the package's version, or the changelog has no section of that version. A pre-release
(`v0.2.0rc1`) without a section of its own has the text of *Unreleased*.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lora_plugins import __version__
from tools.index_page import Addresses

ROOT = Path(__file__).resolve().parent.parent

MAX_CHARACTERS = 120_000  # of a release's text; hosts take 125,000


class NotReady(Exception):
    """The tree is not the one to publish under this tag; one line says why."""


def section(changelog: str, title: str) -> str:
    """The text below a heading such as `[0.2.0]`; empty where there is none."""
    found = re.search(rf"^## \[{re.escape(title)}\].*?\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def notes(tag: str, changelog: str, version: str = __version__) -> str:
    """The release's text.

    Raises:
        NotReady: the tag is not `v` and the version, or there is no text for the version.
    """
    try:
        is_early = Version(version).is_prerelease
    except InvalidVersion as error:
        raise NotReady(f"lora_plugins.__version__ is {version!r}, which is no version") from error
    if tag != f"v{version}":
        raise NotReady(f"the tag is {tag}, and lora_plugins.__version__ is {version}: the tag has to be v{version}")
    text = section(changelog, version) or (section(changelog, "Unreleased") if is_early else "")
    if not text:
        raise NotReady(f"CHANGELOG.md has no section [{version}]: `make release VERSION={version}` writes the heading")
    at = Addresses.of_environment()
    text = re.sub(r"\[([^\]]*)\]\((?!https?:)([^)]*)\)", rf"[\1]({at.web}/blob/{tag}/\2)" if at.web else r"\1", text)
    if len(text) <= MAX_CHARACTERS:
        return text
    rest = f"{at.web}/blob/{tag}/CHANGELOG.md" if at.web else "CHANGELOG.md"
    return f"{text[:MAX_CHARACTERS].rpartition(chr(10))[0]}\n\nThe rest is in {rest}."


def main(arguments: list[str]) -> int:
    try:
        print(notes(arguments[0], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    except NotReady as error:
        print(f"release_notes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
