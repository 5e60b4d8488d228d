"""The proof of ragged rows can fail: every plausible mistake in their templates is caught by it.

Left out, being equivalent: what a thread without a chunk reads, spans that end earlier than they might or that the
rest overlaps (their last elements are moved one by one, as after the last row), and a whole that begins 16 bytes later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from lngen.check.inputs import random_inputs, same_bits
from lngen.emit import emit
from lngen.errors import CompileError, PtxError
from lngen.interpret import interpret
from lngen.ir.numerics import Array
from lngen.lower import Plan, lower
from lngen.ptx import Outcome, run_plan
from lngen.schedule import Schedule
from lngen.spec import parse_spec
from mutants import edited

pytest.importorskip("cupy")

SUBJECTS = {
    # Odd rows of two bytes an element, three stages, two row groups, the last turn not full.
    "halves": ("layernorm.fwd:d=171,dtype=bf16", Schedule("ragged", 16, 2, 1, 1, False, 3, 1, 2, True), 19),
    # Rows that begin at words, each thread has pairs of neighbours.
    "pairs": ("layernorm.fwd:d=554,dtype=bf16", Schedule("ragged", 64, 1, 2, 1, False, 2, 1, 1, True), 5),
    # Held rows: warps, row groups of half a warp, two segments with a last chunk alone.
    "held": ("layernorm.fwd:d=1007,dtype=bf16", Schedule("ragged", 64, 1, 1, 1, False, 2, 1, 1, True, hold=True), 9),
    "held, small": (
        "rmsnorm.fwd:d=171,dtype=f16",
        Schedule("ragged", 16, 2, 1, 1, False, 2, 1, 2, True, hold=True),
        19,
    ),
    "held, long": (
        "rmsnorm.fwd:d=8201,dtype=f16",
        Schedule("ragged", 128, 1, 1, 1, False, 2, 1, 1, True, hold=True),
        9,
    ),
    # The result is wider, then narrower, than the input.
    "wider": (
        "rmsnorm.fwd:d=85,dtype=f16,out=f32",
        Schedule("ragged", 32, 1, 1, 1, False, 2, 1, 1, True, True, hold=True),
        6,
    ),
    "narrower": ("rmsnorm.fwd:d=75,dtype=f32,out=bf16", Schedule("ragged", 16, 2, 1, 1, False, 2, 1, 2, True), 13),
    # Two inputs, column sums, one result.
    "sums": (
        "layernorm.bwd:d=1001,dtype=f16,blocks=2",
        Schedule("ragged", 64, 8, 1, 1, False, 2, 1, 0, True, True, True),
        37,
    ),
}


@cache
def twin(name: str) -> tuple[Plan, str, dict[str, Array], dict[str, Array]]:
    """A subject's plan, source, inputs and results."""
    text, schedule, rows = SUBJECTS[name]
    plan = lower(parse_spec(text), schedule)
    inputs = random_inputs(plan.spec, rows)
    return plan, emit(plan), inputs, interpret(plan.graph, inputs)


def run(name: str, *edits: tuple[str, str, int], stop: bool = True) -> Outcome:
    plan, source, inputs, _ = twin(name)
    return run_plan(plan, inputs, source=edited(source, edits), stop=stop)


@dataclass(frozen=True)
class Mutant:
    """One mistake in the text of a subject, in which ``old`` occurs ``count`` times."""

    name: str
    subject: str
    old: str
    new: str
    count: int = 1


