"""Schedule: what may change the speed of a kernel and never a bit of its results. Its text, and its archs."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace

from lngen.compiler.devices import capability
from lngen.errors import ScheduleError, one_of, short
from lngen.user_input import whole

FORMS = ("registers", "tma", "tma_unaligned", "cp_async", "multipass")
STAGED = ("tma", "tma_unaligned", "cp_async")
BULK_FORMS = ("tma", "tma_unaligned")

MAX_CLUSTER = 16  # blocks

# The first archs with the instructions of a form, and with clusters; from PORTABLE_ARCH on clusters are small.
MINIMUM_ARCH = {"registers": 75, "multipass": 75, "cp_async": 80, "tma": 90, "tma_unaligned": 90}
CLUSTER_ARCH, PORTABLE_ARCH, PORTABLE_CLUSTER = 90, 120, 8

# From this arch on a kernel may start while the previous one ends; see templates/include/lngen/launch.cuh.
OVERLAP_ARCH = 90


@dataclass(frozen=True, order=True)
class Schedule:
    """The layout of rows over threads, and the way rows move.

    form              registers: a row's inputs stay in registers from load to store; tma, cp_async: the next rows are
                      copied to shared memory ahead of time, by bulk copies (sm_90) or by cp.async (sm_80), and every
                      phase reads them there; tma_unaligned: bulk copies of contiguous rows that do not start at
                      multiples of 16 bytes; multipass: every phase reads the row again from global memory, and a
                      kernel of its own adds the columns, for rows or column sums that registers do not hold
    threads           threads of a block that share a row, a power of two
    rows_per_block    rows that a block works on side by side; fixed by the graph if it has column sums, except for
                      long rows, whose row groups may each be a block
    vec               elements per memory access; 1 works for any pointer and stride
    blocks_per_sm     blocks per multiprocessor: the compiler limits registers for that many, and a persistent grid
                      runs that many
    prefetch          registers with column sums: load the next row while this one is computed
    stages            tma, tma_unaligned, cp_async: pipeline stages of a row group, one row per stage
    cluster           tma, tma_unaligned, registers without column sums: blocks that share a row, each with its own
                      segments
    grid              tma, cp_async without column sums, or any form with sums of sets: blocks, or clusters, of the
                      persistent grid; sums of sets without a grid have as many as other column sums
    tma_store         tma, tma_unaligned, of one block always: results leave through shared memory, by bulk copies
    cached_weights    tma, tma_unaligned, cp_async: [D] inputs stay in registers from row to row; registers without
                      column sums: they are loaded together with the row, not where they are used. [N, D] inputs stay
                      while a block adds the rows of a set; without column sums they are loaded with each row
    single_launch     column sums are finished after a grid barrier, not by a second kernel
    row_in_registers  tma, tma_unaligned, cp_async: a row is read from shared memory once, its inputs stay in registers
                      through all phases
    early_release     tma, row_in_registers, no tma_store: the stage of a row is refilled as soon as all threads have
                      the row in registers, not after the row; then one stage less suffices
    dynamic           tma, tma_unaligned, without column sums: a dynamic scheduler; a row group takes the next row from
                      a counter instead of every grid-th row, since multiprocessors differ in speed; in a cluster the
                      first block does so for all
    acquire_shared    a cluster with column sums: the wait for the sums of the other blocks acquires shared memory
                      alone and leaves the L1 cache valid, as it always does without column sums; only measurements
                      show which is faster
    """

    form: str
    threads: int
    rows_per_block: int
    vec: int
    blocks_per_sm: int = 1
    prefetch: bool = False
    stages: int = 0
    cluster: int = 1
    grid: int = 0
    tma_store: bool = False
    cached_weights: bool = False
    single_launch: bool = False
    row_in_registers: bool = False
    early_release: bool = False
    dynamic: bool = False
    acquire_shared: bool = False

    def __str__(self) -> str:
        shown = (f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default)
        return ",".join(f"{f.name}={value_text(getattr(self, f.name))}" for f in shown)

    @property
    def slug(self) -> str:
        """The schedule as part of a C identifier."""
        parts = [f"t{self.threads}", f"r{self.rows_per_block}", f"v{self.vec}", f"b{self.blocks_per_sm}"]
        parts += [self.form] * (self.form != "registers") + [f"s{self.stages}"] * (self.stages > 0)
        parts += [f"c{self.cluster}"] * (self.cluster > 1) + [f"g{self.grid}"] * (self.grid > 0)
        flags = {"prefetch": self.prefetch, "store": self.tma_store, "cached": self.cached_weights}
        flags |= {"single": self.single_launch, "regs": self.row_in_registers, "early": self.early_release}
        flags |= {"dynamic": self.dynamic, "acquire": self.acquire_shared}
        return "_".join([*parts, *(word for word, on in flags.items() if on)])

    @property
    def kind(self) -> tuple[str | int | bool, ...]:
        """The keys that select another kernel, not the same kernel with other sizes."""
        return (
            self.form, self.cluster, self.single_launch, self.row_in_registers, self.early_release, self.dynamic,
            self.acquire_shared,
        )  # fmt: skip

    @property
    def broadcast(self) -> bool:
        """True if the first block of a cluster takes the next row for all blocks and broadcasts it."""
        return self.dynamic and self.cluster > 1

    @property
    def block(self) -> int:
        """Threads per block."""
        return self.threads * self.rows_per_block


ANY = Schedule("registers", threads=1, rows_per_block=1, vec=1)  # the base of a text that is complete


def complete(text: str) -> bool:
    """True if ``text`` names every key that has no default, so that nothing of its base is left."""
    named = {part.partition("=")[0] for part in text.split(",")}
    return named >= {f.name for f in fields(Schedule) if f.default is MISSING}


def parse_schedule(text: str, base: Schedule) -> Schedule:
    """``base`` with the ``key=value,...`` of ``text``; ScheduleError names the nearest right word.

    If ``text`` names a form, all other keys with a default get it, since their values belong to the form of ``base``.
    """
    known = {f.name: getattr(base, f.name) for f in fields(Schedule)}
    changes: dict[str, str | int | bool] = {}
    shown = short(text)
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ScheduleError(f"schedule '{shown}': expected 'key=value', got '{short(part)}'.")
        if key not in known:
            raise ScheduleError(f"schedule '{shown}': there is no key '{short(key)}', {one_of(key, known)}")
        changes[key] = _read(shown, key, value, known[key])
    if "form" in changes:
        changes = {f.name: f.default for f in fields(Schedule) if f.default is not MISSING} | changes
    return replace(base, **changes)  # type: ignore[arg-type]


def changes(s: Schedule, other: Schedule) -> str:
    """The text that makes ``other`` of ``s``, as ``parse_schedule`` reads it; the grid is left out where it follows."""
    base = s if s.form == other.form else replace(ANY, threads=s.threads, rows_per_block=s.rows_per_block, vec=s.vec)
    every = [f.name for f in fields(Schedule)]
    names = [f for f in every if getattr(base, f) != getattr(other, f) or (f == "form" and base is not s)]
    shown = [f for f in names if f != "grid" or names == ["grid"]]
    return ",".join(f"{f}={value_text(getattr(other, f))}" for f in shown)


def value_text(value: object) -> str:
    """A value as the text of a schedule has it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _read(text: str, key: str, value: str, like: object) -> str | int | bool:
    if isinstance(like, bool):
        if value in ("yes", "no"):
            return value == "yes"
        raise ScheduleError(f"schedule '{text}': '{key}' is expected to be yes or no, got '{short(value)}'.")
    if isinstance(like, int):
        number = whole(value)
        if number is not None:
            return number
        raise ScheduleError(f"schedule '{text}': '{key}' is expected to be a whole number, got '{short(value)}'.")
    if value not in FORMS:
        raise ScheduleError(
            f"schedule '{text}': '{key}' is expected to be one of {', '.join(FORMS)}, got '{short(value)}'."
        )
    return value


