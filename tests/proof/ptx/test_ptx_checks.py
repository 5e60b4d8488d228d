"""A kernel that is wrong in one place passes the executor without its finding if these fail."""

import re

import pytest

from lngen.compiler.emit import emit
from lngen.compiler.headers import bundled
from lngen.compiler.problem import Schedule
from lngen.compiler.toolchain import compile_ptx
from lngen.proof.check.inputs import random_inputs
from lngen.proof.ptx import Outcome, run_plan
from plans import plan_of
from ptx_source import judge
from schedules import unaligned

pytest.importorskip("cupy")

BLOCK = "layernorm.fwd:d=4096,dtype=bf16", Schedule("registers", 128, 1, 8)
GROUPS = "layernorm.fwd:d=1024,dtype=bf16", Schedule("registers", 64, 4, 8)
BACKWARD = "layernorm.bwd:d=1000,dtype=f32", Schedule("registers", 64, 4, 4)
ODD = "rmsnorm.fwd:d=1000,dtype=bf16", Schedule("registers", 32, 4, 8)


def changed(
    which: tuple[str, Schedule], *edits: tuple[str, str], rows: int = 5, count: int = 1, **options: object
) -> Outcome:
    """What the plan's CUDA does after the edits, each of which has to apply ``count`` times at most."""
    plan = plan_of(*which)
    source = bundled(emit(plan))
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new, count)
    return run_plan(plan, random_inputs(plan.spec, rows), source=source, **options)  # type: ignore[arg-type]


# Threads without a vector read what lies behind the last one, and store there.
READ_BEYOND = ("if (Row::holds(v, j)) {\n            const bool", "if (true) {\n            const bool")
STORED_BEYOND = ("if (Row::holds(v, j)) {\n            T* to", "if (true) {\n            T* to")


