"""Every mutant still finds the text that it changes: `make mutants`, which runs them, takes minutes."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import mutated
from tests.mutants.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_its_file(mutant: Mutant) -> None:
    assert mutant.new in mutated(mutant)
