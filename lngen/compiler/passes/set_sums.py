"""Sums over all rows of what a set of rows has as a factor: first the rows of each set, then the sets."""

from __future__ import annotations

from dataclasses import replace

from lngen.compiler.ir import SUMS, Axis, Builder, Eqn, Graph, M, Value, is_column_fold, is_set_fold, sets_of
from lngen.compiler.passes.edit import cse


def by_sets(graph: Graph) -> Graph:
    """Each sum over rows of a product that has a factor of sets, as a sum over sets: the factor moves out of one.

    before:  %dgamma32  = reduce_sum %dy_xhat_gain {axis=M}           with %dy_xhat_gain = mul %dy_xhat, %gain
    after:   %set       = reduce_sum %dy_xhat {axis=M, to=N}
             %set_gain  = mul %set, %gain
             %dgamma32  = reduce_sum %set_gain {axis=N}

    So the rows are swept once, for the sums of sets alone. A graph without such sums stays as it is.
    """
    sets = sets_of(graph)
    if sets is None or not any(map(is_set_fold, graph.eqns)):
        return graph
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
