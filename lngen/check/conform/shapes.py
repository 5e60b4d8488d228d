"""Cases about shapes, memory and repetition: the rows of a call, their layout, and other calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lngen.check.conform.contract import FailedError, Found, RaisedError
from lngen.check.conform.layout import laid, strided, transposed, unaligned
from lngen.check.conform.suite import Suite, same
from lngen.check.conform.targets import guarded
from lngen.check.inputs import differing
from lngen.ir.numerics import NUMPY_DTYPE, Array

ROWWISE = ("y", "dx")
BATCH, OFFSET = 1500, 5


def no_rows(suite: Suite) -> Found:
    """M = 0: empty results, and dgamma and dbeta are zero."""
    results = suite.results(suite.inputs(m=0))
    for name in [n for n in ("dgamma", "dbeta") if n in results]:
        count = int((results[name] != 0).sum())
        if count:
            raise FailedError(f"{name}: {count} of {suite.d} elements are not 0", {name: float(count)})
    return Found(", ".join(f"{n} {list(a.shape)}" for n, a in results.items()))


def laid_out(suite: Suite, *, lay: Callable[[Array], Array], names: tuple[str, ...]) -> Found:
    """Inputs with another memory layout: the bits of the contiguous call, or within the bounds, or refused."""
    inputs = suite.inputs()
    moved = {n: lay(a) if n in names else a for n, a in inputs.items()}
    plain = suite.results(inputs)
    try:
        results = suite.results(moved)
    except RaisedError as error:
        return Found(f"refused: {error}")
    if any(differing(results[n], plain[n]) for n in plain):
        return suite.within(suite.reference(inputs), results)
    return Found("as if contiguous")


def strided_rows(suite: Suite) -> Found:
    """x[:, :D] of a wider array, dy alike."""
    return laid_out(suite, lay=strided, names=("x", "dy"))


def unaligned_base(suite: Suite) -> Found:
    """Every array one element after an aligned address."""
    return laid_out(suite, lay=unaligned, names=("x", "dy", "gamma", "beta"))


def column_major(suite: Suite) -> Found:
    """x and dy as transposes of contiguous arrays."""
    return laid_out(suite, lay=transposed, names=("x", "dy"))


def rows_alone(suite: Suite) -> Found:
    """A row in a call of its own has the bits it has among others."""
    inputs = suite.inputs()
    among = suite.results(inputs)
    pairs: dict[str, tuple[Array, Array]] = {}
    for row in sorted({0, 1, len(inputs["x"]) // 2, len(inputs["x"]) - 1}):
        alone = suite.results(_rows(inputs, np.array([row])))
        pairs |= {f"{n} of row {row}": (a, among[n][row : row + 1]) for n, a in alone.items() if n in ROWWISE}
    return same(pairs, "alone")


def rows_permuted(suite: Suite) -> Found:
    """Rows in another order have the same bits."""
    inputs = suite.inputs()
    order = np.random.default_rng(5).permutation(len(inputs["x"]))
    first, second = suite.results(inputs), suite.results(_rows(inputs, order))
    return same({n: (second[n], first[n][order]) for n in ROWWISE if n in first}, "permuted")


def rows_in_bigger_batch(suite: Suite) -> Found:
    """Rows in the middle of many more have the same bits."""
    big = suite.inputs(m=max(suite.rows(BATCH), OFFSET + 4))
    part = np.arange(OFFSET, min(OFFSET + 37, len(big["x"])))
    small, large = suite.results(_rows(big, part)), suite.results(big)
    return same({n: (small[n], large[n][part]) for n in ROWWISE if n in small}, f"in {len(big['x'])} rows")


def _rows(inputs: dict[str, Array], rows: Array) -> dict[str, Array]:
    return {n: np.ascontiguousarray(a[rows]) if a.ndim == 2 else a for n, a in inputs.items()}


def repeated(suite: Suite) -> Found:
    """Three calls on the same inputs: y and dx have the same bits."""
    return _repeat(suite, ROWWISE, times=3, rows=37)


def repeated_columns(suite: Suite) -> Found:
    """Five calls over many rows: dgamma and dbeta have the same bits."""
    if not {"dgamma", "dbeta"} & {*suite.target.gradients}:
        suite.need("dgamma")
    return _repeat(suite, ("dgamma", "dbeta"), times=5, rows=BATCH)


def _repeat(suite: Suite, names: tuple[str, ...], *, times: int, rows: int) -> Found:
    inputs = suite.inputs(m=suite.rows(rows))
    first = suite.results(inputs)
    pairs: dict[str, tuple[Array, Array]] = {}
    for number in range(2, times + 1):
        again = suite.results(inputs)
        pairs |= {f"{n} of call {number}": (again[n], first[n]) for n in names if n in first}
    return same(pairs, "repeated")


def inputs_unmodified(suite: Suite) -> Found:
    """The bytes of every input are unchanged."""
    inputs = suite.inputs()
    with guarded():
        memory = suite.raw(inputs).memory()
    wrong = {n: differing(memory[n], laid(a).memory) for n, a in inputs.items()}
    parts = [f"{n}: {count} elements" for n, count in wrong.items() if count]
    if parts:
        raise FailedError(f"written to: {', '.join(parts)}", {n: float(c) for n, c in wrong.items()})
    return Found(f"{', '.join(inputs)} unchanged")


def shape_and_dtype(suite: Suite) -> Found:
    """Every result has the expected shape and dtype."""
    inputs = suite.inputs()
    wrong, right = [], []
    for name, got in suite.raw(inputs).results.items():
        shape = inputs["x"].shape if name in ROWWISE else inputs["x"].shape[1:]
        dtype = suite.contract.dtype_of(name)
        text = f"{name} {got.dtype} {list(got.shape)}"
        if got.shape != shape or got.dtype != NUMPY_DTYPE[dtype]:
            wrong.append(f"{text}, expected {NUMPY_DTYPE[dtype]} {list(shape)}")
        right.append(text)
    if wrong:
        raise FailedError("; ".join(wrong))
    return Found(", ".join(right))
