"""What versions of exp and tanh cost and how exact they are: instructions, and the error of every f32. Needs no GPU.

    python tests/proof/functions_record.py [--step N] [--out generated/bench/functions.txt]

Instructions are SASS of sm_90, for each element: those of a kernel that applies the function, less those of one that
copies. Errors are in units in the last place of the float64 result, of all numbers for which the function is neither
constant nor its argument, or of every Nth. "Falls": how often the result of the next number is less. The rest of the
record is what was tried in a prototype.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lngen.compiler.compile import Compilation
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import F32, FUNCTIONS, Builder, D, M
from lngen.compiler.passes import decompose
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.lab.inspect.machine_code import machine_code, reached

Array = np.ndarray[Any, Any]
ROWS = [("exp", "v1"), ("exp", "v2"), ("tanh", "v1")]
RANGES = {"exp": [(2.0**-26, 105.0), (-(2.0**-26), -105.0)], "tanh": [(2.0**-14, 11.0)]}  # tanh is odd to the bit
KERNELS = ["softmax.fwd:d=4096,dtype=bf16", "dyt.fwd:d=4096,dtype=bf16"]
FLAT = Schedule("registers", threads=64, rows_per_block=1, vec=4)
BLOCK = 1 << 20

TRIED = """
Tried in a prototype, over all f32 in the ranges above:
exp as in v2, but 1 + r (1 + r (...)) in seven fma: 14 instructions, error 1.66, and 32832 results fall.
exp as in v2, but with log 4 rounded to one float: 14 instructions, error 5.1.
tanh, h and the guess scaled so that the guess takes two fma, then h times a reciprocal: 21 instructions, error 4.4, and
  4 results fall. The scaled h has one digit fewer where tanh nears 1.
tanh, a guess of the second degree: 21 instructions, error 18.8.
Not tried: a rational function for tanh, about 19 instructions. It divides two rounded numbers, so it cannot be monotone
where tanh nears 1. So tanh keeps its equations in v2.
"""


def applied(name: str) -> Definition:
    """A graph that is one function."""

    def describe(b: GraphBuilder) -> None:
        b.output("y", b.emit(name, "f", (b.input("x", M, D),)))

    return Definition(name, describe)


def cost(spec: Spec, schedule: Schedule) -> tuple[float, int]:
    """Instructions for an element, and registers, of a kernel without loops."""
    (code,) = machine_code(Compilation(spec).kernels(schedule), "sm_90")
    assert not code.loops
    return len(reached(code.code)) / (spec.d / schedule.threads), code.used["registers"]


def per_element(name: str, version: str) -> float:
    """Instructions for an element, of the function alone."""
    specs = [make_spec(applied(n), "fwd", {"d": 4096, "functions": version}) for n in (name, "detach")]
    whole, copy = (cost(spec, FLAT)[0] for spec in specs)
    return whole - copy


def errors(name: str, version: str, step: int, bits: tuple[int, int]) -> tuple[float, float, int]:
    """The largest error of the numbers between two, where it is, and how often the function falls."""
    b = Builder("alone")
    graph = decompose(b.build(b.emit(name, "y", (b.param("x", F32, M, D),))), 1, version)
    x = np.arange(*bits, step, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        y = interpret(graph, {"x": x[None]})["y"][0]
        exact = getattr(np, name)(x.astype(np.float64))
        unit = np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 24, -149))
        error = np.where(y == exact.astype(np.float32), 0.0, 1.0) * np.abs(y - exact) / unit
    error[np.isinf(y)] = 0.0
    worst, rises = int(np.argmax(error)), y[1:] >= y[:-1] if x[0] > 0 else y[1:] <= y[:-1]
    return float(error[worst]), float(x[worst]), int((~rises).sum())


def blocks(name: str, step: int) -> Iterator[tuple[int, int]]:
    """The bits of the numbers of a function, a block at a time; neighbouring blocks share a number."""
    for ends in RANGES[name]:
        first, last = np.array(ends, np.float32).view(np.uint32).tolist()
        for begin in range(first, last, BLOCK * step):
            yield begin, min(begin + BLOCK * step, last) + 1


def lines(step: int) -> Iterator[str]:
    """The record."""
    yield f"{'function':<10} {'instructions':>12} {'largest error':>13}  {'at':<13} {'falls':>5}"
    with ProcessPoolExecutor() as pool:
        for name, version in ROWS:
            found = [*pool.map(partial(errors, name, version, step), blocks(name, step), chunksize=4)]
            error, at, _ = max(found)
            count = per_element(name, version)
            yield f"{name + ' ' + version:<10} {count:12.1f} {error:13.3f}  {at:<13.9g} {sum(f for *_, f in found):5}"
    yield f"\n{'kernel':<44} {'registers':>9} {'instructions for an element':>28}"
    for text, version in ((t, v) for t in KERNELS for v in FUNCTIONS):
        spec = parse_spec(f"{text},functions={version}")
        each, registers = cost(spec, Compilation(spec).schedule("sm_90"))
        yield f"{text + ' ' + version:<44} {registers:9} {each:28.1f}"
    yield from TRIED.rstrip().splitlines()


def main() -> None:
    """Print the record, and write it to a file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--step", type=int, default=1)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    found = ["python tests/proof/functions_record.py" + f" --step {given.step}" * (given.step > 1)]
    print(found[0])
    for line in lines(given.step):
        print(line, flush=True)
        found.append(line)
    if given.out:
        given.out.write_text("\n".join(found) + "\n")


if __name__ == "__main__":
    main()
