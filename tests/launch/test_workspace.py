"""If these fail, two calls write to one workspace at the same time, or memory is never freed."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import lngen.launch.runtime as runtime
from fake_gpu import FakeGpu, Launched
from lngen.compiler.compile import Compilation
from lngen.compiler.lower import lower
from lngen.compiler.problem import Schedule, parse_schedule
from lngen.compiler.spec import parse_spec
from lngen.launch.driver import PER_THREAD_STREAM
from lngen.launch.kernels import Workspace, Workspaces
from lngen.launch.runtime import Norm, Saved
from lngen.launch.runtime.launcher import Launcher

D = 64
ONE_LAUNCH = {"bwd": "form=registers,threads=8,rows_per_block=64,vec=4,single_launch=yes"}


def prepared(gpu: FakeGpu, rows: int = 5, **options: Any) -> tuple[Norm, Saved, Any]:
    """A norm, what its forward saved, and a cotangent."""
    norm = runtime.compile("layernorm", d=D, **options)
    _, saved = norm.forward(gpu.array("f32", rows, D), gpu.array("f32", D), gpu.array("f32", D))
    gpu.launched.clear()
    return norm, saved, gpu.array("f32", rows, D)


def workspace(done: Launched) -> int:
    """The first address in the workspace that the kernel was given."""
    return min(done.values[a.name] for a in done.kernel.arguments if a.kind == "workspace")


def in_threads(count: int, work: Callable[[], object]) -> None:
    """``work`` in that many threads at the same time; raises what one of them raised."""
    ready = threading.Barrier(count)

    def run(_: int) -> None:
        ready.wait()
        work()

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


def test_a_workspace_that_is_outgrown_is_kept(gpu: FakeGpu) -> None:
    """What still runs may use it; the larger one is prepared, too, and serves smaller calls."""
    library: Any = gpu
    held, prepared = Workspace(), list[tuple[int, int]]()
    addresses = []
    for size in (64, 65, 64, 128, 1000):
        bound: Any = SimpleNamespace(workspace_bytes=size, prepare=lambda *where: prepared.append(where))
        addresses.append(held.fit(library, 0, 7, bound))
        assert held.size >= size
    assert [a.shape for a in held.arrays] == [(8,), (16,), (125,)]
    first, second, third = (a.address for a in held.arrays)
    assert addresses == [first, second, second, second, third]
    assert prepared == [(first, 7), (second, 7), (third, 7)]


def test_a_workspace_that_could_not_be_prepared_is_not_used(gpu: FakeGpu) -> None:
    def fail(*where: int) -> None:
        raise RuntimeError

    library: Any = gpu
    held, bound = Workspace(), SimpleNamespace(workspace_bytes=64, prepare=fail)
    with pytest.raises(RuntimeError):
        held.fit(library, 0, 7, bound)  # type: ignore[arg-type]
    bound.prepare = lambda *where: None
    assert held.fit(library, 0, 7, bound) == gpu.made[1].address  # type: ignore[arg-type]


def test_each_stream_of_each_device_has_its_own(gpu: FakeGpu) -> None:
    """The default stream is number 0 on every device."""
    held = Workspaces()
    assert held.of(0, 0, "plan") is held.of(0, 0, "plan") is not held.of(1, 0, "plan")
    norm, saved, dy = prepared(gpu)
    for stream in (0, 77, 0, 78, 77):
        gpu.stream_of = lambda stream=stream: stream
        norm.backward(dy, saved)
    found = [workspace(done) for done in gpu.launched[::2]]
    assert [found.index(place) for place in found] == [0, 1, 0, 3, 1]
    assert [done.stream for done in gpu.launched[::2]] == [0, 77, 0, 78, 77]


def test_each_plan_has_its_own(gpu: FakeGpu) -> None:
    """An address that is no multiple of 16 bytes takes another plan, whose counters lie elsewhere."""
    norm, saved, dy = prepared(gpu, schedule=ONE_LAUNCH)
    for address in (dy.address, dy.address + 4, dy.address):
        norm.backward(gpu.array("f32", 5, D, address=address), saved)
    found = [workspace(done) for done in gpu.launched]
    assert found[0] == found[2] != found[1]
    assert [address for address, _, _ in gpu.zeroed] == found[:2]


@pytest.mark.parametrize("schedule", [{}, ONE_LAUNCH])
def test_each_capture_has_its_own(gpu: FakeGpu, schedule: dict[str, str]) -> None:
    """Graphs may run side by side, whatever stream they were captured on; counters are zeroed in each."""
    norm, saved, dy = prepared(gpu, schedule=schedule)
    gpu.stream_of = lambda: 77
    found = []
    for capture in (0, 0, 5, 5, 6, 0, 5):
        gpu.captures = {77: capture} if capture else {}
        norm.backward(dy, saved)
        found.append(workspace(gpu.launched[-1]))
    assert [found.index(place) for place in found] == [0, 0, 2, 2, 4, 0, 2]
    assert len(gpu.zeroed) == (3 if schedule else 0)


@pytest.fixture
def graphs(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> dict[Any, Workspace]:
    """The graphs that count as existing, with their workspaces; calls are captured, by numbers from ``captured``."""
    held: dict[Any, Workspace] = {}
    monkeypatch.setattr("lngen.launch.kernels._of_graphs", held)
    gpu.stream_of = lambda: 77
    return held


def captured(gpu: FakeGpu, norm: Norm, saved: Saved, dy: Any, capture: int) -> int:
    """The workspace of a backward in that capture."""
    gpu.captures = {77: capture}
    norm.backward(dy, saved)
    gpu.captures = {}
    return workspace(gpu.launched[-1])


@pytest.mark.parametrize("schedule", [{}, ONE_LAUNCH])
def test_a_workspace_lives_as_long_as_its_graph(
    gpu: FakeGpu, graphs: dict[Any, Workspace], schedule: dict[str, str]
) -> None:
    """The first capture after a graph's end frees its workspace, and no other; the graph may outlive the norm."""
    norm, saved, dy = prepared(gpu, schedule=schedule)
    first = captured(gpu, norm, saved, dy, 1)
    for capture in range(2, 202):
        captured(gpu, norm, saved, dy, capture)
        assert len(graphs) == 2
        gpu.destroy(capture)
    assert captured(gpu, norm, saved, dy, 1) == first
    del norm
    gc.collect()
    assert first in {w.address for w in graphs.values()}
    gpu.destroy(1)
    norm, saved, dy = prepared(gpu)
    captured(gpu, norm, saved, dy, 202)
    assert first not in {w.address for w in graphs.values()}
    assert len(graphs) == 1


