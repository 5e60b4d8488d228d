"""The phases of an mbarrier, or findings about its uses and initialisation, are wrong if these fail."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ptx_source import with_mbarrier

U4 = np.uint32


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


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 4), OPERATIONS)
@example(2, [("arrive and expect", 1), ("copy", 0), ("copy", 0), ("wait", 0), ("arrive", 0), ("copy", 3), ("wait", 0)])
@example(1, [("arrive", 0), ("arrive", 0), ("arrive and expect", 0), ("copy", 0), ("wait", 0)])
def test_an_mbarrier_does_what_its_model_does(count: int, operations: list[tuple[str, int]]) -> None:
    text, expected, _ = program(count, operations)
    out = with_mbarrier(text, 1, 1, np.zeros(max(1, len(expected)), U4), np.arange(256, dtype=U4))
    assert not out.findings, out.findings[0]
    assert out.results["0"][: len(expected)].tolist() == expected


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 7), st.integers(1, 70), st.integers(0, 3))
def test_arrivals_of_many_threads_end_as_many_phases(count: int, threads: int, times: int) -> None:
    """Each thread arrives some times; after n arrivals in all n // count phases are over."""
    arrivals = "mbarrier.arrive.shared::cta.b64 _, [bar];\n" * times
    poll = "".join(POLL.replace("PARITY", str(p)).replace("AT", str(4 * p)) for p in (0, 1))
    text = f"{READY.replace('COUNT', str(count))}{arrivals}bar.sync 0;\n@!%p0 bra END;\n{poll}END:\n"
    out = with_mbarrier(text, 1, threads, np.zeros(2, U4))
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
    out = with_mbarrier(text, 1, 1, np.zeros(25, U4))
    assert not out.findings
    wanted = [[int(state // 2 < (n + 1) // 2) if state <= n else 0 for state in range(5)] for n in range(5)]
    assert out.results["0"].reshape(5, 5).tolist() == wanted


@pytest.mark.parametrize(("count", "times"), [(2, 3), (1, 2)])
def test_more_arrivals_than_a_phase_has_room_for(count: int, times: int) -> None:
    text = READY.replace("COUNT", str(count)) + f"mbarrier.arrive.shared::cta.b64 %rd9, [bar], {times};\n"
    found = with_mbarrier(text, 1, 1, np.zeros(1, U4)).findings
    assert f"more arrivals in a phase than the {count} it was initialised with" in found[0].message


@pytest.mark.parametrize(("expected", "copied"), [(32, 16), (16, 32), (16, 0)])
def test_bytes_that_do_not_match_what_is_expected(expected: int, copied: int) -> None:
    text = READY.replace("COUNT", "1") + f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {expected};\n"
    text += COPY.replace("SIZE", str(copied)) + WAIT.replace("PARITY", "0")
    assert {f.kind for f in with_mbarrier(text, 1, 1, np.zeros(1, U4), np.arange(16, dtype=U4)).findings} == {
        "deadlock"
    }


def test_who_comes_after_one_that_saw_a_phase_end_sees_it_at_once() -> None:
    """Others may be told once a phase that it is not over: they might have come sooner."""
    text = READY.replace("COUNT", "1") + "@!%p0 bra DONE;\nmbarrier.arrive.shared::cta.b64 _, [bar];\n"
    text += WAIT.replace("PARITY", "0") + "\nDONE: BARRIER\n"
    text += "mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 0;\nselp.u32 %r1, 1, 0, %p1;\n"
    text += "mul.wide.u32 %rd1, %r0, 4;\nadd.u64 %rd1, %rd0, %rd1;\nst.global.u32 [%rd1], %r1;\n"
    assert with_mbarrier(text.replace("BARRIER", "bar.sync 0;"), 1, 2, np.zeros(2, U4)).results["0"].tolist() == [1, 1]
    assert with_mbarrier(text.replace("BARRIER", ""), 1, 2, np.zeros(2, U4)).results["0"].tolist() == [1, 0]


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
    out = with_mbarrier(text, 1, 1, np.zeros(1, U4), np.full(4, 9, U4))
    assert {f.kind for f in out.findings} == (set() if waited == read else {"async-read"})
