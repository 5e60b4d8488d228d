"""What a build asks for, and the schedule of each arch and class of rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import Device, device_for, named, oldest_first, weakest
from lngen.compiler.lower import Plan
from lngen.compiler.problem import ANY, Problem, Schedule, check_arch, complete, is_legal, parse_schedule
from lngen.compiler.problem.footprint import static_shared
from lngen.compiler.schedule import most_bytes, row_counts, workload
from lngen.compiler.spec import Spec
from lngen.errors import LngenError, LowerError, ScheduleError, short
from lngen.launch.runtime.lock_file import Lock, read_lock
from lngen.user_input import whole

PTX = "+ptx"
MOST_ROWS = 2**40


@dataclass(frozen=True)
class Target:
    """An arch to build for; ``ptx``: newer GPUs run its PTX."""

    arch: str
    ptx: bool


@dataclass(frozen=True)
class Request:
    """A build without its specs.

    rows      numbers of rows, None for many; an empty tuple for every class
    schedule  changes of the schedules
    device    the GPU to choose schedules for, on its arch
    """

    targets: tuple[Target, ...]
    rows: tuple[int | None, ...] = (None,)
    schedule: str = ""
    lock: Lock = field(default_factory=Lock)
    device: Device | None = None

    @classmethod
    def of(
        cls,
        arch: str | Sequence[str],
        rows: int | str | Sequence[int | str] = "many",
        schedule: str = "",
        lock: str | Path | None = None,
        device: str | None = None,
    ) -> Request:
        """From the arguments of ``build``; LngenError says what is wrong with one."""
        words = arch.split(",") if isinstance(arch, str) else [*arch]
        asked = sorted(w.strip() for w in words if w.strip())  # with sm_90 and sm_90+ptx the latter is the last
        names = {word.removesuffix(PTX): word.endswith(PTX) for word in asked}
        for name in names:
            if not re.fullmatch(r"sm_\d{2,3}[af]?", name, re.ASCII):
                raise LngenError(
                    f"arch is expected to be a list such as sm_80,sm_90{PTX}, got '{short(name)}'; lngen doctor lists "
                    "the archs."
                )
        if not names:
            raise LngenError("a build is expected to be for one arch at least, got none; add for example sm_90.")
        gpu = named(device) if device is not None else None
        if gpu and gpu.arch not in names:
            raise LngenError(f"device {device} is of {gpu.arch}, which is not built for; add it to the archs.")
        locked = read_lock(lock) if lock is not None else Lock()
        targets = tuple(Target(name, names[name]) for name in oldest_first(names))
        return cls(targets, _rows(rows), schedule, locked, gpu)

    def check(self, kinds: Sequence[str]) -> None:
        """LngenError if the kinds of files do not go with the targets."""
        if {*kinds} == {"vectors"}:
            raise LngenError("vectors are expected beside kernels; emit cu, ptx, cubin or fatbin as well.")
        runs = {"cubin", "fatbin", *(["ptx"] if any(t.ptx for t in self.targets) else [])}
        if "c" in kinds and runs.isdisjoint(kinds):
            raise LngenError("a C library is expected to have kernels that a driver runs; emit cubin as well.")
        if "cubin" not in kinds and "fatbin" not in kinds and "ptx" not in kinds and any(t.ptx for t in self.targets):
            raise LngenError(f"an arch with {PTX} needs compiled kernels; emit ptx, cubin or fatbin, or drop {PTX}.")

    def with_rows(self, rows: Sequence[int]) -> Request:
        """The same request for other numbers of rows; the same if there are none."""
        return replace(self, rows=tuple(rows)) if rows else self

    def gpu(self, arch: str) -> Device:
        """The GPU to choose a schedule for."""
        return self.device if self.device and self.device.arch == arch else device_for(arch)

    def notes(self, compilation: Compilation) -> list[str]:
        """What the caller should know of a spec."""
        spec, lock = str(compilation.spec), self.lock
        unlocked = [t.arch for t in self.targets if lock.entries and not lock.candidates(spec, arch=t.arch)]
        said = f"{spec} is not in '{lock.path}' for {', '.join(unlocked)}; its default schedule is built."
        return [said, *filter(None, [lock.outdated(spec)])] if unlocked else []


def _rows(given: int | str | Sequence[int | str]) -> tuple[int | None, ...]:
    words = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else [*given]
    if [*map(str, words)] == ["all"]:
        return ()
    found: list[int | None] = []
    for word in words:
        number = None if word == "many" else whole(word, 0, MOST_ROWS)
        if number is None and word != "many":
            raise LngenError(
                f"rows is expected to be 'all', or a list of numbers from 0 on and 'many', got '{short(word)}'."
            )
        found.append(number)
    if not found:
        raise LngenError("rows is expected to name one number at least, or 'many', or 'all'; got none.")
    return tuple(dict.fromkeys(found))


# ---- choices ----


@dataclass(frozen=True)
class Choice:
    """The kernels of a spec for an arch and a class of rows.

    most_bytes  of rows for each multiprocessor, at most
    otherwise   what every GPU that runs the arch's kernels can launch, if ``kernels`` is not
    """

    spec: Spec
    problem: Problem
    target: Target
    most_bytes: int
    kernels: KernelSet
    otherwise: KernelSet | None

    @property
    def candidates(self) -> tuple[KernelSet, ...]:
        """Both."""
        return (self.kernels, *([self.otherwise] if self.otherwise else []))


def choices(compilation: Compilation, request: Request) -> list[Choice]:
    """Every arch and class of rows of a request; ScheduleError if an arch has no schedule, or not this one."""
    found: dict[tuple[str, int], Choice] = {}
    for target in request.targets:
        gpu = request.gpu(target.arch)
        for rows in request.rows or row_counts(compilation.problem, gpu):
            key = target.arch, most_bytes(workload(compilation.problem, rows, gpu))
            made = compilation.kernels(_schedule(compilation, request, target.arch, rows))
            check_arch(made.plan.schedule, target.arch)
            other = _otherwise(compilation, made, target, rows, gpu)
            found[key] = Choice(compilation.spec, compilation.problem, target, key[1], made, other)
    return [*found.values()]


def _schedule(compilation: Compilation, request: Request, arch: str, rows: int | None) -> Schedule:
    """The locked schedule on an arch, or the default, changed by the request."""
    base = request.lock.schedule(compilation, rows, arch=arch)
    if base is None:
        base = ANY if complete(request.schedule) else compilation.schedule(arch, rows=rows, device=request.gpu(arch))
    made = parse_schedule(request.schedule, base)
    # vec=1 and the like alone is what a launcher asks for whose arrays are not aligned.
    narrower = re.fullmatch(r"vec=(1|2|4|8)", request.schedule, re.ASCII) and made.vec <= base.vec
    if narrower and (base.form == "tma_unaligned" or not is_legal(made, compilation.problem)):
        # As in a call: a form that needs wide accesses or contiguous rows is replaced by the best that does not.
        return compilation.schedule(arch, vec=made.vec, rows=rows, device=request.gpu(arch))
    return made


def _otherwise(
    compilation: Compilation, made: KernelSet, target: Target, rows: int | None, gpu: Device
) -> KernelSet | None:
    """Kernels for GPUs that cannot launch ``made``, if there may be some among those that run its images."""
    least = weakest(gpu, newer=target.ptx)
    plan = made.plan
    if _launchable(plan, least):
        return None
    if plan.schedule.single_launch:
        two = compilation.kernels(replace(plan.schedule, single_launch=False))
        if _launchable(two.plan, least):
            return two
    try:
        other = compilation.kernels(compilation.schedule(target.arch, rows=rows, device=least))
    except (ScheduleError, LowerError):
        return None  # nothing fits them
    return other if other.plan.schedule != plan.schedule and _launchable(other.plan, least) else None


def _launchable(plan: Plan, least: Device) -> bool:
    """True if any GPU with these limits can launch all kernels, whatever the number of its multiprocessors."""
    limit = least.shared_block_kib * 1024
    # Kernels without dynamic memory fit: a block has 48 KiB of static shared memory at most, which every GPU has.
    static = static_shared(plan.schedule, plan.problem)
    return plan.schedule.cluster <= least.largest_cluster and all(
        not k.cooperative and (not k.dynamic or static + k.dynamic <= limit) for k in plan.kernels
    )
