"""The interpreter's bits for one spec at many rows, compared on the device with the results of a launch.

The interpreter is too slow for the largest arrays and does not need them: the bits of a row depend on that row alone,
those of a column sum on its column alone. So the inputs repeat a block of rows, row results are compared with those of
the block, and column sums of large arrays on a sample of columns, summed over all rows. A column sum that depends on
row sums does not have this property: then fewer rows are compared, and all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lngen.check.inputs import POISON, random_inputs
from lngen.interpret import interpret
from lngen.ir import D, Graph, M, Value, is_number_fold, is_row_fold
from lngen.ir.numerics import Array
from lngen.passes import extract
from lngen.runtime.numpy_arrays import raw
from lngen.spec import Spec

BLOCK_ELEMENTS = 2**20  # of the block of rows that the interpreter computes
COLUMN_ELEMENTS = 2**22  # of the columns that the interpreter sums over all rows
MOST_COLUMNS, LEAST_COLUMNS = 192, 4
EDGE_ROWS = (1, 133)  # checked besides all rows: one row, and one more than the multiprocessors of an H200


class Bits:
    """Inputs on the device, and the expected results.

    xp  cupy, or numpy: the module of the arrays. Numbers are stored as unsigned integers of their size, so that
        equal means equal bits; the inputs have no NaN.
    """

    def __init__(self, spec: Spec, rows: int, xp: Any) -> None:
        self.spec, self.rows, self._xp = spec, rows, xp
        self.graph = spec.graph()
        block = max(1, min(rows, BLOCK_ELEMENTS // spec.d))
        # The block is odd, so that a kernel that reads a row a power of two away cannot be right by accident.
        self.block = block - 1 if block % 2 == 0 else block
        self._rows_graph, self._columns_graph = self._part(True), self._part(False)
        sliceable = not any(is_row_fold(e) or is_number_fold(e) for e in self._columns_graph.eqns)
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
        """By result, how many numbers of a launch with ``rows`` rows differ; an empty text if none does."""
        wrong = {}
        for name, want in self._wanted.items():
            got = results[name]
            starts = range(0, rows, self.block)
            wrong[name] = sum(int((got[s : s + self.block] != want[: min(self.block, rows - s)]).sum()) for s in starts)
        index, sums = self._columns[rows]
        for name, column in sums.items():
            got = results[name]
            wrong[name] = int(((got[index] if got.ndim else got) != column).sum())
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
        """The rows of an input, repeated as often as needed."""
        if M not in value.type.axes or self.rows <= self.block:
            return block
        whole = self._xp.empty((self.rows, *block.shape[1:]), block.dtype)
        for start in range(0, self.rows, self.block):
            part = whole[start : start + self.block]
            part[...] = block[: len(part)]
        return whole
