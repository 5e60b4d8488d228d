"""The statements of a derivation, evaluated as they are printed: in float64, at random numbers.

A text is in the notation of mathematics; read as Python, with ``^`` as ``**``, it gives its value.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lngen.compiler.ir import WIDE, D, Graph, M, real
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.functions import ULPS
from lngen.compiler.ir.numerics import Array
from lngen.compiler.passes.instance import FEATURES, ROWS, cotangents, instance
from lngen.compiler.spec import Spec
from lngen.errors import ValidationError

LENGTHS = {M: ROWS, D: FEATURES}
ALLOWED = 1e-9  # of the larger side: far above rounding, and far below the error of a false statement
LEAST = 1e-3  # the size of a side that is zero


def _along(axis: int, reduce: Callable[..., Any]) -> Callable[[Array], Array]:
    """A reduction of numbers over [M, D] that repeats along an axis of length 1."""

    def apply(a: Array) -> Array:
        a = np.atleast_2d(a)
        times = (ROWS, FEATURES)[axis] // a.shape[axis]
        return np.asarray(reduce(np.repeat(a, times, axis), axis=axis, keepdims=True))

    return apply


MEANINGS: Mapping[str, Any] = {
    **{name: getattr(real, name, None) or getattr(np, name) for name in ULPS},
    **{name: getattr(np, name) for name in ("sqrt", "abs", "maximum", "minimum", "where")},
    **{f"{r}_{axis}": _along(n, getattr(np, r)) for r in ("sum", "mean", "max") for n, axis in enumerate("MD")},
    **{str(axis): n for axis, n in LENGTHS.items()},
    "relu": lambda x: np.maximum(x, 0),
    "rint": np.rint,
    "clamp": lambda x, low, high: np.clip(x, low, high),
}


def value(text: str, known: Mapping[str, Any]) -> Array:
    """The value of a text, from those of the names in it."""
    with np.errstate(all="ignore"):
        return np.asarray(eval(text.replace("^", "**"), {"__builtins__": {}}, {**MEANINGS, **known}), np.float64)


def numbers(spec: Spec, names: Mapping[str, str]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs of a backward, and the value of each of ``names``, which stand for values of its graphs."""
    trace = spec.trace()
    inputs = instance(trace["build"], spec.eps_or_default, spec.definition.positive(spec.options))
    inputs |= cotangents(evaluate(trace["build"], inputs))
    raw = _everything(trace["vjp"], inputs)
    known = _everything(trace["save"], {p.name: raw[p.name].squeeze() for p in trace["save"].params}) | raw
    return inputs, {name: known[v] for name, v in names.items()}


def _everything(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a graph, with length 1 along the axes that it lacks."""
    computed = evaluate(replace(graph, results=tuple(graph.values().values())), inputs)
    places = {v.name: tuple(i for i, a in enumerate(WIDE) if a not in v.type.axes) for v in graph.values().values()}
    return {name: np.expand_dims(real.value, places[name]) for name, real in computed.items()}


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
