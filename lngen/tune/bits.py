"""The interpreter's bits for one spec at many rows, held against what a launch left, on the device.

The interpreter is too slow for the largest arrays, and does not have to see them: the bits of a row depend on that
row alone, those of a column sum on its column alone. So the inputs repeat a block of rows, row results are compared
with the block's, and column sums of large arrays on a sample of columns, summed over all rows. Where a column sum
needs sums over rows that it computes itself, this does not hold: then fewer rows are compared, and all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lngen.check.inputs import POISON, random_inputs
from lngen.interpret import interpret
from lngen.ir import D, Graph, M, Value, is_row_fold
from lngen.ir.numerics import Array
from lngen.passes.edit import extract
from lngen.runtime.arrays_np import raw
from lngen.spec import Spec

BLOCK_ELEMENTS = 2**20  # of the block of rows the interpreter sees
COLUMN_ELEMENTS = 2**22  # of the columns it sees over all rows
MOST_COLUMNS, LEAST_COLUMNS = 192, 4
EDGE_ROWS = (1, 133)  # checked besides all rows: one row, and one more than fills the blocks of a GPU


class Bits:
    """Inputs on the device, and what the results must be.

    xp  cupy, or numpy: the module whose arrays hold them. Numbers travel as unsigned integers of their size, for
        which equal means equal bits; the inputs have no NaN.
    """

    def __init__(self, spec: Spec, rows: int, xp: Any) -> None:
        self.spec, self.rows, self._xp = spec, rows, xp
        self.graph = spec.graph()
        block = max(1, min(rows, BLOCK_ELEMENTS // spec.d))
        # Odd, so that a kernel that takes a row some power of two away cannot be right by accident.
        self.block = block - 1 if block % 2 == 0 else block
        self._rows_graph, self._columns_graph = self._part(True), self._part(False)
        sliceable = not any(is_row_fold(e) for e in self._columns_graph.eqns)
        self.whole = not self._columns_graph.results or sliceable
        affordable = rows if self.whole else max(self.block, 4 * BLOCK_ELEMENTS // spec.d)
        edges = {m for m in EDGE_ROWS if m < rows and m <= affordable}
        self.checked_rows = tuple(sorted({*edges, rows if self.whole else self.block}))
        self._inputs = random_inputs(spec, self.block)
        wanted = interpret(self._rows_graph, self._only(self._rows_graph))
        self._wanted = {n: xp.asarray(raw(a)) for n, a in wanted.items()}
        self._columns: dict[int, tuple[Any, dict[str, Any]]] = {m: self._column_sums(m) for m in self.checked_rows}
        self.inputs = {n: self._repeated(xp.asarray(raw(a)), self.graph.param(n)) for n, a in self._inputs.items()}

    def empty(self, rows: int) -> dict[str, Any]:
        """Results full of poison."""
        out = {}
        for v in self.graph.results:
            out[v.name] = self._xp.empty(v.type.shape(rows, self.spec.d), f"u{v.type.dtype.size}")
            out[v.name].fill(int.from_bytes([POISON] * v.type.dtype.size, "little"))
        return out

    def complaint(self, rows: int, results: Mapping[str, Any]) -> str:
        """How many numbers of a launch with ``rows`` rows differ, by result; an empty text if none does."""
        wrong = {}
        for name, want in self._wanted.items():
            got = results[name]
            pieces = range(0, rows, self.block)
            wrong[name] = sum(int((got[s : s + self.block] != want[: min(self.block, rows - s)]).sum()) for s in pieces)
        index, sums = self._columns[rows]
        for name, column in sums.items():
            wrong[name] = int((results[name][index] != column).sum())
        return "; ".join(f"{name}: {count} numbers differ with {rows} rows" for name, count in wrong.items() if count)

    # ---- expected ----

    def _part(self, by_row: bool) -> Graph:
        results = tuple(r for r in self.graph.results if (M in r.type.axes) is by_row)
        return extract(self.graph, self.graph.name, self.graph.params, results)

    def _only(self, graph: Graph) -> dict[str, Array]:
        return {p.name: self._inputs[p.name] for p in graph.params}

    def _column_sums(self, rows: int) -> tuple[Any, dict[str, Any]]:
        """Indices of the columns compared, and their sums over the first ``rows`` rows."""
        d = self.spec.d
        count = min(max(COLUMN_ELEMENTS // max(rows, 1), LEAST_COLUMNS), MOST_COLUMNS)
        columns = np.arange(d)
        if self.whole and d > count and rows * d > BLOCK_ELEMENTS:
            inner = np.random.default_rng(d).choice(d, count - 2, replace=False)
            columns = np.unique([0, d - 1, *inner])
        if not self._columns_graph.results:
            return columns, {}
        repeat = np.arange(rows) % self.block
        sliced = {}
        for p in self._columns_graph.params:
            a = self._inputs[p.name]
            a = a[..., columns] if D in p.type.axes else a
            sliced[p.name] = a[repeat] if M in p.type.axes else a
        found = interpret(self._columns_graph, sliced)
        return self._xp.asarray(columns), {n: self._xp.asarray(raw(a)) for n, a in found.items()}

    def _repeated(self, block: Any, value: Value) -> Any:
        """The rows of an input, as often as they are needed."""
        if M not in value.type.axes or self.rows <= self.block:
            return block
        whole = self._xp.empty((self.rows, *block.shape[1:]), block.dtype)
        for start in range(0, self.rows, self.block):
            piece = whole[start : start + self.block]
            piece[...] = block[: len(piece)]
        return whole
