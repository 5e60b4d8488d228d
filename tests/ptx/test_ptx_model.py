"""mbarriers and clusters of the PTX executor against models that share nothing with it: a few lines of plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lngen.ptx import Outcome, parse, run_kernel

U4 = np.uint32


def run(body: str, grid: Any, block: int, *arguments: Any, shared: int = 512, **options: Any) -> Outcome:
    """A kernel of that text on arrays; ``%to`` and so on are declared, ``%rdN`` are the arrays."""
    params = ",\n".join(f".param .u64 p{n}" for n in range(len(arguments)))
    loads = "\n".join(f"ld.param.u64 %rd{n}, [p{n}];" for n in range(len(arguments)))
    text = f"""
.version 8.7
.target sm_90
.address_size 64
.visible .entry k(
{params}
)
{{
.reg .pred %p<4>;
.reg .b16 %h<2>;
.reg .b32 %r<64>;
.reg .b64 %rd<64>;
.shared .align 16 .b8 s[{shared}];
.shared .align 8 .b64 bar;
{loads}
mov.u32 %r0, %tid.x;
{body}
ret;
}}
"""
    return run_kernel(parse(text), "k", grid, block, arguments, **options)


# ---- one mbarrier, one thread: every operation in turn ----


@dataclass
class Model:
    """What PTX says of an mbarrier: a phase ends when arrivals and bytes that are pending are none."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    coming: int = 0  # bytes of copies that are under way

    def end(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def arrive(self, times: int = 1) -> None:
        self.pending -= times
        self.end()

    def land(self) -> None:
        self.bytes, self.coming = self.bytes - self.coming, 0
        self.end()


READY = """
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared::cta.b64 [bar], COUNT;
@%p0 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
WAIT = "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], PARITY;\n@!%p1 bra AGAIN;"
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%rd1], SIZE, [bar];"
POLL = """
mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], PARITY;
mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], PARITY;
selp.u32 %r1, 1, 0, %p1;
st.global.u32 [%rd0+AT], %r1;
"""
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive many", "arrive and expect", "expect", "copy", "wait"]), st.integers(0, 3)
    ),
    max_size=12,
)


def program(count: int, operations: list[tuple[str, int]]) -> tuple[str, list[int], Model]:
    """Text that does it, polling both parities behind each operation; what the polls say; the end of the model.

    What PTX does not define (more arrivals than are pending, bytes of a phase that is over) is left out.
    """
    m, text, expected = Model(count, count), READY.replace("COUNT", str(count)), list[int]()
    for n, (name, number) in enumerate(operations):
        size = 16 * (number + 1)
        if name == "arrive" and m.pending:
            text += "mbarrier.arrive.shared::cta.b64 _, [bar];\n"
            m.arrive()
        elif name == "arrive many" and m.pending > number:
            text += f"mbarrier.arrive.shared::cta.b64 %rd9, [bar], {number + 1};\n"
            m.arrive(number + 1)
        elif name == "arrive and expect" and m.pending:
            text += f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {size};\n"
            m.bytes += size
            m.arrive()
        elif name == "expect":
            text += f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {size};\n"
            m.bytes += size
        elif name == "copy" and m.coming == 0 and m.bytes > 0:
            text += COPY.replace("SIZE", str(min(size, m.bytes)))
            m.coming = min(size, m.bytes)
        elif name == "wait" and m.pending == 0 and m.bytes == m.coming:
            text += WAIT.replace("AGAIN", f"AGAIN{n}").replace("PARITY", str(m.phase & 1))
            m.land()
        for parity in (0, 1):
            text += POLL.replace("PARITY", str(parity)).replace("AT", str(4 * len(expected)))
            expected.append(int(m.phase & 1 != parity))
    return text, expected, m


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.integers(1, 4), OPERATIONS)
@example(2, [("arrive and expect", 1), ("copy", 0), ("copy", 0), ("wait", 0), ("arrive", 0), ("copy", 3), ("wait", 0)])
@example(1, [("arrive", 0), ("arrive", 0), ("arrive and expect", 0), ("copy", 0), ("wait", 0)])
def test_an_mbarrier_does_what_its_model_does(count: int, operations: list[tuple[str, int]]) -> None:
    text, expected, _ = program(count, operations)
    out = run(text, 1, 1, np.zeros(max(1, len(expected)), U4), np.arange(256, dtype=U4))
    assert not out.findings, out.findings[0]
    assert out.results["0"][: len(expected)].tolist() == expected


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 7), st.integers(1, 70), st.integers(0, 3))
def test_arrivals_of_many_threads_end_as_many_phases(count: int, threads: int, times: int) -> None:
    """Each thread arrives some times; after n arrivals in all n // count phases are over."""
    arrivals = "mbarrier.arrive.shared::cta.b64 _, [bar];\n" * times
    poll = "".join(POLL.replace("PARITY", str(p)).replace("AT", str(4 * p)) for p in (0, 1))
    text = f"{READY.replace('COUNT', str(count))}{arrivals}bar.sync 0;\n@!%p0 bra END;\n{poll}END:\n"
    out = run(text, 1, threads, np.zeros(2, U4))
    phases = threads * times // count
    assert not out.findings
    assert out.results["0"].tolist() == [phases % 2, 1 - phases % 2]


