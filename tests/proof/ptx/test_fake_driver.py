"""If these fail, tests that launch through the fake driver prove nothing: it takes what a GPU refuses, or errs."""

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fake_launches
from c_calls import STATUS
from c_launcher import ADDRESS, INT, POINTER, allocate, begin, download, function_of, launch, load, run, upload
from fake_driver import FakeDriver
from fake_images import made_up_cubin
from fake_kernels import ADD, DOUBLE, started
from lngen.compiler.emit import emit
from lngen.compiler.interpret import interpret
from lngen.compiler.problem import Schedule
from lngen.launch import driver
from lngen.launch.driver import PROGRAMMATIC_STREAM_SERIALIZATION
from lngen.proof.check.inputs import mismatches, random_inputs
from plans import plan_of
from schedules import cp_async, multipass, registers, tma

pytest.importorskip("cupy")

CASES: dict[str, tuple[str, Schedule, int]] = {
    "registers": ("layernorm.fwd:d=96,dtype=bf16", registers(8, 4, 8), 5),
    "f64": ("layernorm.bwd:d=96,dtype=f64,save=none,blocks=2", registers(8, 32, 2), 5),
    "one launch": ("layernorm.bwd:d=1000,dtype=bf16,blocks=3", registers(64, 8, 8, "prefetch single"), 20),
    "cp_async": ("layernorm.fwd:d=1000,dtype=bf16", cp_async(32, 4, 8, 3, "cached", grid=3), 5),
    "tma": ("layernorm.fwd:d=256,dtype=bf16", tma(32, 2, 8, 2, "store cached", grid=3), 5),
    "tma, one launch": ("layernorm.bwd:d=1024,dtype=f16,blocks=2", tma(64, 8, 8, 3, "store cached single"), 20),
    "cluster": ("layernorm.fwd:d=16384,dtype=bf16", tma(256, 1, 8, 2, "store cached", cluster=2, grid=4), 2),
    "cluster, one launch": ("rmsnorm.bwd:d=16384,dtype=f16,blocks=2", tma(256, 1, 8, 3, "single", cluster=2), 2),
    "multipass": ("layernorm.bwd:d=256,dtype=f16", multipass(32, 8), 5),
}


@pytest.mark.parametrize(("case", "overlap"), [*((case, True) for case in CASES), ("tma, one launch", False)])
def test_a_plan_gives_the_bits_of_the_interpreter(case: str, overlap: bool) -> None:
    spec, schedule, rows = CASES[case]
    plan, gpu = plan_of(spec, schedule), FakeDriver()
    inputs = random_inputs(plan.spec, rows)
    begin(gpu)
    with gpu.behind(driver):
        results = run(gpu, plan, gpu.made_up(emit(plan)), inputs, rows, overlap)
    assert not mismatches(results, interpret(plan.graph, inputs))
    assert [done.kernel for done in gpu.launched] == [k.name for k in plan.kernels]
    assert [done.cooperative for done in gpu.launched] == [k.cooperative for k in plan.kernels]
    assert [done.cluster for done in gpu.launched] == [(k.cluster, 1, 1) for k in plan.kernels]


def doubled(gpu: FakeDriver, address: int, count: int, stream: int = 0) -> int:
    """Launches o[i] *= 2 on so many words."""
    function = function_of(gpu, load(gpu, DOUBLE.encode() + b"\0"), "k")
    return launch(gpu, function, (1,), 32, [ADDRESS(address), ctypes.c_uint32(count)], stream=stream)


@pytest.mark.parametrize("first", [0, 1, 3])
def test_mapped_memory_has_bounds(first: int) -> None:
    """Neighbours in one line of 16 bytes are memories of their own."""
    gpu, words = started(), np.arange(16, dtype=np.uint32)
    one, two = words[first : first + 5], words[first + 5 : first + 9]
    gpu.maps_array(one, "one")
    gpu.maps_array(two, "two")
    assert doubled(gpu, two.ctypes.data, 4) == doubled(gpu, one.ctypes.data, 5) == 0
    assert words.tolist() == [n * 2 if first <= n < first + 9 else n for n in range(16)]
    with pytest.raises(AssertionError, match="out-of-bounds: A read of 4 bytes: bytes 16 to 19 of 'two', which has 16"):
        doubled(gpu, two.ctypes.data, 5)
    gpu.unmaps(two.ctypes.data)
    with pytest.raises(AssertionError, match="out-of-bounds: A read of 4 bytes: bytes 20 to 23 of 'one', which has 20"):
        doubled(gpu, one.ctypes.data, 6)
    with pytest.raises(AssertionError, match="out-of-bounds: A read of 4 bytes: bytes -4 to -1 of 'one'"):
        doubled(gpu, one.ctypes.data - 4, 6)
    assert {f.kind for f in gpu.findings} == {"out-of-bounds"}


