"""Draw docs/images/life.svg from what `benchmarks.life` kept: who held the adapter when, and what happened."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.record import IMAGES

# Of Okabe and Ito, who chose them for every kind of colour vision.
COLOURS = {"old": "#0072b2", "new": "#e69f00", "other": "#9a9a9a"}
NAMES = {"old": "first version", "new": "new version", "other": "other adapters"}
LANES = ("requests", "S3", "store", "host memory", "two slots")
TITLES = {
    "first request": "A first request",
    "new version": "A new version, beside a running answer",
    "back from host memory": "Out of its slot, and back",
    "unloaded": "Unloaded, and gone",
}
MS = r"([\d.]+) ms"
LOADED = re.compile(f"located in {MS}, fetched in {MS}, checked in {MS}, loaded in {MS}")


@dataclass(frozen=True)
class Bar:
    """Where something was, and from when to when, in seconds; `waits` for bars before a first token."""

    lane: str
    row: int  # 0 above, 1 below
    begin: float
    end: float
    who: str
    waits: bool = False


class Story:
    """What the events say of the adapter whose first request is the first of all."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self.events = events
        self.end = events[-1]["at_s"]
        first, new = self.one("first token", request="first"), self.one("refreshed")
        self.name, self.digests = first["name"], {first["digest"]: "old", new["digest"]: "new"}
        self.swapped = self.log(f"Adapter '{self.name}' swapped")
        self.unloaded = self.log(f"Adapter '{self.name}' unloaded")
        (id_of_old,) = next(it["engine_ids"] for it in events if it.get("engine_ids"))
        # Of the old version the API says no more once the name means the new: its worker does.
        self.old_left = next(
            it["at_s"]
            for it in events
            if it["event"] == "adapters" and it["at_s"] > self.swapped and id_of_old not in it["engine_ids"]
        )

    def one(self, event: str, **of: object) -> dict[str, Any]:
        return next(it for it in self.events if it["event"] == event and of.items() <= it.items())

    def at(self, event: str, **of: object) -> float:
        return float(self.one(event, **of)["at_s"])

    def log(self, begin: str) -> float:
        return next(float(it["at_s"]) for it in self.events if it["event"].startswith(begin))

    def steps(self, which: str) -> dict[str, float]:
        """When a version was found at its source, stored, and loaded: the log's lines, and the durations in them."""
        digest = next(digest for digest, who in self.digests.items() if who == which)
        said = [it for it in self.events if it["teller"] == "log" and digest in it["event"]]
        resolved, loaded = (it for it in said if "located in" in it["event"])
        found = LOADED.search(loaded["event"])
        assert found is not None
        _, fetch_s, check_s, load_s = (float(part) / 1e3 for part in found.groups())
        stored = resolved["at_s"] - check_s
        return {
            "found": stored - fetch_s,
            "stored": stored,
            "loads": loaded["at_s"] - load_s,
            "loaded": loaded["at_s"],
        }

    def bars(self) -> Iterator[Bar]:
        yield from self._requests()
        for it in self.events:
            if it["teller"] == "s3":
                of_name = "old" if it["at_s"] < self.at("refresh") else "new"
                who = of_name if it["name"] == self.name else "other"
                yield Bar("S3", 1 if who == "new" else 0, it["at_s"], it["at_s"] + it["took_s"], who)
        for row, (digest, who) in enumerate(self.digests.items()):
            steps = self.steps(who)
            yield Bar("store", row, steps["stored"], self.at("gone", digest=digest), who)
            yield Bar("host memory", row, steps["loads"], steps["loaded"], who, waits=True)
            yield Bar("host memory", row, steps["loaded"], self.old_left if who == "old" else self.unloaded, who)
        yield from self._slots()

    def _who(self, event: dict[str, Any]) -> str:
        return self.digests.get(event.get("digest", ""), "other")

    def _requests(self) -> Iterator[Bar]:
        free = [0.0, 0.0]
        for it in self.events:
            if it["event"] == "asks":
                first, end = (self.one(event, request=it["request"]) for event in ("first token", "ends"))
                row = 0 if free[0] <= it["at_s"] else 1
                free[row] = end["at_s"]
                yield Bar("requests", row, it["at_s"], first["at_s"], self._who(first), waits=True)
                yield Bar("requests", row, first["at_s"], end["at_s"], self._who(first))

    def _slots(self) -> Iterator[Bar]:
        """Two slots, so an adapter that enters is in the one that is free."""
        entered: dict[str, tuple[float, str]] = {}
        spans: list[tuple[float, float, str]] = []

        def leave(key: str, at: float) -> None:
            if key in entered:
                spans.append((entered[key][0], at, entered.pop(key)[1]))

        for it in self.events:
            key = f"{it.get('name')} {it.get('digest')}"
            # A first token was computed in a slot, and is seen before the next poll.
            if it["event"] == "first token" or "slot" in it.get("tiers", ()):
                entered.setdefault(key, (it["at_s"], self._who(it)))
            elif it["event"] == "view" and it.get("digest"):
                leave(key, it["at_s"])
        for key, (_, who) in [*entered.items()]:
            leave(key, {"old": self.old_left, "new": self.unloaded}.get(who, self.end))
        rows: tuple[list[Bar], list[Bar]] = ([], [])
        for begin, end, who in sorted(spans):
            row = min(range(2), key=lambda row: max(rows[row][-1].end - begin, 0) if rows[row] else 0)
            if rows[row]:  # a poll sees that an adapter has left after another's first token in its slot
                rows[row][-1] = replace(rows[row][-1], end=min(rows[row][-1].end, begin))
            rows[row].append(Bar("two slots", row, begin, end, who))
        yield from itertools.chain(*rows)

    def marks(self) -> dict[str, list[tuple[float, str]]]:
        """By part of the story, what happened when."""
        old, new = self.steps("old"), self.steps("new")
        fetched = max(
            it["at_s"] + it["took_s"] for it in self.events if it["teller"] == "s3" and it["at_s"] < old["stored"]
        )
        out_of_slot = next(
            it["at_s"]
            for it in self.events
            if it["event"] == "view" and it["at_s"] > self.at("asks", request="chat") and it["name"] == self.name
            and "slot" not in it.get("tiers", ())
        )  # fmt: skip
        return {
            "first request": [
                (self.at("asks", request="first"), "a request names the adapter"),
                (old["found"], "S3 has it: looked up"),
                (fetched, "its files are here: fetched"),
                (old["stored"], "verified, in the store"),
                (old["loaded"], "loaded into host memory"),
                (self.at("first token", request="first"), "in a slot: first token"),
            ],
            "new version": [
                (self.at("refresh"), "S3 has a new version: refresh"),
                (new["stored"], "verified, in the store"),
                (new["loaded"], "loaded beside the old version"),
                (self.swapped, "swapped: for every later request"),
                (self.at("first token", request="after"), "its first token; the old runs on"),
                (self.at("ends", request="long"), "the old version's last request ends"),
            ],
            "back from host memory": [
                (out_of_slot, "others need both slots: evicted"),
                (self.at("asks", request="again"), "asked for again: no fetch, no load"),
                (self.at("first token", request="again"), "in a slot again: first token"),
            ],
            "unloaded": [
                (self.at("unload"), "unload; a running answer goes on"),
                (self.unloaded, "drained: slot and host memory free"),
                (self.at("gone", digest=[*self.digests][1]), "another needs room: gone from the store"),
            ],
        }


