"""If these fail, a mistake in a kernel, a plan, a launch or a pass can pass the checks that run without a GPU."""

import pytest

pytest.importorskip("cupy")

import sampling
from lngen.proof.check.inputs import same_bits
from mistakes import MUTANTS
from mutants import SUBJECTS, Mutant, clean, killer, twin

CASES = [pytest.param(m, id=f"{kind}: {m.name}: {m.subject}") for kind, listed in MUTANTS.items() for m in listed]


@sampling.rotating("name", SUBJECTS)
def test_the_twin_is_clean(name: str) -> None:
    outcome = clean(name)
    assert outcome.findings == ()
    assert all(same_bits(outcome.results[n], v).all() for n, v in twin(name).expected.items())


@sampling.rotating("mutant", CASES)
def test_the_mutant_is_killed(mutant: Mutant) -> None:
    assert killer(mutant), f"{mutant.name} survives on '{mutant.subject}'"
