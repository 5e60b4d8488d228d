"""Host time: the cost of a call before its kernel starts. At small sizes it dominates.

Calls are issued without waiting, in batches too short to fill the launch queue; after each batch the GPU is awaited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lngen.compiler.ir import DEFAULT_EPS, RUN, WIDE
from lngen.compiler.spec import Spec
from lngen.lab.bench.argument_sets import Tensors
from lngen.lab.bench.peers import own_form
from lngen.lab.bench.records import HostRecord
from lngen.lab.bench.timing import Stats, describe
from lngen.launch.arrays import CuPy, Torch
from lngen.launch.runtime.norm import Norm
from lngen.proof.torch_graph import torch_function

CALLS = 500
BATCHES = 21
ROWS = 16
LIBRARIES: dict[str, Callable[[], Any]] = {"cupy": CuPy, "torch": Torch}

Calls = dict[str, Callable[[], object]]


def host_times(
    calls: Mapping[str, Callable[[], object]],
    synchronize: Callable[[], object],
    *,
    count: int = CALLS,
    batches: int = BATCHES,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Stats | str]:
    """Host time per call of each, in interleaved batches of ``count``; an error's text in place of a time."""
    found: dict[str, Stats | str] = {}
    samples: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            call()  # compiles, allocates, checks
            synchronize()
            samples[name] = []
        except Exception as error:  # the other peers continue, whatever one raises
            found[name] = describe(error)
    for batch in range(batches + 1):
        for name, taken in samples.items():
            call = calls[name]
            start = clock()
            for _ in range(count):
                call()
            us = 1e6 * (clock() - start) / count
            synchronize()
            if batch:  # the first batch warms up
                taken.append(us)
    found |= {name: Stats.of(taken) for name, taken in samples.items()}
    return {name: found[name] for name in calls}


def host_benchmark(spec: Spec, rows: int = ROWS) -> list[HostRecord]:
    """lngen's forward with CuPy arrays and torch tensors, and PyTorch's own functions or the graph in PyTorch."""
    import torch

    spec = spec.with_direction("fwd")
    records = []
    for arrays, library in LIBRARIES.items():
        try:
            calls = host_calls(spec, rows, library())
        except Exception as error:  # a library without its GPU part is a row with a note
            records.append(HostRecord(str(spec), rows, "-", arrays, note=describe(error)))
            continue
        for name, found in host_times(calls, torch.cuda.synchronize).items():
            if isinstance(found, str):
                records.append(HostRecord(str(spec), rows, name, arrays, note=found))
            else:
                times = round(found.median, 3), round(found.p10, 3), round(found.p90, 3)
                records.append(HostRecord(str(spec), rows, name, arrays, *times))
    return records


def host_calls(spec: Spec, rows: int, library: Any) -> Calls:
    """lngen with results that are given and with new ones; with torch tensors also PyTorch."""
    graph, norm = spec.graph(), Norm(spec, spec.with_direction("bwd"), {})
    inputs = [library.maker(v.type.shape(rows, spec.d), v.type.dtype, 0)() for v in graph.tensors]
    eps = {"eps": DEFAULT_EPS} if spec.eps == RUN else {}
    out = tuple(library.maker(v.type.shape(rows, spec.d), v.type.dtype, 0)() for v in graph.results)
    calls: Calls = {
        "lngen, out given": lambda: norm.forward(*inputs, out=out, **eps),
        "lngen": lambda: norm.forward(*inputs, **eps),
    }
    named = {v.name: tensor for v, tensor in zip(graph.tensors, inputs, strict=True)}
    wide = next((named[v.name] for v in graph.tensors if v.type.axes == WIDE), None)
    return calls | (torch_calls(spec, named, wide) if isinstance(library, Torch) else {})


def torch_calls(spec: Spec, t: Tensors, wide: Any = None) -> Calls:
    """PyTorch's own functions for the graph, else its expression; ``wide``: a tensor to allocate one like it."""
    import torch

    own, graph = own_form(spec), spec.forward()
    expression, inputs = torch_function(graph), [t[p.name] for p in graph.tensors]
    calls: Calls = {"torch": lambda: own(t)} if own else {"torch, the expression": lambda: expression(*inputs)}
    if own and spec.definition.name == "layernorm":
        x, gamma, beta, eps = t["x"], t["gamma"], t["beta"], spec.eps_or_default
        calls["torch.native_layer_norm"] = lambda: torch.native_layer_norm(x, (spec.d,), gamma, beta, eps)
    return calls | ({} if wide is None else {"torch.empty_like": lambda: torch.empty_like(wide)})
