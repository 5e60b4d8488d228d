"""The PTX executor on what threads must do for each other and do not: every omission is a finding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lngen.ptx import Outcome, parse, run_kernel
from lngen.toolchain import compile_ptx

pytest.importorskip("cupy")

U4 = np.uint32


def run(source: str, grid: int, block: int, *arguments: Any, **options: Any) -> Outcome:
    """What the kernel ``k`` of a CUDA source does."""
    module = parse(compile_ptx(source, "sm_90", name="k.cu", lines=True))
    return run_kernel(module, "k", grid, block, arguments, source=source, **options)


def messages(outcome: Outcome) -> dict[str, str]:
    """The first message of every kind of finding."""
    return {f.kind: f.message for f in reversed(outcome.findings)}


def broken(source: str, old: str, new: str) -> str:
    """The source with one defect."""
    assert old in source, old
    return source.replace(old, new)


# ---- races in global memory, inside a block ----

HALVES = 'extern "C" __global__ void k(unsigned* o) { o[threadIdx.x / 2] = threadIdx.x; }'
TURNS = """extern "C" __global__ void k(unsigned* o, unsigned* p) {
    o[threadIdx.x] = threadIdx.x;
    __syncthreads();
    p[threadIdx.x] = o[threadIdx.x ^ 1];
}"""


@pytest.mark.parametrize("more", ["", " __syncthreads();", ' asm volatile("fence.acq_rel.gpu;");'])
def test_two_threads_of_a_block_write_one_word(more: str) -> None:
    """With nothing else in the kernel, with a barrier behind, and with a fence, which takes another path."""
    found = messages(run(HALVES.replace("}", more + "}"), 3, 64, np.zeros(32, U4)))
    assert set(found) == {"global-race"}
    assert "'k_param_0'" in found["global-race"]
    assert "with nothing that orders them" in found["global-race"]


def test_a_thread_reads_what_another_of_its_block_writes() -> None:
    arrays = np.zeros(64, U4), np.zeros(64, U4)
    assert run(TURNS, 1, 64, *arrays).findings == ()
    found = messages(run(broken(TURNS, "__syncthreads();", ""), 1, 64, *arrays))
    assert set(found) == {"global-race"}
    early = broken(TURNS, "o[threadIdx.x] = threadIdx.x;\n    __syncthreads();", "")
    late = broken(
        early, "p[threadIdx.x] = o[threadIdx.x ^ 1];", "p[threadIdx.x] = o[threadIdx.x ^ 1]; o[threadIdx.x] = 1;"
    )
    assert "thread" in messages(run(late, 1, 64, *arrays))["global-race"]


# ---- barriers of a block ----

COUNTED = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned s[128];
    s[threadIdx.x] = threadIdx.x;
    asm volatile("bar.sync 1, %0;" :: "r"(COUNT) : "memory");
    o[threadIdx.x] = s[threadIdx.x ^ 1];
}"""


def test_a_barrier_waits_for_whole_warps() -> None:
    def found(block: int, count: str) -> dict[str, str]:
        return messages(run(COUNTED.replace("COUNT", count), 1, block, np.zeros(block, U4)))

    assert found(64, "64") == {}
    assert found(48, "64") == {}  # the last warp is not full, and counts as one that is
    assert "waits for 48 threads: a multiple of 32 is expected" in found(48, "48")["barrier-count"]
    assert "waits for 16 threads" in found(64, "16")["barrier-count"]
    assert "which waits for 96" in found(64, "96")["deadlock"]
    assert "64 threads come to a barrier that waits for 32" in found(64, "32")["divergent-barrier"]
    assert "some give 32 threads and some 64" in found(64, "threadIdx.x < 32 ? 32 : 64")["barrier-count"]
    assert "deadlock" in found(64, "threadIdx.x < 32 ? 64 : 96")


def test_half_a_warp_does_not_arrive() -> None:
    """Of two warps a half each at either barrier: 32 threads, and no warp. Those that have ended need not come."""
    half = broken(COUNTED, '"bar.sync 1, %0;"', '"{ .reg .pred p; setp.lt.u32 p, %0, 16; @p bar.sync 1, 32; OTHERS }"')
    half = half.replace("COUNT", "threadIdx.x % 32")
    found = messages(run(half.replace("OTHERS", "@!p bar.sync 2, 32;"), 1, 64, np.zeros(64, U4)))
    assert "wait for ever at barrier 1, which waits for 32" in found["deadlock"]
    assert "deadlock" not in messages(run(half.replace("OTHERS", "@!p exit;"), 1, 64, np.zeros(64, U4)))


# ---- programmatic launches ----

PLAIN = 'extern "C" __global__ void k(unsigned* o) { WAIT if (threadIdx.x < 8) o[threadIdx.x] = threadIdx.x; }'


def test_a_kernel_that_never_waits_for_the_one_before() -> None:
    source = PLAIN.replace("WAIT", 'asm volatile("griddepcontrol.wait;" ::: "memory");')
    assert run(source, 1, 32, np.zeros(8, U4), programmatic=True).findings == ()
    found = run(PLAIN.replace("WAIT", ""), 1, 32, np.zeros(8, U4), programmatic=True).findings
    assert {f.kind for f in found} == {"early-access"}
    assert "before griddepcontrol.wait" in found[0].message
    assert "no thread of it executes griddepcontrol.wait" in found[-1].message
    assert run(PLAIN.replace("WAIT", ""), 1, 32, np.zeros(8, U4)).findings == ()


def test_a_kernel_without_accesses_has_to_wait_all_the_same() -> None:
    """The kernel behind it waits for this one, not for those before."""
    found = run('extern "C" __global__ void k(unsigned* o) {}', 1, 32, np.zeros(8, U4), programmatic=True).findings
    assert [f.kind for f in found] == ["early-access"]
