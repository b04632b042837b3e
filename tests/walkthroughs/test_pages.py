"""Each page of a walkthrough has just the blocks that its steps name: a new one is run, or left out for a reason."""

from __future__ import annotations

import pytest

from tests.walkthroughs.reader import Do, Walk
from tests.walkthroughs.test_air_gapped import AIR_GAPPED
from tests.walkthroughs.test_hobbyist import CPU, README
from tests.walkthroughs.test_operator import KUBERNETES
from tests.walkthroughs.test_researcher import RL

ALL = pytest.mark.parametrize("walk", [README, CPU, AIR_GAPPED, KUBERNETES, RL], ids=lambda walk: walk.page)


@ALL
def test_every_block_is_a_step_and_substitutions_apply(walk: Walk) -> None:
    assert walk.wrong() == []


@ALL
def test_what_is_left_out_or_replaced_has_a_reason(walk: Walk) -> None:
    assert all(step.note for step in walk.steps if step.do in (Do.LEAVE_OUT, Do.WRITE))
    assert all(why for _, why in walk.substitutions.values())
