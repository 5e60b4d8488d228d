"""A batch of blocks: its registers and memories, and the order in which its threads advance.

Threads that stand at the same instruction form a group; the group at the lowest instruction runs until it splits,
waits or meets another. Barriers and shuffles keep threads until the others they wait for have come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx import barriers, clusters, opaque, shuffle, spin
from lngen.ptx.clusters import Clusters
from lngen.ptx.dependent import waits
from lngen.ptx.flights import Flights
from lngen.ptx.lanes import WARP, Lanes
from lngen.ptx.memory import WORD, Buffer, GlobalMemory, Report
from lngen.ptx.memory_opcodes import restricted
from lngen.ptx.ordering import VectorClock
from lngen.ptx.parser import Instruction
from lngen.ptx.places import Places
from lngen.ptx.program import Program, unknown
from lngen.ptx.proxy import proxies
from lngen.ptx.report import Reporter, Stop, Traffic
from lngen.ptx.scratch import Clock, Scratch
from lngen.ptx.spin import ordered, resident, spins
from lngen.ptx.tracking import narrowest, sectors
from lngen.ptx.values import Value

COUNTED = ("bytes_read", "bytes_written", "sectors_read", "sectors_written", "prefetches")  # of a tensor
MOST = 1 << 18  # segments a batch runs before it is taken to run for ever


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
    dynamic: int = 0  # bytes of dynamic shared memory a block has
    cluster: tuple[int, ...] = ()  # blocks of a cluster along x and y, if there are clusters
    programmatic: bool = False  # it may begin while the kernel before it runs
    waited: bool = False  # a thread waited for the kernel before it


class Batch:
    """Some blocks of a launch, run side by side."""

    def __init__(self, launch: Launch, blocks: Array) -> None:
        self.launch, self.program, self.memory = launch, launch.program, launch.memory
        self.arguments = launch.arguments
        self.width = -(-launch.block // WARP) * WARP  # lanes a block has; those beyond its threads never run
        self.slots, self.blocks = len(blocks), blocks
        self.total = self.slots * self.width
        self.thread = np.tile(np.arange(self.width), self.slots)
        self.slot_of = np.repeat(np.arange(self.slots), self.width)
        self.block_of = np.repeat(blocks, self.width).astype(np.int32)
        self.R: list[Value] = list(self.program.start)
        self.known: dict[int, Any] = {}
        self.order: VectorClock | None = None
        self.clusters: Clusters | None = None
        self.dependent = launch.programmatic or waits(launch.program.entry)
        self.party = self.block_of + 1  # of whom one writes to global memory what others may not touch
        self.whole = self.slots == launch.grid[0] * launch.grid[1]
        if launch.cluster or ordered(launch.program.entry):
            self._order(blocks)
        self.clock: Clock = self.order or Clock(self.total)
        self._places: dict[str, Places] = {}
        self.spins, self.yielded = spins(self.program.entry), dict[int, Lanes]()
        self.progress, self.rounds, self.last = 0, 0, -1
        self.flights, self.mbarriers = Flights(), dict[int, Any]()
        self.met: list[tuple[int, Lanes]] = []
        self.arrived = np.zeros(self.total, np.bool_)
        self.arrived_at = np.zeros(self.total, np.int64)
        self.met_at = np.zeros(self.total, np.int64)  # when each came to the last cluster barrier it passed, or 0
        own = [s for s in self.program.entry.symbols if s.space == "shared"]
        unit = narrowest(launch.program.entry, "shared")
        self.shared = Scratch("shared", own, self.slot_of, self.slots, launch.dynamic, unit)
        if self.order is not None:
            self.shared.races = Places(len(self.shared.data) // unit, True)
        self.opaque = np.zeros(len(self.shared.data) // opaque.SIZE, np.bool_)  # mbarriers live there
        own = [s for s in self.program.entry.symbols if s.space == "local"]
        self.local = Scratch("local", own, np.arange(self.total), self.total if own else 0)
        for slot, name in self.program.specials.items():
            self.R[slot] = self._special(name)
        self.groups: dict[int, Lanes] = {}
        self.waiting: list[barriers.Wait] = []
        self.came: dict[int, barriers.Came] = {}
        self.held: dict[int, Lanes] = {}
        self.alive = Lanes(self.thread < launch.block, self.total)
        self.forced, self.ran = False, 0

    def _order(self, blocks: Array) -> None:
        entry, shape = self.program.entry, self.launch.cluster
        cluster_of, within = np.arange(self.slots), self.thread
        if shape:
            self.clusters = Clusters(self.launch.grid, shape, blocks)
            cluster_of = self.clusters.of
            within = self.clusters.rank[self.slot_of] * self.width + self.thread
            self.party = (blocks[self.slot_of // self.clusters.size * self.clusters.size] + 1).astype(np.int32)
        near = not resident(entry)
        self.order = VectorClock(self.total, self.slot_of, cluster_of, within, near, proxies(entry), restricted(entry))

    def _special(self, name: str) -> Value:
        base, axis = name.split(".") if "." in name else (name, "")
        n = "xyz".find(axis)
        grid, u4 = (*self.launch.grid, 1), np.uint32
        if "cluster" in base:
            return (self.clusters or Clusters(self.launch.grid, (1,), self.blocks)).special(name, self.slot_of)
        match base:
            case "tid":
                return self.thread.astype(u4) if n == 0 else u4(0)
            case "ntid":
                return u4(self.launch.block if n == 0 else 1)
            case "ctaid":
                at = self.block_of % grid[0] if n == 0 else self.block_of // grid[0] if n == 1 else u4(0)
                return at.astype(u4)
            case "nctaid":
                return u4(grid[n])
            case _:
                return (self.thread % WARP).astype(u4)

    def scratch(self, space: str) -> Scratch:
        """Shared or local memory."""
        return self.shared if space == "shared" else self.local

    def places(self, buffer: Buffer) -> tuple[Places, int]:
        """Who touched what of a buffer in this launch, and the bytes of its units."""
        unit = min(WORD, buffer.unit)
        if buffer.name not in self._places:
            self._places[buffer.name] = Places(len(buffer.data) // unit, False)
        return self._places[buffer.name], unit

    def touched(self) -> None:
        """Something changed for which a thread that spins may wait."""
        self.progress += 1

    def report(self, kind: str, message: str, i: Instruction, lanes: Array, addresses: Array | None = None) -> None:
        """A finding of some lanes; the first of them is named."""
        n = int(lanes[0])
        more = f" So do {len(lanes) - 1} other threads." if len(lanes) > 1 else ""
        address = -1 if addresses is None else int(addresses[0])
        self.launch.reporter.add(
            kind, message + more, self.launch.kernel, i, int(self.block_of[n]), int(self.thread[n]), address
        )

    def reporting(self, i: Instruction) -> Report:
        """``report`` for an instruction."""
        return lambda kind, message, lanes, addresses: self.report(kind, message, i, lanes, addresses)

    def moved(self, tensor: str, how: str, address: Array, lanes: Array, count: int) -> None:
        """Counts an access to global memory."""
        row = self._traffic(tensor)
        row[f"bytes_{how}"] += address.size * count
        row[f"sectors_{how}"] += sectors(address, lanes, count)

    def prefetched(self, tensor: str, count: int) -> None:
        """Counts threads that asked for something in L2."""
        self._traffic(tensor)["prefetches"] += count

    def _traffic(self, tensor: str) -> dict[str, int]:
        return self.launch.traffic.tensors[self.launch.kernel].setdefault(tensor, dict.fromkeys(COUNTED, 0))

    def moved_shared(self, how: str, address: Array, lanes: Array, count: int) -> None:
        """Counts an access to shared memory."""
        row = self.launch.traffic.shared[self.launch.kernel]
        accesses, conflicts = shuffle.banks(address, lanes, count)
        row["accesses"] += accesses
        row["bank_conflicts"] += conflicts
        row[f"bytes_{how}"] += address.size * count

    def run(self) -> None:
        """Every thread to its end."""
        late = spin.waves(self)
        self.push(0, late.pop())
        while True:
            if self.groups:
                self._advance(min(self.groups))
            elif self._released() or (self.yielded and spin.again(self, 2 if late else spin.ROUNDS)):
                continue
            elif late:
                self.push(0, late.pop())
                self.touched()
            elif self.held:
                self.forced = True
                pc = min(self.held)
                self.groups[pc] = self.held.pop(pc)
                self._advance(pc)
                self.forced = False
            else:
                self.flights.finish(self)
                spin.deadlock(self)
                clusters.deadlock(self)
                if self.waiting:
                    barriers.deadlock(self)
                if self.clusters is not None:
                    self.clusters.remote.check(self)
                return

    def _released(self) -> bool:
        if (self.waiting and barriers.release(self)) or clusters.release(self):
            self.touched()
            return True
        return False

    def push(self, pc: int, lanes: Lanes) -> None:
        """Lanes that go on at ``pc``."""
        if not lanes.count:
            return
        if pc in self.held:
            lanes = lanes.union(self.held.pop(pc))
        if pc in self.groups:
            lanes = lanes.union(self.groups[pc])
        self.groups[pc] = lanes

    def _advance(self, pc: int) -> None:
        """Run the group at ``pc`` until it splits, waits, ends or is no longer the lowest."""
        segments, counts = self.program.segments, self.launch.counts
        lanes = self.groups.pop(pc)
        while True:
            segment = segments[pc]
            counts[pc] = counts.get(pc, 0) + lanes.warps
            self.ran += 1
            if self.ran > MOST:
                raise self._endless(pc, lanes)
            for step in segment.steps:
                step(self, lanes)
            after: int | None = segment.end
            if segment.control is not None:
                after = self._control(segment.control, segment.end, lanes)
            if after is None:
                return
            if after in self.held or (self.groups and min(self.groups) <= after):
                self.push(after, lanes)
                return
            pc = after

    def _endless(self, pc: int, lanes: Lanes) -> Stop:
        code = self.program.entry.instructions
        text = f"The kernel does not end: {MOST} pieces of straight code have run."
        self.report("deadlock", text, code[min(pc, len(code) - 1)], lanes.index)
        return Stop()

    def _control(self, i: Instruction, pc: int, lanes: Lanes) -> int | None:
        """What ends a segment; the pc at which all of ``lanes`` go on, None if they were sent elsewhere."""
        name = i.opcode.split(".", 1)[0]
        taken = lanes
        if i.predicate:
            p = self.R[self.program.slots[i.predicate]]
            taken = lanes.narrow(~p if i.negated else p)
            if not taken.count:
                return pc + 1
        match name:
            case "bra" if pc in self.spins:
                spin.rest(self, pc, taken)
            case "bra":
                target = self.program.entry.labels[i.operands[0].text]
                if taken is lanes:
                    return target
                self.push(target, taken)
            case "ret" | "exit":
                self.alive = self.alive.without(taken)
                self.touched()
            case "bar" | "vote" | "elect" if i.opcode.startswith(("bar.warp", "vote", "elect")):
                shuffle.warp(self, i, pc, taken)
            case "barrier" if i.opcode.startswith("barrier.cluster"):
                clusters.come(self, i, pc, taken)
            case "bar" | "barrier":
                barriers.arrive(self, i, pc, taken)
            case "shfl":
                shuffle.step(self, i, pc, taken)
            case _:
                raise unknown(i)
        if taken is not lanes:
            self.push(pc + 1, lanes.without(taken))
        return None
