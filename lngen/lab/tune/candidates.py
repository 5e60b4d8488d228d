"""Candidates: which schedules are tried, in what order, and their kernels, compiled side by side without the GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from lngen.compiler.compile import Compilation
from lngen.compiler.devices import Device, device_for
from lngen.compiler.problem import Schedule
from lngen.compiler.problem.footprint import register_limit
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import Spec
from lngen.errors import CompileError, EmitError, LowerError, ScheduleError
from lngen.files import sha256


def ranking(spec: Spec, rows: int, arch: str, device: Device | None = None) -> list[Schedule]:
    """The schedules for ``spec`` with ``rows`` rows, each once: measured ones first, then in the model's order.

    ``device``: the GPU; None for the one that represents ``arch``.
    """
    return ranked(Compilation(spec).problem, device or device_for(arch), rows=rows)


def candidates(compilation: Compilation, rows: int, arch: str, device: Device | None = None) -> list[Schedule]:
    """The schedules in the order of trial: the default, then alternately the next by rank and the best of each kind.

    ``device``: as for ``ranking``. A model that is wrong about a whole kind would otherwise exclude it: kinds are first
    structures, then block shapes. Persistent grids with at least one block per row group are left out: they never
    loop. The default is always tried. Behind a plain kernel on an H100
    the fastest of them took 5 to 12 % longer than the fastest of the others (rmsnorm and layernorm forward in bf16, 1
    to 1024 rows of 2560, 4096 and 8192).
    """
    first = compilation.schedule(arch, rows=rows, device=device)
    ordered = dict.fromkeys([*ranked(compilation.problem, device or device_for(arch), rows=rows), first])
    listed = [s for s in ordered if s == first or s.grid < -(-rows // s.rows_per_block)]
    kinds = [*_best(listed, _structure), *_best(listed, _shape)]
    turns = chain.from_iterable(zip_longest(listed, kinds))
    return [*dict.fromkeys(s for s in (first, *turns) if s is not None)]


def _best(listed: Sequence[Schedule], kind: Callable[[Schedule], Any]) -> list[Schedule]:
    """The first of each kind."""
    found: dict[Any, Schedule] = {}
    for s in listed:
        found.setdefault(kind(s), s)
    return [*found.values()]


def _structure(s: Schedule) -> tuple[Any, ...]:
    return *s.kind, s.cached_weights


def _shape(s: Schedule) -> tuple[Any, ...]:
    return s.form, s.threads, s.rows_per_block, s.blocks_per_sm, s.cluster


# ---- compiling ----


@dataclass(frozen=True)
class Candidate:
    """A schedule to be measured: a cubin, or the reason why there is none.

    status     correct (ready to be measured), constraints or compile
    spilled    bytes a thread, the most of the plan's kernels; one that spills has no image
    kernel     hash of the emitted CUDA, empty for an illegal schedule
    """

    schedule: Schedule
    rank: int
    status: str
    reason: str = ""
    kernel: str = ""
    image: bytes = b""
    registers: int = 0
    shared: int = 0
    compile_ms: float = 0.0
    spilled: int = 0


def build(compilation: Compilation, schedule: Schedule, rank: int, arch: str) -> Candidate:
    """Lower, emit and compile one candidate; MissingError without a compiler. Runs on any executor."""
    start = time.perf_counter()
    try:
        kernels = compilation.kernels(schedule)
        kernel = sha256(kernels.bundle.encode())[:16]
    except (ScheduleError, LowerError, EmitError) as error:
        return Candidate(schedule, rank, "constraints", _sentence(error))
    try:
        binary = kernels.cubin(arch)
    except CompileError as error:
        return Candidate(schedule, rank, "compile", _sentence(error), kernel)
    except ScheduleError as error:
        return Candidate(schedule, rank, "constraints", _sentence(error), kernel)
    used = binary.resources.values()
    spilled = [f"{name} {r.spilled}" for name, r in binary.resources.items() if r.spills]
    return Candidate(
        schedule,
        rank,
        "compile" if spilled else "correct",
        f"spills, in bytes a thread: {', '.join(spilled)}" if spilled else "",
        kernel,
        b"" if spilled else binary.image,
        max((r.registers for r in used), default=0),
        max((r.shared for r in used), default=0),
        round(1e3 * (time.perf_counter() - start), 1),
        max((r.spilled for r in used), default=0),
    )


# A schedule is taken to spill if one that is equal in ALIKE has spilled more than CERTAIN bytes with at least as many
# registers. Chosen from 653 schedules of 16 specs (NVRTC 13.5, sm_90; norms, gated, softmax; both directions, D from
# 640 to 16384, bf16 and f32): one after the other in the order of trial, 82 of 111 that spill are skipped, and none of
# 542 that do not; of 1300 schedules of 44 other specs 19 of 66, and none of 1234. The estimate in footprint.py is no
# such bound: above 0.9 of the limit are 94 that spill and 214 that do not; 209 of 255 spill where 116 of 128 do not.
ALIKE = ("form", "threads", "cluster", "prefetch", "tma_store", "cached_weights", "row_in_registers")
CERTAIN = 48
WAVE = 16  # schedules compiled side by side, whatever the number of processors, so that all machines try the same


@dataclass(frozen=True)
class Built:
    """What became of the schedules of a job, in rank order.

    skipped  schedules that were not compiled because one like them has spilled
    left     trials that there was no time to build
    """

    candidates: tuple[Candidate, ...]
    skipped: int = 0
    left: int = 0


def build_trials(
    compilation: Compilation,
    schedules: Sequence[Schedule],
    arch: str,
    trials: int,
    *,
    seconds: float = float("inf"),
    stopped: Callable[[], bool] = lambda: False,
) -> Built:
    """Build the first ``trials`` of the schedules that do not spill, and those before them that do.

    As with ``build_all``, at least one is built.
    """
    device, until = device_for(arch), time.monotonic() + seconds
    waiting, built, skipped = deque(enumerate(schedules)), list[Candidate](), 0
    too_few = dict[tuple[Any, ...], int]()  # registers with which schedules alike spill
    while True:
        short = trials - sum(not c.spilled for c in built)
        wave: list[tuple[int, Schedule]] = []
        while waiting and len(wave) < min(short, WAVE):
            rank, s = waiting.popleft()
            if register_limit(s, device) <= too_few.get(_alike(s), 0):
                skipped += 1
            else:
                wave.append((rank, s))
        late = bool(built) and (stopped() or time.monotonic() > until)
        done = [] if late else build_all(compilation, wave, arch, seconds=until - time.monotonic(), stopped=stopped)
        built += done
        if len(done) < len(wave) or not wave:
            ready = sum(not c.spilled for c in done)
            left = min(short - ready, len(wave) - len(done) + len(waiting))
            return Built(tuple(built), skipped, left if wave else 0)
        for c in done:
            if c.spilled > CERTAIN:
                most = max(register_limit(c.schedule, device), too_few.get(_alike(c.schedule), 0))
                too_few[_alike(c.schedule)] = most


def _alike(s: Schedule) -> tuple[Any, ...]:
    return tuple(getattr(s, name) for name in ALIKE)


def build_all(
    compilation: Compilation,
    schedules: Sequence[tuple[int, Schedule]],
    arch: str,
    *,
    executor: Executor | None = None,
    seconds: float = float("inf"),
    stopped: Callable[[], bool] = lambda: False,
) -> list[Candidate]:
    """Build (rank, schedule) pairs on ``executor``, by default as many threads as there are processors.

    Returns them in rank order, without those not built within ``seconds`` or before ``stopped``; at least one is built.
    """
    if executor is None:
        with ThreadPoolExecutor() as pool:
            return build_all(compilation, schedules, arch, executor=pool, seconds=seconds, stopped=stopped)
    futures = [executor.submit(build, compilation, schedule, rank, arch) for rank, schedule in schedules]
    try:
        _wait(futures, time.monotonic() + seconds, stopped)
    finally:
        for future in futures:
            future.cancel()
    built = [f.result() for f in futures if f.done() and not f.cancelled()]
    return sorted(built, key=lambda c: c.rank)


def _wait(futures: Sequence[Future[Candidate]], deadline: float, stopped: Callable[[], bool]) -> None:
    """Waits until all are done, or the first is done and it is time to stop; an error of a job is raised at once."""
    pending: Iterable[Future[Candidate]] = futures
    while pending:
        try:
            for future in as_completed(pending, timeout=0.1):
                future.result()
                if stopped():
                    return
        except Late:
            pass
        pending = [f for f in futures if not f.done()]
        if stopped() or (time.monotonic() > deadline and futures[0].done()):
            return


def _sentence(error: Exception) -> str:
    """The first lines of an error as one sentence."""
    return " ".join(str(error).split())[:300]
