"""The recording of the demo: `tools/record_demo.py` on screens whose times are known, and docs/images/demo.svg."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from tools import record_demo


def screen(*lines: str) -> record_demo.Screen:
    return tuple((("", line),) if line else () for line in lines)


def words(groups: list[ET.Element]) -> list[str]:
    return [text.text or "" for group in groups for text in group.findall("{*}text")]


def test_waiting_times_are_cut_and_the_last_screen_stays() -> None:
    waiting = [(float(second), screen("$ make demo", f"⠋ starting, {second} s")) for second in range(1, 31)]
    kept = record_demo.cut([(0.0, screen("$", "")), *waiting, (40.0, screen("$ make demo", "done"))])
    ticks = [record_demo.TICK_S] * 9
    expected = [1.0, *ticks, record_demo.IDLE_S, record_demo.LAST_S]
    assert [seconds for seconds, _ in kept] == pytest.approx(expected)


def test_only_the_last_screen_shows_where_nothing_moves() -> None:
    text = record_demo.svg([(1.0, screen("$", "old")), (2.0, screen("$", "<new>│ cell"))], "a & b")
    groups = ET.fromstring(text).findall("{*}g")
    assert words([group for group in groups if "past" in group.attrib["class"]]) == ["old"]
    assert words([group for group in groups if "past" not in group.attrib["class"]]) == ["$", "<new>", "│", "cell"]
    assert ".past{visibility:hidden}" in text


def test_the_recording_is_small_has_no_script_and_ends_well() -> None:
    text = record_demo.PATH.read_text()
    assert len(text.encode()) < 300_000
    assert "<script" not in text
    assert "prefers-color-scheme:dark" in text
    assert "token for token, as PEFT does" in text
