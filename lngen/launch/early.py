"""Early launch in captured CUDA graphs: the blocks of a kernel take their places while the kernel before it still runs.

In a graph, the edge from the kernel before can say when a kernel may start: at its end, the default, or at one of its
ports, of which LAUNCH_ORDER is open once all of its blocks have begun. Every kernel of lngen waits for that end
(griddepcontrol.wait) before it reads or writes, so only the launch and the prefetch of its first rows come earlier.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from math import prod
from typing import Any
from weakref import WeakValueDictionary

from ..errors import LngenError
from . import driver
from .driver import Launch, capture_of, resident_blocks

KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
TRIGGERED, LAUNCH_ORDER = 1, 2  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER
PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC

# Blocks for each multiprocessor that is idle behind a kernel with one block on each of the others, at most. Chosen from
# generated/bench/h100-early.txt: 128 blocks on 52 idle ones gained 0.6 us, 64 on 4 lost up to 0.6.
BLOCKS_PER_IDLE = 3

# What loaded the functions that wait and trigger, by function. An address may be handed out again, but only after its
# module is unloaded, and so after the value is gone.
kernel_sets: WeakValueDictionary[int, Any] = WeakValueDictionary()


class _Edge(ctypes.Structure):  # CUgraphEdgeData
    _fields_ = (
        ("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )  # fmt: skip


class _Kernel(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


def _ask(name: str, *given: Any) -> None:
    """Call a function of the driver; LngenError if it refuses, or is too old to have it (before CUDA 12.3)."""
    function = getattr(driver.library(), name, None)
    if function is None or function(*given):
        raise LngenError(f"The driver refuses {name} during a capture; capture without early launches.")


def _captured(stream: int) -> tuple[int, list[int]]:
    """The graph that ``stream`` captures, and the nodes that its next node will follow."""
    status, graph, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    nodes, edges = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    found = [ctypes.byref(c) for c in (graph, nodes, edges, count)]
    _ask("cuStreamGetCaptureInfo_v3", ctypes.c_void_p(stream), ctypes.byref(status), None, *found)
    return graph.value or 0, [nodes[n] or 0 for n in range(count.value)]


def _kernel(node: int) -> _Kernel:
    """What a node launches; LngenError if it is no kernel."""
    handle, kind, found = ctypes.c_void_p(node), ctypes.c_int(), _Kernel()
    _ask("cuGraphNodeGetType", handle, ctypes.byref(kind))
    if kind.value != KERNEL:
        raise LngenError("A kernel is expected, but another node of a graph is found.")
    _ask("cuGraphKernelNodeGetParams_v2", handle, ctypes.byref(found))
    if not found.function:
        function = ctypes.c_void_p()
        _ask("cuKernelGetFunction", ctypes.byref(function), ctypes.c_void_p(found.kernel))
        found.function = function.value
    return found


def _port(before: _Kernel, own: _Kernel, multiprocessors: int) -> int:
    """The port of the kernel ``before`` at which a kernel of lngen gains time; 0 if it has to wait for the end.

    A kernel of lngen triggers as soon as it may read. If a multiprocessor holds several blocks of another kernel, they
    end one after another and leave room. Otherwise early blocks crowd onto the multiprocessors that are idle.
    """
    if before.function in kernel_sets:
        return TRIGGERED
    room = resident_blocks(before.function, prod(before.block), before.shared) > 1
    idle = max(0, multiprocessors - prod(before.grid))
    return LAUNCH_ORDER if room or prod(own.grid) <= BLOCKS_PER_IDLE * idle else 0


def _start_early(graph: int, node: int) -> bool:
    """Let a node of a graph start early, if it is the first kernel of a call; True if its edge was changed.

    LngenError only if the driver takes an edge away and refuses to have it back.
    """
    before, edges, count = (ctypes.c_void_p * 2)(), (_Edge * 2)(), ctypes.c_size_t(2)
    try:
        own = _kernel(node)
        loaded = kernel_sets.get(own.function)
        if loaded is None or own.function != loaded.functions[0]:
            return False
        _ask("cuGraphNodeGetDependencies_v2", ctypes.c_void_p(node), before, edges, ctypes.byref(count))
        if count.value != 1 or any(bytes(edges[0])):
            return False
        port = _port(_kernel(before[0] or 0), own, loaded.gpu.multiprocessors)
        pair = ctypes.c_void_p(graph), before, (ctypes.c_void_p * 1)(node)
        if not port:
            return False
        _ask("cuGraphRemoveDependencies_v2", *pair, edges, ctypes.c_size_t(1))
    except LngenError:
        return False
    try:
        _ask("cuGraphAddDependencies_v2", *pair, (_Edge * 1)(_Edge(port, 0, PROGRAMMATIC)), ctypes.c_size_t(1))
    except LngenError:
        _ask("cuGraphAddDependencies_v2", *pair, edges, ctypes.c_size_t(1))
        return False
    return True


class OverlappingLaunch(Launch):
    """The first launch of a call that may start early: by an attribute, its last, and in a capture by the edge alone.

    The attribute costs time behind kernels that do not trigger, and no driver says which do.
    """

    def __call__(self, stream: int) -> None:
        """As of ``Launch``."""
        captured = capture_of(stream) != 0
        self.config.count -= captured
        try:
            super().__call__(stream)
        finally:
            self.config.count += captured
        if not captured:
            return
        try:
            graph, nodes = _captured(stream)
        except LngenError:
            return
        if len(nodes) == 1:
            _start_early(graph, nodes[0])


def overlap_captured(stream: Any) -> int:
    """Let the calls in a CUDA graph start early; to be called on the capturing stream, at the end of the capture.

    stream   a pointer, or a stream of PyTorch or CuPy. Every call of lngen in this process that the graph holds so far
             counts, by whatever way: ``lngen.torch``, packs, ``lngen.compile`` (with ``overlap=True`` it is done in the
             call). Not those in graphs within the graph, nor those of the C library and of a hub package::

                 with torch.cuda.graph(graph):
                     out = model(x)
                     lngen.overlap_captured(torch.cuda.current_stream())

    Returns the number of calls whose first kernel now starts before the end of the kernel that it follows: where it
    follows one kernel alone, on sm_90 and newer with CUDA 12.3 and newer, and where that kernel leaves room
    (lngen/docs/performance.md). No bit changes: a kernel of lngen reads and writes nothing before that end, it only
    prefetches into L2.

    A kernel that starts early holds its place on the GPU while it waits. So do not use it if the kernel before waits,
    spinning, for a kernel of another stream that needs that place.

    LngenError if the stream is not capturing.
    """
    pointer = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if not isinstance(pointer, int) or not capture_of(pointer):
        raise LngenError(
            f"overlap_captured expects a stream that captures a CUDA graph, as a pointer or as a stream of PyTorch or "
            f"CuPy, got {stream!r}; call it before the end of the capture."
        )
    graph, count, nodes = 0, ctypes.c_size_t(), (ctypes.c_void_p * 0)()
    with suppress(LngenError):
        graph, _ = _captured(pointer)
        _ask("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        _ask("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    return sum(_start_early(graph, node) for node in nodes if node)
