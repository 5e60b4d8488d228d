"""Which schedules a problem allows, rule by rule."""

from __future__ import annotations

from lngen.errors import ScheduleError
from lngen.schedule.problem import Problem
from lngen.schedule.schedule import FORMS, Schedule

MAX_THREADS = 1024
MAX_THREADS_PER_SM = 2048
MAX_SHARED = 48 * 1024
MAX_ELEMENTS = 128
WARP = 32
NAMED_BARRIERS = 15


def check(s: Schedule, p: Problem) -> None:
    """ScheduleError with the first rule that ``s`` breaks and the number that breaks it."""
    broken = next((text for holds, text in _rules(s, p) if not holds), None)
    if broken:
        raise ScheduleError(f"schedule '{s}' is illegal for D={p.d}: {broken}.")


def is_legal(s: Schedule, p: Problem) -> bool:
    """True if ``s`` breaks no rule."""
    return all(holds for holds, _ in _rules(s, p))


def slots(s: Schedule, p: Problem) -> int:
    """Chunks a thread owns: of the whole row in registers, of one segment when streaming."""
    return -(-(p.chunks if s.form == "registers" else p.segment_chunks) // s.threads)


def shared_bytes(s: Schedule, p: Problem) -> int:
    """Static shared memory of the row kernel: two turns of the sums of a block, or its groups' column sums."""
    segments = p.segments if s.form == "registers" else 1
    sums = 2 * p.row_sums * segments * s.block * p.real_size if s.threads > WARP else 0
    groups = s.rows * p.d * p.real_size if p.column_sums and s.form == "registers" and s.rows > 1 else 0
    return max(sums, groups)


def _rules(s: Schedule, p: Problem) -> list[tuple[bool, str]]:
    ceiling = 1 << (p.segment_chunks - 1).bit_length()
    fixed_rows = p.column_sums > 0 and s.form == "registers"
    elements = slots(s, p) * p.chunk if s.threads > 0 else 0
    return [
        (s.form in FORMS, f"form is one of {', '.join(FORMS)}, got {s.form}"),
        (_power_of_two(s.threads), f"threads is a power of two, got {s.threads}"),
        (s.rows >= 1, f"rows is at least 1, got {s.rows}"),
        (s.block <= MAX_THREADS, f"threads * rows is at most {MAX_THREADS}, got {s.block}"),
        (s.block % WARP == 0, f"threads * rows fills whole warps of {WARP}, got {s.block}"),
        (
            s.threads <= max(ceiling, WARP if s.rows == 1 else 1),
            f"threads is at most {ceiling}, a row segment having {p.segment_chunks} chunks of {p.chunk} elements, "
            f"got {s.threads}",
        ),
        (
            s.threads <= WARP or s.rows <= NAMED_BARRIERS,
            f"rows of more than {WARP} threads each need a named barrier, of which a block has {NAMED_BARRIERS}, "
            f"got {s.rows} rows",
        ),
        (s.form == "registers" or s.rows == 1, f"a streamed row has a block to itself, got rows={s.rows}"),
        (
            not fixed_rows or s.rows == p.groups,
            f"the graph adds its column sums in {p.groups} row groups a block, so rows is {p.groups}, got {s.rows}",
        ),
        (
            s.vec >= 1 and p.chunk % s.vec == 0 and p.d % s.vec == 0,
            f"vec divides both the chunk ({p.chunk}) and D ({p.d}), got {s.vec}",
        ),
        (
            s.form == "stream" or elements <= MAX_ELEMENTS,
            f"a thread holds at most {MAX_ELEMENTS} elements of a row in registers, got {elements}; "
            "use more threads or form=stream",
        ),
        (
            s.resident >= 1 and s.resident * s.block <= MAX_THREADS_PER_SM,
            f"resident * threads * rows is from 1 to {MAX_THREADS_PER_SM}, got {s.resident * s.block}",
        ),
        (
            shared_bytes(s, p) <= MAX_SHARED,
            f"a block has {MAX_SHARED} bytes of static shared memory, got {shared_bytes(s, p)}",
        ),
        (not s.prefetch or fixed_rows, "prefetch belongs to the kernel that keeps column sums in registers"),
        (
            p.column_sums == 0 or s.form == "registers" or p.groups == 1,
            f"streaming with column sums needs one row group a block; the graph has {p.groups}",
        ),
    ]


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
