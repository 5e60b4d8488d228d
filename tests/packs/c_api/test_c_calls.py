"""If these fail, calls of the C library have other bits than the interpreter, or a wrong call gets a wrong status.

It runs in this process. Its driver is a FakeDriver, whose GPU executes the PTX of the pack.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from c_calls import STATUS
from c_driver import Bridge, no_op
from c_library import CLibrary
from c_packs import CASES, ON_SM_90, PLAIN, SPECIAL
from c_wrong import wrong
from fake_driver import FakeDriver
from fake_launches import PROGRAMMATIC
from lngen.compiler.ir.numerics import Array
from lngen.errors import ArrayError
from lngen.launch import driver
from lngen.launch.array_rules import replaced, span_of
from lngen.launch.signature import Signature, Tensor

pytest.importorskip("cupy")

STREAM, CAPTURE = 77, 5
COUNTED = ("backward, one launch", "claimed rows")


@pytest.mark.parametrize(("capability", "multiprocessors"), [((8, 0), 1), ((9, 0), 132), ((12, 0), 132)])
def test_calls_have_the_bits_of_the_interpreter(make: Any, capability: tuple[int, int], multiprocessors: int) -> None:
    """Twice if a launch counts in its workspace. The small GPU takes kernels for many rows, the newest compiles PTX."""
    made = make(capability=capability, multiprocessors=multiprocessors)
    on_sm_80 = [case for case, (_, spec, *_) in CASES.items() if spec in (*PLAIN, *SPECIAL)]
    cases = {(8, 0): on_sm_80, (9, 0): [*CASES, *ON_SM_90], (12, 0): ["forward", "backward", "two distances"]}
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


@pytest.mark.parametrize("case", [*CASES, *ON_SM_90])
def test_c_and_python_give_the_driver_the_same(make: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Kernels, the bits of their arguments, grids, shared memory and attributes of a call."""
    made = make()
    monkeypatch.setattr(driver, "library", lambda: made.gpu)
    call = made.call(case)
    call.prepare()
    made.gpu.launched.clear()
    call.launch()
    by_c, fields, described = [*made.gpu.launched], call.fields, call.kernels
    d, rows, inner = described["spec"]["d"], fields["rows"], fields.get("inner") or 1
    wide = [t["name"] for t in described["tensors"] if t["axes"] == ["M", "D"]]
    strides: dict[str, Any] = {name: fields[f"{name}_stride"] or d for name in wide}
    if "inner" in fields:
        strides = {name: (fields[f"{name}_outer_stride"], strides[name]) for name in wide}
    loaded = made.pack.kernels(described["spec"]["text"], 0, rows)
    bound = loaded.bind(rows, strides, inner)
    signature = Signature.of(described)
    bound.give(signature.values(fields.get("eps")).bits)
    made.gpu.launched.clear()
    bound([fields[name] for name in loaded.tensors], fields.get("workspace", 0), 0)
    assert [replace(one, thread=0) for one in made.gpu.launched] == [replace(one, thread=0) for one in by_c]


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


@pytest.mark.parametrize("case", COUNTED)
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


# ---- wrong arguments ----


@pytest.mark.parametrize("case", ["forward", "backward", "backward, one launch", "two distances", "eps of the call"])
def test_wrong_arguments_get_their_status_and_launch_nothing(make: Any, case: str) -> None:
    made = make()
    call = made.call(case)
    call.prepare()
    for field, value, status in wrong(call.fields, call.kernels):
        assert call.status(**{field: value}) == status, (field, value)
        assert field.split("_")[0] in made.library.error(), (field, value)
    for device, status in ((-1, "NO_DEVICE"), (1, "NOT_LOADED"), (64, "NO_DEVICE"), (2**31 - 1, "NO_DEVICE")):
        assert call.status(device=device) == status
    assert made.gpu.launched == []
    call.launch()
    assert call.wrong() == []


# ---- memory that arrays share ----


@pytest.fixture(scope="module")
def idle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> CLibrary:
    """The library with a driver that does nothing, loaded."""
    where = tmp_path_factory.mktemp("idle")
    library = CLibrary.built(folder, where, LNGEN_PACK_DIR=folder, LNGEN_CUDA_LIBRARY=no_op(where))
    assert library.call("load", 0) == "OK"
    return library


