"""Runs forms with the plugins of VLLM_PLUGINS, and prints what came of each (see the package)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from testbed.bed import prepare
from testbed.frameworks.forms import KINDS
from testbed.frameworks.runs import names_of, run_kind
from testbed.frameworks.versions import prepare_versions


def main(words: list[str]) -> None:
    versions = prepare_versions(prepare())
    plugins = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name]
    with tempfile.TemporaryDirectory(prefix="frameworks-") as home:
        for number, kind in enumerate(KINDS):
            names = [name for name in names_of(kind) if not words or any(word in name for word in words)]
            rows = run_kind(kind, versions, Path(home) / str(number), plugins, names) if names else {}
            for row in rows.values():
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
