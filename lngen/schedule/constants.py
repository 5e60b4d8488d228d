"""The fitted constants of the schedule model, each with its unit and its reason.

The first three are fitted to the registers and spills of compile logs, the others to times on an H200
(``python -m lngen.schedule.validate --fit``). Properties of a GPU are in lngen/devices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The constants that a device's description does not contain.

    base_registers    registers: addresses, counters and scalars of any kernel
    live_registers    registers per word that stays live from row to row: some words are copied before use
    reused_registers  registers per word that a later phase uses again: the compiler keeps some and recomputes others

    bandwidth         fraction of the memory's bandwidth that mixed reads and writes reach
    blend             exponent of the norm that joins overlapping times (memory bandwidth, latency of rows, instruction
                      issue, start of blocks); larger means more overlap
    launch            ns from the start of a block to its first load: launch, addresses, barrier initialisation
    barrier           ns of a barrier among the threads of a row
    warp              ns for each warp whose sums the threads of a row add after the barrier
    near              ns of a round trip to the L2 cache or to another block's shared memory
    issue             warp instructions per equation and element: the arithmetic, and conversions around it
    alone             cycles per instruction of a warp that depends on the previous one
    atomic            ns of an atomic operation that all blocks wait for: the first rows of a dynamic scheduler, a grid
                      barrier
    uneven            fraction by which the slowest multiprocessor is later under a static scheduler
    copy              ns that a multiprocessor's TMA unit takes for a bulk copy of any size
    block             ns that the GPU takes to start a block of any size
    """

    base_registers: float = 23
    live_registers: float = 1.2
    reused_registers: float = 0.52

    bandwidth: float = 0.95
    blend: float = 2.16
    launch: float = 285
    barrier: float = 64
    warp: float = 42
    near: float = 419
    issue: float = 0.79
    alone: float = 1.68
    atomic: float = 1315
    uneven: float = 0.033
    copy: float = 11.9
    block: float = 0.747


MODEL = Model()
