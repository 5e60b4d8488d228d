"""Reverse-mode derivation: from a forward graph to the graph of its vector-Jacobian product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from lngen.compiler.ir import (
    DEFAULT_EPS,
    F32,
    OPS,
    WIDE,
    Builder,
    Draft,
    DType,
    Eqn,
    Graph,
    Type,
    Value,
    axes_union,
    compute_dtype,
    is_over_segments,
    print_eqn,
)
from lngen.compiler.ir.axes import along
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.names import describing, of_number, of_size, plain, widened
from lngen.compiler.ir.places import downstream
from lngen.compiler.passes.edit import substitute
from lngen.compiler.passes.instance import cotangents, instance
from lngen.compiler.passes.simplify import simplify
from lngen.dtypes import QUANTISED
from lngen.errors import DerivativeError

NONE: Mapping[str, DType] = MappingProxyType({})


def vjp(
    graph: Graph,
    wrt: tuple[str, ...],
    of: tuple[str, ...] | None = None,
    stored: Mapping[str, DType] = NONE,
    constants: Collection[Value] = (),
) -> Graph:
    """The graph of d(results)/d(inputs), contracted with a cotangent for each result, its first parameters.

    For ``of`` (names of results, by default all) = (y, z) and ``wrt`` = (x, gamma):

        graph @f(%x, %gamma) -> (y, z)    becomes    graph @f_bwd(%dy, %dz, %x, %gamma) -> (dx, dgamma)

    The forward equations come first, then one derivative row of the op table per equation, in reverse. A cotangent has
    the compute dtype: f32, or f64 for f64 values. It is rounded once, at the end, to the dtype of its input or to that
    in ``stored``. A cotangent that no path reaches is zeros. Reverse accumulation as in Griewank and Walther,
    Evaluating Derivatives, 2nd ed., section 3.2. ``constants`` are values whose cotangents add up to zero.

    DerivativeError if a name of ``wrt`` or ``of`` does not exist, if ``wrt`` has none, or if no result depends on an
    input. VerifyError if a value has the name of a cotangent or of a gradient.
    """
    results = graph.results if of is None else tuple(_find(graph, "of", "result", graph.results, n) for n in of)
    inputs = tuple(_find(graph, "wrt", "input", graph.tensors, n) for n in wrt)
    if not inputs:
        raise DerivativeError(f"graph @{graph.name}: no input has a gradient, so that there is no backward.")
    b, cotangents, _ = sum_cotangents(graph, inputs, results, constants)
    to = {p: stored.get(p.name, p.type.dtype) for p in inputs}
    return b.build(*(_gradient(b, graph, p, cotangents, to[p]) for p in inputs), stage="vjp")


class Contribution(NamedTuple):
    """What an equation adds to the cotangent of an operand.

    ``given`` is the cotangent of its result, and ``each`` what is added up over the axes that the operand lacks.
    """

    eqn: Eqn
    given: Value
    operand: Value
    each: Value
    added: Value


def sum_cotangents(
    graph: Graph, inputs: tuple[Value, ...], results: tuple[Value, ...], constants: Collection[Value] = ()
) -> tuple[Builder, dict[Value, Value], list[Contribution]]:
    """The equations of a derivative, the cotangents of the forward's values, and what they are sums of."""
    b = Builder(graph.name.removesuffix("_fwd") + "_bwd", params=graph.params, eqns=graph.eqns)
    cotangents, found = {result: _seed(b, result) for result in results}, list[Contribution]()
    b.params = b.params[len(graph.params) :] + b.params[: len(graph.params)]
    for p in inputs:
        b.reserve(f"d{p.name}", f"the gradient of '{p.name}'")
    wanted = downstream(graph.eqns, inputs)
    uses = Counter(a for e in graph.eqns if e.out in wanted for a in e.args)
    _check_derivatives(graph, wanted)
    for eqn in reversed(graph.eqns):
        if eqn.out not in cotangents or eqn.out not in wanted:
            continue
        for arg, ct in zip(eqn.args, _contributions(b, eqn, cotangents[eqn.out], uses), strict=True):
            if arg in wanted and arg not in constants and ct is not None:
                name = widened(f"d{plain(arg.name)}") if arg in inputs else f"d{arg.name}"
                added = _fit(b, name, ct, eqn, arg)
                found.append(Contribution(eqn, cotangents[eqn.out], arg, ct, added))
                cotangents[arg] = b.add(name, cotangents[arg], added) if arg in cotangents else added
    return b, cotangents, found


