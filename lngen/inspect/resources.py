"""The resources of each kernel of a set, and the number of blocks that fit on a multiprocessor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lngen.devices import device_for
from lngen.lower import Plan, requested_shared
from lngen.schedule import occupancy
from lngen.toolchain import Resources

WARP = 32

# A column of the table, and its key.
COLUMNS = {
    "registers": "registers",
    "spill stores": "spill_stores",
    "spill loads": "spill_loads",
    "stack": "stack",
    "static shared": "shared",
    "dynamic shared": "dynamic_shared",
    "launch shared": "launch_shared",
    "barriers": "barriers",
    "threads": "threads",
    "blocks per SM": "blocks_per_multiprocessor",
    "warps per SM": "warps_per_multiprocessor",
}


def resources(plan: Plan, compiled: Mapping[str, Resources], arch: str) -> dict[str, dict[str, Any]]:
    """By kernel: the compiler's numbers, its dynamic shared memory, and the resident blocks and warps.

    dynamic_shared              bytes that the kernel uses, which its text and the plan name
    launch_shared               bytes that a launch requests, more where that spreads the blocks evenly
    threads                     per block
    blocks_per_multiprocessor   limit by threads, registers, shared memory and barriers; clusters may have a lower one
    warps_per_multiprocessor    of that many blocks
    """
    device = device_for(arch)
    requested = requested_shared(plan, {name: used.registers for name, used in compiled.items()}, device)
    found = {}
    for kernel in plan.kernels:
        used, launch = compiled[kernel.name], requested[kernel.name]
        blocks = occupancy(kernel.block, used.registers, used.shared + launch, used.barriers, device)
        found[kernel.name] = {
            **asdict(used),
            "dynamic_shared": kernel.dynamic,
            "launch_shared": launch,
            "threads": kernel.block,
            "blocks_per_multiprocessor": blocks,
            "warps_per_multiprocessor": blocks * -(-kernel.block // WARP),
        }
    return found
