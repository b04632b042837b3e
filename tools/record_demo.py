"""Record `make demo` in a terminal, as docs/images/demo.svg; `make recording` runs this with pyte, a terminal emulator.

bash runs in a pseudo-terminal, and pyte says what a screen shows after each output. The file has every screen as text,
and CSS shows one after the other: no script, light and dark, and the last screen alone where nothing may move.
"""

from __future__ import annotations

import html
import itertools
import os
import pty
import re
import select
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "images" / "demo.svg"
COMMAND = "make demo"
COLUMNS, LINES = 104, 42  # all that the demo prints, so that the last screen has everything
TIMEOUT_S = 600.0
KEY_S, QUIET_S = 0.09, 0.05  # between two keys; without output for so long, a screen counts as drawn
IDLE_S, LAST_S = 1.2, 12.0  # the longest time of a screen, and the time of the last
TICK_S, TICK_EVERY_S = 0.12, 3.0  # of seconds that are counted up: a tick, and the seconds between two that are kept
CELL, LINE, MARGIN = 8.4, 17, 14  # pixels, for letters of 14
COLOURS = {"green": ("#116329", "#56d364"), "red": ("#b3261e", "#ff7b72"), "cyan": ("#0b5c8a", "#79c0ff")}

OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")

Run = tuple[str, str]  # classes, text
Row = tuple[Run, ...]
Screen = tuple[Row, ...]


@dataclass(frozen=True)
class Shown:
    """A row of the screen, and from when to when the screen shows the row; `end_s` is None for the last screen."""

    line: int
    row: Row
    begin_s: float
    end_s: float | None


def record() -> list[tuple[float, Screen]]:
    """Run the command; every screen, and the moment of its output."""
    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        # Without the variables that `make` hands to a `make` below: a user's has none above.
        outer = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
        environment = {**outer, "PS1": "$ ", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        os.execvpe("bash", ["bash", "--noprofile", "--norc", "--noediting", "-i"], environment)
    termios.tcsetwinsize(terminal, (LINES, COLUMNS))
    screens: list[tuple[float, Screen]] = []

    def watch(wait_s: float) -> None:
        """Feed the emulator until nothing has come for so long, and keep its screen."""
        while select.select([terminal], [], [], wait_s)[0]:
            stream.feed(os.read(terminal, 65536))
            wait_s = QUIET_S
        screens.append((time.monotonic(), rows_of(screen)))

    def is_asked() -> bool:
        return screen.display[screen.cursor.y].rstrip() == "$"

    deadline = time.monotonic() + TIMEOUT_S
    while not is_asked() and time.monotonic() < deadline:
        watch(0.5)
    for key in COMMAND:
        os.write(terminal, key.encode())
        watch(KEY_S)
    os.write(terminal, b"\n")
    while not is_asked() and time.monotonic() < deadline:
        watch(0.5)
    os.write(terminal, b"exit\n" if is_asked() else b"\x03exit 1\n")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"{COMMAND} ended with {code}:\n" + "\n".join(screen.display))
    return screens


def rows_of(screen: Any) -> Screen:
    """What an emulator shows, as runs of letters of one look."""
    rows = []
    for line in range(screen.lines):
        runs: list[Run] = []
        for column in range(screen.columns):
            cell = screen.buffer[line][column]
            colour = cell.fg if cell.fg in COLOURS else ""
            look = " ".join(filter(None, [colour, "bold" if cell.bold else "", "italics" if cell.italics else ""]))
            if runs and runs[-1][0] == look:
                runs[-1] = look, runs[-1][1] + cell.data
            else:
                runs.append((look, cell.data))
        while runs and not runs[-1][1].strip():
            runs.pop()
        rows.append(tuple(runs))
    return tuple(rows)


def cut(screens: list[tuple[float, Screen]]) -> list[tuple[float, Screen]]:
    """Each different screen, and how long the recording shows the screen: waiting times are cut."""
    kept = screens[:1]
    for moment, screen in screens[1:]:
        is_new = _words(screen) != _words(kept[-1][1])
        if is_new or (screen != kept[-1][1] and moment - kept[-1][0] >= TICK_EVERY_S):
            kept.append((moment, screen))
    result = []
    for (began, screen), (ended, after) in itertools.pairwise(kept):
        longest_s = IDLE_S if _words(screen) != _words(after) else TICK_S
        result.append((min(ended - began, longest_s), screen))
    return [*result, (LAST_S, kept[-1][1])]


