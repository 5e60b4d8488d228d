"""Cases about results of 8 bits: their numbers are such that the spec's rule has one answer, in every bit.

All elements of a row of x that are not 0 have one size, so x / rms(x) is a power of two, whatever the order of the sum,
and what is quantised is that times gamma. The interpreter says what the rule makes of it. A target that rounds,
saturates or scales by another rule has other bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import DType, values_of
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array, round_to
from lngen.compiler.spec import Spec
from lngen.dtypes import QUANTISED
from lngen.proof.check.conform.implementations import FailedError, Found
from lngen.proof.check.conform.suites import GraphSuite, Inputs, SkippedError, changed
from lngen.proof.check.inputs import same_bits

ROWS, PART, D = 64, 16, 1024  # each row has its elements in a part of its own, which is in one block of any size
SIZE, TIMES = 2.0**10, 8.0  # the elements of x, beside which eps is 0, and what the norm makes of them: sqrt(D / PART)
SHOWN = 4  # numbers of row 1
CALLS = 16  # with a given scale, which all rows share
LAST = 31, 4093  # lengths of rows that no vector divides
Trial = tuple[Inputs, Array]
"""Inputs, and the values [ROWS, D] that they make of gamma."""


def is_quantised(spec: Spec) -> bool:
    """True if a result of the spec's forward has 8 bits."""
    return any(r.type.dtype in QUANTISED for r in spec.with_direction("fwd").forward().results)


# ---- inputs ----


def _format(suite: GraphSuite) -> DType:
    return next(r.type.dtype for r in suite.forward.results if r.type.dtype in QUANTISED)


def _single(suite: GraphSuite, end: str) -> list[str]:
    """The inputs of one number whose names end so: scales that are given, and bounds of amax."""
    return [p.name for p in suite.forward.tensors if not p.type.axes and p.name.endswith(end)]


def _trial(suite: GraphSuite, v: Array, *, scale: float = 1.0, most: float = 2.0**127) -> Trial:
    """For the sizes ``v``, [ROWS, PART], of the values of each row; signs alternate, other elements are zeros.

    scale  what divides, where it is given
    most   the bound of amax, where there is one
    """
    suite.need_weights()
    if ("tensor_scale", "multiply") in suite.spec.chosen:
        scale = 1 / scale
    drawn = {n: a for n, a in suite.inputs(ROWS, D).items() if n in {p.name for p in suite.forward.tensors}}
    new = {n: np.zeros(a.shape) for n, a in drawn.items()}
    new |= {n: v.reshape(D) / TIMES for n in suite.weights if n.startswith("gamma")}
    new |= {n: np.array(scale) for n in _single(suite, "_scale")}
    new |= {n: np.array(most) for n in _single(suite, "_max")}
    x = np.repeat(np.eye(ROWS), PART, axis=1) * np.resize((1.0, -1.0), D) + 0.0  # no -0
    inputs = changed(drawn, **new | {suite.matrices[0]: SIZE * x})
    with np.errstate(all="ignore"):
        return inputs, TIMES * x * inputs[suite.weights[0]].astype(np.float64)


def _placed(values: Array, largest: Array | float) -> Array:
    """The values again and again, [ROWS, PART]; each row begins with its largest one."""
    return np.column_stack((np.broadcast_to(largest, ROWS), np.resize(values, (ROWS, PART - 1))))


def _numbers(to: DType) -> Array:
    """The numbers of 8 bits from 0 on."""
    if not to.digits:
        return np.arange(to.largest + 1)
    found = np.arange(128, dtype=np.uint8).view(NUMPY_DTYPE[to]).astype(np.float64)
    return found[np.isfinite(found)]


def _known(suite: GraphSuite) -> Array:
    """The numbers of 8 bits above 0, with a scale of 1."""
    to = _format(suite)
    return _placed(_numbers(to)[1:], to.largest)


def _drawn(seed: int) -> tuple[Array, Array]:
    """The largest number of each row, with 8 bits, and smaller ones beside it."""
    rng = np.random.default_rng(seed)
    unit = 2.0 ** rng.integers(-8, 9, (ROWS, 1))
    return (unit * rng.integers(128, 256, (ROWS, 1)))[:, 0], unit / 2 * rng.integers(1, 256, (ROWS, PART - 1))


