"""If these fail, a launcher gives other bits than the interpreter, writes beside its results, or refuses other calls.

Every launcher takes the calls of one table. The fake GPU executes the PTX of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from calls import GIVEN, TABLE, Call, Memory
from fake_driver import FakeDriver
from launchers import LAUNCHERS, Host, Launcher, wrong
from sampling import grid

CAPTURE = 5
PAIRS = [(kind, name) for kind, of in LAUNCHERS.items() for name, call in TABLE.items() if of.takes(call)]
ON_A_GPU = [(kind, name) for kind, of in LAUNCHERS.items() for name, call in GIVEN.items()
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


@grid(("launcher", "name"), ON_A_GPU, strength=1, indirect=["launcher"])
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


@grid(("launcher", "name"), ON_A_GPU, strength=1, indirect=["launcher"])
def test_threads_have_calls_of_their_own(launcher: Launcher, gpu: FakeDriver, name: str) -> None:
    """They share kernels and recipes, and have no context of a GPU."""

    def work(seed: int) -> list[str]:
        with memory_of(gpu, GIVEN[name], seed) as (memory, host):
            return memory.wrong(launcher.launch(memory, host), host.after)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(6))] == [[]] * 6
