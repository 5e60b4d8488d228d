"""Workload classes: the number of rows, as far as schedules depend on it."""

from __future__ import annotations

from lngen.devices import Device
from lngen.schedule.problem import Problem

# Workload classes: KiB of rows for each multiprocessor, at most. MANY is assumed if the number of rows is unknown, and
# BEYOND is above MANY. Rows with column sums have fewer classes, because their kernels are persistent in any case.
MANY, BEYOND = 1024, 2048
CLASSES = (*(1 << n for n in range(3, 9)), MANY)
COLUMN_CLASSES = (8, 128, 512, MANY)


def workload(p: Problem, rows: int | None, device: Device) -> int:
    """The workload class of ``rows`` rows on a GPU (None: MANY)."""
    if rows is None:
        return MANY
    each = rows * row_bytes(p) / (device.multiprocessors * 1024)
    return next((most for most in _classes(p) if each <= most), BEYOND)


def row_counts(p: Problem, device: Device) -> list[int | None]:
    """Numbers of rows, one for each nonempty workload class: the most of the class, twice MANY for BEYOND.

    None for MANY.
    """
    found = {workload(p, n, device): n for n in (rows_of(p, most, device) for most in (*_classes(p), BEYOND)) if n}
    return [*(rows for most, rows in found.items() if most != MANY), None]


def rows_of(p: Problem, most: int, device: Device) -> int:
    """The most rows of a workload class."""
    return most * device.multiprocessors * 1024 // row_bytes(p)


def row_bytes(p: Problem) -> int:
    """Bytes of the inputs of a row; 4 per element if rows have none."""
    return p.d * (sum(p.input_sizes) or 4)


def _classes(p: Problem) -> tuple[int, ...]:
    return COLUMN_CLASSES if p.column_sums else CLASSES
