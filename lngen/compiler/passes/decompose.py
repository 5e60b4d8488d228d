"""Write the ops of a graph as those that kernels have: expansions as their equations, products and sums as one fma."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from lngen.compiler.ir import (
    EXPANSIONS,
    F32,
    FUNCTIONS,
    OPS,
    Builder,
    D,
    Eqn,
    Graph,
    Lengths,
    Value,
    is_join,
    is_segment_size,
)
from lngen.compiler.ir.ops import Expansion
from lngen.compiler.passes.edit import cse, dce


def decompose(graph: Graph, d: int, functions: str = FUNCTIONS[0]) -> Graph:
    """Write every op that has an expansion (means, reciprocal roots, functions) as its expansion; rows have length d.

    ``functions``: the version of the equations of functions.

    before:  %mean = reduce_mean %x {axis=D}        after:  %mean_sum = reduce_sum %x {axis=D}
                                                            %d_size   = const {value=4096.0}
                                                            %mean     = div %mean_sum, %d_size
             %rstd = rsqrt %veps                            %rstd_root = sqrt %veps
                                                            %one       = const {value=1.0}
                                                            %rstd      = div %one, %rstd_root
    """
    b = Builder(graph.name, params=graph.params, taken=graph.values())
    for eqn in graph.eqns:
        _write(b, eqn, d, EXPANSIONS[functions])
    return cse(b.build(*graph.results, stage="decompose"), {*graph.values().values()})


def _write(b: Builder, eqn: Eqn, d: int, own: Mapping[str, Expansion]) -> None:
    """Append an equation, or those of its expansion, of which ``own`` go first; the last one defines its value."""
    expand = own.get(eqn.op, OPS[eqn.op].expand)
    if expand:
        begin = len(b.eqns)
        value = expand(b, eqn)
        expansion = b.eqns[begin:]
        del b.eqns[begin:]
        for part in expansion:
            _write(b, replace(part, out=eqn.out) if part.out == value else part, d, own)
    elif eqn.op == "size" and eqn.axis.root is D and not is_segment_size(eqn):
        sizes = Lengths({D: d})
        count = sizes[eqn.axis] if eqn.per is None else sizes.per(eqn.axis, eqn.per)
        b.eqns.append(Eqn(eqn.out, "const", (), (("dtype", eqn.out.type.dtype), ("value", float(count)))))
    else:
        b.eqns.append(eqn)


def place_fma(graph: Graph) -> Graph:
    """Fuse a product that is used once, by an addition, a subtraction or a sum, into it (f32 only).

    before:  %p = mul %a, %b          after:  %y = fma %a, %b, %c
             %y = add %p, %c

    before:  %p = mul %a, %b          after:  %b_neg = neg %b
             %y = sub %c, %p                  %y = fma %a, %b_neg, %c

    before:  %p = mul %a, %b          after:  %y = reduce_dot %a, %b {axis=D}
             %y = reduce_sum %p {axis=D}

    The compiler contracts nothing (-fmad=false), so this pass alone decides which operations are fused. Of two products
    the left one is fused; the sign goes to the factor with fewer axes. A sum over S takes no product.
    """
    uses = Counter(a for e in graph.eqns for a in e.args) + Counter(graph.results)
    producer = graph.producers()
    b = Builder(graph.name, params=graph.params, taken=graph.values())

    def product(v: Value) -> tuple[Value, Value] | None:
        eqn = producer.get(v)
        fits = eqn is not None and eqn.op == "mul" and uses[v] == 1 and v.type.dtype is F32
        return (eqn.args[0], eqn.args[1]) if fits and eqn is not None else None

    for eqn in graph.eqns:
        left = product(eqn.args[0]) if eqn.op in ("add", "sub") else None
        right = product(eqn.args[1]) if eqn.op in ("add", "sub") and left is None else None
        factors = product(eqn.args[0]) if eqn.op == "reduce_sum" and not is_join(eqn) else None
        if factors:
            b.eqns.append(Eqn(eqn.out, "reduce_dot", factors, eqn.attrs))
        elif left:
            addend = eqn.args[1] if eqn.op == "add" else b.neg(f"{eqn.args[1].name}_neg", eqn.args[1])
            b.eqns.append(Eqn(eqn.out, "fma", (*left, addend)))
        elif right:
            p, q = _negated(b, *right) if eqn.op == "sub" else right
            b.eqns.append(Eqn(eqn.out, "fma", (p, q, eqn.args[0])))
        else:
            b.eqns.append(eqn)
    return dce(b.build(*graph.results, stage="place_fma"))


def _negated(b: Builder, p: Value, q: Value) -> tuple[Value, Value]:
    """The factors of -(p * q): the sign goes to the one with fewer axes."""
    if len(q.type.axes) <= len(p.type.axes):
        return p, b.neg(f"{q.name}_neg", q)
    return b.neg(f"{p.name}_neg", p), q
