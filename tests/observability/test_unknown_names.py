"""The log line of an unknown name: what it says, how often it is written, and what a client cannot do with it."""

from __future__ import annotations

import pytest

from lora_plugins.absence import Absence
from lora_plugins.events import AdapterUnknown
from lora_plugins.observability.logs import UnknownNames


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def names(clock):
    return UnknownNames(clock)


def test_line_has_every_place_and_its_answer(names):
    absences = (
        Absence("filesystem", "/adapters/sqll", "no such directory"),
        Absence("s3", "s3://bucket/sqll/", "no weights", is_remembered=True),
        Absence("hub", "", "the list does not name it", was_asked=False),
    )
    assert names.line(AdapterUnknown("sqll", absences=absences)) == (
        "No adapter 'sqll': filesystem: /adapters/sqll: no such directory; "
        "s3: s3://bucket/sqll/: no weights (a moment ago); hub: not asked: the list does not name it"
    )


def test_server_without_sources_says_so(names):
    assert names.line(AdapterUnknown("sql")) == "No adapter 'sql': there is no source to ask"


def test_same_name_is_a_line_once_a_minute(names, clock):
    assert names.line(AdapterUnknown("sql")) is not None
    clock.now_s += 59
    assert names.line(AdapterUnknown("sql")) is None
    assert names.line(AdapterUnknown("other")) is not None
    clock.now_s += 2
    assert names.line(AdapterUnknown("sql")) is not None


def test_flood_of_names_is_bounded_and_counted(names, clock):
    lines = [names.line(AdapterUnknown(f"x{number}")) for number in range(10_000)]
    assert sum(line is not None for line in lines) == 20
    clock.now_s += 60
    assert names.line(AdapterUnknown("sql")).endswith("(9980 more requests for unknown names since the last such line)")
    assert "more requests" not in names.line(AdapterUnknown("next"))


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\u202eb", "a\u2028b", "\ud800"])
def test_name_cannot_move_a_cursor_or_break_the_line(names, name):
    line = names.line(AdapterUnknown(name, reason=f"the segment '{name}'"))
    assert line.isprintable()
    line.encode()


def test_long_name_is_cut(names):
    line = names.line(AdapterUnknown("x" * 100_000, reason="a name of 100000 characters"))
    assert len(line) < 300
    assert "(100000 characters)" in line
