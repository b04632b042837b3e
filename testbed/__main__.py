"""Make a tiny Llama and five adapters; prints where, for a shell: `eval "$(.venv/bin/python -m testbed)"`."""

from __future__ import annotations

import shlex
import sys

from testbed.bed import prepare


def main() -> None:
    bed = prepare(lambda text: print(text, file=sys.stderr))
    print(f"export BASE={shlex.quote(str(bed.base))} ADAPTERS={shlex.quote(str(bed.adapters))}")


if __name__ == "__main__":
    main()