def _contributions(b: Builder, eqn: Eqn, given: Value, uses: Mapping[Value, int]) -> tuple[Value | None, ...]:
    """What ``eqn`` adds to the cotangents of its operands; ``given`` is the cotangent of its result.

    The values that the op table has no word for get their names here: of an operand v that has one of the ``uses``,
    dv; of one that has several, dv and the result.
    """
    derivative, draft = OPS[eqn.op].vjp, Draft(b.name)
    assert derivative is not None  # ``_check_derivatives``
    found = derivative(draft, eqn, given)
    operand = {ct: a for a, ct in zip(eqn.args, found, strict=True)}
    linear, result, new = downstream(draft.eqns, [given]), plain(eqn.out.name), dict[Value, Value]()
    for e in draft.eqns:
        args, name = tuple(new.get(a, a) for a in e.args), e.out.name
        if e.op == "size":
            name = of_size(e.axis, e.per)
        elif name == "number":
            name = of_number(e.value)
        elif name == "ct" and e.out in operand:
            v = operand[e.out]
            name = f"d{v.name}"
            if uses[v] > 1 or not b.is_free(name):
                name = f"d{plain(v.name)}_{result}"
        elif name == "ct":
            name = f"d{result}_part" if e.out in linear else describing(e.op, args, f"d{result}")
        new[e.out] = b.emit(e.op, name, args, **dict(e.attrs))
    return tuple(ct and new.get(ct, ct) for ct in found)


def _check_derivatives(graph: Graph, wanted: set[Value]) -> None:
    for eqn in graph.eqns:
        of_segments = " over segments" if is_over_segments(eqn.out) else ""  # which only the order of sums makes
        if eqn.out in wanted and (of_segments or OPS[eqn.op].vjp is None):
            raise DerivativeError(
                f"graph @{graph.name}: '{eqn.op}'{of_segments} has no derivative; only passes behind the derivation "
                f"write it.\n    {print_eqn(eqn)}"
            )


def _find(graph: Graph, key: str, kind: str, values: tuple[Value, ...], name: str) -> Value:
    for v in values:
        if v.name == name and (v.type.dtype.digits or (kind == "result" and v.type.dtype in QUANTISED)):
            return v
        if v.name == name:
            raise DerivativeError(
                f"{key}={name}: '{v}: {v.type}' of graph @{graph.name} has whole numbers, which have no derivative; "
                "leave it out."
            )
    names = ", ".join(v.name for v in values)
    raise DerivativeError(f"{key}={name}: graph @{graph.name} has no {kind} '{name}'; its {kind}s are {names}.")


def _seed(b: Builder, result: Value) -> Value:
    """A parameter for the cotangent of a result, in the compute dtype; that of a quantised result is stored in f32."""
    name = b.exactly(f"d{result.name}", f"the cotangent of '{result.name}'")
    to = compute_dtype(result.type.dtype)
    seed = b.param(name, F32 if result.type.dtype in QUANTISED else result.type.dtype, *result.type.axes)
    return seed if to is seed.type.dtype else b.cast(widened(name), seed, to=to)


def _gradient(b: Builder, graph: Graph, param: Value, cotangents: dict[Value, Value], to: DType) -> Value:
    if downstream(graph.eqns, [param]).isdisjoint(graph.results):
        raise DerivativeError(f"wrt={param.name}: no result of graph @{graph.name} depends on '{param.name}'.")
    ct = cotangents[param] if param in cotangents else b.const("zero", 0.0, compute_dtype(param.type.dtype))
    for axis in param.type.axes:
        if axis not in ct.type.axes:
            ct = b.expand(f"{plain(ct.name)}_{axis.name.lower()}", ct, axis=axis)
    b.eqns.append(Eqn(Value(f"d{param.name}", Type(to, param.type.axes)), "cast", (ct,), (("to", to),)))
    return b.eqns[-1].out


