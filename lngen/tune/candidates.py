"""Which schedules are worth trying: the only place where the tuner asks the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any

from lngen.runtime.choose import default_schedule
from lngen.schedule import Schedule, capability, problem, ranked
from lngen.spec import Spec


def ranking(spec: Spec, rows: int, arch: str) -> list[Schedule]:
    """The schedules for ``spec`` with ``rows`` rows on ``arch``, each once, the model's favourite first."""
    return ranked(problem(spec.graph(), spec.d), capability(arch), rows=rows)


def candidates(spec: Spec, rows: int, arch: str) -> list[Schedule]:
    """The same in the order in which to try them: the default, then by rank and, in turn, of every kind the best.

    A model that is wrong about a kind as a whole would else keep it from being tried at all: first kinds of
    structures, then those of blocks.
    """
    listed = ranking(spec, rows, arch)
    kinds = [*_best(listed, _structure), *_best(listed, _shape)]
    turns = chain.from_iterable(zip_longest(listed, kinds))
    first = default_schedule(spec, arch, rows=rows)
    return [*dict.fromkeys(s for s in (first, *turns) if s is not None)]


def _best(listed: Sequence[Schedule], kind: Callable[[Schedule], Any]) -> list[Schedule]:
    """The first of each kind."""
    found: dict[Any, Schedule] = {}
    for s in listed:
        found.setdefault(kind(s), s)
    return [*found.values()]


def _structure(s: Schedule) -> tuple[Any, ...]:
    return *s.kind, s.keep


def _shape(s: Schedule) -> tuple[Any, ...]:
    return s.form, s.threads, s.rows, s.resident, s.cluster