def test_a_state_is_over_when_its_phase_is() -> None:
    """What an arrival returns says which phase it was in."""
    text = READY.replace("COUNT", "2")
    for n in range(5):
        text += f"mbarrier.arrive.shared::cta.b64 %rd{10 + n}, [bar];\n"
        for state in range(n + 1):
            text += f"mbarrier.test_wait.shared::cta.b64 %p1, [bar], %rd{10 + state};\n" * 2
            text += f"selp.u32 %r1, 1, 0, %p1;\nst.global.u32 [%rd0+{4 * (5 * n + state)}], %r1;\n"
    out = run(text, 1, 1, np.zeros(25, U4))
    assert not out.findings
    wanted = [[int(state // 2 < (n + 1) // 2) if state <= n else 0 for state in range(5)] for n in range(5)]
    assert out.results["0"].reshape(5, 5).tolist() == wanted


@pytest.mark.parametrize(("count", "times"), [(2, 3), (1, 2)])
def test_more_arrivals_than_a_phase_has_room_for(count: int, times: int) -> None:
    text = READY.replace("COUNT", str(count)) + f"mbarrier.arrive.shared::cta.b64 %rd9, [bar], {times};\n"
    found = run(text, 1, 1, np.zeros(1, U4)).findings
    assert f"more arrivals in a phase than the {count} it was initialised with" in found[0].message


@pytest.mark.parametrize(("expected", "copied"), [(32, 16), (16, 32), (16, 0)])
def test_bytes_that_do_not_match_what_is_expected(expected: int, copied: int) -> None:
    text = READY.replace("COUNT", "1") + f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {expected};\n"
    text += COPY.replace("SIZE", str(copied)) + WAIT.replace("PARITY", "0")
    assert {f.kind for f in run(text, 1, 1, np.zeros(1, U4), np.arange(16, dtype=U4)).findings} == {"deadlock"}


def test_who_comes_after_one_that_saw_a_phase_end_sees_it_at_once() -> None:
    """Others may be told once a phase that it is not over: they might have come sooner."""
    text = READY.replace("COUNT", "1") + "@!%p0 bra DONE;\nmbarrier.arrive.shared::cta.b64 _, [bar];\n"
    text += WAIT.replace("PARITY", "0") + "\nDONE: BARRIER\n"
    text += "mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 0;\nselp.u32 %r1, 1, 0, %p1;\n"
    text += "mul.wide.u32 %rd1, %r0, 4;\nadd.u64 %rd1, %rd0, %rd1;\nst.global.u32 [%rd1], %r1;\n"
    assert run(text.replace("BARRIER", "bar.sync 0;"), 1, 2, np.zeros(2, U4)).results["0"].tolist() == [1, 1]
    assert run(text.replace("BARRIER", ""), 1, 2, np.zeros(2, U4)).results["0"].tolist() == [1, 0]


@pytest.mark.parametrize("waited", [0, 1])
@pytest.mark.parametrize("read", [0, 1])
def test_a_wait_is_for_the_copies_of_its_own_mbarrier(waited: int, read: int) -> None:
    """Two copies, each with an mbarrier; both are there when the wait for one is over: only its own may be read."""
    text = "setp.eq.u32 %p0, %r0, 0;\n"
    for n in (0, 1):
        text += f"mbarrier.init.shared::cta.b64 [s+{256 + 8 * n}], 1;\nfence.mbarrier_init.release.cluster;\n"
        text += f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [s+{256 + 8 * n}], 16;\n"
        text += COPY.replace("[s]", f"[s+{16 * n}]").replace("SIZE", "16").replace("[bar]", f"[s+{256 + 8 * n}]") + "\n"
    text += WAIT.replace("PARITY", "0").replace("[bar]", f"[s+{256 + 8 * waited}]")
    text += f"ld.shared.u32 %r1, [s+{16 * read}];\nst.global.u32 [%rd0], %r1;\n"
    out = run(text, 1, 1, np.zeros(1, U4), np.full(4, 9, U4))
    assert {f.kind for f in out.findings} == (set() if waited == read else {"async-read"})


# ---- clusters: ranks, and whose memory an address is in ----

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 2), (8, 1)]
NAMES = (
    "cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z", "cluster_nctaid.x", "cluster_nctaid.y", "clusterid.x",
    "clusterid.y", "nclusterid.x", "nclusterid.y", "cluster_ctarank", "cluster_nctarank",
)  # fmt: skip
MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
PLACE = f"""
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ctaid.y;
mov.u32 %r4, %nctaid.x;
mad.lo.u32 %r5, %r3, %r4, %r2;
mul.wide.u32 %rd8, %r5, {4 * len(NAMES)};
add.u64 %rd9, %rd0, %rd8;
"""


def blocks(shape: tuple[int, int], many: tuple[int, int]) -> list[dict[str, int]]:
    """Every block of a grid of so many clusters of that shape, row after row: what its special registers hold."""
    found = []
    for y in range(shape[1] * many[1]):
        for x in range(shape[0] * many[0]):
            cx, cy = x % shape[0], y % shape[1]
            at = {"cluster_ctaid.x": cx, "cluster_ctaid.y": cy, "cluster_ctaid.z": 0}
            at |= {"cluster_nctaid.x": shape[0], "cluster_nctaid.y": shape[1]}
            at |= {"clusterid.x": x // shape[0], "clusterid.y": y // shape[1]}
            at |= {"nclusterid.x": many[0], "nclusterid.y": many[1]}
            found.append(at | {"cluster_ctarank": cx + cy * shape[0], "cluster_nctarank": shape[0] * shape[1]})
    return found


def by_rank(all_blocks: list[dict[str, int]], like: dict[str, int], rank: int) -> int:
    """The number of the block of that rank in the cluster of ``like``."""
    same = ("clusterid.x", "clusterid.y")
    return next(
        n for n, b in enumerate(all_blocks) if b["cluster_ctarank"] == rank and all(b[k] == like[k] for k in same)
    )


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from(SHAPES), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(0, 3))
def test_special_registers_of_clusters(shape: tuple[int, int], many: tuple[int, int], order: int) -> None:
    text = PLACE + "".join(
        f"mov.u32 %r1, %{name};\nst.global.u32 [%rd9+{4 * n}], %r1;\n" for n, name in enumerate(NAMES)
    )
    grid, wanted = (shape[0] * many[0], shape[1] * many[1]), blocks(shape, many)
    out = run(text, grid, 1, np.zeros(len(wanted) * len(NAMES), U4), cluster=shape, order=order)
    assert not out.findings
    assert out.results["0"].reshape(-1, len(NAMES)).tolist() == [[b[name] for name in NAMES] for b in wanted]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from(SHAPES), st.tuples(st.integers(1, 2), st.integers(1, 2)), st.integers(0, 7), st.integers(0, 3))