BEGIN = "\n    using Row ="  # of a kernel
NAMED = 'asm volatile("bar.sync %0, %1;" :: "r"(Row::group() + 1), "n"(Row::THREADS) : "memory");'
MANY = ('"n"(Row::THREADS)', '"n"(Row::THREADS * Row::ROWS * 2)')
WORD = ("blockIdx.x", "(blockIdx.x / 2)")  # two blocks write it
NO_BARRIER = ("__syncthreads();", ";")
RAGGED = "layernorm.fwd:d=1001,dtype=bf16", unaligned(32, 2, 1, 2, grid=2)
FILL = "for (int i = 0; i < 8; ++i) held[i] = i;"
LOCAL = (
    f"    int held[8];\n    {FILL}\n    held[rows_ % 8] = 1;\n    if (held[(threadIdx.x + rows_) % 8] < 0) return;\n"
)
Defect = tuple[tuple[str, Schedule], tuple[tuple[str, str], ...], dict[str, object], str]
DEFECTS: dict[str, Defect] = {
    "no named barrier": (GROUPS, ((NAMED, ";"),), {}, "shared-race"),
    "a named barrier of another group": (GROUPS, (('"r"(Row::group() + 1)', '"r"(1)'),), {},
     "divergent-barrier|shared-race"),
    "no block barrier": (BLOCK, (NO_BARRIER,), {}, "shared-race: writes without a barrier between"),
    "one buffer instead of two in turn": (BLOCK, (("turn ^= 1;", ""),), {}, "shared-race"),
    "gap between rows": (ODD, (READ_BEYOND,), {"strides": {"x": 2000}}, "out-of-bounds: between the rows of 'x'"),
    "past the end": (ODD, (READ_BEYOND,), {}, "out-of-bounds: 'gamma', which has 2000 bytes"),
    "store past the end": (ODD, (READ_BEYOND, STORED_BEYOND), {}, "out-of-bounds: write.*'y'"),
    "unwritten shared memory": (BLOCK, (("parts[n][Row::thread()] = part[n];", ""),), {},
     "uninitialised: shared memory"),
    "unwritten workspace": (BACKWARD, (("write<Path, UNIT>(partial + start + unit * UNIT, sum.items);", ""),), {},
     "uninitialised: _partials_'"),
    "one word of two blocks": (ODD, (WORD,), {"rows": 16, "count": 9}, "global-race"),
    "in another order": (ODD, (WORD,), {"rows": 16, "count": 9, "order": 3}, "global-race"),
    "skipped barrier": (BLOCK, (("__syncthreads();", "{ if (threadIdx.x >= 32) __syncthreads(); }"),), {},
     "divergent-barrier"),
    "barrier of threads that have ended": (BLOCK, ((BEGIN, f"\n    if (threadIdx.x >= 96) return;{BEGIN}"),), {},
     "divergent-barrier: 96 of the 128 threads"),
    "shuffle with lanes that have ended": (ODD, ((BEGIN, f"\n    if (threadIdx.x % 32 == 5) return;{BEGIN}"),), {},
     "inactive-shuffle: threads 5 of the warp, which have ended"),
    "barrier of too many": (GROUPS, (MANY,), {}, "deadlock: waits for 512"),
    "results behind a deadlock": (GROUPS, (MANY,), {}, "never-written"),
    "no end": (BACKWARD, (("block_row += STEP;", "block_row += 0 * STEP;"),), {"most": 1000},
     "deadlock: does not end: 1000 segments"),
    "an access wider than the alignment": (BLOCK, (), {"offset": 1}, "=misaligned: 16 bytes at 'x'"),
    "rows that are not aligned": (BLOCK, (), {"strides": {"y": 4097}}, "=misaligned"),
    "an output that is not written": (BLOCK, (("if (stream_.has_row()) store<Row, PlainStore>",
     "if (rows_ < 0) store<Row, PlainStore>"),), {}, "=never-written: 'y.0, 0.'.*20479 others"),
    # Rows of an odd number of bf16: elements of threads side by side may share four bytes.
    "neighbours in a word": (RAGGED, (("+ run + i % RUN;", "+ i;"),), {}, "shared-race"),
    "local memory": (BLOCK, ((BEGIN, LOCAL + BEGIN),), {}, ""),
    "unwritten local memory": (BLOCK, ((BEGIN, LOCAL.replace(FILL, "") + BEGIN),), {}, "uninitialised: local memory"),
    "past local memory": (BLOCK, ((BEGIN, LOCAL.replace("rows_) % 8", "rows_) % 8 + 8 * rows_") + BEGIN),), {},
     "out-of-bounds: local memory"),
    **{f"none in {which[0]}": (which, (), {}, "") for which in (BLOCK, GROUPS, BACKWARD, ODD, RAGGED)},
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_a_finding(name: str) -> None:
    which, edits, options, expected = DEFECTS[name]
    judge(changed(which, *edits, **options), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(3))
def test_every_barrier_of_the_column_fold_is_needed(number: int) -> None:
    source = bundled(emit(plan_of(*BACKWARD)))
    start = source.index('extern "C" __global__')
    places = [m.start() for m in re.finditer(r"__syncthreads\(\);", source) if m.start() > start]
    at = places[number]
    plan = plan_of(*BACKWARD)
    text = source[:at] + ";" + source[at + len("__syncthreads();") :]
    found = run_plan(plan, random_inputs(plan.spec, 5), source=text).findings
    assert "shared-race" in {f.kind for f in found}


def test_bytes_of_a_load_that_are_thrown_away_need_not_be_written() -> None:
    """NVRTC makes one load of three, and says so; the fourth number lies past the end of a row."""
    plan = plan_of("layernorm.bwd:d=31,dtype=f32", Schedule("cp_async", 8, 64, 1, stages=2))
    assert run_plan(plan, random_inputs(plan.spec, 5)).findings == ()


@pytest.mark.parametrize("writes", [r"fma\.rn\.f32[^;]*;", r"setp\.[^;]*;"])
def test_a_register_that_nothing_wrote(writes: str) -> None:
    """One that holds a number, and a predicate."""
    plan = plan_of(*BLOCK)
    text = re.sub(writes, "", compile_ptx(emit(plan), "sm_90"), count=1)
    found = run_plan(plan, random_inputs(plan.spec, 2), ptx=text).findings
    assert {f.kind for f in found} == {"uninitialised"}
    assert re.search(r"register %\w+ is used, but nothing wrote it", str(found[0]))


def test_the_segments_that_a_batch_runs_are_counted_and_bounded() -> None:
    """A bound of just what the kernels take is enough; one less ends the run."""
    plan = plan_of(*BACKWARD)
    inputs = random_inputs(plan.spec, 20)
    took = max(run_plan(plan, inputs).traffic.segments.values())
    assert run_plan(plan, inputs, most=took).findings == ()
    assert [f.kind for f in run_plan(plan, inputs, most=took - 1, stop=True).findings] == ["deadlock"]


def test_stop_ends_at_the_first_finding() -> None:
    assert len(changed(BLOCK, NO_BARRIER, offset=1).findings) > 1
    assert len(changed(BLOCK, NO_BARRIER, offset=1, stop=True).findings) == 1


def test_what_a_finding_names() -> None:
    """Its place, lines, instruction and equation."""
    race = next(f for f in changed(BLOCK, NO_BARRIER).findings if f.kind == "shared-race")
    assert min(race.cuda_line, race.ptx_line) > 0
    assert race.instruction.startswith("ld.shared")
    assert re.search(r"thread \d+ of its block", str(race))
    past = ("rstd_ptr_[stream_.row] = rstd;", "rstd_ptr_[stream_.row + rows_] = rstd;")
    text = str(changed(BLOCK, past).findings[0])
    assert re.search(r"'rstd'.*CUDA line \d+, equation %rstd : f32\[M\] = div", text, re.DOTALL)
    found = [f for f in changed(ODD, READ_BEYOND, STORED_BEYOND).findings if f.kind == "out-of-bounds"]
    assert {f.equation.split()[0] for f in found} == {"%x32", "%gamma32", "%y"}
    assert all(f.address > 0 and f.block >= 0 and f.thread >= 0 for f in found)
