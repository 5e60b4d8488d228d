"""The register model, the space of legal schedules, and the order in which to try them."""

from __future__ import annotations

from itertools import product

from lngen.errors import ScheduleError
from lngen.schedule.legal import is_legal, slots
from lngen.schedule.problem import Problem
from lngen.schedule.schedule import Schedule

REGISTERS_PER_SM = 65536
MAX_REGISTERS = 255

# Registers besides those for elements, and registers per 4 bytes of held elements, fitted to compile logs.
ROW_BASE, ROW_SLOPE = 32, 1.5
COLUMN_BASE = 34
STREAM_BASE = 26

# What was fastest on an H200: bytes of a row per thread, for rows up to LONG_ROW bytes and above; threads a
# multiprocessor should hold; elements per thread beside column sums, for many and for few row groups.
ROW_BYTES, LONG_ROW_BYTES, LONG_ROW = 64, 128, 8192
RESIDENT_THREADS = 512
COLUMN_ELEMENTS, FEW_GROUPS_ELEMENTS = 16, 32


def registers(s: Schedule, p: Problem) -> int:
    """Registers per thread the kernel is expected to need on sm_90.

    A row kernel holds its inputs, widened to the compute type between the phases. One with column sums
    holds its inputs as they come, once more if the next row is prefetched, and one number per column sum.
    """
    elements = slots(s, p) * p.chunk
    if s.form == "stream":
        return STREAM_BASE + 2 * p.chunk * len(p.input_sizes)
    if not p.column_sums:
        return round(ROW_BASE + ROW_SLOPE * elements * len(p.input_sizes) * p.real_size / 4)
    inputs = sum(p.input_sizes) / 4 * (2 if s.prefetch else 1)
    return round(COLUMN_BASE + elements * (inputs + p.column_sums * p.real_size / 4 + 1))


def fits(s: Schedule, p: Problem) -> bool:
    """True if the model expects no spills under the schedule's own register limit."""
    limit = REGISTERS_PER_SM // (s.resident * s.block) // 8 * 8
    return registers(s, p) <= min(limit, MAX_REGISTERS)


def space(p: Problem) -> list[Schedule]:
    """Every legal schedule with the widest accesses D allows, in a fixed order."""
    vec = widest(p)
    rows = {1, 2, 4, 8, 16, 32, 64, 128, p.groups}
    threads = [1 << n for n in range(11)]
    candidates = [
        Schedule(form, t, r, vec, resident, prefetch)
        for form, t, r, resident, prefetch in product(
            ("registers", "stream"), threads, sorted(rows), (1, 2, 3, 4, 6, 8), (False, True)
        )
    ]
    return [s for s in candidates if is_legal(s, p)]


def widest(p: Problem) -> int:
    """The most elements per access that D allows."""
    vec = p.chunk
    while p.d % vec:
        vec //= 2
    return vec


def ranked(p: Problem) -> list[Schedule]:
    """The schedules worth trying, best first: the default is the first that the compiler does not spill."""
    found = [s for s in space(p) if fits(s, p)]
    if not found:
        raise ScheduleError(f"no schedule is legal for D={p.d}.")
    return sorted(found, key=lambda s: (_cost(s, p), s))


def _cost(s: Schedule, p: Problem) -> tuple[float, ...]:
    """Smaller is better; the terms in order of importance."""
    elements = slots(s, p) * p.chunk
    idle = slots(s, p) * s.threads * p.chunk * (p.segments if s.form == "stream" else 1) / p.d
    if p.column_sums and s.form == "registers":
        # One block per multiprocessor, the next row in flight.
        wanted = COLUMN_ELEMENTS if p.groups > 4 else FEW_GROUPS_ELEMENTS
        return (0, not s.prefetch, s.resident != 1, abs(elements - wanted), idle)
    if s.form == "stream":
        return (1, abs(s.threads - 512), abs(s.resident - 2))
    size = max(p.input_sizes, default=4)
    target = (ROW_BYTES if p.d * size <= LONG_ROW else LONG_ROW_BYTES) / size / max(1, len(p.input_sizes))
    away = max(elements / target, target / elements)
    block = max(s.block / 128, 128 / s.block) if s.threads <= 32 else s.rows
    return (0, round(away * idle, 3), block, abs(s.resident * s.block - RESIDENT_THREADS), -s.resident)
