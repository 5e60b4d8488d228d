"""Graphs that the streams of a fake driver capture: their nodes, and the edges between them.

The structures are those of cuda.h (CUgraphEdgeData, CUDA_KERNEL_NODE_PARAMS), written down here once more on purpose.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from c_calls import c_function, number, refuse_if, write
from fake_launches import PROGRAMMATIC, Launched

KERNEL, MEMSET = 0, 2  # CUgraphNodeType
DEFAULT = (0, 0, 0)  # an edge: ports of the two nodes, and the type


class _Edge(ctypes.Structure):
    _fields_ = (("ports", ctypes.c_ubyte * 2), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_char * 5))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("func", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p * 2), ("kern", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


@dataclass
class Node:
    """A node: the nodes that it follows, with an edge for each; of a kernel, what is launched."""

    function: int = 0
    launched: Launched | None = None
    edges: dict[int, tuple[int, int, int]] = field(default_factory=dict)


class Graphs:
    """The part of a driver that knows graphs; a graph's handle is the number of its capture.

    nodes    of each graph, by handle, in order; ``tails``: the nodes of a graph that its next one follows
    kernels  the functions of a runtime, which graphs know as a CUkernel
    """

    captures: dict[int, int]
    _handles: Iterator[int]

    def __init__(self) -> None:
        self.nodes: dict[int, dict[int, Node]] = {}
        self.tails: dict[int, list[int]] = {}
        self.kernels: set[int] = set()
        self._lists: list[Any] = []  # what the driver has pointed at

    def append(self, graph: int, node: Node) -> None:
        """The next node. A programmatic launch may start where the kernel before it triggers."""
        early = node.launched is not None and PROGRAMMATIC in node.launched.attributes
        edges = {t: (1, 0, 1) if early and self._node(t).launched else DEFAULT for t in self.tails.get(graph, [])}
        node.edges, handle = edges, next(self._handles)
        self.nodes.setdefault(graph, {})[handle] = node
        self.tails[graph] = [handle]

    def _node(self, handle: Any) -> Node:
        found = [nodes[number(handle)] for nodes in self.nodes.values() if number(handle) in nodes]
        refuse_if(not found)
        return found[0]

    @c_function()
    def cuStreamGetCaptureInfo_v3(
        self, stream: Any, status: Any, capture: Any, graph: Any, nodes: Any, edges: Any, count: Any
    ) -> None:
        found = self.captures.get(number(stream), 0)
        write(status, ctypes.c_int, int(found != 0))
        tails = self.tails.get(found, [])
        self._lists += [(ctypes.c_void_p * len(tails))(*tails), (_Edge * len(tails))()]
        write(graph, ctypes.c_void_p, found)
        for to, kept in zip((nodes, edges), self._lists[-2:], strict=True):
            write(to, ctypes.c_void_p, ctypes.addressof(kept))
        write(count, ctypes.c_size_t, len(tails))

    @c_function(context=False)
    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> None:
        found = [*self.nodes.get(number(graph), {})]
        if number(nodes):
            (ctypes.c_void_p * len(found)).from_address(number(nodes))[:] = found
        write(count, ctypes.c_size_t, len(found))

    @c_function(context=False)
    def cuGraphNodeGetType(self, node: Any, kind: Any) -> None:
        write(kind, ctypes.c_int, KERNEL if self._node(node).launched else MEMSET)

    @c_function(context=False)
    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> None:
        found, to = self._node(node), _Kernel.from_address(number(params))
        refuse_if(found.launched is None)
        assert found.launched
        runtime = found.function in self.kernels
        to.func, to.kern = (None, found.function + 1) if runtime else (found.function, None)
        to.grid[:], to.block[:], to.shared = found.launched.grid, found.launched.block, found.launched.shared

    @c_function()
    def cuKernelGetFunction(self, function: Any, kernel: Any) -> None:
        refuse_if(number(kernel) - 1 not in self.kernels, "INVALID_HANDLE")
        write(function, ctypes.c_void_p, number(kernel) - 1)

    @c_function(context=False)
    def cuGraphNodeGetDependencies_v2(self, node: Any, before: Any, edges: Any, count: Any) -> None:
        given = ctypes.c_size_t.from_address(number(count))
        for n, (handle, (start, end, kind)) in enumerate([*self._node(node).edges.items()][: given.value]):
            (ctypes.c_void_p * given.value).from_address(number(before))[n] = handle
            (_Edge * given.value).from_address(number(edges))[n] = _Edge((start, end), kind)
        given.value = min(given.value, len(self._node(node).edges))

    @c_function(context=False)
    def cuGraphRemoveDependencies_v2(self, graph: Any, before: Any, after: Any, edges: Any, count: Any) -> None:
        handle, node, edge = self._edge(graph, before, after, edges, count)
        refuse_if(node.edges.get(handle) != edge)
        del node.edges[handle]

    @c_function(context=False)
    def cuGraphAddDependencies_v2(self, graph: Any, before: Any, after: Any, edges: Any, count: Any) -> None:
        handle, node, edge = self._edge(graph, before, after, edges, count)
        early = edge in ((1, 0, 1), (2, 0, 1)) and self._node(handle).launched and node.launched
        refuse_if(handle in node.edges or not (early or edge == DEFAULT))
        node.edges[handle] = edge

    def _edge(self, graph: Any, before: Any, after: Any, edges: Any, count: Any) -> tuple[int, Node, Any]:
        """One edge of a graph, as the caller gives it: from what node, to what node, and its data."""
        assert number(count) == 1
        handle, to = (ctypes.c_void_p.from_address(number(n)).value or 0 for n in (before, after))
        refuse_if(not {handle, to} <= {*self.nodes.get(number(graph), {})})
        found = _Edge.from_address(number(edges))
        return handle, self._node(to), (*found.ports, found.type)
