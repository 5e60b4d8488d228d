"""If these fail, a sum over the rows of a set has another order than its attributes say, or a kernel adds in another.

The order is written here once more, row by row in Python, from ``ir.sums.set_sum``'s words; nothing is shared with it.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from head_bits import ARCHES
from lngen.compiler.compile import Compilation
from lngen.compiler.interpret import interpret
from lngen.compiler.ir.sums import set_sum
from lngen.compiler.spec import parse_spec
from lngen.proof.check.inputs import mismatches
from lngen.proof.check.spec_checks import others
from lngen.proof.ptx import run_plan
from sampling import grid
from set_cases import set_inputs

Array = Any
ZERO = np.float32(-0.0)  # adds nothing to any number


def folded(parts: list[Array]) -> Array:
    """The upper half onto the lower half, until one is left."""
    while len(parts) > 1:
        half = 1
        while 2 * half < len(parts):
            half *= 2
        parts = [p + parts[half + n] if half + n < len(parts) else p for n, p in enumerate(parts[:half])]
    return parts[0]


def model(x: Array, groups: int, stretch: int, least: int, long: int, interleave: int) -> Array:
    """The sum of one set, by the order's words."""
    rows, below = stretch, long
    while rows > least and len(x) < below:
        rows, below = rows // 2, below // 4
    rows = (rows + groups - 1) // groups * groups
    partials = []
    for first in range(0, len(x), rows):
        sums = [np.full(x.shape[1], ZERO)] * groups
        for i, row in enumerate(x[first : first + rows]):
            sums[i % groups] = sums[i % groups] + row
        partials.append(folded(sums))
    strands: list[Array] = [np.full(x.shape[1], ZERO)] * (
        interleave if len(partials) >= 4 * interleave else interleave // 4
    )
    for n, partial in enumerate(partials):
        strands[n % len(strands)] = strands[n % len(strands)] + partial
    return folded(strands) if partials else np.zeros(x.shape[1], np.float32)


ORDERS = [(4, 64, 16, 4096, 16), (8, 64, 16, 4096, 16), (3, 64, 16, 4096, 16), (1, 64, 64, 4096, 16), (2, 4, 4, 64, 4)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_order_of_a_set(order: tuple[int, ...]) -> None:
    """At lengths on both sides of every change of the order."""
    groups, stretch, least, long, interleave = order
    for n in (0, 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 1023, 1024, 4095, 4096, 4200):
        x = np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)
        found = set_sum(x, groups=groups, stretch=stretch, least=least, long=long, interleave=interleave)
        assert found.tobytes() == model(x, *order).tobytes(), n


# ---- kernels ----

SIZES = ((1, 3), (3, 2), (17, 3), (40, 2), (100, 2), (1, 150))
FORMS = {  # of ada_layernorm.bwd:d=1024,dtype=bf16, whose groups are 8
    "registers": "form=registers,threads=128,rows_per_block=8,vec=8",
    "prefetch": "form=registers,threads=64,rows_per_block=8,vec=8,prefetch=yes",
    "tma": "form=tma,threads=128,rows_per_block=8,vec=8,stages=3",
    "early": "form=tma,threads=64,rows_per_block=8,vec=8,stages=4,row_in_registers=yes,early_release=yes",
    "stored": "form=tma,threads=128,rows_per_block=8,vec=8,stages=3,tma_store=yes",
    "cp_async": "form=cp_async,threads=128,rows_per_block=8,vec=8,stages=3",
    "multipass": "form=multipass,threads=128,rows_per_block=1,vec=8",
}
SPECS = (
    "ada_layernorm.bwd:d=64,dtype=f32",
    "ada_layernorm.bwd:d=96,dtype=bf16,gate=yes,residual=yes",
    "ada_layernorm.bwd:d=256,dtype=bf16,weight=f32,gamma=yes,beta=yes",
    "ada_layernorm.bwd:d=100,dtype=f16,stretch=32",
    "ada_rmsnorm.bwd:d=512,dtype=f16,shift=no",
    "ada_rmsnorm.bwd:d=33,dtype=f32,gamma=yes,residual=yes",
    "ada_rmsnorm.bwd:d=3072,dtype=bf16,weight=f32",
    "ada_layernorm.bwd:d=6144,dtype=bf16",
    "ada_layernorm.bwd:d=64,dtype=f64",
    "ada_layernorm.bwd:d=64,dtype=bf16,of=mean",  # gradients of sets that are zeros
    "ada_rmsnorm.bwd:d=256,dtype=bf16,gate=yes,of=h,wrt=scale+gate",
    "ada_rmsnorm.bwd:d=96,dtype=f32,gamma=yes,of=rstd,wrt=gamma+shift",
    "ada_layernorm.bwd:d=64,dtype=bf16,gamma=yes,beta=yes,wrt=gamma",
    "ada_layernorm.fwd:d=1152,dtype=bf16,gate=yes,residual=yes",
    "ada_rmsnorm.fwd:d=100,dtype=f16,weight=f32,gamma=yes",
    "ada_layernorm.fwd:d=20000,dtype=bf16",
    "ada_layernorm.fwd:d=128,dtype=bf16,quant=e4m3",
    "ada_layernorm.fwd:d=1536,dtype=bf16,casts=eager,gate=yes,residual=yes",
    "ada_layernorm.bwd:d=256,dtype=bf16,casts=eager,gate=yes,residual=yes",
    "ada_rmsnorm.bwd:d=96,dtype=f16,casts=norm,gamma=yes",
)


@cache
def compilation(text: str) -> Compilation:
    return Compilation(parse_spec(text))


