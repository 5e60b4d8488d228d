"""If these fail, a launcher gives other bits than the interpreter, writes beside its results, or refuses other calls.

Every launcher takes the calls of one table. The fake GPU executes the PTX of the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from calls import GIVEN, TABLE, THREADED, Call, Memory
from fake_driver import FakeDriver
from launchers import LAUNCHERS, C, CCall, Host, Launcher, wrong
from sampling import grid

CAPTURE = 5
PAIRS = [(kind, name) for kind, of in LAUNCHERS.items() for name, call in TABLE.items() if of.takes(call)]


def on_a_gpu(calls: Mapping[str, Call]) -> list[tuple[str, str]]:
    """What launches the calls."""
    return [(kind, name) for kind, of in LAUNCHERS.items() for name, call in calls.items()
            if of.launches and of.takes(call)]  # fmt: skip


def factors(kind: str, name: str) -> tuple[str, ...]:
    """A plain run makes every call once, and with every launcher those of each spec and each refusal."""
    call = TABLE[name]
    return name, kind + call.spec, kind + call.refused


@contextmanager
def memory_of(gpu: FakeDriver, call: Call, seed: int = 0) -> Iterator[tuple[Memory, Host]]:
    """The memory of a call, on the fake GPU."""
    memory = Memory(call, seed)
    host, loud = Host(gpu, memory), gpu.raises
    gpu.raises = loud and not call.lost  # row groups without a row read the last one again, and drop it
    try:
        yield memory, host
    finally:
        gpu.raises = loud
        host.close()


@grid(("launcher", "name"), PAIRS, factors, strength=1, indirect=["launcher"])
def test_a_call_has_the_bits_of_the_interpreter_or_is_refused(launcher: Launcher, gpu: FakeDriver, name: str) -> None:
    with memory_of(gpu, TABLE[name]) as (memory, host):
        assert wrong(launcher, memory, host) == []


@pytest.mark.parametrize("launcher", ["compiled", "pack"], indirect=True)
def test_results_are_given_in_turns(launcher: Launcher, gpu: FakeDriver) -> None:
    """Arrays of one layout, now for y, now for h: rows of what is given lie apart, those of a new one do not."""
    for name in ("y apart", "h apart", "y apart"):
        with memory_of(gpu, TABLE[name]) as (memory, host):
            assert wrong(launcher, memory, host) == []


@pytest.mark.parametrize("launcher", ["c"], indirect=True)
def test_c_writes_zeros_behind_columns_without_a_stride(launcher: C, gpu: FakeDriver) -> None:
    """Those of Python's new arrays are looked at where they are read (fake_arrays.py)."""
    with memory_of(gpu, TABLE["columns 8 apart, rows (6,)"]) as (memory, host):
        call = CCall(launcher.library, launcher.groups[str(memory.spec)], memory, host)
        call.fields["q_scale_stride"] = 0
        call.prepare()
        call.launch()
        assert call.wrong() == ["q_scale: written beside the results"]
        scale = host.view("q_scale")
        assert not np.lib.stride_tricks.as_strided(scale, (len(scale), 8), scale.strides)[:, 6:].any()


@grid(("launcher", "name"), on_a_gpu(GIVEN), strength=1, indirect=["launcher"])
def test_a_capture_holds_a_call(launcher: Launcher, gpu: FakeDriver, name: str) -> None:
    """It runs when the graph is replayed, each time. A call before it has loaded the kernels."""
    with memory_of(gpu, GIVEN[name]) as (memory, host):
        launcher.launch(memory, host)
        host.restore()
        gpu.captures[0] = CAPTURE
        found = launcher.launch(memory, host)
        gpu.captures.clear()
        placed = {n: a for n, a in found.items() if np.shares_memory(a, host.after(memory.laid[n].memory))}
        assert {*placed} >= {*memory.given}
        assert memory.wrong(placed, host.after) != []
        for _ in range(2):
            gpu.replay(CAPTURE)
            assert memory.wrong(placed, host.after) == []
            host.restore()
        gpu.destroy(CAPTURE)


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
@grid(("launcher", "name"), on_a_gpu(THREADED), strength=1, indirect=["launcher"])
def test_threads_have_calls_of_their_own(launcher: Launcher, gpu: FakeDriver, name: str) -> None:
    """They share kernels and recipes, have no context of a GPU, and pass an eps of their own."""
    call = THREADED[name]

    def work(seed: int) -> list[str]:
        own = call if call.eps is None else replace(call, eps=call.eps * 2.0**seed)
        with memory_of(gpu, own, seed) as (memory, host):
            return memory.wrong(launcher.launch(memory, host), host.after)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(6))] == [[]] * 6
