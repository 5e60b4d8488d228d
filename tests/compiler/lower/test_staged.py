"""Rows staged and values held: if these fail, loads come late, values are computed again, or rows claimed wrongly."""

import re
from dataclasses import replace

import numpy as np
import pytest

from bits import spec_of
from lngen.compiler.devices import default_device
from lngen.compiler.emit import emit
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, M
from lngen.compiler.lower import Plan, lower
from lngen.compiler.lower.kept import MOST_KEPT
from lngen.compiler.problem import Schedule, check, problem
from lngen.compiler.schedule import candidates
from lngen.compiler.spec import make_spec, parse_spec
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import ScheduleError
from lngen.proof.ptx import parse
from plans import plan_of, run_checked
from schedules import multipass, registers, tma

pytest.importorskip("cupy")


@pytest.mark.parametrize("schedule", [tma(64, 8, 8, 2), registers(64, 8, 1)])
def test_partial_rows_stay_in_l2(schedule: Schedule) -> None:
    """Both column sums, and nothing else; where there are no policies they are stored plainly."""
    plan = lower(parse_spec("layernorm.bwd:d=1024,dtype=bf16"), schedule)
    rows = parse(compile_ptx(emit(plan), "sm_90")).entries[plan.kernels[0].name]
    stores = [i.opcode for i in rows.instructions if i.opcode.startswith("st.global")]
    stay = [o for o in stores if o == "st.global.L2::cache_hint.v4.u32"]
    assert len(stay) >= 2
    assert len(stay) < len(stores), "dx may leave"
    assert not any("cache_hint" in o for o in stores if o not in stay)
    policies = {i.opcode for i in rows.instructions if i.opcode.startswith("createpolicy")}
    assert policies == {"createpolicy.fractional.L2::evict_last.b64"}
    if schedule.form == "registers":
        assert "cache_hint" not in compile_ptx(emit(plan), "sm_75")


UNMOVED = "UnmovedLoad16>("
PRELOADED = {  # what is loaded before the first rows are requested, and after
    "layernorm.bwd:d=7168,dtype=bf16": (
        ("mean_next_ = load_scalar<UnmovedLoad4>(", UNMOVED + "gamma_cached_"),
        (),
    ),
    "layernorm.fwd:d=7168,dtype=bf16": ((UNMOVED + "gamma_cached_", UNMOVED + "beta_cached_"), ()),
    "layernorm.fwd:d=7168,dtype=f32": ((), (UNMOVED + "gamma_cached_", UNMOVED + "beta_cached_")),
    "layernorm.fwd:d=7168,dtype=bf16,weight=f32": ((), (UNMOVED + "gamma_cached_",)),
}
PRIME, LOOP = "stream_.prime(fill_stage_);", "while (stream_.next()) {"


def _source(text: str, schedule: Schedule) -> str:
    """The CUDA text of a staged kernel that keeps its weights, with the widest accesses."""
    spec = parse_spec(text)
    return emit(lower(spec, replace(schedule, cached_weights=True, vec=problem(spec.graph(), spec.d).run)))


@pytest.mark.parametrize("text", PRELOADED)
def test_what_is_needed_first_is_loaded_first(text: str) -> None:
    """Memory answers in order: what comes after the rows waits for all of them."""
    grid = 0 if text.startswith("layernorm.bwd") else 132
    source = _source(text, tma(256, 1, 1, 3, "regs", grid=grid))
    before, after = source.split(PRIME)
    after = after[: after.index(LOOP)]
    first, later = PRELOADED[text]
    assert all(load in before and load not in after for load in first)
    assert all(load in after and load not in before for load in later)


