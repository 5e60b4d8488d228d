"""Measured schedules: a table per GPU, written by ``lngen tune --table``, and its entries near a problem."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from lngen.compiler.devices import Device, device_for
from lngen.compiler.problem import ANY, Problem, Schedule, is_legal, parse_schedule
from lngen.compiler.problem.footprint import BULK, has_grid, has_room, whole_groups

# Equations per element: norms and their sums have at most so many. Rows with more, and forward with results of 8 bits,
# have entries of their own. Up to LIKE_NORMS they take those of norms where they have none, as softmax does.
OF_NORMS = {"fwd": 15, "bwd": 20}
LIKE_NORMS = 26
MOST_OF_BLOCKS, VECTORS_OF_BLOCKS = 512, 2  # threads of a row with blocks of features, and vectors of a thread
DIFFERENCES = ("and", "of", "by", "meeting")  # words of a section's name, each before its number
NEAR = 1.25  # rows at most this many times longer or shorter are near


@dataclass(frozen=True)
class Key:
    """The key of an entry: direction, bytes of an element, D, and what sets rows apart from those of a norm alone.

    more    [M, D] inputs besides x, or with column sums besides dy and x
    heavy   equations per element and folds by blocks of features, if they are more than OF_NORMS, if forward has a
            result of 8 bits or takes an element of a row, or backward such folds; else 0. Such rows need other numbers
            of warps
    sets    [N, D] inputs, of sets of rows
    met     folds of heavy rows whose numbers meet in shared memory
    """

    direction: str
    element: int
    d: int
    more: int = 0
    heavy: int = 0
    sets: int = 0
    met: int = 0

    @property
    def kind(self) -> tuple[str, int, int, int, int, int, bool]:
        """The common properties of rows of different lengths: also whether they are whole units of 16 bytes."""
        units = self.d * self.element % BULK == 0
        return self.direction, self.more, self.heavy, self.sets, self.met, self.element, units

    @property
    def order(self) -> tuple[bool, int, int, int, int, int, int]:
        """The position in a table: forward first, then by the differences, element and D."""
        return self.direction != "fwd", self.more, self.heavy, self.sets, self.met, self.element, self.d

    @property
    def section(self) -> str:
        """The name in a file: ``fwd.2_bytes.4096``, ``fwd_and_1_of_31_by_2.2_bytes.4096`` with all differences."""
        parts = dict(zip(DIFFERENCES, (self.more, self.heavy, self.sets, self.met), strict=True))
        differences = "".join(f"_{word}_{number}" for word, number in parts.items() if number)
        return f"{self.direction}{differences}.{self.element}_bytes.{self.d}"


# Rows whose measured schedules spill for one of the norms or with some version of NVRTC: direction, bytes of an
# element, D.
TIGHT = {
    *(("fwd", 2, d) for d in (10240, 16384, 24576, 32768, 98304)),
    *(("fwd", 4, 5120), ("bwd", 2, 12800)),
}


@dataclass(frozen=True)
class Table:
    """Measured schedules of a GPU: by key and workload class.

    An entry is the text of a schedule, which is parsed when it is asked for. It has no accesses and no grid: these
    follow from D and from the GPU. ``file``: the name of the file that it was read from.
    """

    device: str
    arch: str
    entries: Mapping[Key, Mapping[int, str]]
    file: str = field(default="", compare=False)

    def near(self, p: Problem, workload: int) -> Iterator[tuple[Key, Schedule]]:
        """The entries of this class for the same kind of rows, the nearest D first; none for rows of another kind.

        Rows of the same kind have the same direction, number of inputs, element size and alignment, and no more
        arithmetic than norms, or as much; up to LIKE_NORMS those of norms follow. Behind those of rows with inputs of
        sets follow those of rows without. Where none is near, a cluster that shares rows with column sums also suits
        more inputs, if they have one element size.
        """
        own = key_of(p)
        if own.more < 0 or len({*p.input_sizes}) != 1:
            return
        found = [*self._nearest(own, workload)]
        if own.sets:
            own = replace(own, sets=0)
            found += self._nearest(own, workload)
        if 0 < own.heavy <= LIKE_NORMS:
            found += self._nearest(replace(own, heavy=0, met=0), workload)
        if not found and own.more and p.column_sums and not own.heavy:
            found = [entry for entry in self._nearest(replace(own, more=0), workload) if entry[1].cluster > 1]
        yield from found

    def _nearest(self, own: Key, workload: int) -> Iterator[tuple[Key, Schedule]]:
        """The entries of this class for rows like ``own``, the nearest D first."""
        alike = [k for k, lines in self.entries.items() if k.kind == own.kind and workload in lines]
        for key in sorted(alike, key=lambda k: (abs(math.log(k.d / own.d)), k.d)):
            if abs(math.log(key.d / own.d)) > math.log(NEAR):
                return
            yield key, parse_schedule(self.entries[key][workload], ANY)


def key_of(p: Problem) -> Key:
    """The key of entries for exactly these rows."""
    direction, norms = ("bwd", 2) if p.column_sums else ("fwd", 1)
    quantised = direction == "fwd" and 1 in p.output_sizes
    own = quantised or p.takes or p.operations > OF_NORMS[direction] or (direction == "bwd" and p.block_folds > 0)
    heavy, met = (p.operations + p.block_folds, p.block_folds * p.blocks_meet) if own else (0, 0)
    return Key(direction, p.element, p.d, len(p.input_sizes) - norms, heavy, len(p.set_sizes), met)


def measured(p: Problem, workload: int, device: Device) -> Iterator[Schedule]:
    """The nearest measured schedule that is legal and fits the GPU; nothing if there is none near.

    A cluster has all row groups of a graph side by side, as in the space of schedules. Rows of more inputs than were
    measured take more registers: for them the same layout follows with twice the threads.
    """
    return (s for _, _, s in origins(p, workload, device))


def origins(p: Problem, workload: int, device: Device) -> Iterator[tuple[Table, Key, Schedule]]:
    """What ``measured`` yields, each with its table and the key of its entry.

    Entries of rows with as many inputs of sets precede others, and so do those with as much arithmetic. An entry for
    exactly this D precedes one for a D nearby, even if it is of another GPU. Both were timed at 76 points of an H100
    and an H200: they have 0.99 and 0.98 of the best speed. Else the GPU's own table precedes.
    """
    near = [(table, *entry) for table in tables_for(device) for entry in table.near(p, workload)]
    own = key_of(p)

    def rank(found: tuple[Table, Key, Schedule]) -> tuple[bool, ...]:
        return found[1].sets != own.sets, found[1].heavy != own.heavy, found[1].d != own.d

    for table, key, entry in sorted(near, key=rank):
        every = fitted(entry, p, device, key)
        found = [s for s in every if whole_groups(s, p) and is_legal(s, p) and has_room(s, p, device)]
        yield from ((table, key, s) for s in found)
        if found:
            return


def tables_for(device: Device) -> list[Table]:
    """The tables of the arch: the GPU's own, that of the GPU that stands for the arch, then by the files' names."""
    names = device.name, device_for(device.arch).name
    alike = [table for table in tables() if table.arch == device.arch.rstrip("af")]
    return sorted(alike, key=lambda table: [table.device != name for name in names])


def known_clean(s: Schedule, p: Problem, arch: str) -> bool:
    """True for a schedule that was measured with LayerNorm or RMSNorm and exactly these rows: it does not spill."""
    key = key_of(p)
    if s.vec != p.run or key.more or key.heavy or key.sets or (key.direction, key.element, key.d) in TIGHT:
        return False
    found = (t.entries.get(key, {}).values() for t in tables() if t.arch == arch)
    return replace(s, vec=1, grid=0) in (parse_schedule(line, ANY) for lines in found for line in {*lines})


def fitted(entry: Schedule, p: Problem, device: Device, key: Key) -> list[Schedule]:
    """The entry of ``key`` with the accesses and the grid for these rows, and about as many bytes in flight."""
    grid = device.resident_clusters(entry.cluster) * entry.blocks_per_sm if has_grid(entry, p) else 0
    s = replace(entry, vec=p.run, grid=grid)
    own = key_of(p)
    if own.more == key.more:
        of_rows = own.heavy != key.heavy and bool(p.feature_blocks) and s.form == "registers"
        if own.sets and not key.sets and s.form == "registers" and s.cached_weights:
            return [s, replace(s, cached_weights=False)]  # inputs of sets take registers of their own
        return [replace(s, threads=_of_blocks(s, p)), s] if of_rows else [s]
    inputs = len(p.input_sizes)
    fewer = replace(s, stages=max(2, s.stages * (inputs - own.more + key.more) // inputs)) if s.stages else s
    return [fewer, replace(fewer, threads=2 * s.threads)]


def _of_blocks(s: Schedule, p: Problem) -> int:
    """Threads of a row with a number for each block of features, which a thread folds one vector after another.

    With two vectors a thread 128 rows of 4096 take 2.6 us on an H100, with four 3.0 (h100-tuned.txt).
    """
    threads = s.threads
    while threads < MOST_OF_BLOCKS and p.d > VECTORS_OF_BLOCKS * threads * p.chunk:
        threads *= 2
    return threads


@cache
def tables() -> tuple[Table, ...]:
    """Every table that is shipped."""
    return tuple(map(read, sorted((Path(__file__).parents[1] / "devices" / "tables").glob("*.toml"))))


def read(path: Path) -> Table:
    """The table in a file, section by section."""
    head, *sections = path.read_text(encoding="utf-8").split("\n[")
    data: dict[str, Any] = tomllib.loads(head)
    named = (section.partition("]") for section in sections)
    return Table(data["device"], data["arch"], {_key(name): _Lines(lines) for name, _, lines in named}, path.name)


def _key(section: str) -> Key:
    """The key whose ``section`` this is."""
    rows, element, d = section.split(".")
    direction, *parts = rows.split("_")
    numbers = dict(zip(parts[::2], map(int, parts[1::2]), strict=True))
    differences = (numbers.get(word, 0) for word in DIFFERENCES)
    return Key(direction, int(element.removesuffix("_bytes")), int(d), *differences)


class _Lines(Mapping[int, str]):
    """The schedules of a section, by workload class; parsed when they are asked for, since a choice asks for few."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def _schedules(self) -> dict[int, str]:
        lines: dict[str, list[int]] = tomllib.loads(self._text)
        return {w: line for line, classes in lines.items() for w in classes}

    def __getitem__(self, workload: int) -> str:
        return self._schedules[workload]

    def __iter__(self) -> Iterator[int]:
        return iter(self._schedules)

    def __len__(self) -> int:
        return len(self._schedules)


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


def most_bytes(workload: int) -> int:
    """Bytes of rows for each multiprocessor, at most, of a workload class; of BEYOND, those that the model assumes."""
    return workload * 1024


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