def _telling(amax: float, to: DType) -> Array:
    """Numbers of 8 bits below ``amax``: first those of which v / s, v * (1 / s) and v * (Q / amax) are not one."""
    halves = 2.0 ** -np.arange(1, 19 if to.digits else 8)
    v = (2.0 ** np.floor(np.log2(amax)) / 128 * np.outer(halves, np.arange(128, 256))).ravel().astype(np.float32)
    q, largest, one = np.float32(to.largest), np.float32(amax), np.float32(1)
    s = largest / q
    ways = [round_to(way, to).view(np.uint8) for way in (v / s, v * (one / s), v * (q / largest))]
    differ = (ways[0] != ways[1]) | (ways[0] != ways[2])
    return np.concatenate((v[differ], v[~differ])).astype(np.float64)


# ---- the verdict ----


def _judged(suite: GraphSuite, trials: Iterable[Trial]) -> Found:
    """Every bit as by the rule, of which row 1 shows some numbers; all NaNs count as equal."""
    wrong, total, shown = dict[str, float](), 0, [""]
    for inputs, values in trials:
        want, got = _by_rule(suite, inputs, values), suite.results(inputs)
        off = {name: ~same_bits(a, want[name]) for name, a in got.items()}
        total += sum(a.size for a in got.values())
        if not wrong:
            shown = [_first(n, got[n][o], want[n][o]) if o.any() else "" for n, o in off.items()]
            shown = [text for text in shown if text] or [_of_row(n, want[n]) for n in got if want[n].ndim]
        wrong = {name: wrong.get(name, 0) + float(o.sum()) for name, o in off.items() if name in wrong or o.any()}
    if wrong:
        counts = ", ".join(f"{count:.0f} of {name}" for name, count in wrong.items())
        raise FailedError(f"{counts} differ in {total} numbers; first {'; '.join(shown)}", wrong)
    return Found(f"{total} numbers as by the rule, such as {'; '.join(shown)}")


def _by_rule(suite: GraphSuite, inputs: Inputs, values: Array) -> dict[str, Array]:
    """The results of the spec; SkippedError for a graph that makes other values of the inputs."""
    spec = replace(suite.spec, d=D).with_direction("fwd")
    known = inputs | values_of(suite.forward, spec.eps_or_default)
    graph = spec.trace()["cse"]
    made = {e.out: e for e in graph.eqns}
    rounded = [made[r].args[0] for r in graph.results if r.type.dtype in QUANTISED]
    scaled = dict.fromkeys(made[v].args[0] if v in made else v for v in rounded)
    for found in interpret(replace(graph, results=tuple(scaled)), known).values():
        if not np.array_equal(found, values, equal_nan=True):
            raise SkippedError("y is not gamma times a power of two, where the elements of x have one size")
    return interpret(spec.graph(), known)


def _first(name: str, got: Array, want: Array) -> str:
    """The first of the numbers that differ."""
    texts = [f"{float(a[0]):.6g} (0x{int(a[:1].view(f'u{a.itemsize}')[0]):0{2 * a.itemsize}x})" for a in (got, want)]
    return f"{name} {texts[0]}, by the rule {texts[1]}"


def _of_row(name: str, a: Array) -> str:
    """The first numbers of its own part in row 1, or the one of the block or row that the part is in."""
    row = a.reshape(ROWS, -1)[1]
    start = PART * row.size // D
    return f"{name} {' '.join(f'{float(n):.6g}' for n in row[start : start + (SHOWN if row.size == D else 1)])}"


# ---- the cases ----


def every_number(suite: GraphSuite) -> Found:
    """Every number of 8 bits, by a scale of 1: it stays itself, also a subnormal one."""
    return _judged(suite, [_trial(suite, _known(suite))])


def ties(suite: GraphSuite) -> Found:
    """Halfway between two numbers of 8 bits."""
    to = _format(suite)
    known = _numbers(to)
    return _judged(suite, [_trial(suite, _placed((known[1:] + known[:-1]) / 2, to.largest))])


