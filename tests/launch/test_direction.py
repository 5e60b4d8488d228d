"""If these fail, arrays of CuPy and torch are misread, or a call runs kernels that do not suit its arrays."""

import sys
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lngen
import lngen.launch.runtime as runtime
from fake_gpu import FakeGpu
from lngen.compiler.compile import KernelSet
from lngen.compiler.devices import default_device, described
from lngen.compiler.ir import BF16
from lngen.compiler.ir.numerics import NUMPY_DTYPE
from lngen.compiler.lower import Plan
from lngen.errors import ArrayError, MissingError
from lngen.launch import arrays, driver
from lngen.launch.arrays import CuPy
from lngen.launch.runtime import direction as calls
from lngen.launch.runtime import launcher
from own_graphs import gated, only_statistics

# ---- array libraries ----


class Recorded(SimpleNamespace):
    """CuPy, as much of it as makes an array out of an interface; current stream 7."""

    def __init__(self) -> None:
        self.waited: list[Any] = []
        stream = SimpleNamespace(ptr=7, wait_event=lambda event: self.waited.append(event.ptr))
        runtime = SimpleNamespace(getDevice=lambda: 0, eventRecord=lambda event, on: self.waited.append((event, on)))
        self.cuda = SimpleNamespace(
            runtime=runtime, get_current_stream=lambda: stream, Event=lambda disable_timing: SimpleNamespace(ptr=9),
            UnownedMemory=lambda pointer, size, owner: (pointer, size), MemoryPointer=lambda memory, at: (*memory, at),
        )  # fmt: skip
        self.ndarray = type("ndarray", (), {"__init__": lambda array, *what: setattr(array, "what", what)})


@pytest.mark.parametrize(
    ("shape", "strides", "size"), [((3, 4), None, 24), ((3, 4), (20, 2), 48), ((0, 4), (8, 2), 2), ((4,), (0,), 2)]
)
@pytest.mark.parametrize(("stream", "waits"), [(None, []), (7, []), (1, [(9, 1), 9])])
def test_an_array_that_is_only_an_interface(
    monkeypatch: pytest.MonkeyPatch, shape: Any, strides: Any, size: int, stream: int | None, waits: list[Any]
) -> None:
    """The memory it spans; the current stream waits for another one that it names."""
    cupy = Recorded()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    interface = {"data": (4096, False), "typestr": "<V2", "shape": shape, "strides": strides, "stream": stream}
    view = CuPy().view(SimpleNamespace(__cuda_array_interface__=interface), written=True)
    assert view.what == (shape, NUMPY_DTYPE[BF16], (4096, size, 0), strides)
    assert cupy.waited == waits
    read_only = SimpleNamespace(__cuda_array_interface__=interface | {"data": (4096, True)})
    with pytest.raises(ValueError, match="it is written to, but read-only"):
        CuPy().view(read_only, written=True)


def test_strides_of_cupy_are_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Recorded())
    layout = np.dtype("float32"), (3, 8), (64, 4), 1
    assert CuPy().in_elements(layout) == (np.dtype("float32"), (3, 8), (16, 1), 1)


def test_tensors_that_no_kernel_can_take() -> None:
    """On the CPU, or without an address."""
    torch = pytest.importorskip("torch")
    x, weight = torch.ones(2, 8), torch.ones(8)
    nowhere = "is not an array that can be used: Cannot access data"
    for given, message in (
        ((x, weight, weight), "'x' is expected on a GPU, but lies on the CPU; move it there, or pass NumPy arrays"),
        ((x.to_sparse(), weight, weight), f"'x', of torch.Tensor, {nowhere}"),
        ((x, weight.to_sparse(), weight), f"'gamma', of torch.Tensor, {nowhere}"),
    ):
        with pytest.raises(ArrayError, match=message):
            runtime.compile("layernorm", d=8).forward(*given)


# ---- calls ----


