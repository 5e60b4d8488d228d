"""The schedules to try, and their order: the only place where the tuner uses the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Any

from lngen.compile import Compilation
from lngen.devices import Device, device_for
from lngen.schedule import Schedule, ranked
from lngen.spec import Spec


def ranking(spec: Spec, rows: int, arch: str, device: Device | None = None) -> list[Schedule]:
    """The schedules for ``spec`` with ``rows`` rows, each once: measured ones first, then in the model's order.

    ``device``: the GPU; None for the one that represents ``arch``.
    """
    return ranked(Compilation(spec).problem, device or device_for(arch), rows=rows)


def candidates(compilation: Compilation, rows: int, arch: str) -> list[Schedule]:
    """The schedules in the order of trial: the default, then alternately the next by rank and the best of each kind.

    A model that is wrong about a whole kind would otherwise exclude it: kinds are first structures, then block
    shapes.
    """
    listed = ranked(compilation.problem, device_for(arch), rows=rows)
    kinds = [*_best(listed, _structure), *_best(listed, _shape)]
    turns = chain.from_iterable(zip_longest(listed, kinds))
    first = compilation.schedule(arch, rows=rows)
    return [*dict.fromkeys(s for s in (first, *turns) if s is not None)]


def _best(listed: Sequence[Schedule], kind: Callable[[Schedule], Any]) -> list[Schedule]:
    """The first of each kind."""
    found: dict[Any, Schedule] = {}
    for s in listed:
        found.setdefault(kind(s), s)
    return [*found.values()]


def _structure(s: Schedule) -> tuple[Any, ...]:
    return *s.kind, s.cached_weights


def _shape(s: Schedule) -> tuple[Any, ...]:
    return s.form, s.threads, s.rows_per_block, s.blocks_per_sm, s.cluster