def test_memory_that_is_neither_allocated_nor_mapped() -> None:
    gpu, words = started(), np.arange(8, dtype=np.uint32)
    with pytest.raises(AssertionError, match=r"out-of-bounds: .* where no memory is"):
        doubled(gpu, words.ctypes.data, 8)
    gpu.maps_array(words, "words")
    assert doubled(gpu, words.ctypes.data, 8) == 0
    gpu.unmaps(words.ctypes.data)
    gpu.raises = False
    assert doubled(gpu, words.ctypes.data, 8) == 0
    assert words.tolist() == [2 * n for n in range(8)]
    assert len(gpu.findings) == 4, "a read and a write, twice"


def test_mapped_memory_may_be_only_read_or_have_gaps() -> None:
    gpu, words = started(), np.zeros((2, 4), np.uint32)
    words.flags.writeable = False
    gpu.maps_array(words, "fixed")
    with pytest.raises(AssertionError, match="A write to 'fixed', which the kernel may only read"):
        doubled(gpu, words.ctypes.data, 8)
    gpu, words = started(), np.zeros((2, 4), np.uint32)
    gpu.maps_array(words, "rows", pitch=16, used=12)
    assert doubled(gpu, words.ctypes.data, 3) == 0
    with pytest.raises(AssertionError, match="between the rows of 'rows'"):
        doubled(gpu, words.ctypes.data, 4)


def test_maps_that_overlap() -> None:
    gpu, words = started(), np.zeros(8, np.uint32)
    gpu.maps_array(words[:6], "first")
    gpu.maps_array(words[2:4], "part of it")
    gpu.maps_array(words[:0], "nothing")
    with pytest.raises(AssertionError, match="'more' overlaps with 'first'"):
        gpu.maps_array(words, "more")
    gpu.unmaps(words.ctypes.data)
    gpu.maps_array(words, "more")
    assert doubled(gpu, words.ctypes.data, 8) == 0


def test_what_nothing_wrote_and_what_is_freed() -> None:
    gpu, pointer = started(), ADDRESS()
    assert gpu.cuMemAlloc_v2(ctypes.byref(pointer), 64) == 0
    with pytest.raises(AssertionError, match="uninitialised: A read of bytes 0 to 3 of 'allocation_0'"):
        doubled(gpu, pointer.value, 16)
    assert gpu.cuMemsetD8Async(pointer, 1, 64, None) == doubled(gpu, pointer.value, 16) == 0
    assert (download(gpu, pointer.value, (16,), np.uint32) == 0x2020202).all()
    assert gpu.cuMemFree_v2(pointer) == 0
    with pytest.raises(AssertionError, match="out-of-bounds"):
        doubled(gpu, pointer.value, 16)


def test_arguments_have_the_size_of_their_parameters() -> None:
    """Of a wider scalar, the low bytes; a float by its bits."""
    gpu = started()
    function = function_of(gpu, load(gpu, gpu.knows(b"some bytes", ADD, "sm_90")), "k")
    out = upload(gpu, np.zeros(4, np.float32))
    values = [ADDRESS(out), ctypes.c_float(0.1), ctypes.c_uint64(7 << 32 | 3), ctypes.c_double(0.25)]
    assert launch(gpu, function, (1,), 4, values, shared=16, stream=64) == 0
    assert download(gpu, out, (4,), np.float32).tolist() == [np.float32(np.float32(0.1) + 3.25)] * 4
    (done,) = gpu.launched
    assert done.values == (out, 0x3DCCCCCD, 3, 0x3FD0000000000000)
    assert (done.kernel, done.grid, done.block, done.shared, done.stream) == ("k", (1, 1, 1), (4, 1, 1), 16, 64)
    assert (done.attributes, done.device, done.thread) == ({}, 0, threading.get_ident())