def test_a_wrong_cotangent_is_named(gpu: FakeGpu) -> None:
    """The input that gives the rows is one of forward, also where backward has no [M, D] array but dy."""
    x, weight = gpu.array("f32", 2, 8), gpu.array("f32", 8)
    for graph, inputs in ((gated, (x, x, weight)), (only_statistics, (x,))):
        norm = runtime.compile(graph, d=8)
        _, saved = norm.forward(*inputs)
        with pytest.raises(ArrayError, match=r"'dy' is expected to have shape \(2, 8\), got \(3, 8\)"):
            norm.backward(gpu.array("f32", 3, 8), saved)
    _, saved = (norm := runtime.compile(gated, d=8)).forward(x, x, weight)
    for dy, message in (
        (replace(x, device=1), "'dy' is expected on GPU 0, where other arrays lie, got GPU 1"),
        (np.ones((2, 8), np.float32), "'dy' is expected to be an array of the same library as 'x', got numpy"),
    ):
        with pytest.raises(ArrayError, match=message):
            norm.backward(dy, saved)


@pytest.mark.parametrize(("stride", "shift", "vec"), [
    *((1024, shift, vec) for shift, vec in ((0, 8), (16, 8), (8, 4), (4, 2), (12, 2), (2, 1), (6, 1))),
    *((stride, 0, vec) for stride, vec in ((1032, 8), (1028, 4), (1026, 2), (1025, 1), (-1028, 4), (-1026, 2))),
    (1028, 4, 2),
    (1026, 8, 2),
])  # fmt: skip
@pytest.mark.parametrize("array", ["x", "y"])
def test_accesses_as_wide_as_arrays_allow(gpu: FakeGpu, stride: int, shift: int, vec: int, array: str) -> None:
    """16 bytes where every row of every array begins at a multiple of them, else as many as divide all."""
    schedule = {"fwd": "form=registers,threads=128,rows_per_block=1,vec=8"}
    norm = runtime.compile("layernorm", d=1024, dtype="bf16", schedule=schedule)
    odd = gpu.array("bf16", 5, 1024, strides=(stride, 1), address=(1 << 40) + shift)
    even, weight = gpu.array("bf16", 5, 1024), gpu.array("bf16", 1024)
    x, y = (odd, even) if array == "x" else (even, odd)
    norm.forward(x, weight, weight, out=y)
    assert gpu.launched[-1].plan.schedule.vec == vec


@pytest.mark.parametrize(("shift", "vec"), [(0, 4), (16, 4), (8, 2), (4, 1)])
def test_accesses_as_wide_as_the_address_of_gamma_allows(gpu: FakeGpu, shift: int, vec: int) -> None:
    """x is of two bytes an element, gamma of four: 16 bytes hold half as many; [M] results do not count."""
    schedule = {"fwd": "form=registers,threads=128,rows_per_block=1,vec=4"}
    norm = runtime.compile("layernorm", d=1024, dtype="bf16", weight="f32", schedule=schedule)
    x, beta, mean = gpu.array("bf16", 5, 1024), gpu.array("f32", 1024), gpu.array("f32", 5, address=(1 << 41) + 4)
    norm.forward(x, gpu.array("f32", 1024, address=(1 << 40) + shift), beta, out=(None, mean, None))
    assert gpu.launched[-1].plan.schedule.vec == vec


# ---- which kernels are loaded ----


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, device in ((0, 0), (1, 1), (1, -1)):
        monkeypatch.setattr(driver, "device_count", lambda count=count: count)
        with pytest.raises(MissingError, match=f"GPU {device} is expected, but {count} are found; NumPy arrays"):
            launcher.device_arch(device)
    monkeypatch.setattr(driver, "device_count", lambda: 0)
    with pytest.raises(MissingError, match="GPU 0 is expected"):
        runtime.compile("layernorm", d=64).warmup()


def test_a_warm_up_is_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.launch.runtime.direction.live_gpu", lambda device: default_device())
    norm = runtime.compile("layernorm", d=4096, dtype="bf16")
    asked: list[int | None] = []
    for call in (norm._forward, norm._backward):
        monkeypatch.setattr(call, "launcher", lambda device, rows: asked.append(rows))
    norm.warmup(0, rows=7)
    assert asked == [7, 7]
    norm.warmup()
    every = [132, 264, 528, 1056, 2112, 4224, 33792, None, 66, 1056, 4224, 16896, None]
    assert Counter(asked[2:]) == Counter(every)


