"""Calls of norms as data: kernels, where every array of a call lies, and what it gives: bits, or a refusal.

Every launcher of lngen takes the same calls (launchers.py), on memory of the host, of a fake GPU or of a real one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bits import spec_of
from fake_arrays import NUMPY
from lngen.compiler.contract import call as description
from lngen.compiler.interpret import interpret
from lngen.compiler.ir.numerics import Array
from lngen.compiler.spec import Spec
from lngen.launch.signature import Signature, contiguous
from lngen.packs.build import build
from lngen.proof.check.inputs import POISON, mismatches, random_inputs

# Refused for layouts that the interpreter takes.
ANY_LAYOUT = ("row", "columns", "within columns", "vector", "distance", "cut")
ALIGNED = 256  # bytes, of which every memory begins at a multiple
BEHIND = 64  # bytes behind the last array of a memory, which no kernel may write to


class Place(NamedTuple):
    """A memory by its name, the first element of an array in it, and strides in elements; () for a contiguous array."""

    memory: str
    first: int = 0
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call of the kernels of a spec.

    lead      the dimensions that count rows
    at        where arrays lie, by name; any other is contiguous, in memory of its own. A result that is named here
              is given, others are new arrays where a launcher makes them
    eps       of a call that takes one
    unlike    arrays of another dtype or shape than the spec's, by name
    absent    inputs that are None
    refused   why it is refused, a key of ``launchers.REFUSED``; "" if the results have the interpreter's bits
    lost      inputs that a result is written over
    narrow    addresses or distances that suit no kernel of a pack, which refuses
    """

    spec: str
    lead: tuple[int, ...] = (3,)
    at: Mapping[str, Place] = field(default_factory=dict)
    eps: Any = None
    unlike: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    refused: str = ""
    lost: tuple[str, ...] = ()
    narrow: bool = False

    @property
    def rows(self) -> int:
        return math.prod(self.lead)


