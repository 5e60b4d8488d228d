"""If these fail, a kernel that starts early in a CUDA graph reads what is not there yet, or does not start early."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lngen
from lngen.launch import driver, early

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

ROWS, D = 64, 1024
WAITS, TRIGGERED, BEGUN = (0, 0), (1, 1), (2, 1)  # edges: the port of the first kernel, and the type
WHOLE = 160 << 10  # bytes of shared memory with which one block fits on a multiprocessor
SLOW = r"""
extern "C" __global__ void slow(const float* source, float* x, int count, long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) x[i] = source[i];
}
"""


@pytest.fixture
def multiprocessors() -> int:
    gpu = driver.gpu(0)
    if gpu.capability < (9, 0) or gpu.cuda < 12030:
        pytest.skip("needs sm_90 and CUDA 12.3")
    return gpu.multiprocessors


@pytest.fixture
def slow() -> Callable[..., None]:
    """Copies a tensor, by so many blocks with so much shared memory, which spin for about 20 us before they write."""
    kernel = cupy.RawKernel(SLOW, "slow")
    kernel.max_dynamic_shared_size_bytes = WHOLE

    def call(source: Any, x: Any, grid: int, shared: int = 0) -> None:
        pointers = map(ctypes.c_void_p, (source.data_ptr(), x.data_ptr()))
        given = *pointers, ctypes.c_int(x.numel()), ctypes.c_longlong(40000)
        table = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        driver.Launch(kernel.kernel.ptr, (grid, 1), 128, shared, {}, table, "slow")(
            torch.cuda.current_stream().cuda_stream
        )

    call(torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda"), 1)  # loaded before a capture
    return call


def drawn(seed: int, *shape: int) -> Any:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def captured(work: Callable[[], Any]) -> tuple[Any, Any, Counter[tuple[int, int]]]:
    """A graph of ``work``, what it returned, and the edges of the graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
        handle, _ = early._captured(torch.cuda.current_stream().cuda_stream)
        count, room = ctypes.c_size_t(16), (ctypes.c_void_p * 16)
        edges = (early._Edge * 16)()
        early._ask("cuGraphGetEdges_v2", ctypes.c_void_p(handle), room(), room(), edges, ctypes.byref(count))
    return graph, results, Counter((e.from_port, e.type) for e in edges[: count.value])


def assert_same(found: Any, wanted: Any) -> None:
    torch.cuda.synchronize()
    for one, other in zip(found, wanted, strict=True):
        assert (one.detach().cpu().numpy().view(np.int32) == np.asarray(other).view(np.int32)).all()


@pytest.mark.parametrize("kind", ["elementwise", "a small GEMM", "a full GEMM"])
def test_a_forward_behind_a_slow_kernel(slow: Callable[..., None], multiprocessors: int, kind: str) -> None:
    grid, shared, edge = {
        "elementwise": (20 * multiprocessors, 0, BEGUN),
        "a small GEMM": (multiprocessors // 3, WHOLE, BEGUN),
        "a full GEMM": (multiprocessors, WHOLE, WAITS),
    }[kind]
    norm = lngen.compile("layernorm", d=D, overlap=True)
    source, x, gamma, beta = drawn(0, ROWS, D), torch.empty(ROWS, D, device="cuda"), drawn(1, D), drawn(2, D)

    def work() -> Any:
        slow(source, x, grid, shared)
        return norm.forward(x, gamma, beta)[0]

    graph, y, edges = captured(work)
    assert edges == {edge: 1}
    for seed in range(50):
        source.copy_(drawn(seed, ROWS, D))
        graph.replay()
        assert_same([y], norm.forward(*(t.cpu().numpy() for t in (source, gamma, beta)))[:1])


@pytest.mark.parametrize(("schedule", "kernels"), [("", 2), ("single_launch=yes", 1)])
def test_a_backward_behind_a_slow_kernel(
    slow: Callable[..., None], multiprocessors: int, schedule: str, kernels: int
) -> None:
    """Two of them: where it is one launch, the first follows the memset of its counters."""
    norm = lngen.compile("layernorm", d=D, overlap=True, schedule={"bwd": schedule})
    x, gamma, beta, source = drawn(0, ROWS, D), drawn(1, D), drawn(2, D), drawn(3, ROWS, D)
    dys = [torch.empty(ROWS, D, device="cuda") for _ in range(2)]
    _, saved = norm.forward(x, gamma, beta)
    _, kept = norm.forward(*(t.cpu().numpy() for t in (x, gamma, beta)))

    def work() -> Any:
        results = []
        for dy in dys:
            slow(source, dy, 20 * multiprocessors)
            results += norm.backward(dy, saved)
        return results

    graph, results, edges = captured(work)
    assert edges == ({BEGUN: 2, TRIGGERED: 2, WAITS: 1} if kernels == 2 else {BEGUN: 1, WAITS: 3})
    for seed in range(50):
        source.copy_(drawn(seed, ROWS, D))
        graph.replay()
        assert_same(results, 2 * [*norm.backward(source.cpu().numpy(), kept)])


def test_calls_of_lngen_torch_in_a_capture(slow: Callable[..., None], multiprocessors: int) -> None:
    import lngen.torch as L

    norm, counts = lngen.compile("layernorm", d=D), list[int]()
    source, x, gamma, beta = drawn(0, ROWS, D), torch.empty(ROWS, D, device="cuda"), drawn(1, D), drawn(2, D)

    def work() -> Any:
        slow(source, x, 20 * multiprocessors)
        y = L.layer_norm(x, (D,), gamma, beta)
        z = L.layer_norm(y, (D,), gamma, beta)
        if torch.cuda.is_current_stream_capturing():
            counts.append(lngen.overlap_captured(torch.cuda.current_stream()))
        return y, z

    graph, results, edges = captured(work)
    assert counts == [2]
    assert edges == {BEGUN: 1, TRIGGERED: 1}
    for seed in range(50):
        source.copy_(drawn(seed, ROWS, D))
        graph.replay()
        weights = [t.cpu().numpy() for t in (gamma, beta)]
        y, _ = norm.forward(source.cpu().numpy(), *weights)
        assert_same(results, (y, norm.forward(y, *weights)[0]))
