"""Parse the file of declared adapters in a process of its own: parsing 1 MB holds the interpreter's lock for a second.

The process starts for one file and ends with its answer, because the file changes rarely: a start takes 0.2 s, and no
idle process takes memory. Parsing a small file in this process takes less time than a start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_plugins.adapter.pace import paced
from lora_plugins.errors import InvalidSettings, error_of
from lora_plugins.log import logger
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.server.declared_file import parse
from lora_plugins.server.desired import DesiredAdapter
from lora_plugins.verification.process import import_path, variables_of_children

_SMALL_BYTES = 4 << 10  # under 10 ms
_ANSWER_S = 60.0
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from lora_plugins.server.declared_file import answer
answer(sys.stdin.buffer, sys.stdout.buffer)
"""


def parse_apart(content: bytes, path: Path, allowed_uris: Sequence[str]) -> Mapping[str, DesiredAdapter]:
    """Parse as `parse` does, for a thread: the event loop goes on meanwhile. Without a child, this process parses.

    Raises:
        InvalidSettings: as `parse` does.
    """
    allowed = AllowedUris.parse(allowed_uris)
    if len(content) <= _SMALL_BYTES:
        return parse(content, path, allowed)
    try:
        return _parsed_by_process(content, path, allowed_uris)
    except InvalidSettings:
        raise
    except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError) as error:
        logger.warning("No other process parses %s, so the server itself does: %s", path, error)
        return parse(content, path, allowed)


def _parsed_by_process(content: bytes, path: Path, allowed_uris: Sequence[str]) -> Mapping[str, DesiredAdapter]:
    question = {"path": str(path), "allowed_uris": list(allowed_uris)}
    process = subprocess.run(  # noqa: S603 - this interpreter
        # -I keeps the environment and the user's site packages out; the program sets the same import path.
        [sys.executable, "-I", "-c", _PROGRAM, json.dumps(import_path())],
        input=json.dumps(question).encode() + b"\n" + content,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=variables_of_children(),
        cwd="/",
        start_new_session=True,  # Ctrl-C in a terminal must not reach the child
        timeout=_ANSWER_S,
        check=True,
    )
    *lines, last = process.stdout.splitlines()
    end = json.loads(last)
    if "error" in end:
        raise error_of(end["error"])
    adapters = {}
    for line in paced(lines):
        name, uri, held_digest, is_pinned, is_awaited = json.loads(line)
        adapters[name] = DesiredAdapter(name, uri, held_digest, is_pinned, is_awaited=is_awaited)
    # A killed child may leave whole lines behind, but not the right count.
    if len(adapters) != end["count"]:
        raise ValueError(f"{len(adapters)} of {end['count']} adapters in its answer")
    return adapters