def test_what_clusters_load_and_wait_for() -> None:
    """Rows that clusters share leave loads of numbers to the compiler; without column sums L1 need not be emptied."""
    back = _source("layernorm.bwd:d=8192,dtype=bf16", tma(64, 4, 1, 3, cluster=4))
    first = back.index("mean_next_ = load_scalar<ReadOnlyLoad>(")
    assert first < back.index(UNMOVED + "gamma_cached_") < back.index(PRIME)
    alone = _source("layernorm.bwd:d=4096,dtype=bf16", tma(128, 2, 1, 3))
    assert "mean_next_ = load_scalar<UnmovedLoad4>(" in alone
    assert "AcquireAll>" in back
    assert "AcquireShared" not in back
    forward = _source("layernorm.fwd:d=32768,dtype=bf16", tma(128, 1, 1, 3, cluster=4, grid=30))
    shared = _source("layernorm.bwd:d=8192,dtype=bf16", tma(64, 4, 1, 3, "acquire", cluster=4))
    assert all("AcquireShared>" in source for source in (forward, shared))


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_loaded_before_the_rows_is_waited_for_before_them(cached: bool) -> None:
    """No wait for it is left to the loop, where it would be one for the next row's numbers, too."""
    schedule = replace(tma(256, 1, 8, 4, "regs"), cached_weights=cached)
    text = emit(lower(parse_spec("layernorm.bwd:d=7168,dtype=f16"), schedule))
    before, loop = re.sub(r"\s+", " ", text).split(LOOP)
    settled = re.search(
        r"stream_\.parity \^= \((.*?)\) & static_cast<unsigned>\(rows_ >> 63\);", before[before.index(PRIME) :]
    )
    assert settled
    assert all(f"bits_of({number}_next_)" in settled[1] for number in ("mean", "rstd"))
    assert ("vector_bits<Row>(gamma_cached_)" in settled[1]) == cached
    assert "parity" not in loop
    forward = tma(256, 1, 8, 4, "cached", grid=132)
    assert "bits_of" not in emit(lower(parse_spec("layernorm.fwd:d=7168,dtype=f16"), forward)), (
        "it loads nothing by row"
    )


# ---- rows claimed from a counter ----


def test_a_cluster_that_does_not_meet_cannot_claim() -> None:
    """No row is summed: its blocks have nothing to tell each other."""
    spec = spec_of("plain.fwd:d=8192")
    s = tma(128, 1, 4, 2, cluster=2, grid=2)
    check(s, problem(spec.graph(), spec.d))
    with pytest.raises(ScheduleError, match="row sums if a cluster shares the rows"):
        check(replace(s, dynamic=True), problem(spec.graph(), spec.d))


@pytest.mark.parametrize(("d", "dtype", "megabytes", "claims"), [
    (8192, "bf16", 64, True),
    (8192, "bf16", 8, False),  # rows enough for one round or two
    (3072, "bf16", 64, False),  # short rows: the counter would be asked too often
    (4096, "f32", 64, True),
    (4096, "f32", 256, False),  # blocks that come and go keep the order as well
    (7168, "bf16", 256, True),
    (7168, "f32", 256, True),
    (16384, "bf16", 64, True),  # long rows, one at a time
    (16384, "bf16", 32, False),
    (13824, "f16", 64, True),  # two of a block
    (14336, "f16", 64, True),  # by pairs of blocks
    (15360, "f16", 64, True),  # by a block that has one at a time
    (20001, "bf16", 256, True),  # ragged: no cluster shares them
    (12289, "f32", 64, True),
    (32768, "bf16", 64, True),  # shared by a cluster
    (32768, "bf16", 16, False),
    (32768, "f32", 64, True),
    (65536, "bf16", 64, True),  # by a larger one
    (65536, "bf16", 32, False),
    (131072, "bf16", 64, False),  # by the largest, where rows are endless
    (131072, "bf16", 256, True),
    (131072, "f32", 32, True),  # or pieces large
])  # fmt: skip
def test_where_rows_are_claimed(d: int, dtype: str, megabytes: int, claims: bool) -> None:
    spec = parse_spec(f"layernorm.fwd:d={d},dtype={dtype}")
    rows = megabytes * 2**20 // (4 if dtype == "f32" else 2) // d
    assert next(candidates(problem(spec.graph(), d), default_device(), rows=rows)).dynamic is claims


REGISTERS = registers(32, 1, 8)
BACKWARD = registers(32, 8, 8)
TMA = tma(32, 8, 8, 2)
MULTIPASS = multipass(32, 8)


def kept(plan: Plan) -> list[str]:
    return [t.name for kernel in plan.kernels for phase in kernel.phases for r in phase.reduces for t in r.kept]


@pytest.mark.parametrize(("spec", "schedule", "names"), [
    ("softmax.fwd:d=1024,dtype=bf16", REGISTERS, ["e"]),
    ("softmax.bwd:d=1024,dtype=bf16", REGISTERS, ["p"]),
    ("rmsnorm_act.bwd:d=1024,dtype=bf16", BACKWARD, ["slope"]),
    ("rmsnorm_act.bwd:d=1024,dtype=bf16", TMA, ["slope"]),
    ("rmsnorm_act.bwd:d=1024,dtype=bf16", replace(TMA, row_in_registers=True), ["slope"]),
    ("gated_layernorm.bwd:d=1024,dtype=bf16", TMA, ["gate"]),
    # Once in a row, or of little arithmetic.
    ("rmsnorm_act.fwd:d=1024,dtype=bf16", REGISTERS, []),
    ("log_softmax.fwd:d=1024,dtype=bf16", REGISTERS, []),
    ("layernorm.bwd:d=1024,dtype=bf16", BACKWARD, []),
    ("parallel_layernorm.bwd:d=1024,dtype=bf16", registers(32, 4, 8), []),
    # A kernel that reads rows in several passes has no registers for a whole one.
    ("softmax.fwd:d=1024,dtype=bf16", MULTIPASS, []),
])  # fmt: skip
def test_what_is_kept(spec: str, schedule: Schedule, names: list[str]) -> None:
    assert kept(plan_of(spec, schedule)) == names


