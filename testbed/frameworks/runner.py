"""Takes one engine through forms, in this process, and prints a line of JSON for each.

The argument: a JSON object with `kind`, `forms` (their names), the directories `base`, `root` and `home`, and of a
server its `url`. A line has the name, `whose` answers came (`versions.whose`), the beginnings of them, and the calls.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from testbed.frameworks.engines import SETTINGS, Async, Engine, Offline, Said, text_of
from testbed.frameworks.forms import (
    ASYNC,
    ASYNC_TP,
    FORMS,
    LLM,
    OF_TRL,
    OF_VERL,
    SERVE,
    SET_FIRST,
    SET_LAST,
    WITHOUT_LORA,
    Form,
    Run,
)
from testbed.frameworks.served import Served
from testbed.frameworks.versions import MAX_TOKENS, Files, whose

PATIENCE_S = 60  # for one form
MARK = "FRAMEWORKS "


class TooLongError(BaseException):
    """Past those who catch every exception."""


def make(kind: str, base: str, url: str) -> Engine:
    settings = {"model": base, **SETTINGS}
    if kind == SERVE:
        return Served(url)
    if kind == ASYNC:
        return Async(**settings)
    if kind == ASYNC_TP:
        return Async(**settings, tensor_parallel_size=2)
    if kind == LLM:
        return Offline(**settings)
    from testbed.frameworks.merged import OfTRL, WithoutLoRA
    from testbed.frameworks.of_verl import OfVerl
    from testbed.frameworks.other_manager import SetFirst, SetLast

    kinds = {SET_FIRST: SetFirst, SET_LAST: SetLast, WITHOUT_LORA: WithoutLoRA, OF_TRL: OfTRL, OF_VERL: OfVerl}
    return kinds[kind](**settings)


async def take_through(engine: Engine, form: Form, files: Files, answers: dict[str, list[int]]) -> dict[str, Any]:
    """What came of one form; of one that does not end in time, its last answer is "hangs"."""
    module, _, function = form.run.partition(":")
    run: Run = getattr(importlib.import_module(f"testbed.frameworks.{module}"), function)
    said: list[Said] = []
    engine.calls.clear()
    try:
        with _alarm(engine):
            async with asyncio.timeout(PATIENCE_S):
                async for _, answer in run(engine, files):
                    said.append(answer)
    except (TimeoutError, TooLongError):
        engine.is_broken = True
        said.append("hangs")
    except Exception as error:
        said.append(text_of(error))
    return {
        "form": form.name,
        "whose": [whose(answer, answers) for answer in said],
        "said": [answer if isinstance(answer, str) else answer[:MAX_TOKENS] for answer in said],
        "calls": list(engine.calls),
    }


@contextmanager
def _alarm(engine: Engine) -> Iterator[None]:
    """An engine in this process may hang outside of the event loop."""
    if not isinstance(engine, Offline):
        yield
        return

    def too_long(_: int, __: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


async def run_forms(question: dict[str, Any], answers: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Until all are done, or the engine takes no more requests."""
    rows = []
    engine = make(question["kind"], question["base"], question.get("url", ""))
    for number, form in enumerate(chosen(question["kind"], question["forms"])):
        files = Files(Path(question["root"]), Path(question["home"]) / f"form-{number}-{os.getpid()}")
        rows.append(await take_through(engine, form, files, answers))
        print(f"\n{MARK}{json.dumps(rows[-1])}", flush=True)
        if engine.is_broken:
            break
        if question["kind"] in {LLM, ASYNC, ASYNC_TP}:
            await engine.empty()
    return rows


def chosen(kind: str, names: Sequence[str]) -> list[Form]:
    return [form for form in FORMS if form.kind == kind and form.name in names]


def main() -> None:
    question = json.loads(sys.argv[1])
    asyncio.run(run_forms(question, json.loads((Path(question["root"]) / "answers.json").read_text())))
    sys.stdout.flush()
    os._exit(0)  # also past a call that hangs


if __name__ == "__main__":
    main()
