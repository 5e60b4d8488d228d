"""Lower ops that have no CUDA meaning of their own; bind D."""

from __future__ import annotations

from dataclasses import replace

from lngen.ir import OPS, Builder, D, Eqn, Graph
from lngen.passes.clean import cse


def decompose(graph: Graph, d: int) -> Graph:
    """Write every op that has an expansion (means, reciprocal roots, functions) as its expansion; rows have length d.

    before:  %mean = reduce_mean %x {axis=D}        after:  %mean_sum = reduce_sum %x {axis=D}
                                                            %d_size   = const {value=4096.0}
                                                            %mean     = div %mean_sum, %d_size
             %rstd = rsqrt %veps                            %rstd_root = sqrt %veps
                                                            %one       = const {value=1.0}
                                                            %rstd      = div %one, %rstd_root
    """
    b = Builder(graph.name, params=graph.params, taken=graph.values())
    for eqn in graph.eqns:
        _write(b, eqn, d)
    return cse(b.build(*graph.results, stage="decompose"))


def _write(b: Builder, eqn: Eqn, d: int) -> None:
    """Append an equation, or those of its expansion, the last of which defines its value."""
    expand = OPS[eqn.op].expand
    if expand:
        begin = len(b.eqns)
        value = expand(b, eqn)
        expansion = b.eqns[begin:]
        del b.eqns[begin:]
        for part in expansion:
            _write(b, replace(part, out=eqn.out) if part.out == value else part, d)
    elif eqn.op == "size" and eqn.axis is D:
        b.eqns.append(Eqn(eqn.out, "const", (), (("dtype", eqn.out.type.dtype), ("value", float(d)))))
    else:
        b.eqns.append(eqn)
