"""A forward graph as a function of PyTorch tensors, which autograd differentiates and torch.compile compiles.

Each op is one row of ``MEANINGS``, written as a user of PyTorch writes it; autograd, not lngen, derives the backward.
So a graph of one's own has PyTorch as a peer, and a test has an oracle for every graph: with ``wide``, the arithmetic
is in float64 and no cast rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

from lngen.compiler.ir import (
    DEFAULT_EPS,
    WIDE,
    Axis,
    Eqn,
    Graph,
    M,
    Value,
    derived_axes,
    is_over_segments,
    unequal,
    values_of,
)
from lngen.dtypes import QUANTISED, DType
from lngen.errors import LngenError
from lngen.launch.arrays import torch_dtypes
from lngen.rules import padded

Tensor = Any
"""A tensor over [M, D], of size 1 along every axis that its value lacks; a constant is a Python number."""
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Call:
    """What the meanings of a call share: PyTorch, the lengths of axes by name, the dtype of each lngen dtype.

    torch.compile hashes no objects of a class of ours, so tables have names as keys.
    """

    torch: ModuleType
    sizes: Mapping[str, int]
    dtypes: Mapping[str, Any]
    like: Tensor

    def tensor(self, x: Tensor, eqn: Eqn) -> Tensor:
        """``x`` as a tensor of the equation's dtype, also if it is a constant."""
        if isinstance(x, self.torch.Tensor):
            return x
        return self.torch.full((1, 1), x, dtype=self.dtypes[eqn.out.type.dtype.value], device=self.like.device)

    def size(self, axis: Axis) -> int:
        """The length of an axis."""
        return self.sizes[axis.name]

    def at(self, x: Tensor, place: int, axis: Axis, wanted: Axis) -> Tensor:
        """``x`` along ``axis``, repeated for the finer axis ``wanted``: each element in a row, or all in turn."""
        if axis.each > 1:
            x, axis = x.repeat_interleave(axis.each, dim=place), Axis(axis.name, axis.base, axis.by, axis.number)
            times, beside = self.size(wanted) // int(axis.number), place
        else:
            times, beside = self.size(wanted) // self.size(axis), place + (axis.by == "/")
        shape = [*x.shape]
        shape.insert(beside, times)
        return x.unsqueeze(beside).expand(shape).flatten(place, place + 1)

    def grouped(self, x: Tensor, eqn: Eqn) -> tuple[Tensor, int]:
        """``x`` with the elements that a reduction joins in a dimension of their own, and that dimension."""
        place = WIDE.index(eqn.axis.root)
        if eqn.to is None:
            return x, place
        shape, groups = [*x.shape], self.size(eqn.to)
        shape[place] = self.size(eqn.axis)
        whole, neighbours = x.expand(shape), eqn.to.by == "/"
        sizes = (groups, -1) if neighbours else (-1, groups)
        return whole.unflatten(place, sizes), place + neighbours


Meaning = Callable[[Call, Eqn, tuple[Tensor, ...]], Tensor]


def torch_function(graph: Graph, *, wide: bool = False, eps: float = DEFAULT_EPS) -> Function:
    """``graph`` as a function of its tensors, in their order and with the shapes of their types.

    The graph is a forward graph as described, or a backward before its sums are ordered. The function returns the
    results in order, in the shapes of their types and in the dtypes of the graph: a cast is ``Tensor.to``. With
    ``wide`` the parameters are float64, no cast rounds and no constant is rounded. Numbers that are passed by value
    follow from ``eps``. LngenError for an op that no such graph has.
    """
    for eqn in graph.eqns:
        if eqn.op not in MEANINGS or is_over_segments(eqn.out):
            raise LngenError(
                f"graph @{graph.name}: the op '{eqn.op}' of '{eqn.out}' has no meaning in PyTorch; a graph before "
                "its sums are ordered is expected, and for a new op a row in lngen/proof/torch_graph.py."
            )

    run = _runner(graph, graph.eqns, graph.tensors, graph.results, eps, wide)

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return run(inputs)

    return function


def evaluate(graph: Graph, given: Mapping[Value, Tensor], wanted: Sequence[Value], eps: float) -> tuple[Tensor, ...]:
    """Values of a graph, from those that are ``given``: its inputs, or whatever else suffices."""
    needed = {*wanted} - {*given}
    for eqn in reversed(graph.eqns):
        if eqn.out in needed:
            needed.update(a for a in eqn.args if a not in given)
    eqns = [eqn for eqn in graph.eqns if eqn.out in needed]
    return _runner(graph, eqns, [*given], wanted, eps, False)([*given.values()])


