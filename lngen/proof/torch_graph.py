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
    DType,
    Eqn,
    Graph,
    Lengths,
    Value,
    derived_axes,
    is_over_segments,
    unequal,
    values_of,
)
from lngen.errors import LngenError
from lngen.launch.arrays import torch_dtypes

Tensor = Any
"""A tensor over [M, D], of size 1 along every axis that its value lacks; a constant is a Python number."""
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Call:
    """What the meanings of a call share: PyTorch, the lengths of the axes, the dtype of each lngen dtype."""

    torch: ModuleType
    size: Mapping[Axis, int]
    dtypes: Mapping[DType, Any]
    like: Tensor

    def tensor(self, x: Tensor, eqn: Eqn) -> Tensor:
        """``x`` as a tensor of the equation's dtype, also if it is a constant."""
        if isinstance(x, self.torch.Tensor):
            return x
        return self.torch.full((1, 1), x, dtype=self.dtypes[eqn.out.type.dtype], device=self.like.device)

    @property
    def lengths(self) -> Lengths:
        """The lengths of a graph that derives axes."""
        assert isinstance(self.size, Lengths)
        return self.size

    def at(self, x: Tensor, place: int, axis: Axis, wanted: Axis) -> Tensor:
        """``x`` along ``axis``, repeated for the elements of the finer axis ``wanted``."""
        return x.index_select(place, self.torch.from_numpy(self.lengths.positions(wanted, axis)).to(x.device))

    def grouped(self, x: Tensor, eqn: Eqn) -> tuple[Tensor, int]:
        """``x`` with the elements that a reduction joins in a dimension of their own, and that dimension."""
        place = WIDE.index(eqn.axis.root)
        if eqn.to is None:
            return x, place
        shape = [*x.shape]
        shape[place] = self.size[eqn.axis]
        groups = self.torch.from_numpy(self.lengths.groups(eqn.axis, eqn.to)).to(x.device)
        full = x.expand(shape).index_select(place, groups.reshape(-1))
        return full.unflatten(place, tuple(groups.shape)), place + 1


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

    numbers = _numbers(graph, eps)

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(graph.tensors, inputs, strict=True))
        return _run(graph, graph.eqns, given, numbers, graph.results, wide)

    return function


def evaluate(graph: Graph, given: Mapping[Value, Tensor], wanted: Sequence[Value], eps: float) -> tuple[Tensor, ...]:
    """Values of a graph, from those that are ``given``: its inputs, or whatever else suffices."""
    needed = {*wanted} - {*given}
    for eqn in reversed(graph.eqns):
        if eqn.out in needed:
            needed.update(a for a in eqn.args if a not in given)
    eqns = [eqn for eqn in graph.eqns if eqn.out in needed]
    return _run(graph, eqns, given, _numbers(graph, eps), wanted, False)


def _numbers(graph: Graph, eps: float) -> dict[Value, Tensor]:
    numbers = values_of(graph, eps)
    return {v: float(numbers[v.name]) for v in graph.by_value}


def _run(
    graph: Graph,
    eqns: Sequence[Eqn],
    given: Mapping[Value, Tensor],
    numbers: Mapping[Value, Tensor],
    wanted: Sequence[Value],
    wide: bool,
) -> tuple[Tensor, ...]:
    import torch

    found: dict[Axis, int] = {}
    for value, tensor in given.items():
        found |= dict(zip(value.type.axes, tensor.shape, strict=True))
    size = Lengths(found) if derived_axes(graph) else found  # torch.compile knows plain dictionaries alone
    dtypes = {DType(t): torch.float64 if wide else own for t, own in torch_dtypes().items()}
    call = Call(torch, size, dtypes, next(iter(given.values())))
    values = {**numbers, **{v: t.reshape(_spread(v, size)) for v, t in given.items()}}
    for eqn in eqns:
        args = [values[a] for a in eqn.args]
        for n, place, axis, finer in unequal(eqn) if isinstance(size, Lengths) else ():
            args[n] = call.at(args[n], place, axis, finer)
        values[eqn.out] = MEANINGS[eqn.op](call, eqn, tuple(args))
    return tuple(_gather(call, graph, r, values[r]) for r in wanted)


