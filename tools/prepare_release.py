"""Turn the tree into the one to tag: `make release VERSION=0.2.0`. Commits nothing.

- `lora_plugins.__version__` is the version.
- In CHANGELOG.md *Unreleased* becomes the version with today's date, below a new, empty *Unreleased*. A pre-release
  leaves the changelog as it is.
- With the first release, lines that end with `index_page.UNTIL` leave README and docs.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from packaging.version import InvalidVersion, Version

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.index_page import UNTIL, released

ROOT = Path(__file__).resolve().parent.parent


def prepare(root: Path, version: str, today: str) -> list[str]:
    """Change the files below `root`, and return their paths.

    Raises:
        ValueError: it is no version, or the changelog has its section already.
    """
    try:
        is_early = Version(version).is_prerelease
    except InvalidVersion as error:
        raise ValueError(f"{version!r} is no version, such as 0.2.0 or 0.2.0rc1") from error
    package, changelog = root / "lora_plugins" / "__init__.py", root / "CHANGELOG.md"
    changes = {
        package: re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', package.read_text(), flags=re.MULTILINE)
    }
    if not is_early:
        text = changelog.read_text(encoding="utf-8")
        if f"## [{version}]" in text:
            raise ValueError(f"CHANGELOG.md has a section [{version}] already")
        changes[changelog] = text.replace("## [Unreleased]\n", f"## [Unreleased]\n\n## [{version}] - {today}\n", 1)
        for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
            if UNTIL in (text := page.read_text(encoding="utf-8")):
                changes[page] = released(text)
    for path, text in changes.items():
        path.write_text(text, encoding="utf-8")
    return [path.relative_to(root).as_posix() for path in changes]


def main(arguments: list[str]) -> int:
    try:
        changed = prepare(ROOT, arguments[0] if arguments else "", time.strftime("%Y-%m-%d"))
    except ValueError as error:
        print(f"prepare_release: {error}", file=sys.stderr)
        return 1
    print(*changed, sep="\n")
    print(f"\nRead the changes, commit them, and when CI has passed: git tag v{arguments[0]} && git push --tags")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
