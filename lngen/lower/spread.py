"""The shared memory that launches request, so that a multiprocessor takes no more blocks than its share.

While a kernel ends, blocks of the next one go to the first free multiprocessors, as many as fit: a few multiprocessors
would get most of the work, and the others would wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from lngen.devices import Device
from lngen.lower.finish import columns_per_thread
from lngen.lower.kernel import Kernel
from lngen.lower.plan import Plan
from lngen.problem import Problem, Schedule
from lngen.problem.footprint import least_shared, shared_by

# Fractions of the multiprocessors over which the finish is spread, with one block per row and with clusters, which
# start only where several multiprocessors are free; the others take the first blocks of the next kernel. A large
# finish is spread over all. Both fractions are measured.
OVER, OVER_CLUSTERS = 0.85, 0.485


def requested_shared(plan: Plan, registers: Mapping[str, int], device: Device) -> dict[str, int]:
    """Bytes of dynamic shared memory to launch each kernel with, by name and in launch order.

    ``registers``: per thread of each kernel, as compiled for that GPU.
    """
    s, p = plan.schedule, plan.problem
    requested = {k.name: max(k.dynamic, least_shared(s, p, device)) if k.dynamic else 0 for k in plan.kernels}
    # Multipass blocks are not persistent. Persistent blocks of other forms are followed by the finish: where both fit
    # side by side, the finish is spread in any case, and the next call's rows fit beside it.
    follows = s.form != "multipass" and device.pdl
    finish = next((k for k in plan.kernels[1:] if follows and k.role in ("finish", "elementwise")), None)
    if finish and sum(_registers(k, registers) for k in (plan.kernels[0], finish)) > device.registers:
        shared = finish.finish.shared if finish.finish else 0
        share = shared_by(-(-finish.grid[0](0) // _over(s, p, device)), device)
        requested[finish.name] = max(0, share - shared * p.real_size)
    return requested


def _registers(kernel: Kernel, registers: Mapping[str, int]) -> int:
    """Registers of a kernel's blocks on a multiprocessor; they are allocated eight per thread at a time."""
    return kernel.blocks_per_sm * kernel.block * -(-registers[kernel.name] // 8) * 8


def _over(s: Schedule, p: Problem, device: Device) -> int:
    """The number of multiprocessors over which the finish is spread."""
    if columns_per_thread(s, p) > 1:
        return device.multiprocessors
    return round((OVER if s.cluster == 1 else OVER_CLUSTERS) * device.multiprocessors)