def executed(text: str, schedule: Any, per_set: int, sets: int, arch: str = "sm_90", seed: int = 0) -> None:
    """The executor has the interpreter's bits, and finds nothing wrong."""
    found = compilation(text)
    kernels = found.changed(schedule) if isinstance(schedule, str) else found.kernels(schedule)
    inputs = set_inputs(found.spec, per_set, sets, seed)
    outcome = run_plan(kernels.plan, inputs, rows=per_set * sets, arch=arch, order=seed)
    what = (text, str(kernels.plan.schedule), per_set, sets, arch)
    assert not outcome.findings, (what, str(outcome.findings[0]))
    assert not mismatches(outcome.results, interpret(found.graph, inputs)), what


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_adds_in_the_order(form: str) -> None:
    """Sets of one row, shorter than a stretch, of several, and more sets than blocks."""
    for per_set, sets in SIZES if form in ("registers", "multipass") else SIZES[:-1]:
        executed("ada_layernorm.bwd:d=1024,dtype=bf16", FORMS[form], per_set, sets, seed=1)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("grid", [1, 5, 264])
def test_a_grid_decides_no_bit(grid: int) -> None:
    """A set of 65 stretches, which are added in 16 partial sums; a block has all of them, some, or one or none."""
    kept = "stages=2,cached_weights=yes,row_in_registers=yes,early_release=yes"
    schedule = f"form=tma,threads=64,rows_per_block=8,vec=8,grid={grid},{kept}"
    executed("ada_layernorm.bwd:d=1024,dtype=bf16,stretch=8", schedule, 515, 1)


WITH_THE_ROW = (
    ("ada_layernorm.fwd:d=1152,dtype=bf16", "form=registers,threads=64,rows_per_block=2,vec=8,cached_weights=yes"),
    ("ada_layernorm.fwd:d=512,dtype=bf16,gate=yes,residual=yes,gamma=yes",
     "form=tma,threads=32,rows_per_block=2,vec=8,stages=2,grid=3,cached_weights=yes,row_in_registers=yes"),
    ("ada_rmsnorm.fwd:d=256,dtype=f16,weight=f32",
     "form=tma,threads=32,rows_per_block=1,vec=8,stages=2,grid=2,cached_weights=yes,dynamic=yes"),
    ("ada_rmsnorm.bwd:d=256,dtype=f32,wrt=x",
     "form=cp_async,threads=32,rows_per_block=2,vec=4,stages=2,grid=2,cached_weights=yes"),
)  # fmt: skip


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("text", "schedule"), WITH_THE_ROW, ids=[text for text, _ in WITH_THE_ROW])
def test_cached_inputs_of_sets_are_read_with_the_row(text: str, schedule: str) -> None:
    """A kernel without sums of sets takes rows of any set, one after the other."""
    late = schedule.replace("cached_weights=yes", "cached_weights=no")
    texts = [compilation(text).changed(s).text for s in (schedule, late)]
    assert ["scale_row_" in found for found in texts] == [True, False]
    for per_set, sets in ((1, 7), (5, 3)):
        executed(text, schedule, per_set, sets, seed=per_set)


@pytest.mark.usefixtures("compiler")
@grid(("text", "arch"), product(SPECS, ARCHES), strength=1)
def test_default_schedules(text: str, arch: str) -> None:
    """Dtypes, options and lengths of rows, with the schedule that a call would have."""
    d = parse_spec(text).d
    for per_set, sets in ((5, 3), (70, 2)) if d > 4000 else ((1, 3), (5, 3), (300, 2)):
        executed(text, compilation(text).schedule(arch), per_set, sets, arch)


RANDOM = 300


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < 4 else pytest.mark.full) for n in range(RANDOM)])
def test_random_schedules(seed: int) -> None:
    """Any legal schedule of any of these specs, with any sets."""
    rng = np.random.default_rng(seed)
    text, arch = SPECS[seed % len(SPECS)], ARCHES[rng.integers(3)]
    listed = others(compilation(text), 12, arch) or [compilation(text).schedule(arch)]
    per_set, sets = int(rng.choice([1, 2, 7, 16, 33, 64, 130])), int(rng.integers(1, 4))
    executed(text, listed[rng.integers(len(listed))], per_set, sets, arch, seed)


# ---- what a sample's bits depend on ----


@pytest.mark.parametrize("text", [t for t in SPECS if ".bwd" in t and "f64" not in t and "gamma" not in t])
def test_the_bits_of_a_sample_are_its_own(text: str) -> None:
    """They are the same whatever samples are beside it, before it or behind it."""
    spec = parse_spec(text)
    graph, inputs = spec.graph(), set_inputs(spec, 37, 4)
    whole = interpret(graph, inputs)
    for first, end in ((0, 1), (1, 3), (2, 4)):
        part = {
            p.name: inputs[p.name][first * 37 : end * 37] if "M" in map(str, p.type.axes) else inputs[p.name][first:end]
            for p in graph.tensors
        }
        for name, found in interpret(graph, part).items():
            each = 37 if len(whole[name]) == 4 * 37 else 1
            assert found.tobytes() == whole[name][first * each : end * each].tobytes(), (name, first, end)


def test_a_stretch_of_ones_own_is_written_in_the_graph() -> None:
    """The key ``stretch`` replaces the rule, and is a part of the spec."""
    spec = parse_spec("ada_layernorm.bwd:d=1024,dtype=bf16,stretch=40")
    sums = [dict(e.attrs) for e in spec.graph().eqns if "stretch" in dict(e.attrs)]
    assert len(sums) == 2
    assert all(a["stretch"] == a["least"] == 40 for a in sums)
    assert parse_spec(str(spec)) == spec != replace(spec, stretch=None)
