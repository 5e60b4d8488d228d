"""Traffic: if these fail, a kernel moves more bytes than the rows have, or the counts of it are wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest

import sampling
from commands import call
from lngen.compiler.compile import KernelSet
from lngen.compiler.ir import D, M
from lngen.compiler.lower import Plan
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import compile_ptx
from lngen.lab.inspect.traffic import KernelTraffic, measure, row_units, traffic_rows, traffic_text
from lngen.proof.check.inputs import random_inputs
from lngen.proof.ptx import parse, run_kernel
from plans import plan_of, run_checked
from schedules import cp_async, multipass, registers, tma, unaligned

pytest.importorskip("cupy")


def counted(text: str, rows: int, schedule: Schedule | None = None) -> tuple[Plan, list[KernelTraffic]]:
    """The plan under the default schedule, or the one given, and what it moves."""
    plan = plan_of(text, schedule or "")
    return plan, measure(KernelSet(plan), random_inputs(plan.spec, rows))


FORTH = "layernorm.fwd:d=1024,dtype=bf16"
FEW = "layernorm.bwd:d=1024,dtype=bf16,blocks=2"  # blocks, which take more rows than they have stages
MOVED = [
    ("layernorm.fwd:d=64,dtype=bf16", 32, None), ("rmsnorm.fwd:d=1000,dtype=f16", 32, None),
    ("layernorm.bwd:d=768,blocks=2", 32, None), ("rmsnorm.bwd:d=1536,dtype=bf16,blocks=2", 32, None),
    (FEW, 32, tma(64, 8, 8, 3)), (FEW, 64, tma(64, 8, 8, 3, "store cached single")),
    (FEW, 24, cp_async(64, 8, 8, 2, "cached")), (FEW, 64, registers(64, 8, 8)),
    (FEW, 64, registers(64, 8, 8, "single")), (FEW, 56, registers(64, 8, 8, "prefetch")),
    ("rmsnorm.bwd:d=16384,dtype=bf16", 4, tma(256, 1, 8, 2, cluster=2)),
    ("rmsnorm.bwd:d=16384,dtype=bf16", 3, tma(128, 1, 8, 2, "store", cluster=4)),
    (FORTH, 40, tma(64, 2, 8, 3, grid=4)), (FORTH, 40, tma(64, 2, 8, 3, "store", grid=4)),
    (FORTH, 40, cp_async(64, 2, 8, 3, grid=4)), ("layernorm.fwd:d=40000,dtype=bf16", 2, multipass(512, 8)),
    ("rmsnorm.fwd:d=32768,dtype=bf16", 3, tma(256, 1, 8, 2, cluster=4, grid=2)),
]  # fmt: skip


def kinds(spec: str, _rows: int, s: Schedule | None) -> tuple[object, ...]:
    """What differs in kind from case to case."""
    way = parse_spec(spec).direction
    return (way,) if s is None else (way, s.form, s.cluster > 1, s.tma_store, s.single_launch, s.prefetch)


@sampling.grid(("spec", "rows", "schedule"), MOVED, lambda *case: (kinds(*case),), ids=str, strength=1)
def test_every_row_element_moves_once(spec: str, rows: int, schedule: Schedule | None) -> None:
    """x read and y written, or x and dy read and dx written; a streamed row is read once a phase.

    With prefetch the round after the last loads the last row, which the L2 holds: a branch around it costs a quarter.
    """
    plan, measured = counted(spec, rows, schedule)
    units = 4 if plan.schedule.form == "multipass" else {"fwd": 2, "bwd": 3}[plan.spec.direction]
    again = 2 * plan.kernels[0].grid[0](rows) * plan.schedule.rows_per_block / rows if plan.schedule.prefetch else 0
    assert row_units(plan, measured, rows) == pytest.approx(units + again, rel=1e-12)


@pytest.mark.parametrize(("spec", "rows", "schedule"), [
    ("layernorm.bwd:d=1024,dtype=bf16,blocks=3", 24, registers(64, 8, 8)),
    ("layernorm.bwd:d=1024,dtype=bf16,blocks=3", 24, tma(64, 8, 8, 2)),
    ("rmsnorm.bwd:d=8192,dtype=bf16,blocks=2", 8, registers(256, 1, 8)),  # four row groups, a block each
    ("rmsnorm.bwd:d=7168,dtype=bf16,blocks=8", 8, tma(256, 1, 8, 2)),
], ids=str)  # fmt: skip
def test_partial_rows_are_written_and_read_once(spec: str, rows: int, schedule: Schedule) -> None:
    """If there are as many as at most; of few, the last one is read again for each that is not there."""
    plan, (main, finish) = counted(spec, rows, schedule)
    name = next(n for n in main.moved if n.endswith("_partials_"))
    size = rows // schedule.rows_per_block * plan.spec.d * 4
    assert (main.moved[name], finish.moved[name]) == ((0, size), (size, 0))
    assert finish.moved[plan.outputs[-1].name] == (0, plan.spec.d * 2)
    if schedule.rows_per_block > 1:
        assert counted(spec, rows, replace(schedule, single_launch=True))[1][0].moved[name] == (size, size)


def test_aligned_rows_waste_no_sector_and_odd_ones_no_byte() -> None:
    _, (kernel,) = counted(FORTH, 8)
    assert kernel.efficiency["x"] == kernel.efficiency["y"] == 1
    _, (odd,) = counted("layernorm.fwd:d=1023,dtype=bf16", 8, registers(32, 4, 1))
    assert odd.moved["x"] == (8 * 1023 * 2, 0)
    assert 0.6 < odd.efficiency["x"] < 0.9  # element loads, lanes side by side, rows that begin anywhere


def test_mix_barriers_and_flight() -> None:
    _, (warp,) = counted(FORTH, 8, registers(32, 4, 8))
    assert warp.barriers == 0
    assert warp.mix["shuffle"] == 2 * 5 * 8  # two sums, five steps, a warp for each row
    assert warp.in_flight == 4 * 1024 * 2
    plan, (block,) = counted("layernorm.fwd:d=4096,dtype=bf16", 8, registers(128, 1, 8))
    assert block.barriers == 2 * 8 * plan.schedule.threads // 32
    assert block.in_flight == 4096 * 2
    shared = registers(256, 1, 8, cluster=2)
    _, (cluster,) = counted("layernorm.fwd:d=12288,dtype=bf16", 4, shared)
    assert cluster.in_flight == 12288 // 2 * 2, "a block has half a row"
    assert cluster.moved["x"] == (4 * 12288 * 2, 0)
    assert block.bank_conflicts == 0


def test_the_stages_are_in_flight() -> None:
    for staged_in in (tma, cp_async):
        _, (staged,) = counted(FORTH, 24, staged_in(64, 2, 8, 3, grid=2))
        assert staged.in_flight == 3 * 2 * 1024 * 2
        assert staged.mix["copy"] > 0
        assert staged.efficiency["x"] == staged.efficiency["y"] == 1


BULK = """extern "C" __global__ void k(const float* a, float* o) {
    __shared__ __align__(16) float s[2][256];
    __shared__ unsigned long long bar;
    unsigned b = (unsigned)__cvta_generic_to_shared(&bar), to = (unsigned)__cvta_generic_to_shared(s);
    a += 512 * blockIdx.x; o += 256 * blockIdx.x;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(b) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 2048;" :: "r"(b) : "memory");
        for (int n = 0; n < 2; ++n)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
                :: "r"(to + 1024 * n), "l"(a + 256 * n), "r"(b) : "memory");
        unsigned done = 0;
        while (!done) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
            "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(b) : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1008;" :: "l"(o + 4), "r"(to) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}"""


def test_bulk_copies_are_counted() -> None:
    module = parse(compile_ptx(BULK, "sm_90", name="k.cu"))
    outcome = run_kernel(module, "k", 3, 32, [np.arange(1536, dtype=np.float32), np.zeros(768, np.float32)])
    assert outcome.findings == ()
    a, o = outcome.traffic.tensors["k"]["k_param_0"], outcome.traffic.tensors["k"]["k_param_1"]
    assert (a["bytes_read"], a["sectors_read"]) == (3 * 2048, 3 * 64)
    assert (o["bytes_written"], o["sectors_written"]) == (3 * 1008, 3 * 32)
    assert outcome.traffic.in_flight["k"] == 2048


@pytest.mark.parametrize(("spec", "schedule", "rows", "blocks", "lines"), [
    ("layernorm.fwd:d=1000,dtype=bf16", registers(64, 2, 8), 5, 3, 16),
    ("layernorm.bwd:d=768,dtype=bf16", registers(32, 16, 8, "prefetch"), 40, 3, 12),
    ("layernorm.bwd:d=4096,dtype=bf16,blocks=2", tma(128, 2, 8, 3), 9, 2, 64),
    ("layernorm.bwd:d=1001,dtype=f32,blocks=2", unaligned(64, 4, 1, 2),
     12, 2, 32),
    ("layernorm.fwd:d=32768,dtype=bf16", tma(256, 1, 8, 2, cluster=2, grid=2),
     5, 2, 512),
])  # fmt: skip
def test_blocks_ask_for_their_first_rows_before_they_wait(
    spec: str, schedule: Schedule, rows: int, blocks: int, lines: int
) -> None:
    """Lines of a row, by every block; columns by one, since all have the same; numbers of a row with it."""
    plan = plan_of(spec, schedule)
    outcome = run_checked(plan, rows)
    counts = outcome.traffic.tensors[plan.kernels[0].name]
    first = min(rows, blocks * plan.schedule.rows_per_block)
    size = plan.spec.dtype.size
    expected = {v.name: first * lines if v.type.axes == (M, D) else first for v in plan.inputs}
    expected |= {v.name: -(-plan.spec.d * size // 128) for v in plan.inputs if v.type.axes == (D,)}
    assert {name: count["prefetches"] for name, count in counts.items() if count["prefetches"]} == expected


@pytest.mark.parametrize("rows", [1, 5, 133])
def test_show_counts_as_many_rows_as_are_asked_for(rows: int) -> None:
    args = ["show", "layernorm.fwd:d=64,dtype=bf16", "--stage", "traffic", "--rows", str(rows)]
    found = call(*args)
    assert found.exit_code == 0, found.output
    assert f", {rows} rows counted\n" in found.stdout
    data = json.loads(call(*args, "--json").stdout)
    assert data["rows"] == rows
    (kernel,) = data["kernels"]
    assert kernel["moved"]["y"] == {"read": 0, "written": rows * 64 * 2}
    assert kernel["moved"]["mean"] == {"read": 0, "written": rows * 4}


def test_the_legend_has_every_unit() -> None:
    plan, measured = counted("layernorm.bwd:d=64,dtype=bf16", 256, registers(4, 128, 8))
    text, _, legend = traffic_text(plan, measured, 256).rpartition("\n\n")
    for part in ("rows of bf16: 3.000 units", f"{256 * 64 * 2}", "workspace", "instructions per element: load"):
        assert part in text
    for word in ("units of M * D", "read", "written", "floor", "per sector", "instructions", "barriers", "in flight"):
        assert word in text
        assert word in legend


def test_the_executor_counts_so_many_rows() -> None:
    plan, _ = counted("layernorm.fwd:d=64,dtype=bf16", 1)
    assert traffic_rows(plan, 2**25 // 64) == 2**25 // 64
