"""Sums by sets of rows: of a product with a factor of sets, first the rows of each set, then the sets; and of zeros."""

from __future__ import annotations

from dataclasses import replace

from lngen.compiler.ir import SUMS, WIDE, Axis, Builder, Eqn, Graph, M, Value, is_column_fold, is_set_fold, sets_of
from lngen.compiler.passes.edit import cse, dce


def by_sets(graph: Graph) -> Graph:
    """Each sum over rows of a product that has a factor of sets, as a sum over sets: the factor moves out of one.

    before:  %dgamma32  = reduce_sum %dy_xhat_gain {axis=M}           with %dy_xhat_gain = mul %dy_xhat, %gain
    after:   %set       = reduce_sum %dy_xhat {axis=M, to=N}
             %set_gain  = mul %set, %gain
             %dgamma32  = reduce_sum %set_gain {axis=N}

    So the rows are swept once, for the sums of sets alone. Gradients that are zeros become sums of zeros beside such
    sums, as one kernel computes all. A graph without sums and results of sets stays as it is.
    """
    sets = sets_of(graph)
    if sets is None or not (any(map(is_set_fold, graph.eqns)) or any(sets in r.type.axes for r in graph.results)):
        return graph
    graph = _summed_zeros(graph, sets)
    b, producer = Builder(graph.name, params=graph.params, eqns=()), graph.producers()
    for eqn in graph.eqns:
        split = _split(b, eqn.args[0], producer, sets) if eqn.op in SUMS and is_column_fold(eqn) else (None, None)
        rest, factor = split
        if is_set_fold(eqn) or len(eqn.args) > 1 or factor is None or rest is None or rest.type.along(M) is not M:
            b.eqns.append(eqn)
            continue
        of_set = b.reduce_sum(f"{eqn.out.name}_set", rest, axis=eqn.axis, to=sets)
        term = b.mul(f"{eqn.out.name}_term", of_set, factor)
        b.eqns.append(replace(eqn, args=(term,), attrs=(("axis", sets),)))
    return cse(replace(graph, eqns=tuple(b.eqns)))


def _summed_zeros(graph: Graph, sets: Axis) -> Graph:
    """Results without rows that are a constant, the zero of ``vjp``, as sums over the rows of a set, or of all."""
    producer, b = graph.producers(), Builder(graph.name, params=graph.params, taken=graph.values())
    for eqn in graph.eqns:
        out = eqn.out
        value = None if out not in graph.results or M in out.type.axes else _constant(out, producer)
        if value is not None:
            for axis in WIDE:
                value = b.expand(f"{value.name}_{axis.name.lower()}", value, axis=axis)
            value = b.reduce_sum(f"{out.name}_set", value, axis=M, to=sets)
            if sets not in out.type.axes:
                value = b.reduce_sum(f"{out.name}_sum", value, axis=sets)
            eqn = replace(eqn, args=(value,))
        b.eqns.append(eqn)
    return dce(cse(replace(graph, eqns=tuple(b.eqns))))


def _constant(value: Value, producer: dict[Value, Eqn]) -> Value | None:
    """The constant that a value repeats along its axes; None if it is another one's."""
    eqn = producer.get(value)
    while eqn is not None and eqn.op in ("cast", "expand"):
        eqn = producer.get(eqn.args[0])
    return eqn.out if eqn is not None and eqn.op == "const" else None


def _split(b: Builder, value: Value, producer: dict[Value, Eqn], sets: Axis) -> tuple[Value | None, Value | None]:
    """The factors of a product that vary along rows, and those of ``sets``, each as one value; None without any."""
    if value.type.along(M) is sets:
        return None, value
    eqn = producer.get(value)
    if eqn is None or eqn.op != "mul":
        return value, None
    (rest, factor), (other, another) = (_split(b, a, producer, sets) for a in eqn.args)
    if factor is None and another is None:
        return value, None
    return _product(b, value, rest, other), _product(b, value, factor, another)


def _product(b: Builder, of: Value, x: Value | None, y: Value | None) -> Value | None:
    return x if y is None else y if x is None else b.mul(f"{of.name}_rest", x, y)
