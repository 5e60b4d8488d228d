"""Bytes and speeds: the bytes that a call with cold caches must move, each operand once; the peak of the memory.

GB/s is always these bytes over the time, never a kernel's own traffic, so that a repeated read lowers it.
"""

from __future__ import annotations

import math

from lngen.ir import WIDE, Graph, Value
from lngen.spec import Spec


def value_bytes(value: Value, rows: int, d: int) -> int:
    """The bytes of a graph's input or result."""
    return math.prod(value.type.shape(rows, d)) * value.type.dtype.size


def floor_bytes(spec: Spec, rows: int, graph: Graph | None = None) -> int:
    """Every input and every result once: forward 2 units of M*D, backward 3, plus weights and statistics, of a norm."""
    graph = spec.graph() if graph is None else graph
    return sum(value_bytes(v, rows, spec.d) for v in (*graph.params, *graph.results))


def ceiling_bytes(spec: Spec, rows: int, graph: Graph | None = None) -> int:
    """The bytes that the ceiling moves: those of the [M, D] arrays alone."""
    graph = spec.graph() if graph is None else graph
    return sum(value_bytes(v, rows, spec.d) for v in (*graph.params, *graph.results) if v.type.axes == WIDE)


def write_share(graph: Graph) -> float:
    """The share of results in the bytes of a graph's [M, D] arrays; 0 for a graph without any."""
    read, written = (
        sum(v.type.dtype.size for v in values if v.type.axes == WIDE) for values in (graph.params, graph.results)
    )
    return written / (read + written) if read + written else 0.0


def memory_peak(device: int) -> float:
    """10^9 bytes per second that a GPU's memory can move at most: two transfers a clock over the whole bus.

    Infinite where the driver does not report it.
    """
    import cupy

    runtime = cupy.cuda.runtime
    khz = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryClockRate, device)
    bits = runtime.deviceGetAttribute(runtime.cudaDevAttrGlobalMemoryBusWidth, device)
    return float(2 * khz * bits / 8 / 1e6) or math.inf


def gb_s(nbytes: int, us: float) -> float:
    """10^9 bytes per second."""
    return nbytes / us / 1e3