def _spread(value: Value, size: Mapping[Axis, int]) -> tuple[int, ...]:
    """The shape over [M, D], of size 1 along the axes that the value lacks."""
    axes = (value.type.along(root) for root in WIDE)
    return tuple(1 if axis is None else size[axis] for axis in axes)


def _gather(call: Call, graph: Graph, value: Value, x: Tensor) -> Tensor:
    """A result in the shape of its type."""
    if not isinstance(x, call.torch.Tensor):
        x = call.tensor(x, graph.producers()[value])
    return x.reshape(tuple(call.size[axis] for axis in value.type.axes))


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
    return x.expand(_spread(e.out, c.size)) if has is None else c.at(x, WIDE.index(e.axis.root), has, e.axis)


def _places(c: Call, e: Eqn) -> Tensor:
    """0, 1, 2, ... along the equation's axis."""
    return c.torch.arange(c.size[e.axis], device=c.like.device).reshape(_spread(e.out, c.size))


def _rotated(c: Call, x: Tensor, inverse: bool) -> Tensor:
    """The halves of rows exchanged, one of them negated."""
    a, b = x.chunk(2, dim=1)
    return c.torch.cat([b, -a] if inverse else [-b, a], dim=1)


MEANINGS: dict[str, Meaning] = {
    **{op: _called(name) for op, name in {**dict(zip(SAME, SAME, strict=True)), **RENAMED}.items()},
    **{op: _reduced(method) for op, method in REDUCTIONS.items()},
    "reduce_dot": lambda c, e, a: _reduced("sum")(c, e, (a[0] * a[1],)),
    "const": lambda c, e, a: float(e.value),
    "size": lambda c, e, a: float(c.size[e.axis] if e.per is None else c.lengths.per(e.axis, e.per)),
    "iota": lambda c, e, a: _places(c, e),
    "cast": lambda c, e, a: c.tensor(a[0], e).to(c.dtypes[e.out.type.dtype]),
    "expand": lambda c, e, a: _expanded(c, e, c.tensor(a[0], e)),
    "rotate": lambda c, e, a: _rotated(c, c.tensor(a[0], e), bool(e.attr("inverse"))),
    "detach": lambda c, e, a: c.tensor(a[0], e).detach(),
    "stop_gradient": lambda c, e, a: c.tensor(a[0], e).detach(),
    "neg": lambda c, e, a: -a[0],
    "add": lambda c, e, a: a[0] + a[1],
    "sub": lambda c, e, a: a[0] - a[1],
    "mul": lambda c, e, a: a[0] * a[1],
    "weighted": lambda c, e, a: a[0] * c.torch.where(c.tensor(a[0], e) == 0, 0.0, c.tensor(a[1], e)),
    "div": lambda c, e, a: a[0] / a[1],
    "fma": lambda c, e, a: a[0] * a[1] + a[2],
    "clamp": lambda c, e, a: c.torch.clamp(c.tensor(a[0], e), e.attr("low"), e.attr("high")),
    "select_gt": lambda c, e, a: _where(c, a[0] > a[1], a[2], 0.0, e),
    "select_eq": lambda c, e, a: _where(c, a[0] == a[1], a[2], 0.0, e),
    "where_gt": lambda c, e, a: _where(c, a[0] > a[1], a[2], a[3], e),
    "gelu_tanh": lambda c, e, a: c.torch.nn.functional.gelu(c.tensor(a[0], e), approximate="tanh"),
    "softplus": lambda c, e, a: c.torch.nn.functional.softplus(c.tensor(a[0], e), threshold=SOFTPLUS_LINEAR),
}