def test_a_kept_value_is_computed_once() -> None:
    for schedule, times in ((REGISTERS, 1), (MULTIPASS, 2)):
        text = emit(plan_of("softmax.fwd:d=1024,dtype=bf16", schedule))
        body = text[text.index("pdl_wait();") :]
        assert len(re.findall(r"const float e = ", body)) == times, schedule


def test_of_several_the_first_saves_most_and_there_are_few() -> None:
    def several(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        values = [b.named(f"f{n}", (x * float(n + 1)).tanh()) for n in range(4)]
        total = b.sum(values[0] + values[1] + values[2] + values[3])
        b.output("y", values[0] * values[1] * values[2] * values[3] * total)

    spec = make_spec(Definition("several", several), "fwd", {"d": 1024, "dtype": "bf16"})
    names = kept(lower(spec, REGISTERS))
    assert len(names) == MOST_KEPT
    assert set(names) < {"f0", "f1", "f2", "f3"}


# ---- weights ----


def held(text: str, schedule: Schedule) -> Plan:
    """A plan that keeps its weights, with the widest accesses."""
    spec = parse_spec(text)
    return lower(spec, replace(schedule, cached_weights=True, vec=problem(spec.graph(), spec.d).run))


@pytest.mark.parametrize(("text", "schedule", "widened"), [
    ("layernorm.fwd:d=8192,dtype=f16", tma(128, 1, 1, 3, "regs", blocks_per_sm=2, grid=264), True),
    ("layernorm.bwd:d=1024,dtype=f16", tma(64, 8, 1, 2), True),
    ("rmsnorm.fwd:d=8192,dtype=bf16,weight=f16", tma(128, 1, 1, 3, "regs dynamic", grid=132), True),
    ("layernorm.fwd:d=8192,dtype=bf16", tma(128, 1, 1, 3, "regs", grid=132), False),
    ("layernorm.fwd:d=12288,dtype=f16", tma(128, 1, 1, 3, "regs", blocks_per_sm=3, grid=396), False),
    ("layernorm.fwd:d=1024,dtype=f64,weight=f16", tma(128, 1, 1, 3, "regs", grid=132), False),
])  # fmt: skip
def test_halves_that_are_kept_are_widened_once(text: str, schedule: Schedule, widened: bool) -> None:
    """Of f16, if registers hold them widened; the compiler does so itself with bf16."""
    before, loop = emit(held(text, schedule)).split(LOOP)
    assert ("widen_row<Row>(gamma_wide_, gamma_cached_);" in before) == widened
    assert ("= gamma_wide_[v_][i_];" in loop) == widened
    assert ("(gamma_cached_[v_]" in loop) != widened


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_what_is_widened_once_is_not_widened_again(dtype: str) -> None:
    """An element of x, dy and gamma, in a backward of two phases that holds them."""
    spec = parse_spec(f"layernorm.bwd:d=4096,dtype={dtype}")
    schedule = tma(128, 2, 8, 3, "cached regs")
    plan = lower(spec, schedule)
    entry = parse(compile_ptx(emit(plan), "sm_90")).entries[plan.kernels[0].name]
    elements, widened = 4096 // 128, [i.opcode for i in entry.instructions].count("cvt.f32.f16")
    assert 3 * elements <= widened < 2 * 3 * elements if dtype == "f16" else widened == 0
    assert [i.opcode for i in entry.instructions].count("sub.rn.f32") == 2 * elements, "xc and what dy is centred by"


@pytest.mark.full
def test_kept_weights_stay_packed_where_registers_are_few() -> None:
    """Forty-eight elements a thread and 128 registers; with 255 they are widened once."""
    spec = parse_spec("layernorm.fwd:d=12288,dtype=bf16")
    few, many = (lower(spec, tma(256, 1, 8, 3, "cached regs dynamic", blocks_per_sm=n, grid=264)) for n in (2, 1))
    assert "packed(gamma_cached_[v_]);" in emit(few)
    assert "packed(" not in emit(many)
    for plan in (few, many):
        assert np.isfinite(run_checked(plan, 3).results["mean"]).all()
