"""How much shared memory launches ask for, so that a multiprocessor takes no more blocks than its share.

While a kernel ends, blocks of the next one go where there is room first, as many as fit: a few multiprocessors would
have most of the work, and everybody would wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from lngen.lower.constants import abreast
from lngen.lower.plan import Kernel, Plan
from lngen.schedule import (
    MULTIPROCESSORS,
    OVERLAP_ARCH,
    REGISTERS_PER_SM,
    Problem,
    Schedule,
    least_shared,
    problem,
    shared_by,
)

# Multiprocessors that the finish is spread over, of a block a row, and of a cluster, which begins where several are
# free: the others take the first blocks of the next kernel meanwhile. A large finish is spread over all. Measured
# (generated/bench/h200-tried.txt, 40).
OVER, OVER_CLUSTERS = 112, 64


def asked_shared(plan: Plan, registers: Mapping[str, int], capability: int) -> dict[str, int]:
    """Bytes of dynamic shared memory to launch each kernel with, by name and in launch order.

    ``registers``: of a thread of each kernel, as compiled for that compute capability.
    """
    s, p = plan.schedule, problem(plan.graph, plan.spec.d)
    asked = {k.name: max(k.dynamic, least_shared(s, p, capability)) if k.dynamic else 0 for k in plan.kernels}
    # Blocks of streaming kernels come and go. Those of the others stay, and the finish follows them: where the two fit
    # side by side, it is spread anyway, and the next call's rows fit beside it.
    follows = s.form != "stream" and len(plan.kernels) > 1 and capability >= OVERLAP_ARCH
    if follows and sum(_registers(k, registers) for k in plan.kernels) > REGISTERS_PER_SM:
        finish = plan.kernels[-1]
        share = shared_by(-(-finish.grid[0](0) // _over(s, p)), capability)
        asked[finish.name] = max(0, share - finish.shared * p.real_size)
    return asked


def _registers(kernel: Kernel, registers: Mapping[str, int]) -> int:
    """Registers of the blocks of a kernel that a multiprocessor has; a thread gets them eight at a time."""
    return kernel.resident * kernel.block * -(-registers[kernel.name] // 8) * 8


def _over(s: Schedule, p: Problem) -> int:
    """How many multiprocessors the finish is spread over."""
    if abreast(s, p) > 1:
        return MULTIPROCESSORS
    return OVER if s.cluster == 1 else OVER_CLUSTERS
