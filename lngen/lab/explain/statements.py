"""The statements of a derivation, evaluated as they are printed: in float64, at random numbers.

A text is in the notation of mathematics; read as Python, with ``^`` as ``**``, it gives its value.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lngen.compiler.ir import WIDE, Axis, Graph, Lengths, Value, derived_axes, real
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.functions import ULPS
from lngen.compiler.ir.numerics import Array
from lngen.compiler.passes.instance import cotangents, instance, lengths
from lngen.compiler.spec import Spec
from lngen.errors import ValidationError

FOLDED = ("sum", "mean", "max")
ALLOWED = 1e-9  # of the larger side: far above rounding, and far below the error of a false statement
LEAST = 1e-3  # the size of a side that is zero


def along(axis: Axis, to: Axis | None) -> str:
    """An axis, or the elements of one that each of another has, in the name of a reduction or a length."""
    return str(axis) if to is None else f"{axis}_{to}"


def _fold(axis: Axis, to: Axis | None, sizes: Lengths, reduce: Callable[..., Any]) -> Callable[[Array], Array]:
    """A reduction of numbers over [M, D] that repeat along what they are constant along."""
    root = axis.root
    place, whole = WIDE.index(root), sizes[root]
    firsts = np.arange(whole) if axis is root else np.unique(sizes.positions(root, axis), return_index=True)[1]
    group = np.zeros(whole, int) if to is None else sizes.positions(root, to)

    def apply(a: Array) -> Array:
        a = np.atleast_2d(a)
        a = np.repeat(a, whole // a.shape[place], place)
        each = [np.take(a, firsts[group[firsts] == n], place) for n in range(group.max() + 1)]
        found = np.concatenate([reduce(e, axis=place, keepdims=True) for e in each], place)
        return found if to is None else np.take(found, group, place)

    return apply


def _meanings(graph: Graph) -> Iterator[tuple[str, Any]]:
    """The lengths of the axes of a graph, and the reductions over them."""
    sizes, axes = lengths(graph), (*WIDE, *derived_axes(graph))
    for axis in axes:
        at = sizes.places(axis) if axis.base is None else sizes.positions(axis.root, axis)
        yield f"iota_{axis}", partial(np.expand_dims, at, 1 - WIDE.index(axis.root))
        for to in (None, *(a for a in axes if a is not axis and a.root is axis.root and axis.is_finer(a))):
            yield along(axis, to), sizes[axis] if to is None else sizes.per(axis, to)
            yield from ((f"{name}_{along(axis, to)}", _fold(axis, to, sizes, getattr(np, name))) for name in FOLDED)


MEANINGS: Mapping[str, Any] = {
    **{name: getattr(real, name, None) or getattr(np, name) for name in ULPS},
    **{name: getattr(np, name) for name in ("sqrt", "abs", "maximum", "minimum", "where")},
    "relu": lambda x: np.maximum(x, 0),
    "rint": np.rint,
    "clamp": lambda x, low, high: np.clip(x, low, high),
}


def value(text: str, known: Mapping[str, Any]) -> Array:
    """The value of a text, from those of the names in it."""
    with np.errstate(all="ignore"):
        return np.asarray(eval(text.replace("^", "**"), {"__builtins__": {}}, {**MEANINGS, **known}), np.float64)


def numbers(spec: Spec, names: Mapping[str, str]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs of a backward, and the value of each of ``names``, which stand for values of its graphs.

    A value over a derived axis repeats along its base. The lengths of axes and the reductions over them are here, too.
    """
    trace = spec.trace()
    inputs = instance(trace["build"], spec.eps_or_default, spec.definition.positive(spec.options))
    inputs |= cotangents(evaluate(trace["build"], inputs))
    raw = _everything(trace["vjp"], inputs)
    saved = _everything(trace["save"], {p.name: raw[p.name] for p in trace["save"].params})
    values, sizes = trace["save"].values() | trace["vjp"].values(), lengths(trace["build"])
    known = {name: full(values[name], array, sizes) for name, array in (saved | raw).items()}
    return inputs, dict(_meanings(trace["build"])) | {name: known[v] for name, v in names.items()}


def _everything(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a graph, over its own axes."""
    computed = evaluate(replace(graph, results=tuple(graph.values().values())), inputs)
    return {name: real.value for name, real in computed.items()}


def full(value: Value, array: Array, sizes: Lengths) -> Array:
    """An array over [M, D], with length 1 along the axes that its value lacks."""
    array = np.expand_dims(array, tuple(i for i, root in enumerate(WIDE) if value.type.along(root) is None))
    for i, root in enumerate(WIDE):
        axis = value.type.along(root)
        if axis is not None and axis is not root:
            array = np.take(array, sizes.positions(root, axis), axis=i)
    return array


def same(a: Array, b: Array) -> bool:
    """Whether both sides are one number, where both are finite."""
    a, b = np.broadcast_arrays(a, b)
    finite = np.isfinite(a) & np.isfinite(b)
    size = max(np.abs(a[finite]).max(initial=LEAST), np.abs(b[finite]).max(initial=LEAST))
    return bool((np.abs(a - b)[finite] <= ALLOWED * size).all())


def false_equations(data: Mapping[str, Any], known: Mapping[str, Array]) -> Iterator[str]:
    """The equations and identities of ``data`` whose sides differ."""
    sides = [(e["name"], e["equation"]) for e in data["forward"]] + [*data["shared"].items()]
    sides += [(c["cotangent"], c[side]) for c in data["cotangents"] for side in ("before", "after")]
    sides += [(s["before"], s["after"]) for s in data["steps"] if "before" in s]
    for left, right in sides:
        if not same(value(left, known), value(right, known)):
            yield f"{left} = {right}"


def check_equations(data: Mapping[str, Any], spec: Spec) -> None:
    """ValidationError for an equation or an identity that is false: explain prints nothing that it has not tried."""
    for equation in false_equations(data, numbers(spec, data["names"])[1]):
        raise ValidationError(
            f"internal error of lngen: a step of the derivation of {spec} is false: {equation}; please report it."
        )