def _words(screen: Screen) -> str:
    """A screen without digits, and without a spinner, which turns ten times a second."""
    return re.sub("[\u2800-\u28ff\\d]", "", "\n".join("".join(text for _, text in row) for row in screen))


def shown(screens: list[tuple[float, Screen]]) -> Iterator[Shown]:
    """The rows of screens, each once for as long as the row stays the same."""
    for line in range(len(screens[0][1])):
        at_s, begin_s = 0.0, 0.0
        for number, (seconds, screen) in enumerate(screens):
            at_s += seconds
            is_last = number + 1 == len(screens)
            if is_last or screens[number + 1][1][line] != screen[line]:
                if screen[line]:
                    yield Shown(line, screen[line], begin_s, None if is_last else at_s)
                begin_s = at_s


def svg(screens: list[tuple[float, Screen]], title: str) -> str:
    """The recording as an SVG."""
    whole_s = sum(seconds for seconds, _ in screens)
    lines = max(item.line for item in shown(screens)) + 1
    width, height = COLUMNS * CELL + 2 * MARGIN, lines * LINE + 2 * MARGIN
    styles: dict[tuple[float, float | None], str] = {}
    rows = []
    for item in shown(screens):
        name = styles.setdefault((item.begin_s, item.end_s), f"s{len(styles)}")
        rows.append(f'<g class="{name}{"" if item.end_s is None else " past"}">{_texts(item)}</g>')
    moving = []
    for (begin_s, end_s), name in styles.items():
        begin, end = (100 * (at_s or 0) / whole_s for at_s in (begin_s, end_s))
        stops = f"{begin:.2f}%{{visibility:visible}}"
        stops = f"0%{{visibility:hidden}}{stops}" if begin_s else stops
        stops += "" if end_s is None else f"{end:.2f}%{{visibility:hidden}}"
        moving.append(f"@keyframes {name}{{{stops}}}.{name}{{animation:{name} {whole_s:.2f}s step-end infinite}}")
    light, dark = ("".join(f".{colour}{{fill:{of[place]}}}" for colour, of in COLOURS.items()) for place in range(2))
    style = (
        ".screen{fill:#f6f8fb;stroke:#c4ccd8}text{fill:#16202c;white-space:pre}.bold{font-weight:700}"
        f".italics{{font-style:italic}}.past{{visibility:hidden}}{light}"
        "@media (prefers-color-scheme:dark){"
        f".screen{{fill:#161c26;stroke:#3a475a}}text{{fill:#e8edf4}}{dark}}}"
        f"@media (prefers-reduced-motion:no-preference){{{''.join(moving)}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" aria-labelledby="t" '
        "font-family=\"ui-monospace,'SF Mono',Menlo,'DejaVu Sans Mono','Liberation Mono',Consolas,monospace\" "
        f'font-size="14">\n<title id="t">{html.escape(title)}</title>\n<style>{style}</style>\n'
        f'<rect class="screen" x="1" y="1" width="{width - 2:.0f}" height="{height - 2}" rx="9"/>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


def _texts(item: Shown) -> str:
    """Words at their columns, so that another font moves nothing."""
    y, column, texts = MARGIN + LINE * item.line + 13, 0, []
    for look, text in item.row:
        for word in re.finditer(r"[│┃]|[^\s│┃]+(?: [^\s│┃]+)*", text):
            x, length = MARGIN + CELL * (column + word.start()), CELL * len(word[0])
            style = f' class="{look}"' if look else ""
            texts.append(
                f'<text{style} x="{x:.1f}" y="{y}" textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs">'
                f"{html.escape(word[0], quote=False)}</text>"
            )
        column += len(text)
    return "".join(texts)


def title(circumstances: dict[str, Any], load: float) -> str:
    """What was recorded, where and when."""
    vllm = next(version for name, version in circumstances["versions"].items() if name.startswith("vllm"))
    return (
        f"{COMMAND}, recorded on {circumstances['date']}, commit {circumstances['commit']}: vLLM {vllm}, "
        f"{circumstances['cores']} cores of {circumstances['cpu']} at a load of {load:.0f}; waiting times are cut"
    )


def main() -> int:
    from benchmarks.record import circumstances

    screens = cut(record())
    text = svg(screens, title(circumstances(), os.getloadavg()[0]))
    for path in (str(ROOT), str(Path.home())):
        if path in text and len(path) > 1:
            raise SystemExit(f"the recording shows {path}")
    PATH.write_text(text)
    print(f"{PATH.relative_to(ROOT)}: {len(screens)} screens, {len(text.encode()) / 1e3:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
