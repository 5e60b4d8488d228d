"""If these fail, tests that launch through the fake driver prove nothing: it takes what a GPU refuses, or errs."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fake_launches
from c_launcher import ADDRESS, INT, POINTER, begin, download, function_of, launch, load, run, upload
from fake_driver import FakeDriver
from fake_kernels import ADD, DOUBLE, started
from lngen.check.inputs import mismatches, random_inputs
from lngen.emit import emit
from lngen.interpret import interpret
from lngen.launch import driver
from lngen.launch.driver import PROGRAMMATIC_STREAM_SERIALIZATION
from lngen.problem import Schedule
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
