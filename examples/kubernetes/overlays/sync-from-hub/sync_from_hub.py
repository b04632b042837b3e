"""Copy adapters from the Hub to a bucket: `python sync_from_hub.py s3://adapters org/repo[@revision]=name …`.

Each is fetched and verified by `lora-plugins pull`; what is broken is not copied, and what the bucket has already is
left alone. A bucket cannot exchange several files at once, so `adapter_config.json` goes first and comes last: without
it there is no adapter, servers go on with the version that they have, and none sees old and new files together. Ends
with 1 if any adapter could not be copied; the others are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec

CONFIG, DIGEST = "adapter_config.json", "lora-plugins-digest"
ORIGINAL = "adapter_config.original.json"  # the Hub's own; the store has another in its place
OF_THE_STORE = (CONFIG, "manifest.json")


def pull(uri: str) -> tuple[Path, str]:
    """The verified copy in this job's store, and its digest."""
    env = {**os.environ, "LORA_PLUGINS_ALLOWED_URIS": "hf://" + uri.removeprefix("hf://").split("/")[0]}
    command = [sys.executable, "-c", "from lora_plugins.cli import main; main()", "pull", "--json", uri]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(done.stdout.strip() or done.stderr.strip())
    (answer,) = json.loads(done.stdout)["adapters"]
    return Path(answer["path"]), answer["digest"]


def copy(bucket: str, uri: str, name: str) -> str:
    """Bring the bucket's adapter up to date; what was done."""
    path, digest = pull(uri)
    target, (files, _) = f"{bucket}/{name}", (fsspec.core.url_to_fs(bucket))
    there = f"{target}/{DIGEST}"
    if files.exists(there) and files.cat_file(there).decode() == digest:
        return "is there already"
    for name_of_file in (CONFIG, DIGEST):
        if files.exists(f"{target}/{name_of_file}"):
            files.rm_file(f"{target}/{name_of_file}")
    for file in sorted(path.iterdir(), key=lambda each: each.name == ORIGINAL):
        if file.is_file() and file.name not in OF_THE_STORE:
            files.put_file(str(file), f"{target}/{CONFIG if file.name == ORIGINAL else file.name}")
    files.pipe_file(there, digest.encode())  # only now: a copy that broke off is made again
    return f"copied, {digest[:12]}"


def main(bucket: str, *wanted: str) -> int:
    failed = False
    for text in wanted:
        uri, _, name = text.partition("=")
        try:
            print(f"{name}: {copy(bucket.rstrip('/'), f'hf://{uri}', name)}", flush=True)
        except Exception as error:
            failed = True
            print(f"{name}: not copied: {error}", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
