"""Memory transactions of a warp: sectors of global memory, and bank conflicts of shared memory."""

from __future__ import annotations

import numpy as np

from lngen.ir.numerics import Array
from lngen.ptx.lanes import WARP


def sectors(address: Array, who: Array, count: int) -> int:
    """32-byte sectors that each warp touches, or a bulk copy."""
    if count > 32:
        last = address + address.dtype.type(count - 1)
        return int((last // np.uint64(32) - address // np.uint64(32)).sum()) + len(address)
    first = (address // np.uint64(32)).astype(np.int64)
    key = first + (who // WARP << 44)
    steps = np.diff(key)
    if (steps >= 0).all():
        return int(np.count_nonzero(steps)) + 1
    return int(np.unique(key).size)


def banks(address: Array, lanes: Array, count: int) -> tuple[int, int]:
    """Accesses of warps to shared memory, and the wavefronts beyond the least number these need.

    A wavefront serves 128 bytes, one word a bank; 8- and 16-byte accesses go by half and quarter warps.
    """
    if not address.size:
        return 0, 0
    group = lanes // (WARP if count <= 4 else WARP * 4 // count)
    accesses = int(np.count_nonzero(np.diff(lanes // WARP))) + 1
    words = address // 4
    if count <= 4:
        steps = np.diff(words)[np.diff(group) == 0]
        if (steps == 1).all() or (steps == 0).all():
            return accesses, 0
    spread = words[:, None] + np.arange(max(1, count // 4))
    key = np.unique((np.broadcast_to(group[:, None], spread.shape).astype(np.int64) << 32 | spread).ravel())
    _, first = np.unique(key >> 32, return_inverse=True)
    per = np.bincount(first * WARP + (key & 31))
    table = np.pad(per, (0, -per.size % WARP)).reshape(-1, WARP)
    return accesses, int((table.max(axis=1) - 1).sum())
