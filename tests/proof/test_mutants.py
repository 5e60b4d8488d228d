"""The proof on NumPy can fail: every plausible mistake in a header, a template, a plan, a pass or a launch is caught.

Equivalent mutants are left out; the tables say which and why.
"""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("cupy")

import sampling
from lngen.check.inputs import same_bits
from lngen.lower import headers
from mutants import SUBJECTS, Edit, Mutant, clean, killer, twin
from mutants_device import DEVICE
from mutants_kernel import KERNELS

DEVICES = {
    header: [Mutant(name, subject, files=(Edit(f"device/{header}.cuh", *edit),)) for name, subject, *edit in rows]
    for header, rows in DEVICE.items()
}
CLASSES = {**DEVICES, **KERNELS}
CASES = [pytest.param(m, id=f"{kind}: {m.name}: {m.subject}") for kind, listed in CLASSES.items() for m in listed]


@sampling.rotating("name", SUBJECTS)
def test_the_twin_is_clean(name: str) -> None:
    outcome = clean(name)
    assert outcome.findings == ()
    assert all(same_bits(outcome.results[n], v).all() for n, v in twin(name).expected.items())


@sampling.rotating("mutant", CASES, group=lambda mutant: mutant.subject)  # whose clean run they share
def test_the_mutant_is_killed(mutant: Mutant) -> None:
    assert killer(mutant), f"{mutant.name} survives on '{mutant.subject}'"


def test_each_mutant_is_there_once_and_every_header_has_some() -> None:
    listed = [(kind, m.name, m.subject) for kind, mutants in CLASSES.items() for m in mutants]
    assert len(set(listed)) == len(listed) >= 560, Counter(listed).most_common(1)
    assert {m.subject for mutants in CLASSES.values() for m in mutants} <= {*SUBJECTS}
    assert {*headers.HEADERS} - {*DEVICE} == {"preload"}, "what holds loads back changes no bit"
