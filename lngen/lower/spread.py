"""How much shared memory launches ask for, so that a multiprocessor takes no more blocks than its share.

While a kernel ends, blocks of the next one go where there is room first, as many as fit: a few multiprocessors would
have most of the work, and everybody would wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from lngen.lower.constants import abreast
from lngen.lower.plan import Kernel, Plan
from lngen.schedule import MULTIPROCESSORS, REGISTERS_PER_SM, Problem, least_shared, problem, shared_by

OVERLAP = 90  # the compute capability from which on kernels begin while the one before ends

# Multiprocessors that the finish is spread over, of a block a row, and of a cluster, which begins where several are
# free: the others take the first blocks of the next kernel meanwhile. A large finish is spread over all. Measured
# (generated/bench/h200-tried.txt).
OVER, OVER_CLUSTERS = 112, 64


def asked_shared(plan: Plan, registers: Mapping[str, int], capability: int) -> dict[str, int]:
    """Bytes of dynamic shared memory to launch each kernel with, by name.

    ``registers``: of a thread of each kernel, as compiled for that compute capability.
    """
    s, p = plan.schedule, problem(plan.graph, plan.spec.d)
    asked = {k.name: max(k.dynamic, least_shared(s, p, capability)) for k in plan.kernels}
    if s.form != "stream" and len(plan.kernels) > 1 and capability >= OVERLAP:
        rows, finish = plan.kernels
        # Where the two fit side by side, the finish is spread anyway, and the next kernel's blocks fit beside it.
        if sum(_registers(k, registers) for k in plan.kernels) > REGISTERS_PER_SM:
            asked[finish.name] = _finish(plan, rows, finish, p, capability)
    return asked


def _registers(kernel: Kernel, registers: Mapping[str, int]) -> int:
    """Registers of the blocks of a kernel that a multiprocessor has; a thread gets them eight at a time."""
    return kernel.resident * kernel.block * -(-registers[kernel.name] // 8) * 8


def _finish(plan: Plan, rows: Kernel, finish: Kernel, p: Problem, capability: int) -> int:
    """What a block of the finish asks for."""
    small = OVER if rows.cluster == 1 else OVER_CLUSTERS
    over = MULTIPROCESSORS if abreast(plan.schedule, p) > 1 else small
    share = shared_by(-(-finish.grid[0](0) // over), capability)
    return max(0, share - finish.shared * p.real_size)
