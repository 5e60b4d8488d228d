"""The numbers of each kernel, each with what it decides; a kernel has those that its text names."""

from __future__ import annotations

from lngen.lower.parts import Constant
from lngen.schedule import (
    MULTIPROCESSORS,
    STAGED,
    Problem,
    Schedule,
    apart,
    partial_numbers,
    partial_rows,
    piece,
    slots,
    stage_bytes,
)

COLUMN_THREADS = 128

# Columns that a block of the finish completes at a time. From so many threads on, one a column and strand, more of them
# only wait for their turn: a thread then has 16 bytes of neighbouring columns, and a block so many threads.
FINISH_COLUMNS = 32
MANY_THREADS, FINISH_THREADS = 2**17, 128
NO_BOUND = 2**31 - 1
EARLY = 4  # blocks of a multiprocessor, of those that come and go, that ask for rows ahead: more gained nothing
ON_THE_WAY = 16  # numbers that a thread of the finish waits for at a time


def is_exact(s: Schedule, p: Problem) -> bool:
    """True if the chunks of all threads cover a row exactly."""
    per_segment = -(-p.segment_chunks // s.threads)
    return p.segments * per_segment * s.threads * p.chunk == p.d


def pitch(p: Problem) -> int:
    """Numbers from one partial row to the next: whole units."""
    return -(-p.d // _unit(p)) * _unit(p)


def row_constants(s: Schedule, p: Problem) -> list[Constant]:
    """Those of a kernel that goes through rows; ``p`` has the column sums that this kernel adds to."""
    streamed = s.form == "stream"
    per_segment = -(-p.segment_chunks // s.threads)
    constants = [
        Constant("D", p.d, "features per row"),
        Constant("CHUNK", p.chunk, "elements a thread owns, added left to right"),
        Constant("RUN", p.run, "of them side by side"),
        Constant("JUMP", p.segment_chunks * p.run, "columns from one run of a chunk to the next"),
        Constant("THREADS", s.threads, "threads of a block that share a row" if s.cluster > 1 else "threads per row"),
        Constant("SLOTS", slots(s, p), "chunks per thread" + (" and segment" if streamed else "")),
        Constant("SEGMENT", p.segment, "elements per segment of a row"),
        Constant("SEGMENT_SLOTS", per_segment, "chunks per thread and segment"),
        Constant("VEC", s.vec, "elements per memory access"),
    ]
    if p.row_sums:
        exact = "1 if the chunks of all threads cover the row exactly"
        constants.append(Constant("EXACT", int(is_exact(s, p)), exact))
    if not streamed:
        constants.append(Constant("ROWS", s.rows, "rows a block works on side by side"))
    if s.cluster > 1:
        constants.append(Constant("CLUSTER", s.cluster, "blocks that share a row"))
    if s.form == "bulk" or s.cluster > 1 or partial_numbers(s, p):
        constants.append(Constant("PIECE", piece(s, p), "elements of a row a block has"))
    if is_exact(s, p) and (s.form in STAGED or s.cluster > 1):
        constants.append(Constant("BOUND", NO_BOUND, "first column that is not there: none"))
    constants += _staged(s, p) if s.form in STAGED else []
    if p.column_sums:
        constants += _accumulating(s, p)
    elif s.form == "registers":
        constants.append(
            Constant("FIRST", EARLY * MULTIPROCESSORS, "blocks that may begin while the kernel before ends")
        )
    return constants


def _staged(s: Schedule, p: Problem) -> list[Constant]:
    """What a kernel needs whose rows come through shared memory."""
    constants = [
        Constant("STAGES", s.stages, "rows a row group has room for in shared memory"),
        Constant("STAGE_BYTES", stage_bytes(s, p), "shared memory of a row"),
    ]
    if not p.column_sums:
        owner = "clusters" if s.cluster > 1 else "blocks"
        constants.append(Constant("OWNERS", s.owners, f"{owner} that share the rows"))
    return constants


def _accumulating(s: Schedule, p: Problem) -> list[Constant]:
    """What a kernel needs that adds to column sums."""
    owner = "clusters" if s.cluster > 1 else "blocks"
    constants = [Constant("OWNERS", partial_rows(s, p), f"{owner} that share the rows; fixed by the graph")]
    constants += [Constant("UNIT", _unit(p), "column sums moved together"), _pitch(p)]
    if s.form == "registers":
        constants.append(Constant("PREFETCH", int(s.prefetch), "1 to load the next row while computing this one"))
    return constants


def _unit(p: Problem) -> int:
    """Column sums that are 16 bytes, if chunks are whole units."""
    unit = 16 // p.real_size
    return unit if p.chunk % unit == 0 else 1


def _pitch(p: Problem) -> Constant:
    return Constant("PITCH", pitch(p), "column sums from one partial row to the next")


def column_constants(s: Schedule, p: Problem) -> list[Constant]:
    """Those of the kernel that only adds columns."""
    return [
        Constant("D", p.d, "features per row"),
        Constant("CHUNK", p.chunk, "consecutive columns a thread owns"),
        Constant("THREADS", COLUMN_THREADS, "threads per block"),
        Constant("VEC", s.vec, "elements per memory access"),
        Constant("OWNERS", partial_rows(s, p), "blocks that share the rows; fixed by the graph"),
        _pitch(p),
    ]


def _batch(s: Schedule, p: Problem) -> int:
    """All terms of a strand at once, as long as they are no more than ON_THE_WAY numbers."""
    return max(1, min(-(-p.blocks // p.strands), ON_THE_WAY // (p.column_sums * apart(s, p))))


def abreast(s: Schedule, p: Problem) -> int:
    """Columns that a thread of the finish adds side by side: a unit, if rows are whole units."""
    many = p.d * p.strands >= MANY_THREADS and not s.one_launch
    return _unit(p) if many and p.d % _unit(p) == 0 else 1


def narrow_constants(p: Problem) -> list[Constant]:
    """Those of what has no rows and takes no sum over them."""
    return [
        Constant("D", p.d, "features per row"),
        Constant("COLUMNS", COLUMN_THREADS, "columns of a block, one a thread"),
    ]


def finish_columns(s: Schedule, p: Problem) -> int:
    """Columns that a block of the finish completes at a time."""
    side = abreast(s, p)
    return FINISH_COLUMNS if side == 1 else FINISH_THREADS // p.strands * side


def finish_constants(s: Schedule, p: Problem) -> list[Constant]:
    """Those of what completes the column sums."""
    return [
        Constant("D", p.d, "features per row"),
        Constant("SUMS", p.column_sums, "column sums"),
        Constant("COLUMNS", finish_columns(s, p), "columns a block completes at a time"),
        Constant("ABREAST", abreast(s, p), "of them a thread adds side by side"),
        Constant("STRANDS", p.strands, "strands that add the partial rows of a column"),
        Constant("PARTIALS", partial_rows(s, p), "partial rows at most"),
        Constant("APART", apart(s, p), "partial rows that are folded to one term of a strand"),
        _pitch(p),
        Constant("BATCH", _batch(s, p), "terms a strand has on their way at a time"),
        Constant("PER_PARTIAL", s.rows, "rows side by side behind a partial row"),
    ]