def spread(places: Sequence[float], gap: float, end: float) -> list[float]:
    """Places as near to these as they can be with a gap between two, none beyond the end."""
    moved = list(itertools.accumulate(places, lambda before, place: max(before + gap, place)))
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], end - gap * (len(moved) - 1 - number))
    return moved


def plot(events: Sequence[dict[str, Any]]) -> Any:
    """Draw the picture, and return its path."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "life"  # the same events give the same file
    story, number = Story(events), 0
    bars, marks = [*story.bars()], story.marks()
    figure = plt.figure(figsize=(10, 8.8), layout="constrained")
    grid = figure.add_gridspec(4, 2, height_ratios=(1, 0.5, 1, 0.3))
    for place, (stage, of_stage) in enumerate(marks.items()):
        axis = figure.add_subplot(grid[2 * (place // 2), place % 2])
        texts = figure.add_subplot(grid[2 * (place // 2) + 1, place % 2])
        texts.axis("off")
        begin, last = story.at("stage", stage=stage), of_stage[-1][0]
        began = min(bar.begin for bar in bars if bar.lane == "requests" and bar.begin >= begin)
        after = [it["at_s"] for it in events if it["event"] == "stage" and it["at_s"] > began]
        width = min([(last - began) * 1.12, *(at - began for at in after)])
        for bar in bars:
            x, end = (min(max(at - began, 0), width) * 1e3 for at in (bar.begin, bar.end))
            if end > x:
                y = LANES.index(bar.lane) + (bar.row - 0.5) * 0.4
                axis.barh(
                    y, max(end - x, width * 4), 0.36, left=x, color=COLOURS[bar.who],
                    alpha=0.35 if bar.waits else 1, lw=0,
                )  # fmt: skip
        at_ms = [(at - began) * 1e3 for at, _ in of_stage]
        for at, moved, (_, text) in zip(at_ms, spread(at_ms, width * 55, width * 1e3), of_stage, strict=True):
            number += 1
            axis.plot([at, at, moved], [4.6, -0.5, -0.95], color="black", lw=0.7, ls=":", clip_on=False)
            axis.text(moved, -1.0, str(number), ha="center", va="bottom", fontsize=9, fontweight="bold")
            line = number - sum(len(marks[it]) for it in [*marks][:place])
            texts.text(0, 1.02 - line * 0.16 * (1 if place < 2 else 5 / 3), f"{number}", ha="right", fontsize=9,
                       fontweight="bold", transform=texts.transAxes)  # fmt: skip
            texts.text(0.02, 1.02 - line * 0.16 * (1 if place < 2 else 5 / 3), f"{text} ({at:.0f} ms)", fontsize=9,
                       transform=texts.transAxes)  # fmt: skip
        axis.set_title(TITLES[stage], fontsize=11, loc="left", pad=32)
        axis.set_yticks(range(len(LANES)), LANES)
        axis.set_xlim(0, width * 1e3)
        axis.set_ylim(len(LANES) - 0.4, -0.5)
        axis.set_xlabel("ms", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    keys = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[who]) for who in COLOURS]
    keys.append(plt.Rectangle((0, 0), 1, 1, color="black", alpha=0.35))
    figure.legend(keys, [*NAMES.values(), "paler: waits for a first token, or is loaded"], loc="outside upper center",
                  ncols=4, frameon=False, fontsize=9)  # fmt: skip
    path = IMAGES / "life.svg"
    figure.savefig(path, metadata={"Date": None, "Title": "The life of an adapter, from events of a real server"})
    plt.close(figure)
    return path
