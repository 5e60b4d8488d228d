"""Schedule: what may change the speed of a kernel and never a bit of its results."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, fields, replace

from lngen.errors import ScheduleError
from lngen.numbers import whole

FORMS = ("registers", "bulk", "ragged", "async", "stream")
STAGED = ("bulk", "ragged", "async")


@dataclass(frozen=True, order=True)
class Schedule:
    """How rows are laid over threads.

    form        registers: a row's inputs stay in registers from load to store; bulk, async: the rows to come are
                copied to shared memory ahead of time, by bulk copies (sm_90) or by cp.async (sm_80), and read
                from there in every phase; ragged: bulk copies for rows that do not begin at multiples of 16
                bytes, one behind the other; stream: they are read again from global memory in every phase, for rows
                too long to hold
    threads     threads of a block that share a row, a power of two
    rows        rows a block works on side by side; fixed by the graph if it has column sums, but for long rows, whose
                row groups may be a block each
    vec         elements per memory access; 1 works for any pointer and stride
    resident    blocks per multiprocessor: what the compiler limits registers for, and how many stay if they persist
    prefetch    registers with column sums: load the next row while this one is computed
    stages      bulk, ragged, async: rows that a row group has room for in shared memory
    cluster     bulk, registers without column sums: blocks that share a row, each with its own segments
    owners      bulk, async without column sums: blocks, or clusters, that share the rows
    bulk_store  bulk: results leave through shared memory
    keep        bulk, ragged, async: [D] inputs stay in registers from row to row; registers without column sums: they
                are asked for together with the row, not when they are needed
    one_launch  column sums are finished behind a grid barrier, not by a second kernel
    hold        bulk, ragged, async: a row is read from shared memory once, its inputs stay in registers through all
                phases
    soon        bulk, held, results not stored in bulk: the stage of a row takes the next one as soon as all threads
                hold the row, not after it: one stage less does as well
    claim       bulk, ragged, without column sums: a row group takes the next row that nobody has from a counter, not
                every owners-th: multiprocessors are not equally fast; for a cluster its first block does
    restrict    a cluster with column sums: the wait for the other blocks' sums orders shared memory alone, as it always
                does without column sums, and leaves the L1 cache; which is faster, only measuring tells
    """

    form: str
    threads: int
    rows: int
    vec: int
    resident: int = 1
    prefetch: bool = False
    stages: int = 0
    cluster: int = 1
    owners: int = 0
    bulk_store: bool = False
    keep: bool = False
    one_launch: bool = False
    hold: bool = False
    soon: bool = False
    claim: bool = False
    restrict: bool = False

    def __str__(self) -> str:
        shown = (f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default)
        return ",".join(f"{f.name}={_show(getattr(self, f.name))}" for f in shown)

    @property
    def slug(self) -> str:
        """The schedule as part of a C identifier."""
        parts = [f"t{self.threads}", f"r{self.rows}", f"v{self.vec}", f"b{self.resident}"]
        parts += [self.form] * (self.form != "registers") + [f"s{self.stages}"] * (self.stages > 0)
        parts += [f"c{self.cluster}"] * (self.cluster > 1) + [f"o{self.owners}"] * (self.owners > 0)
        flags = {"prefetch": self.prefetch, "store": self.bulk_store, "keep": self.keep, "one": self.one_launch}
        flags |= {"hold": self.hold, "soon": self.soon, "claim": self.claim, "restrict": self.restrict}
        return "_".join([*parts, *(word for word, on in flags.items() if on)])

    @property
    def kind(self) -> tuple[str | int | bool, ...]:
        """What makes it another kernel, not the same one in other sizes."""
        return self.form, self.cluster, self.one_launch, self.hold, self.soon, self.claim, self.restrict

    @property
    def told(self) -> bool:
        """True if the blocks of a cluster are told which row comes next: the first claims it for all."""
        return self.claim and self.cluster > 1

    @property
    def block(self) -> int:
        """Threads per block."""
        return self.threads * self.rows


def parse_schedule(text: str, base: Schedule) -> Schedule:
    """``base`` with the ``key=value,...`` of ``text`` put in; ScheduleError names the nearest right word.

    With a form, everything that is not named and has a default gets it: it belongs to the form of ``base``.
    """
    known = {f.name: getattr(base, f.name) for f in fields(Schedule)}
    changes: dict[str, str | int | bool] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ScheduleError(f"schedule '{text}': expected 'key=value', got '{part}'.")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise ScheduleError(f"schedule '{text}': there is no key '{key}', expected one of {', '.join(known)}{hint}")
        changes[key] = _read(text, key, value, known[key])
    if "form" in changes:
        changes = {f.name: f.default for f in fields(Schedule) if f.default is not MISSING} | changes
    return replace(base, **changes)  # type: ignore[arg-type]


def _show(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _read(text: str, key: str, value: str, like: object) -> str | int | bool:
    if isinstance(like, bool):
        if value in ("yes", "no"):
            return value == "yes"
        raise ScheduleError(f"schedule '{text}': '{key}' is expected to be yes or no, got '{value}'.")
    if isinstance(like, int):
        number = whole(value)
        if number is not None:
            return number
        raise ScheduleError(f"schedule '{text}': '{key}' is expected to be a whole number, got '{value}'.")
    if value not in FORMS:
        raise ScheduleError(f"schedule '{text}': '{key}' is expected to be one of {', '.join(FORMS)}, got '{value}'.")
    return value