class Laid(NamedTuple):
    """An array of a call; ``first`` and ``strides`` in elements."""

    memory: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return NUMPY[self.dtype].itemsize

    @property
    def reach(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low, high = (self.first + sum(pick(0, s) for s in steps) for pick in (min, max))
        return low * self.size, (high + 1) * self.size


def signature(spec: Spec) -> Signature:
    """What a caller of a spec passes and gets."""
    return Signature.of(description(spec, spec.graph()))


class Memory:
    """The memories of a call with their bytes before it, its arrays in them, and the results that it has to give."""

    def __init__(self, call: Call, seed: int = 0) -> None:
        self.call, self.spec, self.seed = call, spec_of(call.spec), seed
        self.signature = signature(self.spec)
        self.laid: dict[str, Laid] = {}
        for t in (*self.signature.inputs, *self.signature.outputs):
            dtype, shape = call.unlike.get(t.name, (t.dtype, t.shape(call.lead, self.spec.d)))
            memory, first, strides = call.at.get(t.name, Place(t.name))
            strides = strides or (contiguous(shape) if t.name in call.unlike else t.strides(call.lead, self.spec.d))
            self.laid[t.name] = Laid(memory, dtype, shape, strides, first)
        self.base: dict[str, int] = {}  # of each memory, the bytes before its element 0
        self.before = {name: self._empty(name) for name in {a.memory for a in self.laid.values()}}
        self.inputs, self.wanted = dict[str, Array](), dict[str, Array]()
        if call.refused in ("", *ANY_LAYOUT):
            self._fill()

    def _empty(self, name: str) -> Array:
        reaches = [a.reach for a in self.laid.values() if a.memory == name]
        self.base[name] = -(min(0, *(low for low, _ in reaches)) // ALIGNED * ALIGNED)
        return np.full(self.base[name] + max(high for _, high in reaches) + BEHIND, POISON, np.uint8)

    def _fill(self) -> None:
        """Draws the inputs. Where some share memory, all have the numbers that end up there."""
        drawn = random_inputs(self.spec, self.call.rows, self.seed, eps=self.call.eps)
        for t in self.signature.inputs:
            self.view(t.name)[...] = drawn[t.name].reshape(self.laid[t.name].shape)
        graph = self.spec.graph()
        flat = {v.name: drawn[v.name].shape for v in graph.tensors}
        self.inputs = {n: self.view(n).reshape(flat[n]).copy() for n in flat}
        by_value = {v.name: drawn[v.name] for v in graph.by_value}
        wanted = interpret(graph, self.inputs | by_value)
        self.wanted = {t.name: wanted[t.name].reshape(self.laid[t.name].shape) for t in self.signature.outputs}
        self.wanted |= {name: self.wanted[first] for name, first in self.signature.same.items()}

    @property
    def given(self) -> list[str]:
        """The results that lie where the call says."""
        return [t.name for t in self.signature.outputs if t.name in self.call.at]

    def place(self, name: str) -> tuple[str, int]:
        """The memory of an array, and the byte in it where its element 0 lies."""
        laid = self.laid[name]
        return laid.memory, self.base[laid.memory] + laid.first * laid.size

    def view(self, name: str, bytes_: Array | None = None) -> Array:
        """An array in the bytes of its memory, by default in those before the call."""
        laid, (memory, at) = self.laid[name], self.place(name)
        over = self.before[memory] if bytes_ is None else bytes_
        strides = [s * laid.size for s in laid.strides]
        return np.ndarray(laid.shape, NUMPY[laid.dtype], over, at if over.size else 0, strides)

    def wrong(self, results: Mapping[str, Array], after: Callable[[str], Array]) -> list[str]:
        """Results with other bits than the interpreter's, and memories that were written to beside the results.

        ``after``: the bytes of a memory after the call.
        """
        wanted = {name: self.wanted[name] for name in results}
        found = mismatches({n: np.ascontiguousarray(a) for n, a in results.items()}, wanted)
        for memory, before in self.before.items():
            here, there = before.copy(), after(memory).copy()
            for name in results:
                if name in self.laid and self.laid[name].memory == memory:
                    for bytes_ in (here, there):
                        self.view(name, bytes_)[...] = 0
            found += [f"{memory}: written beside the results"] * bool((here != there).any())
        return found


# ---- the table ----

SPECS = {
    "f32": "layernorm:d=64,dtype=f32", "bf16": "layernorm:d=96,dtype=bf16", "odd": "layernorm:d=77,dtype=f16",
    "f64": "layernorm:d=33,dtype=f64", "double": "rmsnorm:d=33,dtype=f64,eps=run,save=none",
    "run": "layernorm:d=64,dtype=bf16,eps=run,save=none",
    "heads": "rmsnorm:d=64,dtype=bf16,strides=2", "max": "l2norm:d=40,dtype=f32,guard=max,eps=run",
    "soft": "softmax:d=64,dtype=f32", "gated": "gated_rmsnorm:d=64,dtype=bf16", "added": "add_rmsnorm:d=64,dtype=f32",
    "blocks": "block_scaled:d=512,dtype=bf16", "class": "class_loss:d=96,dtype=bf16",
    "quantised": "quantised:d=512,dtype=bf16", "scaled": "add_rmsnorm:d=64,dtype=f32,quant=int8,scales=tensor,y=yes",
    "columns": "rmsnorm:d=512,dtype=bf16,quant=e5m2,scales=block,block_size=32,scale_layout=columns,save=none",
    "dx": "rmsnorm:d=256,dtype=bf16", "dx_blocks": "layernorm:d=256,dtype=f16",
    "index": "cross_entropy:d=64,dtype=bf16,target=index,reduction=mean",
    "factor": "cross_entropy:d=64,target=index,class_weight=yes,vocabulary=none",
    "of_heads": "qk_rmsnorm:d=160,dtype=bf16,head=32,k_heads=2",
}  # fmt: skip
NO_BACKWARD = ("blocks", "class", "factor", "quantised", "scaled", "columns")
OF_BACKWARD = {"added": ",accumulate=gamma", "dx": ",dx_quant=e5m2", "dx_blocks": ",dx_quant=e4m3,dx_scales=block"}


def spec(name: str, way: str = "fwd") -> str:
    """The text of a spec."""
    graph, _, keys = SPECS[name].partition(":")
    return f"{graph}.{way}:{keys}{OF_BACKWARD.get(name, '') * (way == 'bwd')}"


ALL = [spec(name, way) for name in SPECS for way in ("fwd", "bwd")[: 1 + (name not in NO_BACKWARD)]]

ONE_LAUNCH = "layernorm.bwd:d=128,dtype=bf16"
CLUSTERS = "layernorm.fwd:d=16384,dtype=bf16"
CLAIMED = "layernorm.fwd:d=1024,dtype=bf16"
BULK = "layernorm.fwd:d=1000,dtype=bf16"
SCHEDULES = {  # of GPUs of 9.0, for launches that default schedules of few rows lack
    ONE_LAUNCH: "form=registers,threads=16,rows_per_block=64,vec=8,prefetch=yes,single_launch=yes",
    CLUSTERS: "form=tma,threads=256,rows_per_block=1,vec=8,stages=2,cluster=2,grid=4,tma_store=yes",
    CLAIMED: "form=tma,threads=128,rows_per_block=1,vec=8,stages=2,grid=3,dynamic=yes,cached_weights=yes",
    BULK: "form=tma,threads=64,rows_per_block=2,vec=8,stages=2,grid=64,tma_store=yes",
}


def pack(folder: Path, arch: str, emit: str, rows: str = "1") -> Path:
    """A pack of the table's specs, with a C library."""
    for text, schedule in SCHEDULES.items() if arch == "sm_90" else ():
        build([text], folder, arch=arch, schedule=schedule, emit=emit)
    forward = ONE_LAUNCH.replace("bwd", "fwd")
    build([*map(spec_of, ALL), forward], folder, arch=arch, rows=rows, emit=f"{emit},c")
    return folder


HEADS, TOKENS = 3, 2
PACKED = (3 * HEADS * 64, 64, 1)  # strides of q, k and v in a projection


def packed(memory: str, which: int = 0, more: int = 0) -> Place:
    """q, k or v of one projection; ``more`` elements further on."""
    return Place(memory, which * HEADS * 64 + more, PACKED)


def rows_apart(d: int, gap: int, *names: str) -> dict[str, Place]:
    """Rows of so many arrays with a gap behind each."""
    return {name: Place(name, 0, (d + gap, 1)) for name in names}


def over(d: int, first: int, step: int = 0) -> dict[str, Place]:
    """y in the memory of x, so many elements further on, its rows at another distance."""
    return {"x": Place("x"), "y": Place("x", first, (step or d, 1))}


def of_every_spec(*leads: tuple[int, ...]) -> Iterator[tuple[str, Call]]:
    """By default no rows, one, and more than one dimension of them; new results."""
    for text in ALL:
        eps = 0.25 if "eps=run" in text else None
        for lead in leads or ((0,), (1,), (2, 3)):
            sums = dict.fromkeys(("dgamma", "dgamma_in"), Place("sums")) if "accumulate" in text else {}
            yield f"{text}, rows {lead}", Call(text, lead, sums, eps)


def layouts() -> Iterator[tuple[str, Call]]:
    forward, backward, bf16 = spec("f32"), spec("f32", "bwd"), spec("bf16")
    yield "a vector", Call(forward, ())
    yield "rows apart", Call(forward, at=rows_apart(64, 4, "x", "y"))
    yield "rows apart, bf16", Call(bf16, at=rows_apart(96, 8, "x", "y"))
    yield "rows apart, backward", Call(backward, at=rows_apart(64, 4, "x", "dy", "dx"))
    yield "rows apart, odd D", Call(spec("odd"), at=rows_apart(77, 2, "x", "y"))
    yield "rows backwards", Call(forward, at={"x": Place("x", 0, (-64, 1)), "y": Place("y", 0, (-68, 1))})
    yield "one row for all", Call(forward, at={"x": Place("x", 0, (0, 1))})
    yield "statistics that are given", Call(forward, at={"mean": Place("mean", 1), "rstd": Place("rstd", 3)})
    yield "gradients that are given", Call(backward, at={"dgamma": Place("dgamma", 4), "dbeta": Place("both", 8)})
    for name in "yh":
        yield f"{name} apart", Call(spec("added"), at=rows_apart(64, 64, name))
    yield "inputs in one memory", Call(spec("added"), at={"x": Place("a"), "residual": Place("a")})
    yield "gamma is beta", Call(forward, at={"gamma": Place("w"), "beta": Place("w")})
    yield "halves of wider rows", Call(forward, at={"x": Place("a", 0, (128, 1)), "y": Place("a", 64, (128, 1))})
    yield "end to end", Call(forward, at=over(64, 3 * 64))
    yield "end to end, before", Call(forward, at=over(64, -3 * 64))
    yield "between the rows", Call(forward, at={"x": Place("a", 0, (-128, 1)), "y": Place("a", 64, (-128, 1))})
    yield "in place", Call(forward, at=over(64, 0), lost=("x",))
    yield "in place, rows apart", Call(bf16, at={n: Place("a", 0, (104, 1)) for n in "xy"}, lost=("x",))
    yield "dx over dy", Call(backward, at={n: Place("a") for n in ("dy", "dx")}, lost=("dy",))
    yield "dx over x", Call(backward, at={n: Place("a") for n in ("x", "dx")}, lost=("x",))
    yield "h over a residual", Call(spec("added"), at={n: Place("a") for n in ("residual", "h")}, lost=("residual",))
    yield "over a residual", Call(spec("added"), at={n: Place("a") for n in ("residual", "y")}, lost=("residual",))
    yield "many rows", Call(bf16, (50,), rows_apart(96, 8, "x", "y"))
    for first in (1, 2, 4):
        at = {"x": Place("x", first), "y": Place("y", 8 - first)}
        yield f"{first} elements past an aligned address", Call(bf16, at=at, narrow=True)
    for gap in (1, 2, 4):
        yield f"rows with a gap of {gap}", Call(bf16, at=rows_apart(96, gap, "x", "y"), narrow=True)
    yield "gamma at an odd address", Call(bf16, at={"gamma": Place("gamma", 1)}, narrow=True)
    yield "dy at an odd address", Call(spec("bf16", "bwd"), at={"dy": Place("dy", 1)}, narrow=True)


def columns() -> Iterator[tuple[str, Call]]:
    """Scales that are stored by columns, in an array that is given, of which what is behind the rows stays."""
    forward = spec("columns")
    for lead, steps in {(1,): (4, 12), (4,): (4, 8), (6,): (8, 20), (2, 3): (8, 12), (0,): (4,)}.items():
        for step in steps:
            at = {"q_scale": Place("q_scale", 4, (step, *contiguous(lead)))}
            yield f"columns {step} apart, rows {lead}", Call(forward, lead, at)
    for lead, strides, why in (
        ((6,), (6, 1), "columns"), ((6,), (4, 1), "columns over columns"), ((6,), (0, 1), "columns over columns"),
        ((6,), (-8, 1), "columns"), ((2, 3), (10, 3, 1), "columns"), ((1,), (1, 1), "columns"),
        ((6,), (16, 2), "within columns"), ((2, 3), (32, 8, 1), "within columns"), ((6,), (1, 16), "within columns"),
    ):  # fmt: skip
        yield f"columns of {strides}", Call(forward, lead, {"q_scale": Place("q", 0, strides)}, refused=why)
    at = {"x": Place("a"), "q_scale": Place("a", 4, (8, 1))}
    yield "columns over x", Call(forward, (6,), at, refused="overlap")


def heads() -> Iterator[tuple[str, Call]]:
    """Rows at two distances."""
    forward, backward, lead = spec("heads"), spec("heads", "bwd"), (TOKENS, HEADS)
    yield "q of a projection", Call(forward, lead, {"x": packed("qkv")})
    yield "q of a projection to k of another", Call(forward, lead, {"x": packed("qkv"), "y": packed("out", 1)})
    yield "q in place", Call(forward, lead, {n: packed("qkv") for n in "xy"}, lost=("x",))
    yield "q to k", Call(forward, lead, {"x": packed("qkv"), "y": packed("qkv", 1)})
    yield "gradients of q", Call(backward, lead, {n: packed(n, k) for k, n in enumerate(("x", "dy", "dx"))})
    yield "dx over dy of q", Call(backward, lead, {n: packed("a", 2) for n in ("dy", "dx")}, lost=("dy",))
    yield "heads first", Call(forward, lead, {"x": Place("x", 0, (64, 64 * TOKENS, 1))})
    yield "the same rows for each token", Call(forward, lead, {"x": Place("x", 0, (0, 64, 1))})
    yield "heads backwards", Call(forward, lead, {"x": Place("x", 0, (512, -64, 1))})
    at = {"x": Place("x", 0, (512, 256, 64, 1))}
    yield "tokens of two dimensions", Call(forward, (2, 2, 2), {**at, "y": Place("y", 0, (1024, 512, 72, 1))})
    yield "no tokens", Call(forward, (0, HEADS), {"x": packed("qkv")})
    for more in (8, -8, 64, HEADS * 64 - 8, PACKED[0]):
        at = {"x": packed("qkv"), "y": packed("qkv", 0, more)}
        yield f"q to {more} elements further on", Call(forward, lead, at, refused="overlap")
    yield "rows that interleave", Call(forward, lead, {"y": Place("y", 0, (56, 64, 1))}, refused="own rows")
    at = {"x": Place("x", 0, (1024, 384, 192, 1)), "y": Place("y", 0, (1024, 512, 72, 1))}
    yield "distances that change elsewhere", Call(forward, (2, 2, 2), at, refused="cut")


def scheduled() -> Iterator[tuple[str, Call]]:
    """Launches that count in their workspace, or of clusters; and copies in bulk, or what takes their place."""
    yield "one launch", Call(ONE_LAUNCH, (70,))
    yield "one launch, no rows", Call(ONE_LAUNCH, (0,))
    yield "clusters", Call(CLUSTERS, (2,))
    yield "claimed rows", Call(CLAIMED, (8,))
    for first, gap in ((0, 0), (0, 8), (8, 16), (0, 1), (1, 3), (4, 4), (2, 0)):
        at = {"x": Place("x", first, (1000 + gap, 1))}
        yield f"bulk copies from element {first}, gaps of {gap}", Call(BULK, (5,), at, narrow=(first | gap) % 8 > 0)


def numbers() -> Iterator[tuple[str, Call]]:
    """eps of a call."""
    for eps in (1e-6, 0.0, -1e-3, 2, np.int64(2), np.float32(0.5)):
        yield f"eps {eps!r}", Call(spec("max"), eps=eps)
        yield f"eps {eps!r}, backward", Call(spec("max", "bwd"), eps=eps)
    for eps in (math.nan, math.inf, -math.inf):
        yield f"eps {eps}", Call(spec("run"), eps=eps, refused="eps")
    for eps in ("1e-6", True, 10**400):
        yield f"eps {str(eps)[:9]}", Call(spec("run"), eps=eps, refused="no number")
    yield "no eps", Call(spec("run"), refused="eps is missing")
    yield "eps that is built in", Call(spec("f32"), eps=1e-6, refused="eps is built in")


def overlaps() -> Iterator[tuple[str, Call]]:
    """Every way to share memory that is not exactly the place of an input."""
    forward, backward, whole = spec("f32"), spec("f32", "bwd"), 3 * 64
    for first in (4, -4, 64, -64, whole - 4, 4 - whole):
        yield f"y {first} elements behind x", Call(forward, at=over(64, first), refused="overlap")
    for first in (0, 4 * 64 - 64, 256):
        at = over(64, first, -64)
        yield f"y backwards, {first} elements behind x", Call(forward, at=at, refused="overlap")
    yield "y in rows twice as far apart", Call(forward, at=over(64, 0, 128), refused="overlap")
    yield (
        "y that reaches into rows of x",
        Call(forward, at={"x": Place("a", 0, (128, 1)), "y": Place("a", 60, (128, 1))}, refused="overlap"),
    )
    for name, first in (("gamma", 0), ("gamma", 60), ("beta", 4 - 64), ("gamma", whole - 4)):
        at = {name: Place("a", first), "y": Place("a")}
        yield f"y over {name}, from {first}", Call(forward, at=at, refused="overlap")
    yield "mean over x", Call(forward, at={"x": Place("a"), "mean": Place("a")}, refused="overlap")
    yield "mean is rstd", Call(forward, at={"mean": Place("a"), "rstd": Place("a")}, refused="results")
    yield "y over mean", Call(forward, at={"mean": Place("a", 8), "y": Place("a")}, refused="results")
    yield (
        "y over the last block scales",
        Call(spec("blocks"), at={"scale": Place("a"), "y": Place("a", 64)}, refused="results"),
    )
    yield "dgamma over gamma", Call(backward, at={n: Place("a") for n in ("gamma", "dgamma")}, refused="overlap")
    yield "dx over dgamma", Call(backward, at={n: Place("a") for n in ("dx", "dgamma")}, refused="results")
    yield "dx over dy, a row further on", Call(backward, at={"dy": Place("a"), "dx": Place("a", 64)}, refused="overlap")
    yield "y over rows of one place", Call(forward, at={"y": Place("y", 0, (0, 1))}, refused="own rows")
    yield "rows that overlap", Call(forward, at={"y": Place("y", 0, (60, 1))}, refused="own rows")
    yield "rows that overlap backwards", Call(forward, at={"y": Place("y", 0, (-60, 1))}, refused="own rows")


def arrays() -> Iterator[tuple[str, Call]]:
    """Arrays that no kernel takes."""
    forward, backward = spec("f32"), spec("f32", "bwd")
    yield "no gamma", Call(forward, absent=("gamma",), refused="missing")
    for name, way, dtype, shape in (
        ("x", forward, "f64", (3, 64)), ("gamma", forward, "f16", (64,)), ("y", forward, "bf16", (3, 64)),
        ("mean", forward, "f64", (3,)), ("dy", backward, "f16", (3, 64)),
    ):  # fmt: skip
        at = {name: Place(name)}
        yield f"{name} of {dtype}", Call(way, at=at, unlike={name: (dtype, shape)}, refused="dtype")
    for name, way, shape in (
        ("gamma", forward, (65,)), ("y", forward, (2, 64)), ("mean", forward, (2,)), ("dy", backward, (4, 64)),
        ("y", forward, (64,)), ("dgamma", backward, (32,)),
    ):  # fmt: skip
        at = {name: Place(name)}
        yield f"{name} of {shape}", Call(way, at=at, unlike={name: ("f32", shape)}, refused="shape")
    yield "another D", Call(forward, unlike={"x": ("f32", (3, 65))}, refused="D")
    yield "columns apart", Call(forward, at={"x": Place("x", 0, (128, 2))}, refused="row")
    yield "results whose columns are apart", Call(forward, at={"y": Place("y", 0, (-200, 2))}, refused="row")
    yield "results whose columns are first", Call(forward, at={"y": Place("y", 0, (1, 3))}, refused="row")
    yield "columns first", Call(forward, at={"x": Place("x", 0, (1, 3))}, refused="row")
    yield "gamma apart", Call(forward, at={"gamma": Place("gamma", 0, (2,))}, refused="vector")
    yield "statistics apart", Call(forward, at={"mean": Place("mean", 0, (2,))}, refused="vector")
    yield "rows at two distances", Call(forward, (2, 3), {"x": Place("x", 0, (1024, 64, 1))}, refused="distance")


PARTS = of_every_spec, layouts, columns, heads, scheduled, numbers, overlaps, arrays
TABLE = {name: call for part in PARTS for name, call in part()}

# Every result is given, and so can be looked at after a graph has run.
GIVEN = {
    "forward": Call(spec("f32"), at={n: Place(n) for n in ("y", "mean", "rstd")}),
    "forward, y alone": Call(spec("f32"), at={"y": Place("y")}),
    "backward": Call(spec("bf16", "bwd"), at={n: Place(n) for n in ("dx", "dgamma", "dbeta")}),
    "one launch": Call(ONE_LAUNCH, (70,), {n: Place(n) for n in ("dx", "dgamma", "dbeta")}),
    "claimed rows": Call(CLAIMED, (8,), {n: Place(n) for n in ("y", "mean", "rstd")}),
    "eps": Call(spec("max"), at={n: Place(n) for n in ("y", "rnorm")}, eps=0.5),
}
THREADED = GIVEN | {"new results": Call(spec("f32", "bwd"), (5,)), "several results": Call(spec("added"), (5,))}