def test_mapa_names_the_block_of_that_rank(
    shape: tuple[int, int], many: tuple[int, int], turn: int, order: int
) -> None:
    """Each block stores its number at home, reads that of rank + turn, and counts up in that of rank - turn."""
    size, grid = shape[0] * shape[1], (shape[0] * many[0], shape[1] * many[1])
    text = (
        PLACE
        + f"""
mov.u32 %r6, 0;
st.shared.u32 [s], %r5;
st.shared.u32 [s+4], %r6;
{MEET}
mov.u32 %r7, %cluster_ctarank;
add.u32 %r8, %r7, {turn};
rem.u32 %r8, %r8, {size};
add.u32 %r9, %r7, {size * 8 - turn};
rem.u32 %r9, %r9, {size};
mov.u32 %r10, s;
mapa.shared::cluster.u32 %r11, %r10, %r8;
mapa.shared::cluster.u32 %r12, %r10, %r9;
ld.shared::cluster.u32 %r13, [%r11];
st.global.u32 [%rd9], %r13;
add.u32 %r14, %r5, 1000;
st.shared::cluster.u32 [%r12+4], %r14;
{MEET}
ld.shared.u32 %r13, [s+4];
st.global.u32 [%rd9+4], %r13;
"""
    )
    there = blocks(shape, many)
    out = run(text, grid, 1, np.zeros(len(there) * len(NAMES), U4), cluster=shape, order=order)
    assert not out.findings, out.findings[0]
    read = [by_rank(there, b, (b["cluster_ctarank"] + turn) % size) for b in there]
    assert out.results["0"].reshape(-1, len(NAMES))[:, :2].tolist() == [[n, 1000 + n] for n in read]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from([s for s in SHAPES if s != (1, 1)]), st.integers(1, 2), st.data())
