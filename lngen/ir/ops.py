"""The op table: one row per op, its type rule, NumPy meaning, CUDA meaning and derivative side by side.

Adding an op is adding a row. A row's columns:

- ``typ(args, attrs)``   the type of the result, or a ValueError saying what was expected;
- ``numpy(args, eqn, size)``  the value, on arrays [M, D] or [M, S] that have size 1 along every axis they lack;
- ``cuda(args, eqn)``    a C expression over the arguments' C names; None for ops that a pass lowers first;
- ``expand(b, eqn)``     in place of both, the equations that the op stands for: the interpreter evaluates them, and
  ``passes.decompose`` writes them, so that the function is defined once;
- ``vjp(b, eqn, ct)``    the cotangent of each argument, None if there is none; None for ops that passes write after the
  derivation. A cotangent that lacks an axis is constant along it; ``passes.vjp`` sums one over an axis that its
  argument lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lngen.ir import derivatives, expansions, numerics, type_rules
from lngen.ir.function_rows import BIT_ROWS, FUNCTION_ROWS
from lngen.ir.methods import Methods
from lngen.ir.numerics import NUMPY_DTYPE, Array
from lngen.ir.op import Op, compute_dtype, ctype, literal
from lngen.ir.types import F32, WIDE, Axis, D, Eqn, M, S, Value

# ---- meanings that are more than one call ----


def _zero(eqn: Eqn) -> str:
    return literal(0.0, eqn.out.type.dtype)


def _f(eqn: Eqn) -> str:
    """The end of the name of a C function of floats."""
    return "f" if eqn.out.type.dtype is F32 else ""


def _cuda_cast(args: tuple[str, ...], eqn: Eqn) -> str:
    to, given = eqn.out.type.dtype, eqn.args[0].type.dtype
    return args[0] if to is given else f"{to}_from_{given}({args[0]})"


def _numpy_reduce_sum(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    attrs: dict[str, Any] = dict(eqn.attrs)
    terms = np.broadcast_arrays(*args)  # for reduce_dot, the factors
    interleave = attrs.get("interleave", 1)
    if attrs["axis"] is D:
        return np.asarray(numerics.row_sum(*terms, **_row_order(eqn, size), interleave=interleave)[..., None])
    if attrs["axis"] is S:
        return np.asarray(numerics.interleaved_sum(terms[0], interleave)[..., None])
    order = {k: attrs.get(k, 1) for k in ("groups", "blocks", "interleave")}
    return numerics.column_sum(*terms, **order)[None, :]


def _numpy_reduce_max(x: Array, axis: Axis) -> Array:
    return numerics.column_max(x)[None, :] if axis is M else numerics.row_max(x)[..., None]


def _row_order(eqn: Eqn, size: Mapping[Axis, int]) -> dict[str, Any]:
    attrs = dict(eqn.attrs)
    return {"chunk": attrs.get("chunk", 1), "segment": attrs.get("segment", size[D]), "run": attrs.get("run")}


def _numpy_segment_sum(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    return numerics.segment_sums(*np.broadcast_arrays(*args), **_row_order(eqn, size))


def _numpy_segment_size(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    segment = _row_order(eqn, size)["segment"]
    return numerics.segment_sizes(size[D], segment, eqn.out.type.dtype)[None, :]


def _numpy_const(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    return np.full((1, 1), eqn.value, NUMPY_DTYPE[eqn.out.type.dtype])


def _numpy_size(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    return np.full((1, 1), size[eqn.axis], NUMPY_DTYPE[eqn.out.type.dtype])


def _numpy_expand(args: tuple[Array, ...], eqn: Eqn, size: Mapping[Axis, int]) -> Array:
    shape = list(args[0].shape)
    shape[WIDE.index(eqn.axis)] = size[eqn.axis]
    return np.ascontiguousarray(np.broadcast_to(args[0], shape))


# ---- a derivative; those of several equations are in lngen.ir.derivatives ----


def _vjp_cast(b: Methods, e: Eqn, ct: Value) -> tuple[Value, ...]:
    # Cotangents keep the compute dtype; the one rounding to the input's dtype is the last step.
    to = compute_dtype(e.args[0].type.dtype)
    return (ct if ct.type.dtype is to else b.cast("ct", ct, to=to),)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "const", 0, type_rules.const,
            numpy=_numpy_const,
            cuda=lambda a, e: literal(float(e.value), e.out.type.dtype),
            vjp=lambda b, e, ct: (),
            attrs=("dtype", "value"),
        ),
        Op(
            "size", 0, type_rules.size,
            numpy=_numpy_size,
            cuda=lambda a, e: f"static_cast<{ctype(e.out.type.dtype)}>(rows_)",  # D is a constant after decompose
            vjp=lambda b, e, ct: (),
            attrs=("axis", "dtype"),
        ),
        Op(
            "cast", 1, type_rules.cast,
            numpy=lambda a, e, n: numerics.round_to(a[0], e.out.type.dtype),
            cuda=_cuda_cast,
            vjp=_vjp_cast,
            attrs=("to",),
        ),
        Op(
            "expand", 1, type_rules.expand,
            numpy=_numpy_expand,
            cuda=lambda a, e: a[0],
            vjp=lambda b, e, ct: (ct,),
            attrs=("axis",),
        ),
        Op(
            "neg", 1, type_rules.arithmetic,
            numpy=lambda a, e, n: -a[0],
            cuda=lambda a, e: f"-{a[0]}",
            vjp=lambda b, e, ct: (b.neg("ct", ct),),
        ),
        Op(
            "add", 2, type_rules.arithmetic,
            numpy=lambda a, e, n: a[0] + a[1],
            cuda=lambda a, e: f"{a[0]} + {a[1]}",
            vjp=lambda b, e, ct: (ct, ct),
        ),
        Op(
            "sub", 2, type_rules.arithmetic,
            numpy=lambda a, e, n: a[0] - a[1],
            cuda=lambda a, e: f"{a[0]} - {a[1]}",
            vjp=lambda b, e, ct: (ct, b.neg("ct", ct)),
        ),
        Op(
            "mul", 2, type_rules.arithmetic,
            numpy=lambda a, e, n: a[0] * a[1],
            cuda=lambda a, e: f"{a[0]} * {a[1]}",
            vjp=lambda b, e, ct: (b.mul("ct", ct, e.args[1]), b.mul("ct", ct, e.args[0])),
        ),
        Op(
            "div", 2, type_rules.arithmetic,
            numpy=lambda a, e, n: a[0] / a[1],
            cuda=lambda a, e: f"{a[0]} / {a[1]}",
            vjp=derivatives.div,
        ),
        Op(
            "fma", 3, type_rules.fma,
            numpy=lambda a, e, n: numerics.fma(*a),
            cuda=lambda a, e: f"fmaf({a[0]}, {a[1]}, {a[2]})",
            vjp=lambda b, e, ct: (b.mul("ct", ct, e.args[1]), b.mul("ct", ct, e.args[0]), ct),
        ),
        Op(  # equal operands, also +0 and -0, get half of the cotangent each, a NaN none
            "maximum", 2, type_rules.arithmetic,
            numpy=lambda a, e, n: numerics.maximum(a[0], a[1]),
            cuda=lambda a, e: f"maximum({a[0]}, {a[1]})",
            vjp=derivatives.extreme,
        ),
        Op(  # the same of the smaller
            "minimum", 2, type_rules.arithmetic,
            numpy=lambda a, e, n: numerics.minimum(a[0], a[1]),
            cuda=lambda a, e: f"minimum({a[0]}, {a[1]})",
            vjp=derivatives.extreme,
        ),
        Op(
            "abs", 1, type_rules.arithmetic,
            numpy=lambda a, e, n: np.abs(a[0]),
            cuda=lambda a, e: f"fabs{_f(e)}({a[0]})",
            vjp=derivatives.absolute,
        ),
        Op(  # to nearest even
            "rint", 1, type_rules.arithmetic,
            numpy=lambda a, e, n: np.rint(a[0]),
            cuda=lambda a, e: f"rint{_f(e)}({a[0]})",
            vjp=lambda b, e, ct: (None,),
        ),
        Op(
            "detach", 1, type_rules.arithmetic,
            numpy=lambda a, e, n: a[0],
            cuda=lambda a, e: a[0],
            vjp=lambda b, e, ct: (None,),
        ),
        Op(  # x where x > 0, a NaN where it is one, else +0; the cotangent passes where x > 0, not at 0 or a NaN
            "relu", 1, type_rules.arithmetic,
            numpy=lambda a, e, n: np.where(a[0] <= 0, a[0].dtype.type(0), a[0]),
            cuda=lambda a, e: f"{a[0]} <= {_zero(e)} ? {_zero(e)} : {a[0]}",
            vjp=lambda b, e, ct: (b.select_gt("ct", e.args[0], b.const("zero", 0.0, ct.type.dtype), ct),),
        ),
        Op(  # c where a > b, else +0
            "select_gt", 3, type_rules.arithmetic,
            numpy=lambda a, e, n: np.where(a[0] > a[1], a[2], a[2].dtype.type(0)),
            cuda=lambda a, e: f"{a[0]} > {a[1]} ? {a[2]} : {_zero(e)}",
            vjp=lambda b, e, ct: (None, None, b.select_gt("ct", e.args[0], e.args[1], ct)),
        ),
        Op(  # c where a == b, else +0
            "select_eq", 3, type_rules.arithmetic,
            numpy=lambda a, e, n: np.where(a[0] == a[1], a[2], a[2].dtype.type(0)),
            cuda=lambda a, e: f"{a[0]} == {a[1]} ? {a[2]} : {_zero(e)}",
            vjp=lambda b, e, ct: (None, None, b.select_eq("ct", e.args[0], e.args[1], ct)),
        ),
        Op(  # c where a > b, else d
            "where_gt", 4, type_rules.arithmetic,
            numpy=lambda a, e, n: np.where(a[0] > a[1], a[2], a[3]),
            cuda=lambda a, e: f"{a[0]} > {a[1]} ? {a[2]} : {a[3]}",
            vjp=derivatives.where_gt,
        ),
        Op(
            "sqrt", 1, type_rules.arithmetic,
            numpy=lambda a, e, n: np.sqrt(a[0]),
            cuda=lambda a, e: f"sqrt{_f(e)}({a[0]})",
            vjp=derivatives.sqrt,
        ),
        Op.expanded("rsqrt", 1, type_rules.arithmetic, expansions.rsqrt, derivatives.rsqrt),
        Op.expanded("reduce_mean", 1, type_rules.mean, expansions.reduce_mean, derivatives.mean, attrs=("axis",)),
        Op(  # in the order of its attributes; lowering turns it into a phase
            "reduce_sum", 1, type_rules.reduction,
            numpy=_numpy_reduce_sum,
            cuda=None, lowered_by="lower",
            vjp=lambda b, e, ct: (ct,),
            attrs=("axis", *type_rules.ORDER),
        ),
        Op(  # the sum of a product, each term rounded once, with its addition to the chunk or the row group
            "reduce_dot", 2, type_rules.dot,
            numpy=_numpy_reduce_sum,
            cuda=None, lowered_by="lower",
            vjp=lambda b, e, ct: (b.mul("ct", ct, e.args[1]), b.mul("ct", ct, e.args[0])),
            attrs=("axis", *type_rules.ORDER),
        ),
        Op(  # the sum of each segment, added like a row of one segment
            "segment_sum", 1, type_rules.segment_sum,
            numpy=_numpy_segment_sum,
            cuda=None, lowered_by="lower",
            vjp=None,
            attrs=type_rules.SEGMENT_ORDER,
        ),
        Op(  # the same of a product, each term rounded once, with its addition to the chunk
            "segment_dot", 2, type_rules.segment_dot,
            numpy=_numpy_segment_sum,
            cuda=None, lowered_by="lower",
            vjp=None,
            attrs=type_rules.SEGMENT_ORDER,
        ),
        Op(  # the number of elements of each segment; the last may have fewer
            "segment_size", 0, type_rules.segment_size,
            numpy=_numpy_segment_size,
            cuda=None, lowered_by="lower",
            vjp=None,
            attrs=("dtype", "segment"),
        ),
        Op(  # the same in every order, so without order attributes; the n largest get 1/n of the cotangent each
            "reduce_max", 1, type_rules.maximum,
            numpy=lambda a, e, n: _numpy_reduce_max(a[0], e.axis),
            cuda=None, lowered_by="lower",
            vjp=derivatives.reduce_max,
            attrs=("axis",),
        ),
        *BIT_ROWS,
        *FUNCTION_ROWS,
    )
}  # fmt: skip