def minimum_arch(s: Schedule) -> int:
    """The lowest compute capability that has the schedule's instructions."""
    return max(MINIMUM_ARCH[s.form], CLUSTER_ARCH if s.cluster > 1 else 0)


def largest_cluster(here: int) -> int:
    """The largest cluster on an arch: none before sm_90, from sm_120 on the size that every GPU supports."""
    return 1 if here < CLUSTER_ARCH else MAX_CLUSTER if here < PORTABLE_ARCH else PORTABLE_CLUSTER


def exists(s: Schedule, here: int) -> bool:
    """True if the compute capability ``here`` has the schedule's instructions and cluster size."""
    return here >= MINIMUM_ARCH[s.form] and s.cluster <= largest_cluster(here)


def check_arch(s: Schedule, arch: str) -> None:
    """ScheduleError if ``arch`` lacks the schedule's instructions; an unknown arch is reported by the compiler."""
    here = capability(arch)
    there = [form for form in FORMS if MINIMUM_ARCH[form] <= here]
    if there and s.form not in there:
        raise ScheduleError(
            f"form={s.form} needs sm_{MINIMUM_ARCH[s.form]} or later, got {arch}; use form={_either(there)}."
        )
    if there and s.cluster > largest_cluster(here):
        raise ScheduleError(f"cluster is at most {largest_cluster(here)} on {arch}, got {s.cluster}.")


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