def test_a_multicast_goes_to_the_ranks_of_its_mask(shape: tuple[int, int], many: int, data: st.DataObject) -> None:
    """One block of each cluster copies for those in a mask; each of these has the bytes, and its own mbarrier."""
    size = shape[0] * shape[1]
    mask, leader = data.draw(st.integers(1, (1 << size) - 1)), data.draw(st.integers(0, size - 1))
    text = (
        PLACE
        + f"""
mbarrier.init.shared::cta.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;
mov.u32 %r6, 7;
st.shared.u32 [s], %r6;
fence.proxy.async.shared::cta;
{MEET}
mov.u32 %r7, %cluster_ctarank;
mov.u16 %h0, {mask};
setp.eq.u32 %p2, %r7, {leader};
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [s], [%rd1], 16, [bar], %h0;
mov.u32 %r8, 1;
shl.b32 %r8, %r8, %r7;
and.b32 %r8, %r8, {mask};
setp.eq.u32 %p2, %r8, 0;
@%p2 bra END;
AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [bar], 0;
@!%p1 bra AGAIN;
END:
ld.shared.u32 %r13, [s];
st.global.u32 [%rd9], %r13;
{MEET}
"""
    )
    there = blocks(shape, (many, 1))
    out = run(
        text, (shape[0] * many, shape[1]), 1, np.zeros(len(there) * len(NAMES), U4), np.full(4, 9, U4), cluster=shape
    )
    assert not out.findings, out.findings[0]
    wanted = [9 if mask >> b["cluster_ctarank"] & 1 else 7 for b in there]
    assert out.results["0"].reshape(-1, len(NAMES))[:, 0].tolist() == wanted


def test_an_address_of_another_block_has_to_be_there() -> None:
    text = "mov.u32 %r10, s;\nmapa.shared::cluster.u32 %r11, %r10, RANK;\nst.shared::cluster.u32 [%r11], %r0;\n"
    near, far = (
        run(MEET + text.replace("RANK", r) + MEET, 2, 1, cluster=(2,)).findings for r in ("%cluster_ctarank", "2")
    )
    assert not near
    assert any("mapa names a block that the cluster does not have" in f.message for f in far)


def test_a_line_names_the_kernel_s_line_through_all_calls_that_were_inlined() -> None:
    """Line 3 is called in line 7, which is called in line 20 of the kernel; then line 7 in line 30."""
    inlined = ".loc 1 {} 9, function_name $i, inlined_at 1 {} 9\nmov.u32 %r0, 0;\n"
    code = "".join(
        f".loc 1 {kernel} 5\nmov.u32 %r0, 0;\n{inlined.format(7, kernel)}{inlined.format(3, 7)}" for kernel in (20, 30)
    )
    head = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\n.reg .b32 %r<2>;\n"
    found = [(i.loc.line, i.loc.inlined_at) for i in parse(f"{head}{code}ret;\n}}\n").entries["k"].instructions[:6]]
    assert found == [(20, 0), (7, 20), (3, 20), (30, 0), (7, 30), (3, 30)]
