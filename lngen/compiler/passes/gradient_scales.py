"""Gradients of 8 bits: the result dx of a backward divided by a scale, for the GEMM of the layer before."""

from __future__ import annotations

from lngen.compiler.ir import F32, Builder, D, DType, Eqn, Graph, Type, Value
from lngen.compiler.ir.scales import SCALE_MIN
from lngen.compiler.passes.edit import dce

BLOCK = 128  # features that have a scale


def quantise(graph: Graph, name: str, dtype: DType, scales: str) -> Graph:
    """Write the result ``name`` in 8 bits, over the input ``{name}_scale``, or with that result for each block.

    before:  %dx = cast %dx32 {to=bf16}           after:  graph @f_bwd(..., %dx_scale: f32[]) ...
                                                          %dx_scaled = div_scale %dx32, %dx_scale {...}
                                                          %dx        = cast %dx_scaled {to=e5m2}
    """
    b = Builder(graph.name, params=graph.params, eqns=(), taken=graph.values())
    results = [*graph.results]
    for eqn in graph.eqns:
        if eqn.out not in graph.results or eqn.out.name != name:
            b.eqns.append(eqn)
            continue
        wide = eqn.args[0]
        if scales == "block":
            results.append(scale := _own_scale(b, name, wide, dtype))
        else:
            scale = b.param(f"{name}_scale", F32)
        least = SCALE_MIN if scales == "block" else 0.0
        s = scale if wide.type.dtype is F32 else b.cast(f"{name}_scale64", scale, to=wide.type.dtype)
        scaled = b.div_scale(f"{name}_scaled", wide, s, least=least, bounded=scales == "block")
        out = Value(name, Type(dtype, eqn.out.type.axes))
        b.eqns.append(Eqn(out, "cast", (scaled,), (("to", dtype),)))
        results[results.index(eqn.out)] = out
    return dce(b.build(*results, stage="quantise"))


def _own_scale(b: Builder, name: str, wide: Value, dtype: DType) -> Value:
    """The largest number of each block over the largest of the dtype."""
    blocks = b.axis("B", D / BLOCK)
    largest = b.reduce_max(f"{name}_amax", b.abs(f"abs_{name}", wide), axis=D, to=blocks)
    return b.cast(f"{name}_scale", b.least_scale(name, largest, dtype.largest, SCALE_MIN), to=F32)
