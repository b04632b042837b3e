"""The site's pages on a narrow screen, as a browser lays them out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSS = Path(__file__).parents[1] / "docs" / "assets" / "site.css"
CHROMIUM = shutil.which("chromium")
PAGE = """<!doctype html><style>
pre > code {{ display: block; overflow: auto }}
{css}</style><body style="margin: 0; width: {width}px"><article class="md-typeset">
<table><thead><tr><th>variable</th><th>default</th><th>meaning</th></tr></thead><tbody><tr>
<td><code>LORA_PLUGINS_FETCH_TIMEOUT_S</code></td><td><code>300</code></td>
<td id="meaning">How long a source may take to find an adapter, or no byte may come in a fetch</td></tr></table>
<pre><code id="command">export {command}</code></pre></article><script>
const code = document.getElementById("command"), cell = document.getElementById("meaning")
document.title = [innerWidth, cell.clientWidth, code.scrollWidth - code.clientWidth].join(" ")
</script>"""


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [500, 1300])
def test_meanings_have_room_and_commands_are_whole(tmp_path: Path, width: int) -> None:
    page = tmp_path / "page.html"
    command = " ".join(f"VLLM_PLUGINS=lora_plugins_{number}" for number in range(6))
    page.write_text(PAGE.format(css=CSS.read_text(encoding="utf-8"), width=width, command=command), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900")
    run = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path}/home", "--dump-dom", page.as_uri()]
    dom = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout
    (measured,) = re.findall(r"<title>(.*)</title>", dom)
    window, meaning, hidden = map(int, measured.split())
    assert window == width
    assert meaning > 300, "more than a few words a line"
    if width == 500:
        assert hidden <= 0, "nothing of a command is to the right of the screen"