def _runner(
    graph: Graph, eqns: Sequence[Eqn], given: Sequence[Value], wanted: Sequence[Value], eps: float, wide: bool
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """A function of the values ``given`` that evaluates equations; what needs no tensor is computed here, once."""
    import torch

    numbers = {v.name: float(n) for v in graph.by_value for n in [values_of(graph, eps)[v.name]]}
    dtypes = {t: torch.float64 if wide else own for t, own in torch_dtypes().items()}
    steps = [(eqn, MEANINGS[eqn.op], unequal(eqn)) for eqn in eqns]
    derived = derived_axes(graph)
    producers = {v.name: eqn for v, eqn in graph.producers().items()}

    def sizes_of(tensors: Sequence[Tensor]) -> dict[str, int]:
        found = {
            axis.name: n
            for v, t in zip(given, tensors, strict=True)
            for axis, n in zip(v.type.axes, t.shape, strict=True)
        }
        for axis in derived:
            if axis.name not in found:
                found[axis.name] = axis.length(found[axis.root.name])
        return found

    def run(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        call = Call(torch, sizes_of(tensors), dtypes, tensors[0])
        values = {**numbers, **{v.name: t.reshape(_spread(v, call.sizes)) for v, t in zip(given, tensors, strict=True)}}
        for eqn, meaning, places in steps:
            args = [values[a.name] for a in eqn.args]
            for n, place, axis, finer in places:
                args[n] = call.at(args[n], place, axis, finer)
            values[eqn.out.name] = meaning(call, eqn, tuple(args))
        return tuple([_gather(call, producers.get(r.name), r, values[r.name]) for r in wanted])

    return run


def _spread(value: Value, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape over [M, D], of size 1 along the axes that the value lacks."""
    axes = [value.type.along(root) for root in WIDE]
    return tuple([1 if axis is None else sizes[axis.name] for axis in axes])


def _gather(call: Call, producer: Eqn | None, value: Value, x: Tensor) -> Tensor:
    """A result in the shape of its type."""
    if not isinstance(x, call.torch.Tensor):
        assert producer is not None
        x = call.tensor(x, producer)
    if value.type.by_columns:
        rows = call.size(M)
        return call.torch.nn.functional.pad(x.mT, (0, padded(rows) - rows))[:, :rows]
    return x.reshape(tuple([call.size(axis) for axis in value.type.axes]))


# ---- meanings ----

# Functions of PyTorch's of as many operands as the op: those of its name, and those of another.
SAME = ("abs", "erf", "exp", "exp2", "log", "maximum", "minimum", "relu", "rsqrt", "sigmoid", "sqrt", "tanh")
RENAMED = {
    "rint": "round",  # half to even
    "normal_cdf": "special.ndtr",
    "gelu": "nn.functional.gelu",
    "silu": "nn.functional.silu",
}
REDUCTIONS = {"reduce_mean": "mean", "reduce_sum": "sum", "reduce_max": "amax"}
SOFTPLUS_LINEAR = 40.0  # beyond it log(1 + exp(x)) is x in float64


def _called(name: str) -> Meaning:
    """The meaning of an op that is one function of PyTorch's."""
    return lambda c, e, a: attrgetter(name)(c.torch)(*(c.tensor(x, e) for x in a))


def _reduced(method: str) -> Meaning:
    """The meaning of a reduction, by the name of a tensor's method."""

    def reduced(c: Call, e: Eqn, a: tuple[Tensor, ...]) -> Tensor:
        x, dim = c.grouped(c.tensor(a[0], e), e)
        return getattr(x, method)(dim=dim, keepdim=e.to is None)

    return reduced


def _where(c: Call, chosen: Tensor, x: Tensor, y: Tensor, e: Eqn) -> Tensor:
    """``x`` where ``chosen``, else ``y``; ``chosen`` is a Python truth value if it compares two constants."""
    if not isinstance(chosen, c.torch.Tensor):
        chosen = c.torch.full((1, 1), chosen, device=c.like.device)
    return c.torch.where(chosen, c.tensor(x, e), c.tensor(y, e))


def _expanded(c: Call, e: Eqn, x: Tensor) -> Tensor:
    """``x``, repeated along the equation's axis."""
    has = e.args[0].type.along(e.axis.root)
    return x.expand(_spread(e.out, c.sizes)) if has is None else c.at(x, WIDE.index(e.axis.root), has, e.axis)


def _places(c: Call, e: Eqn) -> Tensor:
    """0, 1, 2, ... along the equation's axis."""
    return c.torch.arange(c.size(e.axis), device=c.like.device).reshape(_spread(e.out, c.sizes))


def _ceil_power(c: Call, x: Tensor) -> Tensor:
    """The least power of two that is not below ``x``."""
    significand, exponent = c.torch.frexp(x)  # in [1/2, 1)
    power = c.torch.ldexp(c.torch.ones_like(x), exponent - (significand == 0.5).to(exponent.dtype))
    return c.torch.where(c.torch.isfinite(x), power, x)


def _cast(c: Call, x: Tensor, to: DType) -> Tensor:
    """``x`` in a dtype; of those that saturate, PyTorch's own casts do not all."""
    own = c.dtypes[to.value]
    if to is DType.I32:
        x = x.round().nan_to_num(0.0).clamp(-to.largest - 1, to.largest)
    if to in QUANTISED and own is not c.torch.float64:
        x = x.clamp(-to.largest - (not to.digits), to.largest)
        x = x if to.digits else x.round().nan_to_num(0.0)
    return x.to(own)


def _rotated(c: Call, e: Eqn, x: Tensor) -> Tensor:
    """Features a quarter turn on, and 0 behind the width of a head."""
    head, width = e.int_attr("head"), e.int_attr("width")
    heads = x.unflatten(1, (-1, head))
    turning, still = heads[..., :width], c.torch.zeros_like(heads[..., width:])
    if e.attr("by") == "pairs":
        turned = c.torch.stack([-turning[..., 1::2], turning[..., ::2]], dim=-1).flatten(-2)
    else:
        a, b = turning.chunk(2, dim=-1)
        turned = c.torch.cat([-b, a], dim=-1)
    return c.torch.cat([turned, still], dim=-1).flatten(1)


def _taken(call: Call, x: Tensor, index: Tensor) -> Tensor:
    inside = (index >= 0) & (index < x.shape[-1])
    rows = x.expand(index.shape[0], x.shape[-1])
    return call.torch.where(inside, rows.gather(1, call.torch.where(inside, index, 0).long()), 0)


MEANINGS: dict[str, Meaning] = {
    **{op: _called(name) for op, name in {**dict(zip(SAME, SAME, strict=True)), **RENAMED}.items()},
    **{op: _reduced(method) for op, method in REDUCTIONS.items()},
    "reduce_dot": lambda c, e, a: _reduced("sum")(c, e, (a[0] * a[1],)),
    "const": lambda c, e, a: float(e.value),
    "size": lambda c, e, a: float(c.size(e.axis) // (1 if e.per is None else max(c.size(e.per), 1))),
    "iota": lambda c, e, a: _places(c, e),
    "cast": lambda c, e, a: _cast(c, c.tensor(a[0], e), e.out.type.dtype),
    "expand": lambda c, e, a: _expanded(c, e, c.tensor(a[0], e)),
    "rotate": lambda c, e, a: _rotated(c, e, c.tensor(a[0], e)),
    "gather": lambda c, e, a: a[0][a[1][:, 0].long()],
    "detach": lambda c, e, a: c.tensor(a[0], e).detach(),
    "stop_gradient": lambda c, e, a: c.tensor(a[0], e).detach(),
    "sealed": lambda c, e, a: c.torch.where(c.tensor(a[1], e) > 0.5, c.tensor(a[0], e).detach(), c.tensor(a[0], e)),
    "decay": lambda c, e, a: c.tensor(a[0], e).clamp(max=88.0).exp(),
    "neg": lambda c, e, a: -a[0],
    "add": lambda c, e, a: a[0] + a[1],
    "sub": lambda c, e, a: a[0] - a[1],
    "mul": lambda c, e, a: a[0] * a[1],
    "weighted": lambda c, e, a: a[0] * c.torch.where(c.tensor(a[0], e) == 0, 0.0, c.tensor(a[1], e)),
    "div": lambda c, e, a: a[0] / a[1],
    "fma": lambda c, e, a: a[0] * a[1] + a[2],
    "div_scale": lambda c, e, a: a[0] / a[1],
    "by_columns": lambda c, e, a: a[0],
    "ceil_power": lambda c, e, a: _ceil_power(c, c.tensor(a[0], e)),
    "clamp": lambda c, e, a: c.torch.clamp(c.tensor(a[0], e), e.attr("low"), e.attr("high")),
    "select_gt": lambda c, e, a: _where(c, a[0] > a[1], a[2], 0.0, e),
    "select_eq": lambda c, e, a: _where(c, a[0] == a[1], a[2], 0.0, e),
    "take": lambda c, e, a: _taken(c, c.tensor(a[0], e), c.tensor(a[1], e)),
    "where_gt": lambda c, e, a: _where(c, a[0] > a[1], a[2], a[3], e),
    "gelu_tanh": lambda c, e, a: c.torch.nn.functional.gelu(c.tensor(a[0], e), approximate="tanh"),
    "softplus": lambda c, e, a: c.torch.nn.functional.softplus(c.tensor(a[0], e), threshold=SOFTPLUS_LINEAR),
}