def _fit(b: Builder, name: str, ct: Value, eqn: Eqn, arg: Value) -> Value:
    """What ``eqn`` adds to the cotangent of ``arg``: ``ct``, summed over what an element of ``arg`` is used for.

    A cotangent that lacks an axis is constant along it, so its sum is a product with a length.
    """
    for root in WIDE:
        worked = along(axes_union(ct.type.axes, eqn.out.type.axes, *(a.type.axes for a in eqn.args)), root)
        kept, has = arg.type.along(root), ct.type.along(root)
        if worked is None or worked is kept:
            continue
        if has is not None and has is not kept and kept is not None and not has.is_finer(kept):
            if kept.is_finer(has):  # constant along what an element of the operand is used for
                has = kept
            else:
                has, ct = worked, b.expand(f"{plain(ct.name)}_{worked.name.lower()}", ct, axis=worked)
        counted = kept if has is None else has
        if counted is not worked:
            per = {} if counted is None else {"per": counted}
            ct = b.mul(name, ct, b.size(of_size(worked, counted), worked, ct.type.dtype, **per))
        if has is not None and has is not kept:
            to = {} if kept is None else {"to": kept}
            ct = b.reduce_sum(name, ct, axis=has, **to)
    return ct


def constants(
    graph: Graph,
    wrt: tuple[str, ...],
    of: tuple[str, ...],
    eps: float = DEFAULT_EPS,
    positive: Collection[str] = (),
) -> frozenset[Value]:
    """The maxima whose effects on the results ``of`` cancel: the derivative by ``wrt`` takes them for constants.

    exp(x - max(x)) / sum(exp(x - max(x))) does not change with the maximum that it subtracts; sum(exp(x - max(x)))
    does. DerivativeError for a detached value whose effects do not cancel: the gradient would not be that of the
    forward. Each value is tried while all others are constants. That suffices: if several acted together, the last one
    computed would act alone. Where ``simplify`` cannot show
    that the effects of a detached value cancel, numbers do: ``eps`` and ``positive`` as in ``instance``.
    """
    wanted = downstream(graph.eqns, [p for p in graph.params if p.name in wrt])
    found = set()
    for eqn in graph.eqns:
        if eqn.out not in wanted or eqn.op not in ("detach", "reduce_max"):
            continue
        effect = _effect(graph, eqn.out, of)
        cancels = effect is None or _is_zero(effect)
        if eqn.op == "detach":
            shown = cancels or (effect is not None and _vanishes(graph, eqn.out, effect, eps, positive))
            if eqn.out.name in of or not shown:
                raise DerivativeError(_why(graph, eqn, of))
        elif cancels:
            found.add(eqn.out)
    return frozenset(found)


def _effect(graph: Graph, value: Value, of: tuple[str, ...]) -> Graph | None:
    """The gradient of the results by ``value``, where the equations use it; None if no result depends on it.

    The cotangents of the results are its first parameters, and the value is its last.
    """
    given = _renamed(graph, value)
    cut = substitute(replace(graph, results=()), {value: given})
    results = tuple(r for r in graph.results if r.name in of and r in downstream(cut.eqns, [given]))
    if not results:
        return None
    return vjp(replace(cut, params=(*graph.params, given), results=results), (given.name,))


def _renamed(graph: Graph, value: Value) -> Value:
    """A value of the same type with a name that is free, and so is that of its gradient."""
    name, taken = "given", graph.values()
    while name in taken or f"d{name}" in taken:
        name += "x"
    return replace(value, name=name)


def _is_zero(effect: Graph) -> bool:
    """Whether a gradient simplifies to zero. Its values are read as polynomials, those of the forward pass, too."""
    proof = simplify(effect, *(p.name for p in effect.params))
    producer, (value,) = proof.producers(), proof.results
    while value in producer and producer[value].op in ("cast", "expand"):
        (value,) = producer[value].args
    return value in producer and producer[value].op == "const" and producer[value].value == 0


def _vanishes(graph: Graph, value: Value, effect: Graph, eps: float, positive: Collection[str]) -> bool:
    """Whether a gradient by ``value`` is zero within its error bound, at the numbers of two instances."""
    for seed in range(2):
        inputs = instance(graph, eps, positive, seed)
        results = evaluate(replace(graph, results=(*graph.results, value)), inputs, wide=True)
        known = inputs | cotangents(results, seed) | {effect.params[-1].name: results[value.name].value}
        (found,) = evaluate(effect, {p.name: known[p.name] for p in effect.params}, wide=True).values()
        if not (np.isfinite(found.error) & (np.abs(found.value) <= found.error)).all():
            return False
    return True


def _why(graph: Graph, detach: Eqn, of: tuple[str, ...]) -> str:
    names = ", ".join(f"'{name}'" for name in of)
    return (
        f"graph @{graph.name}: '{detach.args[0].name}' is detached, but its effects on {names} do not cancel, as far "
        "as lngen can show. The gradient would not be that of the forward: leave detach away, or differentiate other "
        f"results (of=).\n    {print_eqn(detach)}"
    )
