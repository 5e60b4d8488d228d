"""If these fail, a wrong call of the C library crashes, goes unnoticed, or gets a status that says too little."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from c_calls import STATUS
from c_driver import Bridge, no_op
from c_library import CLibrary, built
from c_packs import Made
from c_wrong import wrong
from fake_driver import FakeDriver
from fuzz import fuzzed

pytest.importorskip("cupy")

CASES = ("forward", "backward", "backward, one launch", "two distances", "eps of the call")


@pytest.mark.parametrize("case", CASES)
def test_wrong_arguments_get_their_status_and_launch_nothing(make: Any, case: str) -> None:
    made = make()
    call, library = made.call(case), made.library
    call.prepare()
    fields = {name: getattr(call.arguments, name) for name, _ in call.arguments._fields_}
    for one in wrong(fields, call.kernels):
        arguments = type(call.arguments)(**{**fields, one.field: one.value})
        assert library.call(call.group, arguments, 0, None) == one.status, one
        assert one.field.split("_")[0] in library.error(), one
    for device in (-1, 1, 64, 2**31 - 1):
        assert library.call(call.group, call.arguments, device, None) in ("NO_DEVICE", "NOT_LOADED")
    assert library.call(call.group, None, 0, None) == "NULL_POINTER"
    assert library.call(f"{call.group}_workspace_bytes", call.arguments, 0, None) == "NULL_POINTER"
    assert made.gpu.launched == []
    call.launch()
    assert call.wrong() == []


distances = st.integers(-30, 30).map(lambda n: 8 * n)


@pytest.fixture(scope="module")
def idle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> CLibrary:
    """The library with a driver that does nothing, loaded."""
    where = tmp_path_factory.mktemp("idle")
    library = CLibrary(built(folder, where / "kernels.so", f'-DLNGEN_CUDA_LIBRARY="{no_op(where)}"'), folder)
    assert library.call("set_folder", str(folder).encode()) == library.call("load", 0) == "OK"
    return library


@fuzzed
@given(
    st.integers(0, 5), st.integers(0, 3), st.tuples(distances, distances), st.tuples(distances, distances), distances
)
@example(4, 0, (192, 0), (192, 0), 64)  # columns of one array
@example(4, 2, (128, 640), (128, 640), 64)
@example(4, 2, (64, 640), (64, 640), 0)  # y takes the place of x
def test_overlaps_are_seen(
    idle: CLibrary, rows: int, inner: int, of_x: tuple[int, int], of_y: tuple[int, int], offset: int
) -> None:
    """Against the elements themselves. Arrays that alternate in another way than columns do may be refused."""
    d, size = 64, 2

    def elements(start: int, step: int, outer: int) -> list[int]:
        many = inner or max(rows, 1)
        step = step or d
        outer = outer or step * min(many, rows)
        return [start + r // many * outer + r % many * step + n for r in range(rows) for n in range(d)]

    x, y = elements(0, *of_x), elements(offset, *of_y)
    fields = {"x": 1 << 30, "y": (1 << 30) + size * offset, "gamma": 1 << 20, "rstd": 2 << 20}
    fields |= {"x_stride": of_x[0], "x_outer_stride": of_x[1], "y_stride": of_y[0], "y_outer_stride": of_y[1]}
    group = "rmsnorm_forward_strides_2"
    arguments = idle.structs[group](d=d, dtype=idle.dtypes["bf16"], rows=rows, inner=inner, **fields)
    found = idle.call(group, arguments, 0, None)
    if len({*y}) < len(y):
        assert found == "BAD_STRIDE"
    elif x != y and {*x} & {*y}:
        assert found in ("OVERLAP", "BAD_STRIDE")
    elif not rows or x == y or of_x == of_y or max(x) < min(y) or max(y) < min(x):
        assert found == "OK" or (inner and rows % inner), idle.error()
    else:
        assert found in ("OK", "OVERLAP", "BAD_STRIDE")


@pytest.mark.parametrize(("one", "other", "status"), [("rstd", "mean", "OVERLAP"), ("gamma", "beta", "OK")])
def test_vectors_that_coincide(idle: CLibrary, one: str, other: str, status: str) -> None:
    names = ("x", "gamma", "beta", "y", "mean", "rstd")
    fields = {name: place << 20 for place, name in enumerate(names, 1)}
    fields[one] = fields[other]
    group = "layernorm_forward"
    arguments = idle.structs[group](d=96, dtype=idle.dtypes["bf16"], rows=4, **fields)
    assert idle.call(group, arguments, 0, None) == status


def test_what_is_not_loaded_is_not_launched(folder: Path, library: Path, bridge: Bridge) -> None:
    made = Made(folder, library, devices=2)
    with bridge.behind(made.gpu):
        call = made.call("forward")
        assert made.library.call(call.group, call.arguments, 0, None) == "NOT_LOADED"
        for name, device, status in (
            ("unload", 0, "NOT_LOADED"), ("load", 2, "NO_DEVICE"), ("load", -1, "NO_DEVICE"), ("unload", 64, "NO_DEVICE"),
            ("load", 0, "OK"),
        ):  # fmt: skip
            assert made.library.call(name, device) == status
        assert made.library.call(call.group, call.arguments, 1, None) == "NOT_LOADED"
        call.launch()
        assert made.library.call("unload", 0) == "OK"
        assert made.library.call(call.group, call.arguments, 0, None) == "NOT_LOADED"


def test_a_pointer_of_another_device_is_refused(make: Any) -> None:
    made = make(devices=2)
    assert made.library.call("load", 1) == "OK"
    call = made.call("forward", 1)
    assert made.library.call(call.group, call.arguments, 0, None) == "WRONG_DEVICE"


@pytest.mark.parametrize(
    ("driver", "status", "said"),
    [
        ({"capability": (7, 5)}, "NO_IMAGE", "7.5"),
        ({"version": 11040}, "OLD_DRIVER", "11.4"),
        ({"devices": 0}, "NO_DRIVER", "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_a_machine_that_cannot_run_the_pack(
    folder: Path, library: Path, bridge: Bridge, driver: Any, status: str, said: str
) -> None:
    made = Made(folder, library, **driver)
    with bridge.behind(made.gpu):
        assert made.library.call("load", 0) == status
        assert said in made.library.error()
        assert made.library.supported("layernorm", 96, "bf16") == (status == "OLD_DRIVER")


def test_a_driver_that_is_missing_or_lacks_a_function(folder: Path, tmp_path: Path) -> None:
    bridge = Bridge(tmp_path, lacks=["cuLaunchKernelEx"])
    for path, status, said in (
        ("missing.so", "NO_DRIVER", "missing.so"),
        (bridge.path, "OLD_DRIVER", "LaunchKernelEx"),
    ):
        library = CLibrary(built(folder, tmp_path / f"{status}.so", f'-DLNGEN_CUDA_LIBRARY="{path}"'), folder)
        with bridge.behind(FakeDriver()):
            assert library.call("load", 0) == status
            assert said in library.error()


@pytest.mark.parametrize("change", ["other", "longer", "shorter", "missing"])
def test_a_tampered_pack_is_not_loaded(make: Any, folder: Path, tmp_path: Path, change: str) -> None:
    made = make()
    copy = shutil.copytree(folder, tmp_path / "pack")
    for path in copy.glob("layernorm_fwd*.sm_90.cubin"):
        data = path.read_bytes()
        new = {"other": data[:-1] + bytes([data[-1] ^ 1]), "longer": data + b"\0", "shorter": data[:-1], "missing": b""}
        path.unlink()
        if change != "missing":
            path.write_bytes(new[change])
    assert made.library.call("unload", 0) == "OK"
    assert made.library.call("set_folder", str(copy).encode()) == "OK"
    assert made.library.call("load", 0) == "TAMPERED"
    assert ".cubin" in made.library.error()
    assert made.library.call("set_folder", str(folder).encode()) == "OK"
    assert made.library.call("load", 0) == "OK"


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
    asked = "_init_workspace" if function == "cuMemsetD8Async" else ""
    assert made.library.call(f"{call.group}{asked}", call.arguments, 0, None) == status
    assert str(STATUS[f"CUDA_ERROR_{error}"]) in made.library.error()
    assert made.gpu.context == 0
    made.gpu.refuse = {}
    call.launch()
    assert call.wrong() == []


def test_a_gpu_without_room_takes_other_kernels_or_says_so(make: Any) -> None:
    for multiprocessors, kernels in ((132, 1), (60, 2)):
        made = make(multiprocessors=multiprocessors)
        call = made.call("backward, one launch")
        call.prepare()
        call.launch()
        assert (len(made.gpu.launched), call.wrong()) == (kernels, [])
    assert made.library.call("unload", 0) == "OK"
    made.gpu.attributes[97] = 1 << 10  # bytes of shared memory of a block
    assert made.library.call("load", 0) == "OK"
    call = made.call("claimed rows")
    assert made.library.call(call.group, call.arguments, 0, None) == "NO_ROOM"
    assert "shared memory" in made.library.text("NO_ROOM")