def python_says(rows: int, inner: int, of: Sequence[tuple[int, tuple[int, int]]]) -> str:
    """What the engine in Python says of x and y, by their addresses and distances."""
    tensors = [Tensor(name, "bf16", 2, ("M", "D")) for name in "xy"]
    places = [(at, span_of(t, rows, 64, distance, inner)) for t, (at, distance) in zip(tensors, of, strict=True)]
    try:
        replaced(tensors, places, 1)
    except ArrayError:
        return "OVERLAP"
    return "OK"


def test_overlaps_are_seen_as_the_elements_tell(idle: CLibrary) -> None:
    """Rows of x and y at one distance or two, of any sign; a last group that is not whole counts as if it were.

    C and Python, which find it by other ways, agree.
    """
    d, chance, found = 64, random.Random(41), Counter[str]()

    def distance() -> int:
        return chance.choice((8, 32, 64)) * chance.randint(-12, 12)

    def starts(step: int, outer: int) -> Array:
        step = step or d
        outer = outer or step * many
        r = np.arange(-(-rows // many) * many)  # of whole groups
        return r // many * outer + r % many * step

    def near(a: Array, b: Array) -> Array:
        return np.abs(a[:, None] - b) < d

    for _ in range(20_000):
        inner = chance.choice((0, 0, 2, 3, 5))
        rows = chance.randint(0, 12)
        many = max(1, min(inner or rows, rows))
        of_x = distance(), distance()
        of_y = chance.choice((of_x[0], -of_x[0], distance())), chance.choice((of_x[1], -of_x[1], distance()))
        offset = chance.choice((0, 64, distance(), 8 * chance.randint(-99, 99)))
        x, y, two = starts(*of_x), starts(*of_y) + offset, ((0, of_x), (offset, of_y))
        wanted = "OK"
        if near(y, y).sum() > len(y):
            wanted = "BAD_STRIDE"
        elif near(x, y).any() and (x != y).any():
            wanted = "OVERLAP"
        given = {"x": 1 << 30, "y": (1 << 30) + 2 * offset, "gamma": 1 << 20, "rstd": 2 << 20, "inner": inner}
        given |= dict(zip(("x_stride", "x_outer_stride", "y_stride", "y_outer_stride"), of_x + of_y, strict=True))
        got = idle.with_fields("rmsnorm_forward_strides_2", d, "bf16", rows, **given)
        assert got == wanted, (rows, given, idle.error())
        if rows and rows % many == 0 and got != "BAD_STRIDE":
            of = [(2 * offset, (outer or (step or d) * many, step or d)) for offset, (step, outer) in two]
            assert python_says(rows, many, of) == got, (rows, given)
        found[got] += 1
    assert min(found[status] for status in ("OK", "OVERLAP", "BAD_STRIDE")) > 1000


def test_the_workspace_lies_in_no_array(make: Any) -> None:
    call = make().call("backward")
    call.prepare()
    assert call.status(workspace=(call.fields["dx"] + 255) // 256 * 256) == "OVERLAP"
    assert (
        call.status(workspace=(call.fields["gamma"] - call.fields["workspace_bytes"]) // 256 * 256 + 256) == "OVERLAP"
    )


# ---- devices, drivers and packs ----


def test_what_is_not_loaded_is_not_launched(make: Any) -> None:
    made = make(load=False, devices=2)
    call, of = made.call("forward"), made.library.call
    assert call.status() == "NOT_LOADED"
    assert [of("unload", 0), of("load", 2), of("load", -1), of("unload", 64)] == ["NOT_LOADED", *["NO_DEVICE"] * 3]
    assert [of("load", 0), call.status(), call.status(device=1)] == ["OK", "OK", "NOT_LOADED"]
    assert [of("load", 1), call.status(device=1)] == ["OK", "WRONG_DEVICE"]
    assert [of("unload", 0), call.status()] == ["OK", "NOT_LOADED"]
    said = made.library.error()
    assert not made.library.supported("layernorm", 96, "bf16", device=2)
    assert made.library.error() == said


def test_no_workspace_of_another_device_is_cleared(make: Any) -> None:
    made = make(devices=2)
    call = made.call("backward, one launch")
    call.prepare()
    assert made.library.call("load", 1) == "OK"
    assert call.status("_init_workspace", device=1) == "WRONG_DEVICE"
    assert "workspace is expected on device 1" in made.library.error()


@pytest.mark.parametrize(
    ("driver", "status", "said"),
    [
        ({"capability": (7, 5)}, "NO_IMAGE", "7.5"),
        ({"version": 11040}, "OLD_DRIVER", "11.4"),
        ({"devices": 0}, "NO_DRIVER", "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_a_machine_that_cannot_run_the_pack(make: Any, driver: Any, status: str, said: str) -> None:
    library = make(load=False, **driver).library
    assert library.call("load", 0) == status
    assert said in library.error()
    assert library.supported("layernorm", 96, "bf16") == (status == "OLD_DRIVER")


def test_a_driver_that_is_missing_or_lacks_a_function(folder: Path, tmp_path: Path) -> None:
    bridge = Bridge(tmp_path, lacks=["cuLaunchKernelEx"])
    for path, status, said in (("none.so", "NO_DRIVER", "none.so"), (bridge.path, "OLD_DRIVER", "cuLaunchKernelEx")):
        library = CLibrary.built(folder, tmp_path, LNGEN_CUDA_LIBRARY=path)
        with bridge.behind(FakeDriver()):
            assert library.call("load", 0) == status
            assert said in library.error()


@pytest.mark.parametrize("change", ["other", "longer", "shorter", "missing", "FIFO", "folder"])
def test_a_tampered_pack_is_not_loaded(make: Any, folder: Path, tmp_path: Path, change: str) -> None:
    library, copy = make(load=False).library, shutil.copytree(folder, tmp_path / "pack")
    for path in copy.glob("layernorm_fwd*.sm_90.cubin"):
        data = path.read_bytes()
        path.unlink()
        new = {"other": data[:-1] + bytes([data[-1] ^ 1]), "longer": data + b"\0", "shorter": data[:-1]}
        if change in new:
            path.write_bytes(new[change])
        elif change != "missing":  # which nobody waits for
            {"FIFO": os.mkfifo, "folder": os.mkdir}[change](path)
    assert [library.call("set_folder", str(copy).encode()), library.call("load", 0)] == ["OK", "TAMPERED"]
    assert ".cubin" in library.error()
    assert [library.call("set_folder", str(folder).encode()), library.call("load", 0)] == ["OK", "OK"]


@pytest.mark.parametrize(
    ("function", "error", "status"),
    [
        ("cuLaunchKernelEx", "COOPERATIVE_LAUNCH_TOO_LARGE", "NO_ROOM"),
        ("cuLaunchKernelEx", "INVALID_HANDLE", "WRONG_DEVICE"),
        ("cuLaunchKernelEx", "LAUNCH_FAILED", "DRIVER_ERROR"),
        ("cuMemsetD8Async", "OUT_OF_MEMORY", "OUT_OF_MEMORY"),
        ("cuPointerGetAttribute", "INVALID_VALUE", "WRONG_DEVICE"),
        ("cuCtxPushCurrent_v2", "UNKNOWN", "DRIVER_ERROR"),
    ],
)
def test_what_the_driver_refuses(make: Any, function: str, error: str, status: str) -> None:
    """The next call is not harmed."""
    made = make()
    call = made.call("backward, one launch")
    call.prepare()
    assert made.gpu.cuCtxSetCurrent(None) == 0
    made.gpu.refuse = {function: STATUS[f"CUDA_ERROR_{error}"]}
    assert call.status("_init_workspace" if function == "cuMemsetD8Async" else "") == status
    assert str(STATUS[f"CUDA_ERROR_{error}"]) in made.library.error()
    made.gpu.refuse = {}
    call.launch()
    assert (made.gpu.context, call.wrong()) == (0, [])


def test_a_gpu_without_room_takes_other_kernels_or_says_so(make: Any) -> None:
    for multiprocessors, kernels in ((132, 1), (60, 2)):
        made = make(multiprocessors=multiprocessors)
        call = made.call("backward, one launch")
        call.prepare()
        call.launch()
        assert (len(made.gpu.launched), call.wrong()) == (kernels, [])
    made = make(load=False)
    made.gpu.attributes[97] = 1 << 10  # bytes of shared memory of a block
    assert (made.library.call("load", 0), made.library.error()) == ("OK", "")
    assert [made.call(case).status() for case in ("forward", "claimed rows")] == ["OK", "NO_ROOM"]
    assert "d=1024" in made.library.error()
