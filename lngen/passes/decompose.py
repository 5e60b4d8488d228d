"""Lower ops that have no CUDA meaning of their own; bind D."""

from __future__ import annotations

from lngen.ir import Builder, D, Eqn, Graph
from lngen.passes.clean import cse


def decompose(graph: Graph, d: int) -> Graph:
    """Write means, row lengths and reciprocal roots in ops that CUDA has, for rows of length ``d``.

    before:  %mean = reduce_mean %x {axis=D}        after:  %mean_sum = reduce_sum %x {axis=D}
                                                            %d_size   = const {value=4096.0}
                                                            %mean     = div %mean_sum, %d_size
             %rstd = rsqrt %veps                            %rstd_root = sqrt %veps
                                                            %one       = const {value=1.0}
                                                            %rstd      = div %one, %rstd_root

    A mean is divided by D, not multiplied by a rounded 1/D, which would move the mean of a constant row.
    """
    b = Builder(graph.name, params=graph.params, taken=graph.values())
    for eqn in graph.eqns:
        out, dtype = eqn.out, eqn.out.type.dtype
        match eqn.op:
            case "reduce_mean":
                total = b.reduce_sum(f"{out.name}_sum", eqn.args[0], axis=eqn.axis)
                count = b.const("d_size", float(d), dtype) if eqn.axis is D else b.size("m_size", eqn.axis, dtype)
                b.eqns.append(Eqn(out, "div", (total, count)))
            case "size" if eqn.axis is D:
                b.eqns.append(Eqn(out, "const", (), (("dtype", dtype), ("value", float(d)))))
            case "rsqrt":
                root = b.sqrt(f"{out.name}_root", eqn.args[0])
                b.eqns.append(Eqn(out, "div", (b.const("one", 1.0, dtype), root)))
            case _:
                b.eqns.append(eqn)
    return cse(b.build(*graph.results, stage="decompose"))
