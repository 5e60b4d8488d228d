"""The legality of a schedule for a problem: a table of rules, from which the space of schedules is generated too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from lngen.compiler.problem.facts import MAX_STATIC, WARP, Problem
from lngen.compiler.problem.footprint import (
    BULK,
    MAX_SHARED,
    NAMED_BARRIERS,
    cluster_tile,
    column_block,
    dynamic_shared,
    exchanged_values,
    has_grid,
    rows_of_a_block,
    static_shared,
    vectors_per_thread,
)
from lngen.compiler.problem.schedule import BULK_FORMS, FORMS, MAX_CLUSTER, STAGED, Schedule
from lngen.errors import ScheduleError

MAX_THREADS, MAX_THREADS_PER_SM = 1024, 2048
MAX_ELEMENTS = 128
MIN_STAGES, MAX_STAGES = 2, 8
ANY_STAGED = " or ".join(STAGED)  # in messages

Rule = tuple[bool, Callable[[], str]]  # whether it holds, and its message, which is built only on demand
Rules = Callable[[Schedule, Problem], Iterator[Rule]]


def check(s: Schedule, p: Problem) -> None:
    """ScheduleError with the first rule that ``s`` breaks and the number that breaks it."""
    broken = next((text for holds, text in _rules(s, p) if not holds), None)
    if broken:
        raise ScheduleError(f"schedule '{s}' is illegal for D={p.d}: {broken()}.")


def is_legal(s: Schedule, p: Problem) -> bool:
    """True if ``s`` breaks no rule."""
    return all(holds for holds, _ in _rules(s, p))


def _rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Each rule in its order."""
    for _, rules in RULES:
        yield from rules(s, p)