def test_threads_have_contexts_of_their_own() -> None:
    gpu, spec = FakeDriver(devices=2), CASES["registers"]
    plan = plan_of(*spec[:2])
    image = gpu.made_up(emit(plan))

    def work(device: int) -> int:
        context = POINTER(5)
        assert gpu.cuInit(0) == gpu.cuCtxGetCurrent(ctypes.byref(context)) == 0
        assert context.value is None
        assert gpu.cuMemAlloc_v2(ctypes.byref(context), 4) == 201
        begin(gpu, device)
        found = INT(-1)
        assert gpu.cuCtxGetDevice(ctypes.byref(found)) == 0
        assert found.value == device
        for seed in range(3):
            inputs = random_inputs(plan.spec, 3, seed + 9 * device)
            assert not mismatches(run(gpu, plan, image, inputs, 3, True), interpret(plan.graph, inputs))
        return threading.get_ident()

    with gpu.behind(driver), ThreadPoolExecutor(2) as pool:
        threads = [*pool.map(work, range(2))]
    assert {(done.device, done.thread) for done in gpu.launched} == {*enumerate(threads)}


def test_a_device_does_not_reach_the_memory_of_another() -> None:
    gpu = FakeDriver(devices=2)
    begin(gpu, 0)
    address, where = upload(gpu, np.ones(4, np.uint32)), INT()
    begin(gpu, 1)
    assert gpu.cuPointerGetAttribute(ctypes.byref(where), 9, ADDRESS(address)) == where.value == 0
    assert gpu.cuPointerGetAttribute(ctypes.byref(where), 9, ADDRESS(upload(gpu, np.ones(4)))) == 0
    assert where.value == 1
    with pytest.raises(AssertionError, match="out-of-bounds"):
        doubled(gpu, address, 4)
    function = function_of(gpu, load(gpu, DOUBLE.encode()), "k")
    begin(gpu, 0)
    assert launch(gpu, function, (1,), 32, [ADDRESS(address), ctypes.c_uint32(4)]) == 400


def test_an_early_start_needs_a_wait() -> None:
    gpu = started()
    values = [ADDRESS(upload(gpu, np.ones(4, np.uint32))), ctypes.c_uint32(4)]
    function = function_of(gpu, load(gpu, DOUBLE.encode()), "k")
    assert launch(gpu, function, (1,), 32, values) == 0
    with pytest.raises(AssertionError, match="early-access"):
        launch(gpu, function, (1,), 32, values, attributes={PROGRAMMATIC_STREAM_SERIALIZATION: 1})


