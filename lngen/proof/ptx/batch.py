"""A batch of blocks: its registers, its memories, its clusters, and what its threads wait for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from lngen.compiler.ir.numerics import Array
from lngen.errors import PtxError
from lngen.proof.ptx.clocks import AGENTS
from lngen.proof.ptx.memory import WORD, Allocation, GlobalMemory, Scratch
from lngen.proof.ptx.opcodes import co_resident, narrowest, ordered, proxies, restricted, spins, waits
from lngen.proof.ptx.ordering import Clock, VectorClock
from lngen.proof.ptx.outcome import Reporter, Traffic, banks, sectors
from lngen.proof.ptx.parser import Instruction
from lngen.proof.ptx.program import WARP, Lanes, Program, Value
from lngen.proof.ptx.races import Places

SHIFT = 24  # a shared::cluster address: a block's rank plus one, then the offset in its shared memory


def cluster_order(grid: tuple[int, int], shape: tuple[int, ...]) -> tuple[Array, int]:
    """The blocks of a grid, cluster after cluster, each in the order of its ranks; and the blocks per cluster."""
    x, y, z = (*shape, 1, 1, 1)[:3]
    if grid[0] % x or grid[1] % y or z != 1:
        raise PtxError(f"A grid of whole clusters of {x} x {y} blocks is expected, got {grid}.")
    number = np.arange(grid[0] * grid[1])
    column, row = number % grid[0], number // grid[0]
    cluster, rank = row // y * (grid[0] // x) + column // x, row % y * x + column % x
    return np.lexsort((rank, cluster)), x * y


class Clusters:
    """Of a batch: its ``blocks`` are ordered cluster after cluster, each in the order of its ranks."""

    def __init__(self, shape: tuple[int, ...], blocks: Array) -> None:
        self.x, self.y = (*shape, 1, 1)[:2]
        self.size = self.x * self.y
        number = np.arange(len(blocks))
        self.of, self.rank = number // self.size, number % self.size
        # The last time at which each thread (or agent) accessed the shared memory of another block (by position).
        self.remote: dict[tuple[int, int], tuple[int, Instruction, int]] = {}

    def resolve(self, address: Array, slot: Array) -> tuple[Array, Array]:
        """Addresses relative to the shared memory of a block, and that block; others do not change."""
        rank = (address.astype(np.int64) >> SHIFT) - 1
        far = (rank >= 0) & (rank < self.size)
        inner = np.where(far, address & address.dtype.type((1 << SHIFT) - 1), address)
        owner = self.of[slot] * self.size + np.where(far, rank, self.rank[slot])
        return inner, np.asarray(owner)


Memory = Scratch | Allocation


@dataclass
class Copy:
    """One copy of one thread: its bytes, its source (if that may change) and its destination."""

    instruction: Instruction
    lane: int
    writer: int  # the thread, or the agent of a barrier, that counts as having written
    data: Array
    to: Memory
    at: int
    source: Memory | None = None
    start: int = 0
    group: int = 0
    releases: bool = False  # threads that wait on its barrier see what was visible to its thread
    visible: Array | None = None  # the clock of its thread, if it releases


@dataclass(frozen=True)
class ThreadCopies:
    """The copies of one cp.async, to shared memory: an entry of each array for each thread that has one in flight."""

    instruction: Instruction
    lanes: Array
    data: Array  # a row of bytes for each thread
    at: Array
    group: Array

    def part(self, chosen: Array) -> ThreadCopies:
        """The copies of some of the threads, by position or mask."""
        arrays = (a[chosen] for a in (self.lanes, self.data, self.at, self.group))
        return ThreadCopies(self.instruction, *arrays)

    @cached_property
    def spread(self) -> Array:
        """The positions of the bytes that each copy writes."""
        return np.asarray(self.at[:, None] + np.arange(self.data.shape[1]))


@dataclass
class Flights:
    """Of a batch: its copies in flight, and for every byte the number of copies in flight that use it."""

    committed: Array  # by thread, its groups of cp.async
    of_threads: list[ThreadCopies] = field(default_factory=list)
    copies: dict[tuple[str, int], list[Copy]] = field(default_factory=dict)  # bulk copies, by kind and thread
    commits: dict[tuple[str, int], int] = field(default_factory=dict)  # and their groups
    loading: dict[int, int] = field(default_factory=dict)  # bytes in flight from global memory, by block
    _marks: dict[tuple[str, int], Array] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """True once a copy has started."""
        return bool(self._marks)

    def marks(self, how: str, memory: Memory) -> Array:
        """Number of copies that write ("to") or read ("from") each byte."""
        key = how, id(memory)
        if key not in self._marks:
            self._marks[key] = np.zeros(len(memory.data), np.int16)
        return self._marks[key]

    def commit(self, bulk: bool, lanes: Array) -> None:
        """The uncommitted copies of each thread become a group of its own."""
        if not bulk:
            self.committed[lanes] += 1
            return
        for lane in lanes.tolist():
            self.commits["bulk", lane] = self.commits.get(("bulk", lane), 0) + 1


@dataclass(frozen=True)
class Wait:
    """Lanes that wait at the barrier instruction at ``pc``; identity and thread count are a number or one per lane."""

    pc: int
    instruction: Instruction
    identity: Any
    expected: Any
    lanes: Lanes


@dataclass
class Came:
    """Threads that arrived at a barrier without waiting, the count they gave, and the accesses visible to them."""

    expected: int
    lanes: list[Array] = field(default_factory=list)
    visible: list[Array] = field(default_factory=list)


COUNTED = ("bytes_read", "bytes_written", "sectors_read", "sectors_written", "prefetches")  # of a tensor
MBARRIER = 8  # bytes of an mbarrier
MOST = 1 << 18  # segments that a batch runs before its kernel counts as one that does not end


@dataclass
class Launch:
    """What the batches of one launch share."""

    kernel: str
    program: Program
    arguments: dict[str, int]
    grid: tuple[int, int]
    block: int
    memory: GlobalMemory
    reporter: Reporter
    traffic: Traffic
    counts: dict[int, int] = field(default_factory=dict)
    order: int = 0
    dynamic: int = 0  # bytes of dynamic shared memory of a block
    cluster: tuple[int, ...] = ()  # blocks of a cluster along x and y, if there are clusters
    programmatic: bool = False  # the kernel may start while the previous kernel runs
    waited: bool = False  # a thread has waited for the previous kernel
    most: int = MOST  # segments a batch may run


class Batch:
    """Some blocks of a launch, executed side by side."""

    def __init__(self, launch: Launch, blocks: Array) -> None:
        self.launch, self.program, self.memory = launch, launch.program, launch.memory
        self.arguments, entry = launch.arguments, launch.program.entry
        self.width = -(-launch.block // WARP) * WARP  # lanes of a block; lanes beyond its threads never run
        self.slots, self.blocks = len(blocks), blocks
        self.total = self.slots * self.width
        self.thread = np.tile(np.arange(self.width), self.slots)
        self.slot_of = np.repeat(np.arange(self.slots), self.width)
        self.block_of = np.repeat(blocks, self.width).astype(np.int32)
        self.R: list[Value] = list(self.program.start)
        self.known: dict[int, Any] = {}
        self.order: VectorClock | None = None
        self.clusters: Clusters | None = None
        self.dependent = launch.programmatic or waits(entry)
        self.party = self.block_of + 1  # a write by one party excludes accesses by the others
        self.whole = self.slots == launch.grid[0] * launch.grid[1]
        if launch.cluster or ordered(entry):
            self._order(blocks)
        self.clock: Clock = self.order or Clock(self.total)
        self._places: dict[Memory, Places] = {}
        self.spins, self.yielded = spins(entry), dict[int, Lanes]()
        self.progress, self.rounds, self.last = 0, 0, -1
        self.flights, self.mbarriers = Flights(np.zeros(self.total, np.int64)), dict[int, Any]()
        self.met: list[tuple[int, Lanes]] = []
        self.arrived = np.zeros(self.total, np.bool_)
        self.arrived_at = np.zeros(self.total, np.int64)
        self.met_at = np.zeros(self.total, np.int64)  # time of arrival at the last cluster barrier passed, or 0
        self._allocate()
        for slot, name in self.program.specials.items():
            self.R[slot] = self._special(name)
        self.groups: dict[int, Lanes] = {}
        self.held: dict[int, Lanes] = {}
        self.waiting: list[Wait] = []
        self.came: dict[int, Came] = {}
        self.alive = Lanes(self.thread < launch.block, self.total)
        self.forced, self.ran = False, 0

    def _allocate(self) -> None:
        """Shared and local memory."""
        entry = self.program.entry
        unit = narrowest(entry, "shared")
        self.shared = Scratch("shared", entry.symbols, self.slot_of, self.slots, self.launch.dynamic, unit)
        self.opaque = np.zeros(len(self.shared.data) // MBARRIER, np.bool_)  # True where an mbarrier is initialised
        self.local = Scratch("local", entry.symbols, np.arange(self.total), self.total)

    def _order(self, blocks: Array) -> None:
        entry, shape = self.program.entry, self.launch.cluster
        cluster_of, within = np.arange(self.slots), self.thread
        if shape:
            self.clusters = Clusters(shape, blocks)
            cluster_of = self.clusters.of
            within = self.clusters.rank[self.slot_of] * self.width + self.thread
            self.party = (blocks[self.slot_of // self.clusters.size * self.clusters.size] + 1).astype(np.int32)
        self.order = VectorClock(
            self.total, self.slot_of, cluster_of, within, not co_resident(entry), proxies(entry), restricted(entry)
        )

    def _special(self, name: str) -> Value:
        """The value of a special register such as %ctaid.x."""
        base, _, axis = name.partition(".")
        n, launch = "xyz".find(axis), self.launch
        clusters = self.clusters or Clusters((1,), self.blocks)
        shape, grid, block = (clusters.x, clusters.y, 1), (*launch.grid, 1), (launch.block, 1, 1)
        at = (self.blocks % grid[0], self.blocks // grid[0], np.zeros_like(self.blocks))[n][self.slot_of]
        value = {
            "tid": self.thread if n == 0 else 0, "ntid": block[n], "laneid": self.thread % WARP,
            "ctaid": at, "nctaid": grid[n],
            "cluster_ctaid": at % shape[n], "cluster_nctaid": shape[n],
            "clusterid": at // shape[n], "nclusterid": grid[n] // shape[n],
            "cluster_ctarank": clusters.rank[self.slot_of], "cluster_nctarank": clusters.size,
        }[base]  # fmt: skip
        return np.asarray(value).astype(np.uint32)[()]

    def scratch(self, space: str) -> Scratch:
        """Shared or local memory."""
        return self.shared if space == "shared" else self.local

    def places(self, memory: Memory) -> tuple[Places, int]:
        """The accesses to a memory in this launch, and the bytes of a unit of their records."""
        unit = min(WORD, memory.unit)
        if memory not in self._places:
            self._places[memory] = Places(len(memory.data) // unit, memory is self.shared)
        return self._places[memory], unit

    def agent(self, key: int) -> int:
        """The agent that counts as the writer of the copies that complete on an mbarrier."""
        return self.total + key // MBARRIER % AGENTS

    def loading(self, block: int, count: int) -> None:
        """``count`` more bytes (fewer, if negative) are in flight from global memory to ``block``."""
        loading, most, kernel = self.flights.loading, self.launch.traffic.in_flight, self.launch.kernel
        loading[block] = loading.get(block, 0) + count
        most[kernel] = max(most[kernel], loading[block])

    def touched(self) -> None:
        """Something changed that a spinning thread may wait for."""
        self.progress += 1

    def report(self, kind: str, message: str, i: Instruction, lanes: Array, addresses: Array | None = None) -> None:
        """A finding about some lanes; its text names the first of them."""
        n = int(lanes[0])
        more = f" So do {len(lanes) - 1} other threads." if len(lanes) > 1 else ""
        address = -1 if addresses is None else int(addresses[0])
        self.launch.reporter.add(
            kind, message + more, self.launch.kernel, i,
            block=int(self.block_of[n]), thread=int(self.thread[n]), address=address,
        )  # fmt: skip

    def buffers(
        self, i: Instruction, address: Array, who: Array, count: int, what: str
    ) -> Iterator[tuple[Allocation, Array, Array, Array | None]]:
        """The buffers that threads access: addresses, threads, and their positions in ``who`` (None: all)."""
        for buffer, part, where in self.memory.parts(address, count):
            if buffer is None:
                self.report("out-of-bounds", f"{what} {where}.", i, who[part], address[part])
            elif part is None:
                yield buffer, address, who, None
            else:
                yield buffer, address[part], who[part], part

    def moved(self, tensor: str, how: str, address: Array, lanes: Array, count: int) -> None:
        """Counts an access to global memory."""
        row = self._traffic(tensor)
        row[f"bytes_{how}"] += address.size * count
        row[f"sectors_{how}"] += sectors(address, lanes, count)

    def prefetched(self, tensor: str, count: int) -> None:
        """Counts threads that prefetch into L2."""
        self._traffic(tensor)["prefetches"] += count

    def _traffic(self, tensor: str) -> dict[str, int]:
        return self.launch.traffic.tensors[self.launch.kernel].setdefault(tensor, dict.fromkeys(COUNTED, 0))

    def moved_shared(self, how: str, address: Array, lanes: Array, count: int) -> None:
        """Counts an access to shared memory."""
        row = self.launch.traffic.shared[self.launch.kernel]
        accesses, conflicts = banks(address, lanes, count)
        row["accesses"] += accesses
        row["bank_conflicts"] += conflicts
        row[f"bytes_{how}"] += address.size * count

    def obeys(self, i: Instruction, lanes: Lanes) -> Lanes:
        """Those of ``lanes`` for which the predicate of ``i`` holds."""
        if not i.predicate:
            return lanes
        p = self.R[self.program.slots[i.predicate]]
        return lanes.narrow(~p if i.negated else p)

    def push(self, pc: int, lanes: Lanes) -> None:
        """Lanes that continue at ``pc``."""
        if not lanes.count:
            return
        if pc in self.held:
            lanes = lanes.union(self.held.pop(pc))
        if pc in self.groups:
            lanes = lanes.union(self.groups[pc])
        self.groups[pc] = lanes