def saturation(suite: GraphSuite) -> Found:
    """Numbers beyond the largest one, by a scale that is given or whose amax is bounded."""
    if not (_single(suite, "_scale") or _single(suite, "_max")):
        raise SkippedError("the scale follows from the largest number, so that nothing saturates")
    below, largest = _numbers(_format(suite))[-2:]
    beyond = np.concatenate((largest + (largest - below) * np.arange(1, 8) / 4, largest * np.arange(1.5, 8)))
    return _judged(suite, [_trial(suite, _placed(beyond, 8 * largest), most=largest / 4)])


def division(suite: GraphSuite) -> Found:
    """Numbers of which v / s, v * (1 / s) and v * (Q / amax) are not one in 8 bits."""
    to, (largest, _) = _format(suite), _drawn(1)
    if not _single(suite, "_scale"):
        return _judged(suite, [_trial(suite, np.array([[a, *_telling(a, to)[: PART - 1]] for a in largest]))])
    scales = ((a, float(np.float32(a) / np.float32(to.largest))) for a in largest[:CALLS])
    return _judged(suite, (_trial(suite, _placed(_telling(a, to)[: D - ROWS], a), scale=s) for a, s in scales))


def scale(suite: GraphSuite) -> Found:
    """Rows with largest numbers of their own."""
    if _single(suite, "_scale"):
        raise SkippedError("the scale is given")
    return _judged(suite, [_trial(suite, np.column_stack(_drawn(2)))])


def zeros(suite: GraphSuite) -> Found:
    """A row of zeros and one of negative zeros, beside ordinary ones, in which whole blocks may be zeros, too."""
    inputs, values = _trial(suite, _known(suite))
    inputs[suite.matrices[0]][:2] = np.array([[0.0], [-0.0]])
    values[:2] = 0
    return _judged(suite, [(inputs, values)])


def nan(suite: GraphSuite) -> Found:
    """A NaN in x, which its row consists of then; and one in gamma, so in one block of each row."""
    v = _known(suite)
    inputs, values = _trial(suite, v)
    inputs[suite.matrices[0]][1, PART + 1] = values[1] = np.nan
    v[1, 2] = np.nan
    return _judged(suite, [(inputs, values), _trial(suite, v)])


def infinity(suite: GraphSuite) -> Found:
    """An infinity in gamma: in row 1 an infinite number, in others a NaN, as 0 times infinity is one."""
    v = _known(suite)
    v[1, 2] = np.inf
    return _judged(suite, [_trial(suite, v)])


def tiny(suite: GraphSuite) -> Found:
    """From the least number of gamma on, in f32 and bf16 below the least normal number, so is amax / Q."""
    suite.need_weights()
    unit = TIMES * suite.type_of(suite.weights[0]).dtype.least * 2.0 ** (np.arange(ROWS) // 2)
    v = unit[:, None] * _placed(np.random.default_rng(6).integers(1, 256, ROWS * PART), 255)
    return _judged(suite, [_trial(suite, v, scale=2.0**-126)])


def huge(suite: GraphSuite) -> Found:
    """The largest number near that of f32, others up to 2^30 times smaller."""
    suite.need_weights()
    most = min(suite.type_of(suite.weights[0]).dtype.largest, DType.F32.largest / TIMES)
    top = TIMES * 2.0 ** (np.floor(np.log2(most)) - 8)
    v = top * np.random.default_rng(7).integers(128, 256, (ROWS, PART)) * 2.0 ** (-2 * np.arange(PART))
    return _judged(suite, [_trial(suite, v, scale=2 * top)])


def last(suite: GraphSuite) -> Found:
    """The largest number is the last of its row; within the bounds of any numbers."""
    for d in LAST:
        inputs = suite.inputs(5, d)
        x = inputs[suite.matrices[0]].astype(np.float64)
        x[:, -1] = 8 * np.abs(x).max()
        weights = {n: inputs[n].astype(np.float64) for n in suite.weights}
        for weight in weights.values():
            weight[-1] = 2
        found = suite.accuracy(changed(inputs, **weights | {suite.matrices[0]: x}))
    return found
