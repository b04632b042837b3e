"""What our reading of a page refuses; `promtool`, where it is installed, agrees with it on what Go cannot read."""

from __future__ import annotations

import shutil

import pytest

from tests.observability import strict_page
from tests.observability.strict_page import check_page

GOOD = """# HELP vllm:lora_adapter_loaded Adapters
# TYPE vllm:lora_adapter_loaded gauge
vllm:lora_adapter_loaded{adapter_name="team/\\"sql"} 1.0
# HELP wait_seconds Waits
# TYPE wait_seconds histogram
wait_seconds_bucket{le="0.1"} 1.0
wait_seconds_bucket{le="+Inf"} 2.0
wait_seconds_count 2.0
wait_seconds_sum 3e-05
"""
ANOTHER = """# HELP vllm:lora_adapter_loaded Adapters
# TYPE vllm:lora_adapter_loaded gauge
"""
GO_REFUSES = {
    "second HELP": GOOD + ANOTHER,
    "second TYPE": GOOD + ANOTHER.splitlines()[1] + "\n",
    "after its samples": "a 1.0\n# TYPE a gauge\n",
    "neither a comment": GOOD + "a{b=1} 1.0 x y\n",
}
WE_REFUSE = {
    "in two places": GOOD + 'vllm:lora_adapter_loaded{adapter_name="chat"} 1.0\n',
    "twice": GOOD + "a 1.0\na 2.0\n",
    "wait_seconds": GOOD.replace('"+Inf"} 2.0', '"+Inf"} 1.0'),
}


def test_a_page_that_all_can_read_is_read() -> None:
    assert check_page(GOOD) == {"vllm:lora_adapter_loaded": ['team/"sql'], "wait_seconds": []}


@pytest.mark.parametrize("said", [*GO_REFUSES, *WE_REFUSE])
def test_pages_that_some_cannot_read_are_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr(strict_page.shutil, "which", lambda _: None)
    with pytest.raises(AssertionError, match=said):
        check_page((GO_REFUSES | WE_REFUSE)[said])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
@pytest.mark.parametrize("said", GO_REFUSES)
def test_promtool_refuses_what_we_say_that_it_does(said: str) -> None:
    with pytest.raises(AssertionError, match="error while linting"):
        strict_page._check_with_promtool(GO_REFUSES[said])
