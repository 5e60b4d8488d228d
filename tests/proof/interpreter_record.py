"""What the interpreter takes of a CPU: its time and memory beside plain NumPy of the same mathematics. Needs no GPU.

    python tests/proof/interpreter_record.py [--before FILE] [--out generated/bench/interpreter.txt]

Times are of the processor, one thread, the least of several calls in turns. Plain NumPy computes in float32, and 16-bit
arrays go through it. NumPy has no erf: beside gelu stands the approximation with tanh. ``--before``: an earlier record,
whose ratios stand in a column of their own. Numbers "of few bits" are bf16 numbers in float32 arrays: their sums often
lie in the middle of two float32.
"""

import argparse
import math
import os
import platform
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import lngen

Arrays = dict[str, np.ndarray[Any, Any]]
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32 of few bits": np.float32}
EPS = 1e-5

# Graph, dtypes and the shapes of x.
CASES = [
    *(
        (graph, dtype, shape)
        for graph in ("layernorm", "rmsnorm")
        for dtype in DTYPES
        for shape in ((4096, 4096), (16, 768))
    ),
    *((graph, "f32", (4096, 1024)) for graph in ("softmax", "gelu", "gelu_tanh")),
]


def activation(name: str) -> lngen.Definition:
    """A graph that is one function."""

    def describe(b: lngen.GraphBuilder) -> None:
        b.output("y", getattr(b.input("x", lngen.M, lngen.D), name)())

    return lngen.Definition(name, describe)


# ---- the same mathematics in NumPy ----


def layernorm(x: Any, gamma: Any, beta: Any) -> Any:
    mean = x.mean(1, keepdims=True)
    rstd = 1 / np.sqrt(x.var(1, keepdims=True) + np.float32(EPS))
    return (x - mean) * rstd * gamma + beta, mean, rstd


def layernorm_backward(dy: Any, x: Any, gamma: Any, mean: Any, rstd: Any) -> Any:
    xhat = (x - mean) * rstd
    part = dy * gamma
    dx = (part - part.mean(1, keepdims=True) - xhat * (part * xhat).mean(1, keepdims=True)) * rstd
    return dx, (dy * xhat).sum(0), dy.sum(0)


def rmsnorm(x: Any, gamma: Any) -> Any:
    rstd = 1 / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(EPS))
    return x * rstd * gamma, rstd


def rmsnorm_backward(dy: Any, x: Any, gamma: Any, rstd: Any) -> Any:
    xhat = x * rstd
    part = dy * gamma
    return (part - xhat * (part * xhat).mean(1, keepdims=True)) * rstd, (dy * xhat).sum(0)


def softmax(x: Any) -> Any:
    powers = np.exp(x - x.max(1, keepdims=True))
    return (powers / powers.sum(1, keepdims=True),)


def softmax_backward(dy: Any, x: Any) -> Any:
    (y,) = softmax(x)
    return ((dy - (dy * y).sum(1, keepdims=True)) * y,)


def _tanh(x: Any) -> Any:
    return np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x))


def gelu(x: Any) -> Any:
    return (np.float32(0.5) * x * (1 + _tanh(x)),)


def gelu_backward(dy: Any, x: Any) -> Any:
    t = _tanh(x)
    slope = np.float32(math.sqrt(2 / math.pi)) * (1 + np.float32(3 * 0.044715) * x * x)
    return (dy * np.float32(0.5) * (1 + t + x * (1 - t * t) * slope),)


PLAIN = {
    "layernorm": (layernorm, layernorm_backward, 3),
    "rmsnorm": (rmsnorm, rmsnorm_backward, 2),
    "softmax": (softmax, softmax_backward, 1),
    "gelu": (gelu, gelu_backward, 1),
    "gelu_tanh": (gelu, gelu_backward, 1),
}


def through_f32(function: Callable[..., Any], *arrays: Any) -> Any:
    """The results in the dtype of the arrays, computed in float32; statistics stay as they are."""
    if arrays[0].dtype == np.float32:
        return function(*arrays)
    wide = function(*(a.astype(np.float32) for a in arrays))
    return tuple(r if r.shape[-1] == 1 else r.astype(arrays[0].dtype) for r in wide)


# ---- the record ----


def pairs(graph: str, dtype: str, shape: tuple[int, int]) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Forward and backward: NumPy's call, and lngen's."""
    forward, backward, count = PLAIN[graph]
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(s, np.float32) for s in (shape, shape[1:], shape[1:])]
    dy, *arrays = (_as(dtype, a) for a in (rng.standard_normal(shape, np.float32), *given[:count]))
    norm = lngen.compile(activation(graph) if "gelu" in graph else graph, d=shape[1], dtype=dtype.split()[0])
    yield "forward", partial(through_f32, forward, *arrays), partial(norm.forward, *arrays)
    _, saved = norm.forward(*arrays)
    _, *statistics = through_f32(forward, *arrays)
    read = (dy, *arrays[: 1 + (count > 1)], *(statistics if count > 1 else ()))
    yield "backward", partial(through_f32, backward, *read), partial(norm.backward, dy, saved)


def _as(dtype: str, numbers: Any) -> Any:
    few = numbers.astype(ml_dtypes.bfloat16) if "few" in dtype else numbers
    return few.astype(DTYPES[dtype])


def least(calls: list[Callable[[], Any]], budget: float = 2.0) -> list[float]:
    """Milliseconds of processor time of each call, the least of several, in turns."""
    times = [_milliseconds(call, 1) for call in calls]
    count = max(1, int(20 / max(times)))
    end = time.process_time() + budget
    while time.process_time() < end:
        times = [min(t, _milliseconds(call, count)) for t, call in zip(times, calls, strict=True)]
    return times


def _milliseconds(call: Callable[[], Any], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count * 1e3


def peak(call: Callable[[], Any]) -> float:
    """MiB that are allocated at most during a call, its results among them."""
    tracemalloc.start()
    call()
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found / 2**20


def lines(before: dict[str, str]) -> Iterator[str]:
    """A line for each case."""
    yield f"{'':<48} {'NumPy ms':>9} {'lngen ms':>9} {'ratio':>6} {'before':>6}   {'MiB':>6} {'lngen':>6}"
    for graph, dtype, shape in CASES:
        for way, plain, own in pairs(graph, dtype, shape):
            name = f"{graph} {way}, {shape[0]} x {shape[1]} {dtype}"
            a, b = least([plain, own])
            memory = [f"{peak(call):6.1f}" for call in (plain, own)]
            yield f"{name:<48} {a:9.3f} {b:9.3f} {b / a:6.1f} {before.get(name, '-'):>6}   {' '.join(memory)}"


def main() -> None:
    """Print the record, and write it to a file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--before", type=Path)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    earlier = given.before.read_text().splitlines() if given.before else []
    columns = [line.split() for line in earlier[2:]]
    before = {" ".join(of[:-6]): of[-4] for of in columns}
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} cores"
    found = [f"python tests/proof/interpreter_record.py: {versions}"]
    print(found[0])
    for line in lines(before):
        print(line, flush=True)
        found.append(line)
    if given.out:
        given.out.write_text("\n".join(found) + "\n")


if __name__ == "__main__":
    main()
