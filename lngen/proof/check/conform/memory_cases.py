"""Cases about shapes, memory and repetition: the rows of a call, their layout, and other calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.proof.check.conform.implementations import FailedError, Found, RaisedError, guarded, laid
from lngen.proof.check.conform.suites import Calls, SkippedError, same
from lngen.proof.check.inputs import differing

BATCH, OFFSET = 1500, 5


def strided(a: Array) -> Array:
    """The same rows, with a gap of five elements between rows."""
    wide = np.zeros((a.shape[0], a.shape[1] + 5), a.dtype)
    wide[:, : a.shape[1]] = a
    return wide[:, : a.shape[1]]


def unaligned(a: Array) -> Array:
    """The same elements, one element after an aligned address."""
    memory = np.zeros(a.size + 1, a.dtype)
    memory[1:] = a.reshape(-1)
    return memory[1:].reshape(a.shape)


def transposed(a: Array) -> Array:
    """The same rows, stored column by column."""
    return np.ascontiguousarray(a.T).T


def no_rows(suite: Calls) -> Found:
    """M = 0: empty results, and dgamma and dbeta are zero."""
    results = suite.results(suite.inputs(m=0))
    for name in [n for n in suite.columns if n in results]:
        count = int((results[name] != 0).sum())
        if count:
            raise FailedError(f"{name}: {count} of {results[name].size} elements are not 0", {name: float(count)})
    return Found(", ".join(f"{n} {list(a.shape)}" for n, a in results.items()))


def laid_out(suite: Calls, *, lay: Callable[[Array], Array], names: tuple[str, ...]) -> Found:
    """Inputs with another memory layout: the bits of the contiguous call, or within the bounds, or refused."""
    inputs = suite.inputs()
    moved = {n: lay(a) if n in names else a for n, a in inputs.items()}
    plain = suite.results(inputs)
    try:
        results = suite.results(moved)
    except RaisedError as error:
        return Found(f"refused: {error}")
    if any(differing(results[n], plain[n]) for n in plain):
        return suite.judged(inputs, results)
    return Found("as if contiguous")


def strided_rows(suite: Calls) -> Found:
    """x[:, :D] of a wider array, dy alike."""
    return laid_out(suite, lay=strided, names=suite.matrices)


def unaligned_base(suite: Calls) -> Found:
    """Every array one element after an aligned address."""
    return laid_out(suite, lay=unaligned, names=tuple(suite.inputs()))


def column_major(suite: Calls) -> Found:
    """x and dy as transposes of contiguous arrays."""
    return laid_out(suite, lay=transposed, names=suite.matrices)


def rows_alone(suite: Calls) -> Found:
    """A row in a call of its own has the bits it has among others."""
    suite.need_rows()
    inputs = suite.inputs()
    among, length = suite.results(inputs), len(inputs[suite.matrices[0]])
    pairs: dict[str, tuple[Array, Array]] = {}
    for row in sorted({0, 1, length // 2, length - 1}):
        alone = suite.results(suite.some(inputs, np.array([row])))
        pairs |= {f"{n} of row {row}": (a, among[n][row : row + 1]) for n, a in alone.items() if n in suite.rowwise}
    return same(pairs, "alone")


def rows_permuted(suite: Calls) -> Found:
    """Rows in another order have the same bits."""
    suite.need_rows()
    inputs = suite.inputs()
    order = np.random.default_rng(5).permutation(len(inputs[suite.matrices[0]]))
    first, second = suite.results(inputs), suite.results(suite.some(inputs, order))
    return same({n: (second[n], first[n][order]) for n in suite.rowwise if n in first}, "permuted")


def rows_in_bigger_batch(suite: Calls) -> Found:
    """Rows in the middle of many more have the same bits."""
    suite.need_rows()
    big = suite.inputs(m=max(suite.rows(BATCH), OFFSET + 4))
    length = len(big[suite.matrices[0]])
    part = np.arange(OFFSET, min(OFFSET + 37, length))
    small, large = suite.results(suite.some(big, part)), suite.results(big)
    return same({n: (small[n], large[n][part]) for n in suite.rowwise if n in small}, f"in {length} rows")


def repeated(suite: Calls) -> Found:
    """Three calls on the same inputs: y and dx have the same bits."""
    return _repeat(suite, suite.rowwise, times=3, rows=37)


def repeated_columns(suite: Calls) -> Found:
    """Five calls over many rows: dgamma and dbeta have the same bits."""
    if not {*suite.columns} & {*suite.target.gradients}:
        suite.need(*suite.columns[:1])
        raise SkippedError("no gradient without rows")
    return _repeat(suite, suite.columns, times=5, rows=BATCH)


def _repeat(suite: Calls, names: tuple[str, ...], *, times: int, rows: int) -> Found:
    inputs = suite.inputs(m=suite.rows(rows))
    first = suite.results(inputs)
    pairs: dict[str, tuple[Array, Array]] = {}
    for number in range(2, times + 1):
        again = suite.results(inputs)
        pairs |= {f"{n} of call {number}": (again[n], first[n]) for n in names if n in first}
    return same(pairs, "repeated")


def inputs_unmodified(suite: Calls) -> Found:
    """The bytes of every input are unchanged."""
    inputs = suite.inputs()
    with guarded():
        memory = suite.raw(inputs).memory()
    wrong = {n: differing(memory[n], laid(a).memory) for n, a in inputs.items()}
    parts = [f"{n}: {count} elements" for n, count in wrong.items() if count]
    if parts:
        raise FailedError(f"written to: {', '.join(parts)}", {n: float(c) for n, c in wrong.items()})
    return Found(f"{', '.join(inputs)} unchanged")


def shape_and_dtype(suite: Calls) -> Found:
    """Every result has the expected shape and dtype."""
    inputs = suite.inputs()
    wrong, right = [], []
    for name, got in suite.raw(inputs).results.items():
        wanted = suite.type_of(name)
        shape, dtype = suite.shape_of(name, inputs), wanted.dtype
        text = f"{name} {got.dtype} {list(got.shape)}"
        if got.shape != shape or got.dtype != NUMPY_DTYPE[dtype]:
            wrong.append(f"{text}, expected {NUMPY_DTYPE[dtype]} {list(shape)}")
        right.append(text)
    if wrong:
        raise FailedError("; ".join(wrong))
    return Found(", ".join(right))
