"""Digests of the interpreter's results over a grid of specs, and a command that writes them.

    python tests/proof/digests.py          compare every case with tests/data/digests_v1.json
    python tests/proof/digests.py --write  write the file anew

They are the bits of ``order=v1`` and of every version of the functions. A digest covers the order of the sums as the
graph's attributes spell it, and every result. Inputs come from integers alone, so that no version of a library can
change them.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import SUMS, D, DType, Graph, M, Value, sets_of
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import Spec, parse_spec
from lngen.files import write_all

FILE = Path(__file__).resolve().parents[1] / "data" / "digests_v1.json"

# Short, odd, whole and partial chunks; the lengths at which the table of the order changes, and their neighbours;
# rows of 1, 2, 3, ... 128 segments.
LENGTHS = (
    1, 2, 3, 5, 7, 8, 16, 31, 33, 64, 100, 127, 128, 257, 512, 768, 769, 1000, 1024, 1280, 1281, 1536, 1537, 2048,
    3072, 3584, 3592, 4095, 4096, 4104, 5120, 5121, 5128, 6144, 6152, 7168, 7170, 7176, 8184, 8192, 8200, 10240,
    10248, 12280, 12287, 12288, 12296, 13304, 13312, 13824, 13832, 16376, 16384, 16392, 24576, 24584, 32768, 32776,
    50001, 65536, 65544, 100000, 131072, 262144, 262152,
)  # fmt: skip
FEW_LENGTHS = (1, 33, 100, 1000, 4096, 16384, 32776)  # of the other graphs
DTYPES = ("f32", "f16", "bf16", "f64", "bf16,weight=f32", "f32,out=bf16", "bf16,weight=f64")
OWN_DTYPES = ("f32", "bf16")
DIRECTIONS = ("fwd", "bwd")
DIGITS = 12
NUMBERS = ("chunk", "run", "segment", "groups", "blocks", "stretch", "least", "long")

FEW_ROWS, MANY_ROWS = 3, 300
LENGTHS_OF_SETS, ROWS_OF_SETS = (33, 100, 1000, 1024), (1030, 4100)  # sets from 1024 and from 4096 rows on
SHORT = 4096  # rows of up to so many elements are cheap enough for many of them


def peak_scale(b: GraphBuilder) -> None:
    """Rows over their largest element, a mean of it beside: a maximum, and sums of several kinds in one graph."""
    x32, gamma32 = b.input("x", M, D), b.optional_input("gamma", D)
    peak = b.maximum("peak", b.reduce_max("top", x32, axis=D), b.number("one", 1.0))
    scaled = b.relu("scaled", b.div("ratio", x32, peak))
    mean = b.reduce_mean("level", scaled, axis=D)
    moved = b.sub("moved", scaled, mean)
    b.output("y", moved if gamma32 is None else b.mul("weighted", moved, gamma32))
    b.statistic(peak)


def add_norm(b: GraphBuilder) -> None:
    """LayerNorm of x + z, whose sum is a result as well: two wide inputs, a product before the row sums."""
    x32, z32, gamma32 = b.input("x", M, D), b.input("z", M, D), b.input("gamma", D)
    total = b.add("total", x32, z32)
    mean = b.reduce_mean("mean", total, axis=D)
    xc = b.sub("xc", total, mean)
    var = b.reduce_mean("var", b.mul("xc2", xc, xc), axis=D)
    rstd = b.rsqrt("rstd", b.add("veps", var, b.eps()))
    b.output("y", b.mul("scaled", b.mul("xhat", xc, rstd), gamma32))
    b.output("residual", total)
    b.statistic(mean)
    b.statistic(rstd)


FUNCTIONS = ("exp", "exp2", "tanh", "sigmoid", "erf", "normal_cdf", "gelu", "gelu_tanh", "silu", "softplus")


def functions(b: GraphBuilder) -> None:
    """Every function of the op table, of numbers up to 8 and up to 40."""
    x = b.input("x", M, D)
    for factor in (1.0, 5.0):
        for name in FUNCTIONS:
            b.output(f"{name}{factor:g}", b.emit(name, f"{name}_{factor:g}", (x * factor,)))
        b.output(f"log{factor:g}", b.log(f"log_{factor:g}", (x * factor).abs() + 0.01))


OWN = (Definition("peak_scale", peak_scale), Definition("add_norm", add_norm))
NORMS = ("layernorm", "rmsnorm")
# The order of sums over heads is not frozen yet.
FROZEN = {name: d for name, d in GRAPHS.items() if d.group != "heads"}
GRAPHS_BY_NAME = {**FROZEN, **{d.name: d for d in (*OWN, Definition("functions", functions))}}


@dataclass(frozen=True)
class Case:
    """A spec and a number of rows, which are so many sets; ``row`` and ``column`` are its place in the file."""

    graph: str
    direction: str
    d: int
    dtype: str
    rows: int = FEW_ROWS
    sets: int = 0

    @property
    def row(self) -> str:
        return f"{self.graph}.{self.direction}:d={self.d}"

    @property
    def column(self) -> str:
        rows = f" rows={self.rows}" if self.rows != FEW_ROWS else ""
        return f"{self.dtype}{rows}{f' sets={self.sets}' if self.sets else ''}"

    def __str__(self) -> str:
        return f"{self.row},dtype={self.column}"


def cases(d: int) -> Iterator[Case]:
    """Every case of one row length; layernorm and rmsnorm have all dtypes, short rows a case of many rows."""
    for name in GRAPHS_BY_NAME:
        if name in (*NORMS, *(own.name for own in OWN)) or d in FEW_LENGTHS:
            for direction in DIRECTIONS:
                for dtype in DTYPES if name in NORMS else OWN_DTYPES:
                    yield Case(name, direction, d, dtype)
    if d in FEW_LENGTHS:
        yield from (Case("functions", direction, d, "f32,functions=v2") for direction in DIRECTIONS)
    if d <= SHORT:
        yield Case("layernorm", "bwd", d, "bf16", MANY_ROWS)
        yield Case("rmsnorm", "bwd", d, "f32,blocks=5", MANY_ROWS)
        yield Case("rmsnorm", "bwd", d, "bf16,blocks=40", MANY_ROWS)
        yield Case("ada_layernorm", "bwd", d, "bf16", MANY_ROWS, sets=2)
    if d in LENGTHS_OF_SETS:
        yield from (Case("ada_layernorm", "bwd", d, "bf16,gate=yes", n, sets=1) for n in ROWS_OF_SETS)


CASES = tuple(case for d in LENGTHS for case in cases(d))


def digest(case: Case) -> str:
    """What the file says of a case: the first hex digits of a SHA-256 of the order and of every result."""
    spec = parse_spec(f"{case.row},dtype={case.dtype}", GRAPHS_BY_NAME)
    graph = spec.trace()["order_sums"]  # which has a result for every gradient, also for those that are stored once
    results = interpret(graph, {p.name: numbers(p, case, spec) for p in graph.params})
    digest = hashlib.sha256(order_of(graph).encode())
    for result in graph.results:
        array = results[result.name]
        if not np.isfinite(array.astype(np.float64)).all():
            raise ValueError(f"{case}: {result} is not finite, and which NaN a result is has no meaning.")
        digest.update(f"{result.name}: {result.type} {array.shape}\n".encode())
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()[:DIGITS]


def order_of(graph: Graph) -> str:
    """How sums along D and along M are ordered, as the attributes say it."""
    found: dict[str, str] = {}
    for eqn in graph.eqns:
        attrs = dict(eqn.attrs)
        numbers = {k: attrs[k] for k in NUMBERS if k in attrs}
        if eqn.op in SUMS and numbers:
            axis = str(eqn.axis)
            if found.setdefault(axis, str(numbers)) != str(numbers):
                raise ValueError(
                    f"graph @{graph.name}: sums along {axis} have two orders, {found[axis]} and {numbers}."
                )
    return str(sorted(found.items()))


def numbers(value: Value, case: Case, spec: Spec) -> Array:
    """Numbers between -8 and 8 with as many bits as the dtype has, from a hash of the input's name and the place.

    Products of powers of two and whole numbers: exact in the dtype, so that nothing is rounded here.
    """
    shape = value.type.shape(case.rows, spec.d)
    if case.sets and sets_of(spec.forward()) in value.type.axes:
        shape = case.sets, *shape[1:]
    seed = int.from_bytes(hashlib.sha256(value.name.encode()).digest()[:8], "little")
    bits = mixed(np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed))
    significant = {DType.F16: 11, DType.BF16: 8, DType.F32: 24, DType.F64: 53}[value.type.dtype]
    whole = (bits >> np.uint64(64 - significant)).astype(np.float64)  # exact: 53 bits at most
    exponent = (bits & np.uint64(3)).astype(np.int32) - significant
    sign = 1.0 - 2.0 * ((bits >> np.uint64(2)) & np.uint64(1)).astype(np.float64)
    return np.asarray((sign * np.ldexp(whole, exponent)).astype(NUMPY_DTYPE[value.type.dtype]).reshape(shape))


def mixed(counter: Array) -> Array:
    """SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = counter * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def recorded() -> dict[Case, str]:
    """The file's digests by case; KeyError for a case that the file lacks."""
    document = json.loads(FILE.read_text())
    if document["order"] != "v1":
        raise ValueError(f"'{FILE}' is expected to hold the digests of order v1, got {document['order']}.")
    return {case: document["digests"][case.row][case.column] for case in CASES}


def write() -> None:
    """Writes the file, a line for each graph, direction and row length."""
    table: dict[str, dict[str, str]] = {}
    for case in CASES:
        table.setdefault(case.row, {})[case.column] = digest(case)
    lines = ",\n".join(f"  {json.dumps(row)}: {json.dumps(found)}" for row, found in table.items())
    write_all({FILE: f'{{"order": "v1", "digests": {{\n{lines}\n}}}}\n'.encode()})


def main() -> int:
    """Compares every case with the file, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file anew")
    if parser.parse_args().write:
        write()
        return 0
    changed = [str(case) for case, before in recorded().items() if digest(case) != before]
    print("\n".join([*changed, f"{len(changed)} of {len(CASES)} cases differ from {FILE.name}"]))
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
