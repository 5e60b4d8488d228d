"""The ceilings: a copy and an addition of as many bytes as the [M, D] tensors of a call, which compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lngen.bench.cases import Case
from lngen.bench.engines import Array
from lngen.bench.floor import ceiling_bytes
from lngen.bench.providers import Prepared
from lngen.bench.sets import MEAN
from lngen.bench.tasks import MOVES, ceiling_of
from lngen.bench.timing import fastest
from lngen.spec import Spec


def buffers(case: Case) -> list[list[Array]]:
    """For each set the array that the case's ceiling writes, and those it reads, all of one length.

    Together they have the bytes of the case's [M, D] tensors, up to an element each. They hold what inputs hold, since
    the power that memory takes depends on its bits. Of a chain, each launch reads what the one before wrote.
    """
    engine, dtype = case.engine, case.spec.dtype
    arrays = 1 + MOVES[ceiling_of(case.spec)]
    length = max(1, -(-ceiling_bytes(case.spec, case.rows, case.graph) // (arrays * dtype.size)))
    first = [engine.normal((length,), dtype, MEAN, seed) for seed in range(arrays)]
    if case.chain:
        other = [first[1], first[0], *first[2:]]
        return [other if i % 2 else first for i in range(len(case.sets))]
    return [first, *([engine.clone(a) for a in first] for _ in case.sets[1:])]


class Ceiling:
    """A copy or an addition, by its name, or one after the other for forward and backward as one unit (``copy+add``).

    The driver's copy takes twice as long for some sizes, an elementwise kernel does not: the faster one is used.
    """

    needs = ""
    checked = False
    settings = "the library's own; of the driver's copy and an elementwise one the faster"

    def __init__(self, name: str) -> None:
        self.name = name

    def available(self) -> bool:
        return True

    def covers(self, spec: Spec) -> bool:
        return ceiling_of(spec) in self.name.split("+")

    def prepare(self, case: Case) -> Prepared:
        engine, arrays = case.engine, buffers(case)
        ways = [engine.copy, engine.scale] if ceiling_of(case.spec) == "copy" else [engine.add]

        def launch(way: Callable[..., None], stream: int, index: int) -> None:
            way(*arrays[index])

        return Prepared(fastest([partial(launch, way) for way in ways], len(arrays), engine), lambda index: {})
