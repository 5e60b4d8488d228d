"""The bytes of the emitted kernels, counted: forward moves 2 row-units, backward 3, and nothing more."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from lngen.check.inputs import random_inputs
from lngen.cli import cli
from lngen.inspect import measure, traffic_text
from lngen.inspect.traffic import row_units
from lngen.lower import lower
from lngen.ptx import parse, run_kernel
from lngen.schedule import problem, ranked
from lngen.spec import parse_spec
from lngen.toolchain import compile_ptx

pytest.importorskip("cupy")


def counted(text: str, rows: int, form: str = "registers", prefetch: bool | None = None):  # type: ignore[no-untyped-def]
    spec = parse_spec(text)
    fits = (s for s in ranked(problem(spec.graph(), spec.d)) if s.form == form and prefetch in (None, s.prefetch))
    schedule = next(fits)
    plan = lower(spec, schedule)
    return plan, measure(plan, random_inputs(spec, rows))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("options", ["d=64,dtype=bf16", "d=768,dtype=f32", "d=1000,dtype=f16", "d=4093,dtype=f32"])
@pytest.mark.parametrize(("way", "units"), [("fwd", 2), ("bwd", 3)])
def test_every_row_element_moves_once(norm: str, options: str, way: str, units: int) -> None:
    rows = 256  # whole row groups
    plan, measured = counted(f"{norm}.{way}:{options}", rows, prefetch=False)
    assert row_units(plan, measured, rows) == units


def test_more_rows_than_one_round_of_blocks() -> None:
    plan, measured = counted("layernorm.bwd:d=2048,dtype=bf16", 4 * 132 + 8, prefetch=False)
    assert row_units(plan, measured, 4 * 132 + 8) == 3


@pytest.mark.parametrize("rows", [256, 4 * 132 + 8])
def test_prefetch_reads_the_last_row_once_more_for_every_row_group(rows: int) -> None:
    """The round after the last loads the last row, which the L2 holds: a branch around it costs a quarter."""
    plan, measured = counted("layernorm.bwd:d=2048,dtype=bf16", rows, prefetch=True)
    blocks = plan.kernels[0].grid[0](rows)
    assert row_units(plan, measured, rows) == pytest.approx(3 + 2 * blocks * plan.schedule.rows / rows, rel=1e-12)


def test_a_streamed_row_is_read_once_a_phase() -> None:
    plan, measured = counted("layernorm.fwd:d=40000,dtype=bf16", 2, form="stream")
    assert row_units(plan, measured, 2) == 4  # the mean, the variance, y; and y written


def test_partial_rows_are_written_and_read_once() -> None:
    rows, d = 64, 1024
    plan, (main, finish) = counted(f"layernorm.bwd:d={d},dtype=bf16", rows)
    groups = plan.schedule.rows
    assert main.moved["sum_dy_partial"] == (0, rows // groups * d * 4)
    assert finish.moved["sum_dy_partial"] == (rows // groups * d * 4, 0)
    assert finish.moved["dbeta"] == (0, d * 2)


def test_statistics_are_written_once() -> None:
    _, (kernel,) = counted("layernorm.fwd:d=768,dtype=bf16", 17)
    assert kernel.moved["mean"] == kernel.moved["rstd"] == (0, 17 * 4)


def test_aligned_rows_waste_no_sector_and_odd_ones_no_byte() -> None:
    _, (kernel,) = counted("layernorm.fwd:d=1024,dtype=bf16", 8)
    assert kernel.efficiency["x"] == kernel.efficiency["y"] == 1
    _, (odd,) = counted("layernorm.fwd:d=1023,dtype=bf16", 8)
    assert odd.moved["x"] == (8 * 1023 * 2, 0)
    assert odd.efficiency["x"] < 0.5  # element loads, a chunk apart from lane to lane


def test_mix_barriers_and_flight() -> None:
    _, (warp,) = counted("layernorm.fwd:d=1024,dtype=bf16", 8)
    assert warp.barriers == 0
    assert warp.mix["shuffle"] == 2 * 5 * 8  # two sums, five steps, a warp for each row
    plan, (block,) = counted("layernorm.fwd:d=4096,dtype=bf16", 8)
    assert block.barriers == 2 * 8 * plan.schedule.threads // 32
    assert block.in_flight == 4096 * 2
    assert block.bank_conflicts == 0


def test_the_text_names_what_it_counts() -> None:
    plan, measured = counted("layernorm.bwd:d=64,dtype=bf16", 256, prefetch=False)
    text = traffic_text(plan, measured, 256)
    assert "rows of bf16: 3.000 units of M * D" in text
    assert f"{256 * 64 * 2}" in text
    assert "workspace" in text
    assert "instructions per element: load" in text


BULK = """extern "C" __global__ void k(const float* a, float* o) {
    __shared__ __align__(16) float s[2][256];
    __shared__ unsigned long long bar;
    unsigned b = (unsigned)__cvta_generic_to_shared(&bar), to = (unsigned)__cvta_generic_to_shared(s);
    a += 512 * blockIdx.x; o += 256 * blockIdx.x;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(b) : "memory");
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


def test_show_prints_it() -> None:
    found = CliRunner().invoke(cli, ["show", "layernorm.fwd:d=64,dtype=bf16", "--stage", "traffic"])
    assert found.exit_code == 0, found.output
    assert "rows of bf16: 2.000 units of M * D" in found.output