RAGGED = [
    Mutant("elements, not bytes, from a multiple of 16", "halves", "% 16 / sizeof(T));", "% 16);"),
    Mutant(
        "rows begin at multiples of 16", "halves",
        "return static_cast<int>(reinterpret_cast<unsigned long long>(p)",
        "return 0 * static_cast<int>(reinterpret_cast<unsigned long long>(p)",
    ),
    Mutant("from multiples of 8", "halves", "(p) % 16", "(p) % 8"),
    Mutant("a barrier of another stage", "halves", "barrier_init(&landed[s][r], 1)", "barrier_init(&landed[s][0], 1)"),
    Mutant("nobody waits for the barriers", "halves", "    }\n    __syncthreads();\n", "    }\n"),
    Mutant("the span begins at the row", "halves", "first = row - shift;", "first = row;"),
    Mutant(
        "the span ends where no 16 bytes end", "halves",
        "bytes = last ? end / 16 * 16 : (end + 15) / 16 * 16;",
        "bytes = end;",
    ),
    Mutant("the last span goes past the array", "halves", "last ? end / 16 * 16 : ", ""),
    Mutant(
        "none is taken for the last", "halves",
        "const bool last = row == rows - 1;",
        "const bool last = row == rows;",
    ),
    Mutant("the last but one is the last", "halves", "row == rows - 1;", "row == rows - 2;"),
    Mutant("the rest is not loaded", "halves", "static_cast<T*>(to)[span.shift + i] = row[i];", ";"),
    Mutant(
        "the rest comes to another place", "halves",
        "static_cast<T*>(to)[span.shift + i]",
        "static_cast<T*>(to)[i]",
    ),
    Mutant("the rest is an element short", "halves", "int i = span.whole; i < D;", "int i = span.whole + 1; i < D;"),
    Mutant("the rest goes past the row", "halves", "int i = span.whole; i < D;", "int i = span.whole; i <= D;"),
    Mutant("whole forgets the shift", "halves", "sizeof(T)) - shift;", "sizeof(T));"),
    Mutant(
        "the rest is loaded after the bytes are expected", "halves",
        "    bytes += load_rest",
        "    bytes = 16 + load_rest",
    ),
    Mutant("bytes of one tensor only", "sums", "bytes += load_rest", "bytes = load_rest", 2),
    Mutant("an input in the place of the other", "sums", "at(stage, 2048)", "at(stage, 0)", 3),
    Mutant(
        "fewer bytes expected", "halves",
        "expect_bytes(&landed[stage][group], bytes)",
        "expect_bytes(&landed[stage][group], bytes - 16)",
    ),
    Mutant(
        "nothing waited for", "halves",
        "const auto await = [&](int stage, unsigned parity) { wait_for_bytes(&landed[stage][group], parity); };",
        "const auto await = [&](int stage, unsigned parity) {};",
    ),
    Mutant(
        "groups past the last row load there", "halves",
        "first + group < rows ? first + group : rows - 1;  //",
        "first + group;  //",
    ),
    Mutant(
        "the shift of another row", "halves",
        "shift_of(x_ptr + there * x_stride)",
        "shift_of(x_ptr + (there + 1) * x_stride)",
    ),
    Mutant("the result's shift for the input's", "wider", "x_stage + x_shift", "x_stage + y_shift"),
    Mutant("the input's shift for the result's", "wider", "y_stage + y_shift", "y_stage + x_shift"),
    Mutant("a result begins at the stage", "halves", "y_stage + y_shift", "y_stage"),
    Mutant("a row held before it is there", "wider", "        await(stage, parity);\n", ""),
    Mutant(
        "what is before the whole is not stored", "halves",
        "lane < PIECES ? i < before :",
        "lane < PIECES ? false :",
    ),
    Mutant("one before the whole too few", "halves", "i < before :", "i < before - 1 :"),
    Mutant("one before the whole too many", "halves", "i < before :", "i <= before :"),
    Mutant("what is behind the whole is not stored", "halves", "lane < 2 * PIECES && i >= before + whole", "false"),
    Mutant("one behind the whole too few", "halves", "i >= before + whole", "i > before + whole"),
    Mutant("one behind the whole too many", "halves", "i >= before + whole", "i >= before + whole - 1"),
    Mutant("the last elements, an element off", "halves", "D - 2 * PIECES + lane;", "D - 2 * PIECES + lane + 1;"),
    Mutant(
        "the whole is longer than the row", "halves",
        "(D - before) / PIECES * PIECES;",
        "(D - before + PIECES - 1) / PIECES * PIECES;",
    ),
    Mutant("the whole forgets what is before it", "halves", "(D - before) / PIECES * PIECES;", "D / PIECES * PIECES;"),
    Mutant(
        "the whole begins with the row", "halves",
        "bulk_store(row + before, staged_row + before,",
        "bulk_store(row, staged_row,",
    ),
    Mutant("the whole comes from elsewhere", "halves", "staged_row + before, whole", "staged_row - shift, whole"),
    Mutant("the whole in elements, not bytes", "halves", "whole * static_cast<int>(sizeof(T)))", "whole)"),
    Mutant("before as if rows began at 16", "halves", "(PIECES - shift) % PIECES;", "shift % PIECES;"),
    Mutant("pieces of four bytes", "narrower", "PIECES = 16 / static_cast<int>(sizeof(T));", "PIECES = 16 / 4;"),
    Mutant(
        "the first thread stores all", "halves",
        "if (lane == 0) bulk_store(row + before",
        "if (lane < 2) bulk_store(row + before",
    ),
    Mutant(
        "dead rows leave", "halves",
        "const auto store_row = [&](int stage, long long row) {\n        if (row >= rows) return;",
        "const auto store_row = [&](int stage, long long row) {",
    ),
    Mutant(
        "no fence before rows leave", "halves",
        "    before_bulk_copies();\n        row_barrier",
        "    row_barrier",
    ),
    Mutant(
        "rows leave too early", "halves",
        "before_bulk_copies();\n        row_barrier<THREADS, ROWS>(group);",
        "before_bulk_copies();",
    ),
    Mutant("stores are not committed", "halves", "if (lane == 0) commit_stores();", ""),
    Mutant(
        "stages are filled before rows have left", "halves",
        "        wait_for_stores<0>();\n        fetch(",
        "        fetch(", 1,
    ),
    Mutant(
        "the stage of this row is filled", "halves",
        "fetch(stage == 0 ? STAGES - 1 : stage - 1, first",
        "fetch(stage, first",
    ),
    Mutant("rows are fetched a turn too early", "halves", "first + (STAGES - 1) * step", "first + (STAGES - 2) * step"),
    Mutant("a row begins at the stage", "halves", "x_stage + x_shift", "x_stage", 3),
    Mutant("a held row begins at the stage", "held", "x_stage + x_shift", "x_stage"),
    Mutant("elements of a chunk side by side", "halves", "return i / RUN * JUMP + i % RUN;", "return i;"),
    Mutant("elements of a chunk a column closer", "held", "return i / RUN * JUMP", "return i / RUN * (JUMP - 1)"),
    Mutant("all of a chunk in one place", "held, small", "return i / RUN * JUMP + i % RUN;", "return i % RUN;"),
    Mutant("chunks a chunk apart", "halves", "THREADS + lane) * RUN;", "THREADS + lane) * 8;"),
    Mutant("pairs a column apart", "pairs", "THREADS + lane) * RUN;", "THREADS + lane);"),
    Mutant("pairs torn apart", "pairs", "i / RUN * JUMP + i % RUN;", "i * JUMP;"),
    Mutant("threads without a chunk have one", "halves",
           "|| (slot % SEGMENT_SLOTS", "|| true || (slot % SEGMENT_SLOTS"),
    Mutant("the last chunk has no thread", "halves",
           "* THREADS + lane) * RUN < JUMP;", "* THREADS + lane + 1) * RUN < JUMP;"),
    Mutant("one chunk for all segments", "held, long", "slot / SEGMENT_SLOTS * SEGMENT + there", "there"),
    Mutant("elements beyond the row", "halves", "if (owned && there < D) {", "if (owned) {", 2),
    Mutant("sums beyond the row", "halves", "if (behind<RUN, JUMP>(i) < D - col)", "if (true)", 2),
    Mutant("column sums of neighbours", "sums",
           "const int at = col - start + behind<RUN, JUMP>(i);",
           "const int at = col - start + i;"),
]  # fmt: skip


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_twin_is_clean(name: str) -> None:
    outcome, expected = run(name), twin(name)[3]
    assert outcome.findings == ()
    assert all(same_bits(outcome.results[n], v).all() for n, v in expected.items())


