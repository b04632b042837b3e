"""Find words that this project has replaced by those of the field; docs/explanation/glossary.md has the ones that stay.

    python tools/check_words.py [PATH ...]

Prints file, line, word and what to say in its place, and names of tests that have more than ten words; exits 1 if there
are any. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READ = {".py", ".md", ".toml", ".c", ".yml", ".yaml", ".sh", ""}
# What happened stays as it was said then; and where the words themselves stand.
LEFT_OUT = (
    "CHANGELOG.md",
    "LICENSE",
    "benchmarks/results/",
    "docs/explanation/glossary.md",
    "tools/check_words.py",
    "requirements/",
)

# A pattern for the old word, and what to say.
WORDS: tuple[tuple[str, str], ...] = (
    (r"\bdoors?\b", "entry point, patch"),
    (r"\bseams?\b", "patch, entry point, ledger entry"),
    (r"(?<![._\w])(?<!expert )gates?\b(?!_|\.|[ _-]?(?:proj|up))", "admission"),
    (r"\bquantum holders?\b|\bwhose turn\b|\bhad_turn\b|\b(?:its|their|his) turn\b", "admission, fair scheduling"),
    (r"\blook(?:s|ing|ed)?[- _]?out\b", "poller, refresh"),
    (r"\bstaged\b|\bstaging\b", "load, activate"),
    (r"\bhost tiers?\b", "host cache"),
    (r"\bbeside the (?:engine )?loop\b", "in a background thread"),
    (r"\bgoes[_ ]by\b|\bis[_]called\b", "matches"),
    (r"\bend(?:s|ed)? the start\b", "startup fails"),
    (r"\bfail(?:s|ed)?[_ ]alone\b", "failure is isolated"),
    (r"\bnobody's\b|\beverybody's\b", "unassigned, shared"),
    (r"\banew\b", "again; force_refresh"),
    (r"\btold of\b|\btells\b", "notified, registered; says"),
    (r"\b(?:held|holds?|holding) (?:[\w`.]+ ){0,6}against\b", "validated against, compared with"),
    (
        r"\bgiv(?:e|es|en|ing)[_ ]back\b|\bgave back\b|\bgiven_back\b|\btaken? back\b|\btake_back\b|\btakes back\b",
        "acquire, release",
    ),
    (r"\bdecoys?\b", "placeholder"),
    (r"\bput[_ ]off\b|\bputs off\b", "deferred"),
    (r"\bput[_ ]aside\b", "quarantined"),
    (r"\bArriving\b", "PartialDownload"),
    (r"\bLocated\b", "RemoteAdapter"),
    (r"\bWanted\b", "DownloadSpec"),
    (r"\bthe engine ends\b|\bends the engine\b|\bended the engine\b", "the engine crashes"),
    (r"\bof one's own\b", "user-supplied"),
    (r"\b(?:can|could)(?:not|n't| not) say\b", "unavailable"),
    (r"\bcatalogue\b", "registry"),
    (r"\blora_id\b(?=.*\bsha|\()", "adapter_id (of a name), engine_id (vLLM's lora_int_id)"),
)
_LONG_TEST_NAME = re.compile(r"def test(?:_[^_\W]+){11,}")
_EXACT = {r"\bArriving\b", r"\bLocated\b", r"\bWanted\b"}
_FOUND = [(re.compile(pattern, 0 if pattern in _EXACT else re.IGNORECASE), say) for pattern, say in WORDS]


def files(paths: list[str]) -> Iterator[Path]:
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in READ and path.is_file() and not path.is_symlink() and not name.startswith(LEFT_OUT):
            yield path


def main(paths: list[str]) -> int:
    found = 0
    for path in files(paths):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            # An underscore is a word's end here: test names are read too.
            plain = re.sub(r"(?<=[a-z])_(?=[a-z])", " ", line) if path.suffix == ".py" else line
            if long := _LONG_TEST_NAME.search(line):
                found += 1
                print(f"{path.relative_to(ROOT)}:{number}: {long[0]!r}: say it in ten words")
            for pattern, say in _FOUND:
                match = pattern.search(line) or pattern.search(plain)
                if match is not None:
                    found += 1
                    print(f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: say {say}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
