"""Write requirements/constraints/vllm-VERSION.txt from unpacked wheels of vLLM: what each release needs, as limits.

`pip install -c` with such a file leaves what that release was released with. Run it with the directories of the
wheels: `.venv/bin/python tools/write_constraints.py DIRECTORY…`.
"""

from __future__ import annotations

import sys
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).resolve().parent.parent / "requirements" / "constraints"


def constraints(metadata: str) -> tuple[str, list[str]]:
    """The version that METADATA names, and its requirements as constraints: no extras, no URLs, none of its extras'."""
    headers = HeaderParser().parsestr(metadata)
    version = headers["Version"]
    lines = [f"vllm=={version}"]
    for text in headers.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        marker = str(requirement.marker or "")
        if "extra ==" in marker or not requirement.specifier:
            continue
        lines.append(f"{requirement.name}{requirement.specifier}" + (f" ; {marker}" if marker else ""))
    return version, sorted(lines, key=str.lower)


def main(directories: list[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for directory in directories:
        for metadata in sorted(Path(directory).glob("vllm*.dist-info/METADATA")):
            version, lines = constraints(metadata.read_text(encoding="utf-8"))
            file = FOLDER / f"vllm-{version}.txt"
            head = (
                f"# What vLLM {version} requires (tools/write_constraints.py): pip install -c this file lora-plugins\n"
            )
            file.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
            print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
