"""The targets of lngen: fractions of the ceiling on an H200 by tensor size, and ratios to the best peer."""

from __future__ import annotations

import math

MB = 1 << 20  # bytes; 8 MB are 4096 x 1024 in 16 bits

# By the bytes of one [M, D] tensor: the fraction of the copy (forward), of the addition (backward).
FRACTIONS = {
    8 * MB: {"fwd": 0.94, "bwd": 0.68},
    16 * MB: {"fwd": 0.94, "bwd": 0.76},
    32 * MB: {"fwd": 0.95, "bwd": 0.84},
    64 * MB: {"fwd": 0.97, "bwd": 0.90},
    256 * MB: {"fwd": 0.98, "bwd": 0.95},
}
GRAPHS = ("layernorm", "rmsnorm")  # with their default keys: the graphs that have targets
DTYPES = ("f16", "bf16", "f32")
IRREGULAR = 0.85  # of the fraction, for rows that are not a multiple of REGULAR
REGULAR = 256
SLACK = 0.97  # whole rows may lie slightly below a size

RATIO_EACH = 1.0  # times the speed of the best peer, at every point
RATIO_MEAN = {"fwd": 1.15, "bwd": 1.4}  # geometric mean over all points


def target_fraction(direction: str, dtype: str, tensor_bytes: int, d: int) -> float | None:
    """The fraction of the ceiling to reach; between two sizes of the table, interpolated in log bytes.

    None where there is no target: for tensors below the table, for f64, for forward and backward as one unit.
    """
    sizes = sorted(FRACTIONS)
    if direction not in FRACTIONS[sizes[0]] or dtype not in DTYPES or tensor_bytes < SLACK * sizes[0]:
        return None
    place = min(max(tensor_bytes, sizes[0]), sizes[-1])
    upper = next(size for size in sizes if size >= place)
    lower = max((size for size in sizes if size < upper), default=upper)
    share = 1.0 if upper == lower else math.log(place / lower) / math.log(upper / lower)
    low, high = FRACTIONS[lower][direction], FRACTIONS[upper][direction]
    return round((low + share * (high - low)) * (1.0 if d % REGULAR == 0 else IRREGULAR), 4)
