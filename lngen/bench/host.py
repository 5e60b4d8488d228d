"""Host time: the cost of a call before its kernel starts. At small sizes it dominates.

Calls are issued without waiting, in batches too short to fill the launch queue; after each batch the GPU is awaited.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lngen.bench.cases import Tensors
from lngen.bench.providers import is_native, own_function
from lngen.bench.timing import Stats, describe
from lngen.bench.torch_graph import torch_function
from lngen.ir import WIDE
from lngen.runtime.norm import Norm
from lngen.spec import Spec

CALLS = 500
BATCHES = 21
ROWS = 16

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class HostRecord:
    """Microseconds of host time per call; without a time, ``note`` has the reason."""

    spec: str
    rows: int
    call: str
    arrays: str
    us_median: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    note: str = ""


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
    """lngen with CuPy arrays and torch tensors against PyTorch's own function, or the graph in PyTorch; forward."""
    spec = spec.with_direction("fwd")
    records = _on(spec, rows, "cupy")
    return records + _on(spec, rows, "torch") if importlib.util.find_spec("torch") is not None else records


def _on(spec: Spec, rows: int, arrays: str) -> list[HostRecord]:
    try:
        calls, synchronize = (_cupy_calls if arrays == "cupy" else _torch_calls)(spec, rows)
    except Exception as error:  # a library without its GPU part is a row with a note
        return [HostRecord(str(spec), rows, "-", arrays, note=describe(error))]
    found = host_times(calls, synchronize)
    return [_record(spec, rows, name, arrays, stats) for name, stats in found.items()]


def _record(spec: Spec, rows: int, call: str, arrays: str, found: Stats | str) -> HostRecord:
    if isinstance(found, str):
        return HostRecord(str(spec), rows, call, arrays, note=found)
    times = round(found.median, 3), round(found.p10, 3), round(found.p90, 3)
    return HostRecord(str(spec), rows, call, arrays, *times)


def _cupy_calls(spec: Spec, rows: int) -> tuple[Calls, Callable[[], object]]:
    import cupy

    from lngen.runtime.arrays import CuPy

    return _lngen_calls(spec, rows, CuPy()), cupy.cuda.runtime.deviceSynchronize


def _torch_calls(spec: Spec, rows: int) -> tuple[Calls, Callable[[], object]]:
    import torch

    from lngen.runtime.arrays import Torch

    library = Torch()
    calls = _lngen_calls(spec, rows, library)
    params = {v.name: v.type for v in spec.forward().params}
    t = {
        n: torch.zeros(v.shape(rows, spec.d), dtype=library.to_torch[v.dtype], device="cuda") for n, v in params.items()
    }
    calls |= _native_calls(spec, t) if is_native(spec) else _expression_calls(spec, t)
    wide = next((n for n, v in params.items() if v.axes == WIDE), None)
    if wide is not None:
        calls["torch.empty_like"] = lambda: torch.empty_like(t[wide])
    return calls, torch.cuda.synchronize


def _native_calls(spec: Spec, t: Tensors) -> Calls:
    import torch

    shape, eps, functional = (spec.d,), spec.eps, torch.nn.functional
    if spec.definition.name == "rmsnorm":
        return {"F.rms_norm": lambda: functional.rms_norm(t["x"], shape, t["gamma"], eps)}
    x, gamma, beta = t["x"], t["gamma"], t["beta"]
    return {
        "torch.native_layer_norm": lambda: torch.native_layer_norm(x, shape, gamma, beta, eps),
        "F.layer_norm": lambda: functional.layer_norm(x, shape, gamma, beta, eps),
    }


def _expression_calls(spec: Spec, t: Tensors) -> Calls:
    own, inputs = own_function(spec), [*t.values()]
    function = own or torch_function(spec.forward())
    return {f"F.{spec.definition.name}" if own else "torch, the expression": lambda: function(*inputs)}


def _lngen_calls(spec: Spec, rows: int, library: Any) -> Calls:
    norm = Norm(spec, spec.with_direction("bwd"), {})
    graph = spec.graph()
    inputs = [library.maker(v.type.shape(rows, spec.d), v.type.dtype, 0)() for v in graph.params]
    out = tuple(library.maker(v.type.shape(rows, spec.d), v.type.dtype, 0)() for v in graph.results)
    return {
        "lngen, out given": lambda: norm.forward(*inputs, out=out),
        "lngen": lambda: norm.forward(*inputs),
    }