def test_a_workspace_is_kept_where_the_driver_does_not_say_what_a_graph_needs(
    gpu: FakeGpu, graphs: dict[Any, Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, saved, dy = prepared(gpu)
    for name, kept in (("cuGraphRetainUserObject", 3), ("cuUserObjectCreate", 6)):
        monkeypatch.setattr(gpu, name, lambda *_: 1)
        places = {captured(gpu, norm, saved, dy, kept + n) for n in range(3)}
        assert len(places) == 3
        assert len(graphs) == kept


def test_the_per_thread_default_stream_is_another_one_in_each_thread(gpu: FakeGpu) -> None:
    norm, saved, dy = prepared(gpu)
    gpu.stream_of = lambda: PER_THREAD_STREAM
    in_threads(2, lambda: [norm.backward(dy, saved) for _ in range(3)])
    places = {(done.thread, workspace(done)) for done in gpu.launched}
    assert len(places) == len({place for _, place in places}) == 2


def test_kernels_outlive_the_norm_whose_call_a_graph_may_have(gpu: FakeGpu) -> None:
    """A kernel set that no call has launched, such as one that was tuned, is unloaded with its owner."""
    norm, saved, dy = prepared(gpu)
    norm.backward(dy, saved)
    gpu.calls.clear()
    del norm, saved
    gc.collect()
    assert "cuModuleUnload" not in gpu.calls
    spec = parse_spec("layernorm.fwd:d=64,dtype=f32")
    kernels = Compilation(spec).kernels(Schedule("registers", 8, 16, 4))
    alone = Launcher(kernels.plan, kernels.cubin("sm_90").image, 0)
    del alone
    gc.collect()
    assert "cuModuleUnload" in gpu.calls


def test_only_the_arrivals_are_zeroed() -> None:
    """At the start of the workspace, whatever the rows: one that has grown or shrunk keeps them where they are."""
    spec = parse_spec("layernorm.bwd:d=64,dtype=f32")
    text = "form=registers,threads=8,rows_per_block=64,vec=4,single_launch=yes"
    plan = lower(spec, parse_schedule(text, Schedule("registers", 32, 1, 1)))
    assert [b.name for b in plan.workspace if b.zeroed] == ["arrivals_"]
    assert {plan.workspace_offsets(rows)["arrivals_"] for rows in (0, 1, 7, 4096)} == {0}
