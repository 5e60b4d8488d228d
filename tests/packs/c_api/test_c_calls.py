"""If these fail, calls of the C library have other bits than the interpreter, or a wrong call gets a wrong status.

It runs in this process. Its driver is a FakeDriver, whose GPU executes the PTX of the pack.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from c_calls import STATUS
from c_driver import Bridge
from c_library import CLibrary
from c_wrong import wrong
from fake_driver import FakeDriver
from fake_launches import PROGRAMMATIC

pytest.importorskip("cupy")

COUNTED = ("one launch", "claimed rows")
ON = {  # a GPU of few multiprocessors takes kernels for many rows, the newest compiles PTX
    (8, 0): (1, ("forward", "many rows", "no rows", "backward", "backward, no rows", "one launch")),
    (9, 0): (132, (*COUNTED, "PTX of an older arch")),
    (12, 0): (132, ("forward", "backward", "heads")),
}


@pytest.mark.parametrize("capability", ON)
def test_calls_have_the_bits_of_the_interpreter(make: Any, capability: tuple[int, int]) -> None:
    """Twice if a launch counts in its workspace. The calls of tests/calls have all kinds of arrays."""
    multiprocessors, names = ON[capability]
    made = make(capability=capability, multiprocessors=multiprocessors)
    for name in names:
        call = made.call(name)
        call.prepare()
        for _ in range(1 + (name in COUNTED)):
            call.launch()
            assert call.wrong() == [], name


def test_a_launch_launches_and_does_nothing_else(make: Any) -> None:
    """`generated/bench/c-overhead.txt` has the time. A kernel behind another one of its call may start early."""
    made = make()
    early = {
        "forward": [False],
        "backward": [False, True],
        "one launch": [False],
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
        call = made.call(("odd D", "odd D, backward")[number // 2 % 2], number % 2, number)
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


# ---- wrong arguments ----


@pytest.mark.parametrize("case", ["forward", "backward", "one launch", "heads", "eps"])
def test_wrong_arguments_get_their_status_and_launch_nothing(make: Any, case: str) -> None:
    made = make()
    call = made.call(case)
    call.prepare()
    for field, value, status in wrong(call.fields, made.described(case)):
        assert call.status(**{field: value}) == status, (field, value)
        assert field.split("_")[0] in made.library.error(), (field, value)
    size_of = made.library.structs[call.group](**call.fields)
    assert made.library.call(f"{call.group}_workspace_bytes", size_of, 0, None) == "NULL_POINTER"
    for device, status in ((-1, "NO_DEVICE"), (1, "NOT_LOADED"), (64, "NO_DEVICE"), (2**31 - 1, "NO_DEVICE")):
        assert call.status(device=device) == status
    assert made.gpu.launched == []
    call.launch()
    assert call.wrong() == []


# ---- memory that arrays share ----


def test_the_last_rows_of_a_group_count_as_if_they_were_all_there(make: Any) -> None:
    """Of three rows, in groups of two; test_c_agrees.py has whole groups."""
    call = make().call("heads")
    changes = {"rows": 3, "inner": 2, "x_stride": 64, "x_outer_stride": 128, "y_stride": 64, "y_outer_stride": 128}
    for behind, status in ((3, "OVERLAP"), (4, "OK")):
        assert call.status(**changes, y=call.fields["x"] + 2 * 64 * behind) == status


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
    call = made.call("one launch")
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
    call = made.call("one launch")
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
        call = made.call("one launch")
        call.prepare()
        call.launch()
        assert (len(made.gpu.launched), call.wrong()) == (kernels, [])
    made = make(load=False)
    made.gpu.attributes[97] = 1 << 10  # bytes of shared memory of a block
    assert (made.library.call("load", 0), made.library.error()) == ("OK", "")
    assert [made.call(case).status() for case in ("forward", "claimed rows")] == ["OK", "NO_ROOM"]
    assert "d=1024" in made.library.error()
