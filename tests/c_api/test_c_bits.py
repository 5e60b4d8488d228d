"""If these fail, the C library of a pack gives other bits than the interpreter, or does more in a launch than launch.

It runs in this process. Its driver is a FakeDriver, whose GPU executes the PTX of the pack.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from c_packs import CASES, ON_SM_90
from fake_launches import PROGRAMMATIC

pytest.importorskip("cupy")

STREAM, CAPTURE = 77, 5
COUNTED = ("backward, one launch", "claimed rows")


@pytest.mark.parametrize(("capability", "multiprocessors"), [((8, 0), 1), ((9, 0), 132), ((12, 0), 132)])
def test_calls_have_the_bits_of_the_interpreter(make: Any, capability: tuple[int, int], multiprocessors: int) -> None:
    """Twice if a launch counts in its workspace. The small GPU takes kernels for many rows, the newest compiles PTX."""
    made = make(capability=capability, multiprocessors=multiprocessors)
    cases = {(8, 0): [*CASES], (9, 0): [*CASES, *ON_SM_90], (12, 0): ["forward", "backward", "two distances"]}
    for case in cases[capability]:
        call = made.call(case)
        call.prepare()
        for _ in range(1 + (case in COUNTED)):
            call.launch()
            assert call.wrong() == [], case


def test_a_launch_launches_and_does_nothing_else(make: Any) -> None:
    """`generated/bench/c-overhead.txt` has the time. A kernel behind another one of its call may start early."""
    made = make()
    early = {
        "forward": [False],
        "backward": [False, True],
        "backward, one launch": [False],
        "backward, no rows": [True],
        "PTX of an older arch": [False, False],  # it has no griddepcontrol.wait
    }
    for case, kernels in early.items():
        call = made.call(case)
        call.prepare()
        made.gpu.calls.clear()
        made.gpu.launched.clear()
        call.launch()
        assert {*made.gpu.calls} <= {"cuCtxGetCurrent", "cuPointerGetAttribute", "cuLaunchKernelEx"}, case
        assert [PROGRAMMATIC in launched.attributes for launched in made.gpu.launched] == kernels, case


@pytest.mark.parametrize("current", [None, 0, 1])
def test_the_context_of_a_thread_stays(make: Any, current: int | None) -> None:
    """None, that of the device, or of another."""
    made = make(devices=2)
    call = made.call("forward")
    context = made.gpu.context if current is not None else 0
    call.prepare()
    made.gpu.retained[1] += 1  # by this program
    assert made.gpu.cuCtxSetCurrent(context + (current or 0)) == 0
    call.launch()
    made.gpu.refuse = {"cuCtxPushCurrent_v2": 999}
    assert made.library.call("unload", 0) == "OK"
    assert (made.gpu.context, call.wrong()) == (context + (current or 0), [])


def test_calls_of_several_threads_on_two_devices(make: Any) -> None:
    made = make(devices=2)
    assert made.library.call("load", 1) == "OK"

    def one(number: int) -> list[str]:
        call = made.call(("forward, odd D", "backward, odd D")[number // 2 % 2], number % 2, seed=number)
        call.prepare()
        call.launch()
        return call.wrong()

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(one, range(8))] == [[]] * 8
    assert {launched.device for launched in made.gpu.launched} == {0, 1}
    assert len({launched.thread for launched in made.gpu.launched}) > 1


def test_threads_load_once(make: Any) -> None:
    made = make(load=False, devices=2)
    of, calls = made.library.call, made.gpu.calls
    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(lambda n: of("load", n % 2), range(8))} == {"OK"}
    loaded = calls.count("cuModuleLoadDataEx")
    assert (of("load", 0), calls.count("cuModuleLoadDataEx")) == ("OK", loaded)
    assert [of("unload", 0), of("unload", 1)] == ["OK", "OK"]
    assert (calls.count("cuModuleUnload"), made.gpu.retained) == (loaded, [0, 0])


@pytest.mark.parametrize("case", ["forward", "backward", *COUNTED])
def test_a_capture_holds_a_call(make: Any, case: str) -> None:
    """It runs when the graph is replayed, each time; what counters count starts again."""
    made = make()
    call = made.call(case)
    call.prepare()
    made.gpu.captures[STREAM] = CAPTURE
    call.launch(STREAM)
    made.gpu.captures.clear()
    assert call.wrong() != []
    for _ in range(2):
        made.gpu.replay(CAPTURE)
        assert call.wrong() == []
