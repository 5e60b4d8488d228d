"""Which schedules a problem allows, rule by rule."""

from __future__ import annotations

from collections.abc import Iterator

from lngen.errors import ScheduleError
from lngen.schedule.problem import SPREAD_MET, Problem
from lngen.schedule.schedule import FORMS, STAGED, Schedule

MAX_THREADS = 1024
MAX_THREADS_PER_SM = 2048
MAX_STATIC = 48 * 1024
MAX_SHARED = 227 * 1024
MAX_ELEMENTS = 128
MAX_CLUSTER = 16
MIN_STAGES, MAX_STAGES = 2, 8
WARP = 32
NAMED_BARRIERS = 15
BULK = 16  # bytes: bulk copies begin at multiples of it and are as long


def check(s: Schedule, p: Problem) -> None:
    """ScheduleError with the first rule that ``s`` breaks and the number that breaks it."""
    broken = next((text for holds, text in _rules(s, p) if not holds), None)
    if broken:
        raise ScheduleError(f"schedule '{s}' is illegal for D={p.d}: {broken}.")


def is_legal(s: Schedule, p: Problem) -> bool:
    """True if ``s`` breaks no rule."""
    return all(holds for holds, _ in _rules(s, p))


def segments_held(s: Schedule, p: Problem) -> int:
    """Segments of a row a block has at a time: its share of them, or one when streaming."""
    return 1 if s.form == "stream" else -(-p.segments // s.cluster)


def slots(s: Schedule, p: Problem) -> int:
    """Chunks a thread has at a time: of its block's share of a row, or of one segment when streaming."""
    return segments_held(s, p) * -(-p.segment_chunks // s.threads)


def piece(s: Schedule, p: Problem) -> int:
    """Elements of a row that one block of a cluster works on; the last block may have fewer."""
    return segments_held(s, p) * p.segment


def scratch_numbers(s: Schedule, p: Problem) -> int:
    """Numbers of static shared memory for row sums: two turns of what the threads of a block have."""
    return 2 * p.row_sums * segments_held(s, p) * s.block if s.threads > WARP else 0


def met_numbers(s: Schedule, p: Problem) -> int:
    """Numbers that the blocks of a cluster leave each other for a row."""
    return p.met_sums * p.segments if s.cluster > 1 else 0


def rows_ahead(s: Schedule) -> int:
    """Rows that a row group has at a time: this one, which is in registers or a stage, and those on their way."""
    return s.stages + s.soon


def partial_numbers(s: Schedule, p: Problem) -> int:
    """Numbers of shared memory through which column sums leave: in order, the row groups folded."""
    if s.form == "stream" or not p.column_sums or (s.rows == 1 and s.form not in STAGED):
        return 0
    # In dynamic memory the sums have a place each, in static memory they take turns.
    together = p.column_sums if s.form in STAGED else 1
    return together * s.rows * -(-piece(s, p) // 8) * 8


def rows_of_a_block(p: Problem) -> tuple[int, ...]:
    """What column sums allow: the graph's row groups side by side, or, of long rows, which have few, one of them."""
    return (p.groups, 1) if p.cluster > 1 and p.groups > 1 else (p.groups,)


def apart(s: Schedule, p: Problem) -> int:
    """Blocks that the row groups which share a block in the graph are here; for column sums."""
    return p.groups // s.rows


def partial_rows(s: Schedule, p: Problem) -> int:
    """Blocks, or clusters, that share the rows; each leaves a partial row of every column sum."""
    return p.blocks * apart(s, p)


def stage_bytes(s: Schedule, p: Problem) -> int:
    """Shared memory of one row of one group, each tensor from a multiple of 128 bytes on."""
    if s.form not in STAGED:
        return 0
    # A result takes the place of an input of its size, as long as there is one.
    free = list(p.input_sizes) if s.form != "ragged" else []
    extra = []
    for size in p.output_sizes if s.bulk_store else ():
        free.remove(size) if size in free else extra.append(size)
    return sum(stage_share(size, s, p) for size in (*p.input_sizes, *extra))


def stage_share(size: int, s: Schedule, p: Problem) -> int:
    """Bytes of a stage for one tensor of elements of ``size`` bytes: whole lines of 128."""
    neighbours = 32 if s.form == "ragged" else 0  # what shares 16 bytes with the ends of a ragged row
    return -(-(piece(s, p) * size + neighbours) // 128) * 128


def static_shared(s: Schedule, p: Problem) -> int:
    """Static shared memory in bytes."""
    numbers = scratch_numbers(s, p) + (SPREAD_MET * p.spreads * p.segments if s.form == "stream" else 0)
    met = 2 * s.rows * met_numbers(s, p)
    barriers = s.rows * (s.stages + 2) if s.form in STAGED or met else 0
    # The row of each stage, and in a cluster what is told, of 8 bytes as a barrier is.
    taken = s.rows * (s.stages + 2 * s.told) if s.claim else 0
    if s.form not in STAGED:
        numbers = max(numbers, partial_numbers(s, p))
    return (numbers + met) * p.real_size + 8 * (barriers + taken)


def dynamic_shared(s: Schedule, p: Problem) -> int:
    """Dynamic shared memory in bytes: the stages, at the end of the kernel the column sums."""
    if s.form not in STAGED:
        return 0
    return max(s.stages * s.rows * stage_bytes(s, p), partial_numbers(s, p) * p.real_size)


def _rules(s: Schedule, p: Problem) -> Iterator[tuple[bool, str]]:
    """Each rule, whether it holds, and what it says; a rule counts on those before it."""
    yield from _shape_rules(s, p)
    yield from _form_rules(s, p)
    yield from _option_rules(s, p)
    yield from _room_rules(s, p)


def _shape_rules(s: Schedule, p: Problem) -> list[tuple[bool, str]]:
    """How a row is laid over threads and blocks."""
    ceiling = _power_from(p.segment_chunks)
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
        (s.form != "stream" or s.rows == 1, f"a streamed row has a block to itself, got rows={s.rows}"),
        (
            not _fixed_rows(s, p) or s.rows in rows_of_a_block(p),
            f"the graph adds its column sums in {p.groups} row groups a block, so rows is "
            f"{' or '.join(map(str, rows_of_a_block(p)))}, got {s.rows}",
        ),
        (
            s.vec >= 1 and p.chunk % s.vec == 0 and p.d % s.vec == 0,
            f"vec divides both the chunk ({p.chunk}) and D ({p.d}), got {s.vec}",
        ),
        (
            s.cluster == 1 or (_may_share(s, p) and _power_of_two(s.cluster) and s.cluster <= MAX_CLUSTER),
            f"a cluster is of 2, 4, 8 or {MAX_CLUSTER} blocks with form=bulk, or form=registers without column sums, "
            f"else 1, got {s.cluster} with form={s.form}",
        ),
        (
            s.cluster >= 1 and p.segments % s.cluster == 0,
            f"the blocks of a cluster have equally many of the {p.segments} segments of a row, got cluster={s.cluster}",
        ),
    ]


def _form_rules(s: Schedule, p: Problem) -> list[tuple[bool, str]]:
    """What belongs to which form, and what a form asks for."""
    narrowest = s.vec * p.element
    staged = s.form in STAGED
    least = 2 * BULK // min((*p.input_sizes, *p.output_sizes), default=4)  # elements in twice the unit of a bulk copy
    leaving = [n * size for size in p.output_sizes for n in (p.d, *[piece(s, p)] * (s.cluster > 1))]
    return [
        (
            MIN_STAGES <= s.stages <= MAX_STAGES if staged else s.stages == 0,
            f"stages is from {MIN_STAGES} to {MAX_STAGES} with form={' or '.join(STAGED)}, else 0, got {s.stages}",
        ),
        (not staged or bool(p.input_sizes), "there is no [M, D] input to stage"),
        (
            s.form != "bulk" or (s.vec == p.chunk and p.d % p.chunk == 0),
            f"bulk copies need vec={p.chunk} and a D that is a multiple of it, got vec={s.vec}",
        ),
        (
            s.form != "ragged" or (p.d % p.chunk > 0 and p.d >= least and s.threads >= least),
            f"ragged rows end within a chunk of {p.chunk}, have at least {least} elements, twice {BULK} bytes of the "
            f"narrowest, and as many threads, got D={p.d}, threads={s.threads}",
        ),
        (
            s.form != "ragged" or s.bulk_store == bool(p.output_sizes),
            f"ragged rows leave in bulk: bulk_store is {'yes' if p.output_sizes else 'no'} for "
            f"{len(p.output_sizes)} [M, D] results",
        ),
        (
            s.form != "async" or narrowest >= 4,
            f"asynchronous copies move at least 4 bytes, got vec={s.vec} of {p.element} bytes",
        ),
        (
            s.owners >= 1 if staged and not p.column_sums else s.owners == 0,
            f"owners is at least 1 with form={' or '.join(STAGED)} and no column sums, else 0, got {s.owners}",
        ),
        (
            not s.bulk_store or (s.form in ("bulk", "ragged") and bool(p.output_sizes)),
            "bulk_store belongs to form=bulk and an [M, D] result",
        ),
        (
            s.form != "bulk" or not s.bulk_store or not any(n % BULK for n in leaving),
            f"rows that leave in bulk, and their pieces, are multiples of {BULK} bytes, got "
            f"{next((n for n in leaving if n % BULK), 0)}",
        ),
    ]


def _option_rules(s: Schedule, p: Problem) -> list[tuple[bool, str]]:
    """Which options belong to which forms."""
    staged = s.form in STAGED
    return [
        (
            not s.keep or (bool(p.column_sizes) and (staged or (s.form == "registers" and not p.column_sums))),
            f"keep belongs to a [D] input and form={' or '.join(STAGED)}, or form=registers without column sums",
        ),
        (not s.hold or staged, f"hold belongs to form={' or '.join(STAGED)}"),
        (
            not s.soon or (s.form == "bulk" and s.hold and not s.bulk_store),
            "soon belongs to form=bulk with hold=yes and bulk_store=no",
        ),
        (
            not s.claim
            or (s.form in ("bulk", "ragged") and not p.column_sums and (s.cluster == 1 or met_numbers(s, p) > 0)),
            "claim belongs to form=bulk or ragged, without column sums, and to row sums if a cluster shares the rows",
        ),
        (
            not s.claim or s.threads >= WARP,
            f"row groups that claim rows end apart, so they have whole warps of {WARP} threads, got {s.threads}",
        ),
        (
            not s.restrict or (s.cluster > 1 and p.column_sums > 0),
            f"restrict belongs to column sums of rows that a cluster shares, got cluster={s.cluster}",
        ),
        (not s.one_launch or _fixed_rows(s, p), "one_launch belongs to column sums that are kept in registers"),
        (
            not s.prefetch or (_fixed_rows(s, p) and s.form == "registers"),
            "prefetch belongs to form=registers with column sums",
        ),
        (
            p.column_sums == 0 or s.form != "stream" or 1 in rows_of_a_block(p),
            f"streaming with column sums needs one row group a block, or long rows; the graph has {p.groups}",
        ),
    ]


def _room_rules(s: Schedule, p: Problem) -> list[tuple[bool, str]]:
    """Registers, threads and shared memory."""
    elements = slots(s, p) * p.chunk
    shared = static_shared(s, p) + dynamic_shared(s, p)
    return [
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
            static_shared(s, p) <= MAX_STATIC,
            f"a block has {MAX_STATIC} bytes of static shared memory, got {static_shared(s, p)}",
        ),
        (
            shared <= MAX_SHARED,
            f"a block has {MAX_SHARED} bytes of shared memory, got {shared}",
        ),
    ]


def _fixed_rows(s: Schedule, p: Problem) -> bool:
    """True if the graph fixes the rows of a block: it keeps column sums in registers."""
    return p.column_sums > 0 and s.form != "stream"


def _may_share(s: Schedule, p: Problem) -> bool:
    return s.form == "bulk" or (s.form == "registers" and not p.column_sums)


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _power_from(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