def test_launches_run_one_after_another_in_the_order_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that launch at the same time do not meet in the executor."""
    gpu, inside, orders = FakeDriver(), list[int](), list[tuple[int, int]]()
    gpu.order = 7

    def run_blocks(work: object, order: int) -> None:
        inside.append(1)
        time.sleep(0.01)
        orders.append((len(inside), order))
        inside.pop()

    def work(_: int) -> int:
        begin(gpu)
        return doubled(gpu, 0, 0)

    monkeypatch.setattr(fake_launches, "run_blocks", run_blocks)
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(work, range(4)))
    assert orders == [(1, 7)] * 4


ref = ctypes.byref
CLUSTER, COOPERATIVE, PROGRAMMATIC = 4, 2, 6
SHARED, NON_PORTABLE = 8, 14


def loaded(gpu: FakeDriver, text: str = DOUBLE) -> ctypes.c_void_p:
    """The kernel k of a text, as a function."""
    return function_of(gpu, load(gpu, gpu.knows(made_up_cubin(text, "sm_90"), text, "sm_90")), "k")


def launched(gpu: FakeDriver, grid: int = 1, block: int = 32, shared: int = 0, **attributes: int) -> int:
    """The status of a launch of k."""
    keys = {"cluster": CLUSTER, "cooperative": COOPERATIVE, "programmatic": PROGRAMMATIC}
    function, given = loaded(gpu), {keys[name]: value for name, value in attributes.items()}
    values = [ADDRESS(upload(gpu, np.ones(1, np.uint32))), ctypes.c_uint32(0)]
    return launch(gpu, function, (grid,), block, values, shared=shared, attributes=given)


def load_status(gpu: FakeDriver, image: bytes) -> int:
    module = POINTER()
    status = int(gpu.cuModuleLoadData(ref(module), image))
    assert bool(module.value) == (status == 0)
    return status


def test_nothing_works_before_the_start() -> None:
    gpu, count, context, version = FakeDriver(), INT(), POINTER(), INT()
    assert gpu.cuDriverGetVersion(ref(version)) == 0
    assert version.value == 13000
    assert gpu.cuDeviceGetCount(ref(count)) == gpu.cuDevicePrimaryCtxRetain(ref(context), 0) == 3
    assert gpu.cuInit(1) == 1
    assert gpu.cuInit(0) == gpu.cuDeviceGetCount(ref(count)) == 0
    assert count.value == 1
    assert FakeDriver(devices=0).cuInit(0) == 100
    for call in (
        lambda: gpu.cuCtxGetDevice(ref(count)), lambda: gpu.cuMemAlloc_v2(ref(ADDRESS()), 8),
        lambda: load_status(gpu, DOUBLE.encode()), gpu.cuCtxSynchronize, lambda: gpu.cuStreamSynchronize(None),
        lambda: gpu.cuMemcpyHtoD_v2(ADDRESS(0), b"", 0), lambda: gpu.cuFuncSetAttribute(POINTER(5), 8, 0),
    ):  # fmt: skip
        assert call() == 201


def test_images_suit_the_gpu_and_the_driver() -> None:
    gpu = started((8, 6))
    for arch, status in (("sm_80", 0), ("sm_86", 0), ("sm_89", 209), ("sm_90", 209), ("sm_75", 209), ("sm_80a", 209)):
        assert load_status(gpu, gpu.knows(made_up_cubin(DOUBLE, arch), DOUBLE, arch)) == status, arch
    for old, new, status in (
        ("sm_90", "sm_86", 0), ("sm_90", "sm_75", 0), ("sm_90", "sm_90", 218), ("8.7", "9.9", 222),
        (".version 8.7", "", 200), (".entry k", ".entry k(", 218),
    ):  # fmt: skip
        text = DOUBLE.replace("sm_90", "sm_80") if old != "sm_90" else DOUBLE
        assert load_status(gpu, text.replace(old, new).encode()) == status, new
    cubin = gpu.knows(made_up_cubin(ADD, "sm_80"), ADD, "sm_80")
    for image in (b"no image", b"\x7fELF", cubin[:-1], cubin[:-1] + b"x", made_up_cubin(ADD, "sm_86")):
        assert load_status(gpu, image) == 200
    assert load_status(gpu, cubin + b"after it") == 0
    assert gpu.cuModuleLoadData(ref(POINTER()), None) == 1


def test_handles_end_with_their_module() -> None:
    gpu, value = started(), INT()
    module = load(gpu, DOUBLE.encode())
    function = function_of(gpu, module, "k")
    assert gpu.cuModuleGetFunction(ref(POINTER()), module, b"other") == 500
    assert gpu.cuFuncGetAttribute(ref(value), 4, function) == gpu.cuModuleUnload(module) == 0
    assert gpu.cuFuncGetAttribute(ref(value), 4, function) == gpu.cuFuncSetAttribute(function, SHARED, 0) == 400
    assert gpu.cuModuleUnload(module) == gpu.cuModuleGetFunction(ref(POINTER()), module, b"k") == 400
    assert launch(gpu, function, (1,), 32, [ADDRESS(), ADDRESS()]) == 400


def test_attributes_of_functions() -> None:
    gpu, value = started(), INT()
    gpu.registers = {"k": 77}
    text = DOUBLE.replace(")\n{", ")\n.maxntid 96\n{").replace("ret;", "ret;\n.shared .align 4 .b8 s[1024];", 1)
    function = loaded(gpu, text)
    for attribute, want in {0: 96, 1: 1024, 4: 77, 6: 90, 8: 47 << 10, 14: 0}.items():
        assert gpu.cuFuncGetAttribute(ref(value), attribute, function) == 0
        assert value.value == want, attribute
    assert gpu.cuFuncGetAttribute(ref(value), 99, function) == gpu.cuFuncSetAttribute(function, 99, 1) == 1
    for size, status in ((226 << 10, 0), ((226 << 10) + 1, 1), (-1, 1)):
        assert gpu.cuFuncSetAttribute(function, SHARED, size) == status
    values = [ADDRESS(upload(gpu, np.ones(1, np.uint32))), ctypes.c_uint32(0)]
    assert [launch(gpu, function, (1,), block, values) for block in (96, 97)] == [0, 1]
    registers = {"k": 40}
    image = gpu.knows(b"a cubin", DOUBLE, "sm_90", registers=registers)
    assert gpu.cuFuncGetAttribute(ref(value), 4, function_of(gpu, load(gpu, image), "k")) == 0
    assert value.value == 40, "the image's own number"


def test_shared_memory_has_to_be_asked_for() -> None:
    gpu = started()
    assert [launched(gpu, shared=size) for size in (48 << 10, (48 << 10) + 1)] == [0, 1]
    function, values = loaded(gpu), [ADDRESS(upload(gpu, np.ones(1, np.uint32))), ctypes.c_uint32(0)]
    assert gpu.cuFuncSetAttribute(function, SHARED, 100 << 10) == 0
    sizes = (100 << 10, (100 << 10) + 1)
    assert [launch(gpu, function, (1,), 32, values, shared=size) for size in sizes] == [0, 1]


def test_shapes_of_launches() -> None:
    gpu = started()
    assert [launched(gpu, *shape) for shape in ((0, 32), (1, 0), (1, 1025), (1, 1024))] == [1, 1, 1, 0]
    assert [launched(gpu, 6, cluster=n) for n in (1, 2, 3, 4, 0)] == [0, 0, 0, 1, 1]
    assert [launched(gpu, 16, cluster=n) for n in (8, 16)] == [0, 912]
    function, values = loaded(gpu), [ADDRESS(upload(gpu, np.ones(1, np.uint32))), ctypes.c_uint32(0)]
    assert gpu.cuFuncSetAttribute(function, NON_PORTABLE, 1) == 0
    assert [launch(gpu, function, (n,), 32, values, attributes={CLUSTER: n}) for n in (16, 32)] == [0, 912]
    own = loaded(gpu, DOUBLE.replace(")\n{", ")\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{"))
    assert [launch(gpu, own, (8,), 32, values, attributes={CLUSTER: n}) for n in (2, 4)] == [0, 1]
    with pytest.raises(AssertionError, match="grids of two dimensions"):
        launch(gpu, function, (1, 1, 2), 32, values)
    old = started((8, 0))
    old_function = function_of(old, load(old, DOUBLE.replace("sm_90", "sm_80").encode()), "k")
    values = [ADDRESS(upload(old, np.ones(1, np.uint32))), ctypes.c_uint32(0)]
    for attribute, status in ((CLUSTER, 801), (PROGRAMMATIC, 801), (COOPERATIVE, 0)):
        assert launch(old, old_function, (1,), 32, values, attributes={attribute: 1}) == status
    assert old.cuFuncSetAttribute(old_function, NON_PORTABLE, 1) == 1


@pytest.mark.parametrize(("block", "shared", "registers", "most"), [
    (1024, 0, 32, 8), (1024, 0, 33, 4), (32, 0, 32, 128), (32, 47104, 32, 16),
])  # fmt: skip
def test_a_cooperative_launch_fits_on_the_gpu(block: int, shared: int, registers: int, most: int) -> None:
    """Threads, registers, blocks or shared memory of four multiprocessors are the limit."""
    gpu = started(multiprocessors=4)
    gpu.registers = {"k": registers}
    assert launched(gpu, most, block, shared, cooperative=1) == launched(gpu, most + 1, block, shared) == 0
    assert launched(gpu, most + 1, block, shared, cooperative=1) == 720


def test_a_block_fits_on_a_multiprocessor() -> None:
    gpu = started()
    gpu.registers = {"k": 255}
    assert [launched(gpu, 1, block) for block in (256, 512)] == [0, 701]


def test_memory_is_there_or_refused() -> None:
    gpu, pointer, value = started(), ADDRESS(), ctypes.create_string_buffer(64)
    gpu.capacity = 1000
    assert [gpu.cuMemAlloc_v2(ref(pointer), size) for size in (0, 600, 600)] == [1, 0, 2]
    at = pointer.value
    assert at % 256 == 0
    for first, size, status in ((0, 64, 0), (536, 64, 0), (537, 64, 1), (-1, 64, 1), (0, 0, 0), (600, 1, 1)):
        assert gpu.cuMemcpyHtoD_v2(ADDRESS(at + first), value, size) == status, (first, size)
        assert gpu.cuMemcpyDtoH_v2(value, ADDRESS(at + first), size) == status
        assert gpu.cuMemsetD8Async(ADDRESS(at + first), 1, size, None) == status
    for attribute, status in ((9, 0), (2, 0), (1, 0), (77, 1)):
        assert gpu.cuPointerGetAttribute(value, attribute, ADDRESS(at + 5)) == status
    assert gpu.cuPointerGetAttribute(value, 9, ADDRESS(at - 1)) == 1
    assert [gpu.cuMemFree_v2(ADDRESS(a)) for a in (at + 1, at, at, 0)] == [1, 0, 1, 0]
    assert gpu.cuMemAlloc_v2(ref(pointer), 1000) == 0
    assert pointer.value != at, "what is freed stays out of bounds"


def test_a_capture_takes_launches_only() -> None:
    gpu, pointer = started(), allocate(started(), 64)
    pointer = allocate(gpu, 64)
    calls: dict[str, Callable[[], int]] = {
        "load": lambda: load_status(gpu, DOUBLE.encode()),
        "load with options": lambda: gpu.cuModuleLoadDataEx(ref(POINTER()), DOUBLE.encode(), 0, None, None),
        "allocate": lambda: gpu.cuMemAlloc_v2(ref(ADDRESS()), 64),
        "copy": lambda: gpu.cuMemcpyHtoD_v2(pointer, bytes(64), 64),
        "copy back": lambda: gpu.cuMemcpyDtoH_v2(ctypes.create_string_buffer(64), pointer, 64),
        "wait for all": gpu.cuCtxSynchronize,
        "wait": lambda: gpu.cuStreamSynchronize(POINTER(64)),
        "free": lambda: gpu.cuMemFree_v2(pointer),
    }
    gpu.captures = {64: 1}
    assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, 900)
    assert gpu.cuMemsetD8Async(pointer, 0, 64, POINTER(64)) == gpu.cuStreamSynchronize(POINTER(7)) == 0
    gpu.captures = {}
    assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, 0)


def test_any_function_can_fail() -> None:
    gpu, text = started(), ctypes.c_char_p()
    gpu.refuse["cuModuleLoadData"] = 2
    assert load_status(gpu, DOUBLE.encode()) == 2
    assert gpu.calls == ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuModuleLoadData"]
    names = [name for name in dir(gpu) if name.startswith("cu")]
    gpu.refuse = dict.fromkeys(names, 719)
    assert {getattr(gpu, name)(*[None] * 6) for name in names} == {719}
    gpu.refuse.clear()
    for name, status in STATUS.items():
        assert gpu.cuGetErrorName(status, ref(text)) == 0
        assert text.value == name.encode()
        assert gpu.cuGetErrorString(status, ref(text)) == 0
        assert text.value
    assert gpu.cuGetErrorName(12345, ref(text)) == 1
    with pytest.raises(AttributeError):
        _ = gpu.cuNoSuchFunction


def test_what_ctypes_would_pass_on_wrongly() -> None:
    gpu, pointer = started(), ADDRESS()
    assert gpu.cuMemAlloc_v2(ref(pointer), 64) == 0
    with pytest.raises(
        AssertionError, match=r"cuMemFree_v2: argument 0 is the plain number .* of which ctypes passes 32"
    ):
        gpu.cuMemFree_v2(pointer.value)
    gpu.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    assert gpu.cuMemFree_v2(pointer.value) == 0
    with pytest.raises(ctypes.ArgumentError):
        gpu.cuMemFree_v2(b"text")
    with pytest.raises(AssertionError, match="takes 1 arguments, got 2"):
        gpu.cuMemFree_v2(1, 2)
    with pytest.raises(AssertionError, match=r"8 bytes are written .* the caller gives 4"):
        gpu.cuModuleLoadData(ref(INT()), DOUBLE.encode())
    with pytest.raises(AssertionError, match="5 bytes are read"):
        gpu.cuMemcpyHtoD_v2(pointer, b"four", 5)
    function = loaded(gpu)
    with pytest.raises(AssertionError, match="'k' has 2 parameters, and the table of arguments 3 pointers"):
        launch(gpu, function, (1,), 32, [INT(), INT(), INT()])
