"""What each kernel of a set takes of a multiprocessor, and how many of its blocks fit there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lngen.lower import Plan, asked_shared
from lngen.schedule import capability, occupancy
from lngen.toolchain import Resources

WARP = 32

# A column of the table, and what it shows.
COLUMNS = {
    "registers": "registers",
    "spill stores": "spill_stores",
    "spill loads": "spill_loads",
    "stack": "stack",
    "static shared": "shared",
    "dynamic shared": "dynamic_shared",
    "barriers": "barriers",
    "threads": "threads",
    "blocks per SM": "blocks_per_multiprocessor",
    "warps per SM": "warps_per_multiprocessor",
}


def resources(plan: Plan, compiled: Mapping[str, Resources], arch: str) -> dict[str, dict[str, Any]]:
    """By kernel: what the compiler counted, what a launch asks for, and how many blocks and warps are held at a time.

    dynamic_shared              bytes of dynamic shared memory that a launch asks for
    threads                     of a block
    blocks_per_multiprocessor   that fit by threads, registers, shared memory and barriers; clusters may fit less often
    warps_per_multiprocessor    of so many blocks
    """
    here = capability(arch)
    asked = asked_shared(plan, {name: used.registers for name, used in compiled.items()}, here)
    found = {}
    for kernel in plan.kernels:
        used, dynamic = compiled[kernel.name], asked[kernel.name]
        blocks = occupancy(kernel.block, used.registers, used.shared + dynamic, used.barriers, here)
        found[kernel.name] = {
            **asdict(used),
            "dynamic_shared": dynamic,
            "threads": kernel.block,
            "blocks_per_multiprocessor": blocks,
            "warps_per_multiprocessor": blocks * -(-kernel.block // WARP),
        }
    return found