def killer(m: Mutant) -> str:
    """What gives the mutant away; nothing if nothing does."""
    try:
        outcome = run(m.subject, (m.old, m.new, m.count))
    except (CompileError, PtxError) as error:
        return type(error).__name__
    if outcome.findings:
        return outcome.findings[0].kind
    return "bits" if any(not same_bits(outcome.results[n], v).all() for n, v in twin(m.subject)[3].items()) else ""


@pytest.mark.parametrize("m", RAGGED, ids=lambda m: m.name)
def test_the_mutant_is_killed(m: Mutant) -> None:
    assert killer(m), f"{m.name} survives on '{m.subject}'"


def test_a_stage_has_room_for_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 2046 bytes touch up to 2064."""
    spec = parse_spec("layernorm.fwd:d=1023,dtype=bf16")
    s = Schedule("ragged", 32, 1, 1, 1, False, 2, 1, 1, True)
    inputs = random_inputs(spec, 9)
    assert run_plan(lower(spec, s), inputs).findings == ()
    for module in ("lngen.schedule.legal", "lngen.lower.staged"):
        monkeypatch.setattr(f"{module}.stage_share", lambda size, s, p: -(-p.d * size // 128) * 128)
    assert run_plan(lower(spec, s), inputs).findings


def test_each_mutant_is_there_once() -> None:
    assert max(Counter(m.name for m in RAGGED).values()) == 1


@pytest.mark.parametrize("name", ["pairs", "held", "sums"])
def test_neighbouring_threads_meet_in_no_bank(name: str) -> None:
    """Threads side by side read and store what lies side by side, where whole warps have a row."""

    def conflicts(*edits: tuple[str, str, int]) -> int:
        return sum(t["bank_conflicts"] for t in run(name, *edits, stop=False).traffic.shared.values())

    consecutive = (
        ("return i / RUN * JUMP + i % RUN;", "return i;", 1),
        ("THREADS + lane) * RUN;", "THREADS + lane) * 8;", 1),
    )
    assert conflicts() < conflicts(*consecutive) / 2