def test_gpus_of_one_arch_have_schedules_of_their_own() -> None:
    """Also where a number of rows is of the same workload class on both."""
    call = runtime.compile("layernorm", d=8192, dtype="bf16")._forward
    whole = next(device for device in described().values() if device.arch == "sm_80")
    half = whole.completed({"multiProcessorCount": whole.multiprocessors // 2})
    differ = 0
    for rows in (16, 32, 64, 128, 256, 512, 1024, 2048):
        chosen = [call.kernels("sm_80", rows=rows, gpu=gpu).plan.schedule for gpu in (whole, half)]
        assert chosen == [call.compilation.schedule("sm_80", rows=rows, device=gpu) for gpu in (whole, half)]
        differ += chosen[0] != chosen[1]
    assert differ > 0


def test_a_plan_for_few_rows() -> None:
    norm = runtime.compile("rmsnorm", d=1024, dtype="bf16")
    few, many = norm.plan(rows=1), norm.plan()
    assert few.schedule.form == "registers"
    assert few != many
    assert norm.plan(rows=2) == few
    assert norm.plan(rows=10**6) == many
    assert f"__launch_bounds__({few.schedule.block}, " in norm.source(rows=1)
    back = [norm.plan("bwd", rows=rows) for rows in (1, None)]
    assert back[0].schedule != back[1].schedule
    assert back[0].workspace == back[1].workspace, "the same partial rows, so the same bits"


@pytest.mark.parametrize("keys", [{}, {"overlap": True}])
def test_every_kernel_set_of_a_norm_is_loaded_for_calls_that_overlap_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, bool]
) -> None:
    """Those of forward, of backward and of a backward without one of the cotangents."""
    loaded: list[tuple[str, bool]] = []

    def load(plan: Plan, image: bytes, device: int, overlap: bool) -> Any:
        loaded.append((str(plan.spec), overlap))
        return SimpleNamespace(plan=plan)

    monkeypatch.setattr(calls, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(calls, "live_gpu", lambda device: None)
    monkeypatch.setattr(calls, "Launcher", load)
    monkeypatch.setattr(KernelSet, "cubin", lambda kernels, arch: SimpleNamespace(image=b"", resources={}))
    norm = lngen.compile("add_rmsnorm", d=64, dtype="f16", **keys)
    for made in (norm._forward, norm._backward, norm._backward_of(("dy",))):
        made.launcher(0, rows=16)
    assert len({text for text, _ in loaded}) == 3
    assert {overlap for _, overlap in loaded} == {keys.get("overlap", False)}


def test_a_thread_that_gets_a_new_python_state_keeps_its_recipes(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd's threads do in every call; then threading.local is empty, and the thread's number is the same."""
    norm = runtime.compile("rmsnorm", d=64)
    arrays = gpu.array("f32", 5, 64), gpu.array("f32", 64)
    made = []
    real = type(norm._forward).recipe
    monkeypatch.setattr(type(norm._forward), "recipe", lambda *args: made.append(1) or real(*args))
    for numbers, recipes in (((7, 7, 7), 1), ((8, 9), 3)):
        for number in numbers:
            monkeypatch.setattr("lngen.launch.array_call.get_ident", lambda number=number: number)
            thread = threading.Thread(target=norm.forward, args=arrays)
            thread.start()
            thread.join()
        assert len(made) == recipes
    assert len(gpu.launched) == 5


def test_new_results_beside_an_array_of_another_library(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The array is viewed; it has no layout of its own that the library knows."""
    monkeypatch.setattr(gpu, "view", lambda array, written: getattr(array, "inside", array))
    norm = lngen.compile("rmsnorm", d=64, dtype="f32")
    x, gamma, y = gpu.array("f32", 3, 64), gpu.array("f32", 64), gpu.array("f32", 3, 64)
    foreign = SimpleNamespace(inside=y)
    monkeypatch.setitem(arrays._BY_TYPE, SimpleNamespace, gpu)
    found, saved = norm.forward(x, gamma, out=(foreign, None))
    assert found is foreign
    (launched,) = gpu.launched
    assert (launched.values["y_ptr_"], launched.values["rstd_ptr_"]) == (y.address, saved["rstd"].address)
