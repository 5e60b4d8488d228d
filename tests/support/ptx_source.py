"""Kernels that the PTX executor runs, as CUDA or as PTX, and what a test asks of the outcome."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lngen.compiler.toolchain import compile_ptx
from lngen.proof.ptx import Outcome, parse, run_kernel
from lngen.proof.ptx.compiler import compile_entry
from lngen.proof.ptx.parser import Entry

# Device functions for sources that use mbarriers, bulk copies and clusters.
HELPERS = """
extern __shared__ __align__(128) unsigned s[];
__device__ __forceinline__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(void* b, unsigned n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect(void* b, unsigned n) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
                 :: "r"(at(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void arrive(void* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(b)) : "memory"); }
__device__ __forceinline__ void wait(void* b, unsigned parity) {
    asm volatile("{\\n.reg .pred p;\\nAGAIN:\\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\\n@p bra DONE;\\nbra AGAIN;\\n"
                 "DONE:\\n}" :: "r"(at(b)), "r"(parity) : "memory"); }
__device__ __forceinline__ void load(void* to, const void* from, unsigned n, void* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at(to)), "l"(from), "r"(n), "r"(at(b)) : "memory"); }
__device__ __forceinline__ unsigned map(const void* p, unsigned rank) {
    unsigned far;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(at(p)), "r"(rank));
    return far; }
__device__ __forceinline__ unsigned rank() {
    unsigned r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() { cluster_arrive(); cluster_wait(); }
"""

# Types of loads and stores, and those of each atomic operation.
TYPES = [f"{k}{w}" for k in "bus" for w in (8, 16, 32, 64)] + ["f32", "f64"]
OPERATIONS = {
    **{op: ["b32", "b64"] for op in ("and", "or", "xor", "exch", "cas")},
    **{op: ["u32", "s32", "u64", "s64"] for op in ("min", "max")},
    "add": ["u32", "s32", "u64", "f32", "f64"], "inc": ["u32"], "dec": ["u32"],
}  # fmt: skip

# The text of a kernel k: its parameters, and its instructions.
KERNEL = """.version 8.7
.target sm_90
.address_size 64
.visible .entry k(
{params}
)
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .b64 %rd<64>;
.reg .f32 %f<8>;
.reg .f64 %fd<8>;
{body}
ret;
}}"""


def run(source: str, grid: Any, block: int, *arguments: Any, **options: Any) -> Outcome:
    """What the kernel ``k`` of a CUDA source does."""
    pytest.importorskip("cupy")
    module = parse(compile_ptx(source, "sm_90", name="k.cu", lines=True))
    return run_kernel(module, "k", grid, block, arguments, source=source, **options)


def run_ptx(body: str, *arguments: Any, grid: Any = 1, block: int = 1, kinds: str = "", **options: Any) -> Outcome:
    """What a kernel of these instructions does; %rd0, %rd1, ... are the addresses of arrays.

    ``kinds``: the types of the parameters, which are not loaded then.
    """
    types = kinds.split() or ["u64"] * len(arguments)
    params = ",\n".join(f".param .{t} p{n}" for n, t in enumerate(types))
    loads = "" if kinds else "".join(f"ld.param.u64 %rd{n}, [p{n}];\n" for n in range(len(types)))
    return run_kernel(parse(KERNEL.format(params=params, body=loads + body)), "k", grid, block, arguments, **options)


def with_mbarrier(body: str, grid: Any, block: int, *arguments: Any, **options: Any) -> Outcome:
    """A kernel with memory ``s`` and an mbarrier ``bar`` in each block; %r0 is the thread."""
    head = ".shared .align 16 .b8 s[512];\n.shared .align 8 .b64 bar;\nmov.u32 %r0, %tid.x;\n"
    return run_ptx(head + body, *arguments, grid=grid, block=block, **options)


def bound(line: str) -> Entry:
    """A kernel of one instruction, on line 14, which the executor binds."""
    entry = parse(KERNEL.format(params=".param .u64 p0", body=f"{line};")).entries["k"]
    compile_entry(entry, ())
    return entry


def kinds(outcome: Outcome) -> set[str]:
    return {f.kind for f in outcome.findings}


def messages(outcome: Outcome) -> dict[str, str]:
    """The first message of every kind of finding."""
    return {f.kind: f.message for f in reversed(outcome.findings)}


def clean(outcome: Outcome) -> dict[str, Any]:
    """The results of a run without findings."""
    assert outcome.findings == (), "\n".join(map(str, outcome.findings))
    return outcome.results


def broken(source: str, old: str, new: str) -> str:
    """The source with one defect."""
    assert old in source, old
    return source.replace(old, new)


@dataclass(frozen=True)
class Sample:
    """A kernel k of CUDA, how it is launched, and what its last array holds where nothing is wrong."""

    source: str
    grid: Any
    block: int
    arguments: tuple[Any, ...]
    want: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, *edits: str) -> Outcome:
        """What it does after edits: the old text and the new one, in turn."""
        source = self.source
        for old, new in zip(edits[::2], edits[1::2], strict=True):
            source = broken(source, old, new)
        given = [a.copy() if isinstance(a, np.ndarray) else a for a in self.arguments]
        return run(source, self.grid, self.block, *given, **self.options)


def judge(outcome: Outcome, expected: str, want: Any = None) -> None:
    """``expected``: nothing is found and the last array is ``want``, or one of these is: "deadlock|async-read".

    With "=" before it just these: "=async-read early-exit"; after a colon what the message says.
    """
    head, _, text = expected.removeprefix("=").partition(": ")
    found = kinds(outcome)
    if not expected:
        results = clean(outcome)
        assert want is None or (results[max(results, key=int)] == want).all()
    elif expected.startswith("="):
        assert found == {*head.split()}, outcome.findings
    else:
        assert found & {*head.split("|")}, outcome.findings
    said = [f.message for f in outcome.findings if f.kind in re.split("[| ]", head)]
    assert not text or any(re.search(text, message) for message in said), said


def edits(table: Mapping[str, Sequence[tuple[str, ...]]]) -> pytest.MarkDecorator:
    """A table: by the name of a kernel what is expected, and the edits that show it."""
    rows = [(name, expected, texts) for name, listed in table.items() for expected, *texts in listed]
    made = [pytest.param(n, e, tuple(t), id=f"{n}: {' -> '.join(t)[:90] or 'whole'}") for n, e, t in rows]
    return pytest.mark.parametrize(("name", "expected", "texts"), made)
