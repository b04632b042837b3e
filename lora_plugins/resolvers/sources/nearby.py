"""What may be meant by a name that a source lacks, read from listings; without any I/O of its own.

A listing has the names that lie directly at a place, folders with a slash at the end, and perhaps paths below those.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Sequence

from lora_plugins.absence import AbsenceKind
from lora_plugins.resolvers.sources.source import ADAPTER_FILES
from lora_plugins.spelling import closest

_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")
_MODEL = re.compile(r"(model|pytorch_model|consolidated)([.-].*)?\.(safetensors|bin|pth)(\.index\.json)?|.*\.gguf")
_SHOWN = 3


def describe(listing: Collection[str], spelt: Callable[[str], str]) -> tuple[AbsenceKind, str, str]:
    """Kind, detail and hint for a place without adapter files; `spelt` names an adapter in one of its folders."""
    if not listing:
        hint = "has the copy or upload ended? An adapter is adapter_config.json and its weights"
        return AbsenceKind.NO_ADAPTER, "an empty directory", hint
    deeper = _folders_of_adapters(listing)
    if deeper:
        names = [spelt(folder) for folder in deeper[:_SHOWN]]
        more = "" if len(deeper) <= _SHOWN else f" or {len(deeper) - _SHOWN} more"
        hint = "the adapter lies one level deeper" if len(deeper) == 1 else "adapters lie one level deeper"
        hint += ": did you mean " + " or ".join(f"'{name}'" for name in names) + f"{more}?"
        return AbsenceKind.NO_ADAPTER, "a folder without adapter files of its own", hint
    if "config.json" in listing and any(_MODEL.fullmatch(name) for name in listing):
        hint = "start a server with it, or save the adapter alone: PEFT's save_pretrained writes adapter_config.json"
        return AbsenceKind.NO_ADAPTER, "a full model, not an adapter", hint
    beside = sorted({name.split("/")[0] + ("/" if "/" in name else "") for name in listing})
    shown = ", ".join(beside[:_SHOWN]) + (f" and {len(beside) - _SHOWN} more" if len(beside) > _SHOWN else "")
    hint = "an adapter is adapter_config.json and adapter_model.safetensors"
    return AbsenceKind.NO_ADAPTER, f"no adapter files among {shown}", hint


async def closest_path(
    segments: Sequence[str], folders_in: Callable[[tuple[str, ...]], Awaitable[Collection[str]]]
) -> tuple[str, ...] | None:
    """The path that is there and is spelt most like one that is not; None where none is close.

    `folders_in` lists the folders in one; it is asked once for each segment.
    """
    found: tuple[str, ...] = ()
    for segment in segments:
        names = await folders_in(found)
        match = segment if segment in names else closest(segment, names)
        if match is None:
            return None
        found += (match,)
    return found if found != tuple(segments) else None


def _folders_of_adapters(listing: Collection[str]) -> list[str]:
    """Folders with adapter files, or called as a trainer calls its checkpoints; of checkpoints the newest one alone."""
    known = {folder for folder, _, file in (path.partition("/") for path in listing) if file in ADAPTER_FILES}
    called = {path[:-1] for path in listing if path.endswith("/") and _CHECKPOINT.fullmatch(path[:-1])}
    checkpoints = {folder for folder in known | called if _CHECKPOINT.fullmatch(folder)}
    others = sorted(known - checkpoints)
    return others + sorted(checkpoints, key=lambda folder: int(folder.partition("-")[2]))[-1:]