def _block_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for the threads of a block."""
    yield _power_of_two(s.threads), lambda: f"threads is a power of two, got {s.threads}"
    yield s.rows_per_block >= 1, lambda: f"rows_per_block is at least 1, got {s.rows_per_block}"
    yield s.block <= MAX_THREADS, lambda: f"threads * rows_per_block is at most {MAX_THREADS}, got {s.block}"
    yield s.block % WARP == 0, lambda: f"threads * rows_per_block fills whole warps of {WARP}, got {s.block}"
    yield (
        s.threads <= WARP or s.rows_per_block <= NAMED_BARRIERS,
        lambda: (
            f"rows of more than {WARP} threads each need a named barrier, of which a block has {NAMED_BARRIERS}, "
            f"got {s.rows_per_block} rows"
        ),
    )
    yield (
        s.threads >= p.block_lanes,
        lambda: f"{p.block_lanes} neighbouring threads fold a block of features, got threads={s.threads}",
    )


def _row_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for the layout of rows over the threads of a block."""
    ceiling = 1 << max(p.segment_chunks - 1, 0).bit_length()  # the next power of two
    # A block of few, fixed rows may have threads without elements, so that it fills whole warps.
    few = s.rows_per_block == 1 or _fixed_rows(s, p)
    most = max(ceiling, WARP // math.gcd(s.rows_per_block, WARP) if few else 1)
    yield s.form in FORMS, lambda: f"form is one of {', '.join(FORMS)}, got {s.form}"
    yield (
        s.threads <= most,
        lambda: (
            f"threads is at most {most}, a row segment has {p.segment_chunks} chunks of {p.chunk} elements, "
            f"got {s.threads}"
        ),
    )
    yield (
        s.form != "multipass" or s.rows_per_block == 1,
        lambda: f"form=multipass has one row per block, got rows_per_block={s.rows_per_block}",
    )
    yield (
        not _fixed_rows(s, p) or s.rows_per_block in rows_of_a_block(p),
        lambda: (
            f"the graph adds its column sums in {p.groups} row groups a block, so rows_per_block is "
            f"{' or '.join(map(str, rows_of_a_block(p)))}, got {s.rows_per_block}"
        ),
    )


def _access_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """The rule for the accesses of a thread."""
    yield (
        s.vec >= 1 and p.chunk % s.vec == 0 and p.d % s.vec == 0,
        lambda: f"vec divides both the chunk ({p.chunk}) and D ({p.d}), got {s.vec}",
    )


def _cluster_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for the blocks that share a row."""
    clustered = s.form in BULK_FORMS or (s.form == "registers" and not p.column_sums)
    yield (
        s.cluster == 1 or (clustered and _power_of_two(s.cluster) and s.cluster <= MAX_CLUSTER),
        lambda: (
            f"a cluster is of 2, 4, 8 or {MAX_CLUSTER} blocks with form={' or '.join(BULK_FORMS)}, or form=registers "
            f"without column sums, else 1, got {s.cluster} with form={s.form}"
        ),
    )
    yield (
        s.cluster >= 1 and p.segments % s.cluster == 0,
        lambda: (
            f"the blocks of a cluster have equally many of the {p.segments} segments of a row, got cluster={s.cluster}"
        ),
    )
    cut = next((n for n in p.feature_blocks if s.cluster > 1 and cluster_tile(s, p) % n), 0)
    yield (
        not cut,
        lambda: f"a cluster tile has whole blocks of {cut} features, got {cluster_tile(s, p)} features",
    )


def _stage_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for the stages of a form."""
    staged = s.form in STAGED
    yield (
        MIN_STAGES <= s.stages <= MAX_STAGES if staged else s.stages == 0,
        lambda: f"stages is from {MIN_STAGES} to {MAX_STAGES} with form={ANY_STAGED}, else 0, got {s.stages}",
    )
    yield not staged or bool(p.input_sizes), lambda: "there is no [M, D] input to stage"


def _load_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for the loads of each form."""
    unaligned = s.form == "tma_unaligned"
    least = 2 * BULK // min((*p.input_sizes, *p.output_sizes), default=4)  # elements in twice the unit of a bulk copy
    loaded = next((n for n in _row_bytes(s, p, p.input_sizes) if n % BULK), 0)
    last = p.d - (s.cluster - 1) * cluster_tile(s, p)
    yield (
        s.form != "tma" or (s.vec == p.chunk and p.d % p.chunk == 0),
        lambda: f"bulk copies need vec={p.chunk} and a D that is a multiple of it, got vec={s.vec}",
    )
    yield (
        s.form != "tma" or not loaded,
        lambda: f"rows, or cluster tiles, that are loaded by bulk copies are multiples of {BULK} bytes, got {loaded}",
    )
    yield (
        not unaligned or p.strides == 1,
        lambda: f"form=tma_unaligned takes contiguous rows, got rows at two distances (strides={p.strides})",
    )
    yield (
        not unaligned or (p.d % p.chunk > 0 and last >= least and s.threads >= least),
        lambda: (
            f"unaligned rows end within a chunk of {p.chunk}, and the last block has at least {least} elements of one, "
            f"twice {BULK} bytes of the narrowest, and as many threads, got D={p.d}, {last} in the last block, "
            f"threads={s.threads}"
        ),
    )
    yield (
        s.form != "cp_async" or s.vec * p.element >= 4,
        lambda: f"asynchronous copies move at least 4 bytes, got vec={s.vec} of {p.element} bytes",
    )


def _store_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for the stores of each form."""
    stored = s.form in BULK_FORMS and bool(p.output_sizes)
    odd = next((n for n in _row_bytes(s, p, p.output_sizes) if n % BULK), 0)
    yield (
        s.form != "tma_unaligned" or s.cluster > 1 or s.tma_store == bool(p.output_sizes),
        lambda: (
            f"unaligned rows of one block are stored by bulk copies: tma_store is "
            f"{'yes' if p.output_sizes else 'no'} for {len(p.output_sizes)} [M, D] results"
        ),
    )
    yield not s.tma_store or stored, lambda: "tma_store belongs to form=tma and an [M, D] result"
    yield (
        s.form != "tma" or not s.tma_store or not odd,
        lambda: f"rows, or cluster tiles, that are stored by bulk copies are multiples of {BULK} bytes, got {odd}",
    )


def _grid_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """The rule for the grid."""
    yield (
        s.grid == 0 or has_grid(s, p) if p.column_sums else (s.grid > 0) == has_grid(s, p),
        lambda: (
            f"grid is at least 1 with form={ANY_STAGED} and no column sums, at least 0 with sums of sets in any form "
            f"but multipass, else 0, got {s.grid}"
        ),
    )


def _weight_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """The rule for [D] and [N, D] inputs that are in registers before their use."""
    may_cache = s.form in STAGED or (s.form == "registers" and not p.column_sums)
    yield (
        not s.cached_weights or (bool(p.kept_sizes) and may_cache),
        lambda: (
            f"cached_weights belongs to a [D] or [N, D] input and form={ANY_STAGED}, or form=registers without column "
            "sums"
        ),
    )


def _held_row_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for staged rows that stay in registers."""
    yield not s.row_in_registers or s.form in STAGED, lambda: f"row_in_registers belongs to form={ANY_STAGED}"
    yield (
        not s.early_release or (s.form == "tma" and s.row_in_registers and not s.tma_store),
        lambda: "early_release belongs to form=tma with row_in_registers=yes and tma_store=no",
    )


def _dynamic_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for the dynamic scheduler."""
    yield (
        not s.dynamic
        or (s.form in BULK_FORMS and not p.column_sums and (s.cluster == 1 or exchanged_values(s, p) > 0)),
        lambda: (
            "dynamic belongs to form=tma or tma_unaligned, without column sums, and to row sums if a cluster shares "
            "the rows"
        ),
    )
    yield (
        not s.dynamic or s.threads >= WARP,
        lambda: (
            f"row groups with dynamic=yes end at different times, so each has whole warps of {WARP} threads, "
            f"got {s.threads}"
        ),
    )


def _column_sum_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for options of column sums."""
    yield (
        not s.acquire_shared or (s.cluster > 1 and p.column_sums > 0),
        lambda: f"acquire_shared belongs to column sums of rows that a cluster shares, got cluster={s.cluster}",
    )
    yield (
        not s.single_launch or (_fixed_rows(s, p) and not p.stretch),
        lambda: "single_launch belongs to column sums of all rows that are kept in registers",
    )
    yield (
        not s.prefetch or (_fixed_rows(s, p) and s.form == "registers"),
        lambda: "prefetch belongs to form=registers with column sums",
    )
    yield (
        p.column_sums == 0 or s.form != "multipass" or column_block(s, p) <= MAX_THREADS,
        lambda: f"form=multipass adds column sums in blocks of {MAX_THREADS} threads at most, got {column_block(s, p)}",
    )


def _register_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """The rule for the elements of a thread."""
    elements = vectors_per_thread(s, p) * p.chunk
    yield (
        s.form == "multipass" or elements <= MAX_ELEMENTS,
        lambda: (
            f"a thread holds at most {MAX_ELEMENTS} elements of a row in registers, got {elements}; "
            "use more threads or form=multipass"
        ),
    )


def _occupancy_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """The rule for the blocks of a multiprocessor."""
    yield (
        s.blocks_per_sm >= 1 and s.blocks_per_sm * s.block <= MAX_THREADS_PER_SM,
        lambda: (
            f"blocks_per_sm * threads * rows_per_block is from 1 to {MAX_THREADS_PER_SM}, got "
            f"{s.blocks_per_sm * s.block}"
        ),
    )


def _shared_rules(s: Schedule, p: Problem) -> Iterator[Rule]:
    """Rules for shared memory."""
    static = static_shared(s, p)
    shared = static + dynamic_shared(s, p)
    yield static <= MAX_STATIC, lambda: f"a block has {MAX_STATIC} bytes of static shared memory, got {static}"
    yield shared <= MAX_SHARED, lambda: f"a block has {MAX_SHARED} bytes of shared memory, got {shared}"


def _fixed_rows(s: Schedule, p: Problem) -> bool:
    """True if the graph fixes the rows of a block, because it has column sums in registers."""
    return p.column_sums > 0 and s.form != "multipass"


def _row_bytes(s: Schedule, p: Problem, sizes: Iterable[int]) -> list[int]:
    """Bytes of a row, and of a cluster's tile of it, for tensors with elements of these sizes."""
    return [n * size for size in sizes for n in (p.d, *[cluster_tile(s, p)] * (s.cluster > 1))]


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


# The rules in their order, by the fields of a schedule on which they depend. A rule may assume those before it. The
# fewer fields a rule has, the sooner it bounds the space, which grows field by field.
RULES: tuple[tuple[str, Rules], ...] = (
    ("threads rows_per_block", _block_rules),
    ("form threads rows_per_block", _row_rules),
    ("vec", _access_rules),
    ("form cluster", _cluster_rules),
    ("form stages", _stage_rules),
    ("form threads vec cluster", _load_rules),
    ("form cluster tma_store", _store_rules),
    ("form grid", _grid_rules),
    ("form cached_weights", _weight_rules),
    ("form tma_store row_in_registers early_release", _held_row_rules),
    ("form threads cluster dynamic", _dynamic_rules),
    ("form cluster prefetch single_launch acquire_shared", _column_sum_rules),
    ("form threads cluster", _register_rules),
    ("threads rows_per_block blocks_per_sm", _occupancy_rules),
    ("form threads rows_per_block stages cluster tma_store dynamic", _shared_rules),
)
