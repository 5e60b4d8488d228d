"""The proof of ragged rows can fail: every plausible mistake in their templates is caught by it.

Left out, being equivalent: in which turn a thread stores a word (a matter of speed, which
``test_turns_spare_bank_conflicts`` looks at), what a chunk has beyond the end of its row, spans that end earlier than
they might or that the rest overlaps (their last elements are moved one by one, as after the last row), and a whole
that begins 16 bytes later.
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
    # A row of all turns: 32 threads and more.
    "wide": ("layernorm.fwd:d=555,dtype=bf16", Schedule("ragged", 64, 1, 1, 1, False, 2, 1, 1, True), 5),
    # All that a thread has of a row at once: warps, row groups of half a warp, two segments with a last chunk alone.
    "at once": ("layernorm.fwd:d=1007,dtype=bf16", Schedule("ragged", 64, 1, 1, 1, False, 2, 1, 1, True, hold=True), 9),
    "at once, small": (
        "rmsnorm.fwd:d=171,dtype=f16",
        Schedule("ragged", 16, 2, 1, 1, False, 2, 1, 2, True, hold=True),
        19,
    ),
    "at once, long": (
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
    Mutant("a piece too few loaded", "halves", "int i = 0; i <= PIECES; ++i", "int i = 0; i < PIECES; ++i"),
    Mutant("pieces of another thread", "halves", "(span + (col < D ? col : LAST))[i]", "(span + LAST)[i]"),
    Mutant("pieces past the stage", "halves", "(span + (col < D ? col : LAST))[i]", "(span + 4096)[i]"),
    Mutant("loaded from the element", "halves", "(span + (col < D ? col", "(span + shift + (col < D ? col"),
    Mutant("not moved by 8 bytes", "halves", "bytes & 8 ? words[i + 2]", "bytes & 8 ? words[i]"),
    Mutant("moved by 4 bytes, not 8", "halves", "bytes & 8 ? words[i + 2]", "bytes & 8 ? words[i + 1]"),
    Mutant("not moved by 4 bytes", "halves", "bytes & 4 ? words[i + 1]", "bytes & 4 ? words[i]"),
    Mutant("moved by 8 a word too few", "halves", "i < PIECES * 4 + 2; ++i", "i < PIECES * 4 + 1; ++i"),
    Mutant("moved by 4 a word too few", "halves", "i < PIECES * 4 + 1 && SIZE < 8", "i < PIECES * 4 && SIZE < 8"),
    Mutant("f32 not moved by 4 bytes", "narrower", "PIECES * 4 + 1 && SIZE < 8", "PIECES * 4 + 1 && SIZE < 4"),
    Mutant("not moved by 2 bytes", "halves", "i < PIECES * 4 && SIZE < 4", "i < PIECES * 4 && SIZE < 2"),
    Mutant("moved by 2 too far", "halves", "words[i + 1], bytes % 4 * 8)", "words[i + 1], bytes % 4 * 4)"),
    Mutant("the shift in elements", "halves", "const int bytes = shift * SIZE;", "const int bytes = shift;"),
    Mutant("the end of a row not cleared", "halves", "i <= LAST; ++i) static_cast", "i < END; ++i) static_cast"),
    Mutant("cleared one piece too few", "halves", "i <= LAST; ++i) static_cast", "i < LAST; ++i) static_cast"),
    Mutant("cleared past the stage", "halves", "i <= LAST; ++i) static_cast", "i <= LAST + 64; ++i) static_cast"),
    Mutant("cleared of the first stage", "halves", "staged + i * STAGE_BYTES + 0", "staged + 0"),
    Mutant("a barrier of another stage", "halves", "barrier_init(&landed[s][r], 1)", "barrier_init(&landed[s][0], 1)"),
    Mutant("ends of a stage too few cleared", "halves", "i < STAGES * ROWS;", "i < (STAGES - 1) * ROWS;"),
    Mutant("nobody waits for the barriers", "halves", "    }\n    __syncthreads();\n", "    }\n"),
    Mutant("chunks stored that are none", "halves", "if (col >= D) return;", ""),
    Mutant("the last chunk not stored", "halves", "if (col >= D) return;", "if (col + N > D) return;"),
    Mutant("never half a word", "halves", "halved = shift % 2;", "halved = false;"),
    Mutant("always half a word", "halves", "halved = shift % 2;", "halved = true;"),
    Mutant("half a word of the last only", "halves", "if (halved && i == turn) row[col] = chunk[0];\n        else", ""),
    Mutant("the last half not stored", "halves", "row[col + N - 1] = chunk[N - 1];", ""),
    Mutant("the last half of another", "halves", "= chunk[N - 1];", "= chunk[N - 2];"),
    Mutant("words moved the wrong way", "halves", "words[i - 1], words[i], 16)", "words[i], words[i - 1], 16)"),
    Mutant("words move from the front", "halves", "int i = WORDS - 1; i > 0; --i", "int i = 1; i < WORDS; ++i"),
    Mutant("words from the wrong one", "halves", "row + col - halved", "row + col"),
    Mutant("words in turns and left so", "halves", "to[i ^ turn] = words[i];", "to[i] = words[i];"),
    Mutant("turns of the wrong bit", "wide", "turn & bit ? words[i ^ bit]", "turn & bit ? words[i ^ 1]"),
    Mutant("a turn too few", "sums", "bit < WORDS; bit *= 2", "bit < WORDS / 2; bit *= 2"),
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
    Mutant("the result's shift for the input's", "wider", "x_stage, x_shift", "x_stage, y_shift"),
    Mutant("the input's shift for the result's", "wider", "y_out, y_shift", "y_out, x_shift"),
    Mutant("a result begins at the stage", "halves", "y_out, y_shift", "y_out, 0"),
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
        "no fence before rows land", "halves",
        "    before_bulk_copies();\n\n    // A barrier",
        "\n    // A barrier",
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
    Mutant("shifts as if they were bytes", "at once", "if (2 * shift & BIT) load", "if (shift & BIT) load"),
    Mutant("moved by all bits but one", "at once", "BIT / 2, BYTES + BIT>(chunks", "BIT / 2, BYTES>(chunks"),
    Mutant("no odd half", "at once", "BYTES % 4 ? __funnelshift_r", "BYTES % 2 ? __funnelshift_r"),
    Mutant("halves the wrong way", "at once", "words[i + BYTES / 4 + 1], 16)", "words[i + BYTES / 4 + 1], 0)"),
    Mutant("one piece of two loaded", "at once", "i < PIECES + (BYTES > 0); ++i", "i < PIECES; ++i"),
    Mutant("the first chunk for all slots", "at once", "load_shifted<D, BYTES>(chunks[k], span, cols[k])",
           "load_shifted<D, BYTES>(chunks[k], span, cols[0])"),
    Mutant("words of two threads before", "at once", "own[WORDS - BEFORE + i], 1, LANES)",
           "own[WORDS - BEFORE + i], 2, LANES)"),
    Mutant("words from the front", "at once", "own[WORDS - BEFORE + i], 1, LANES)", "own[i], 1, LANES)"),
    Mutant("nothing of the thread before", "at once", "words[i] = __shfl_up_sync(together, own[WORDS - BEFORE + i], 1,",
           "__shfl_up_sync(together, own[WORDS - BEFORE + i], 1,"),
    Mutant("words across row groups", "at once, small", "LANES = THREADS < 32 ? THREADS : 32;", "LANES = 32;"),
    Mutant("the other group's threads", "at once, small", " << threadIdx.x % 32 / LANES * LANES;", ";"),
    Mutant("the first stores what it has not", "at once", "if (i > 0 || !first) reinterpret", "if (true) reinterpret"),
    Mutant("the first stores nothing", "at once", "        for (int i = BEFORE; i < 4; ++i) to[i] = moved[i];", ""),
    Mutant("the first stores from the front", "at once", "for (int i = BEFORE; i < 4; ++i) to[i]",
           "for (int i = 0; i < 4; ++i) to[i]"),
    Mutant("the first half is left out", "at once", "row[0] = chunk[0];", ";"),
    Mutant("the last half is left out", "at once", "row[N - 1] = chunk[N - 1];", ";"),
    Mutant("what is left over of a warp", "at once", "(ends || lane % LANES == LANES - 1)", "(ends)"),
    Mutant("what is left over of a row", "at once", "ends = col + N >= D || (", "ends = ("),
    Mutant("what is left over of a segment", "at once, long", "(SEGMENT < D && (col + N) % SEGMENT == 0)", "false"),
    Mutant("a word too few left over", "at once", "i < BYTES / 4; ++i) to[WORDS", "i + 1 < BYTES / 4; ++i) to[WORDS"),
    Mutant("stored beyond the row", "at once", "if (col >= D) return;\n    union { uint4 pieces[WORDS / 4]",
           "union { uint4 pieces[WORDS / 4]"),
    Mutant("results of the slot before", "at once", "copy_chunk(y_held[k], y_out);", "copy_chunk(y_held[0], y_out);"),
    Mutant("the input's shift for all a thread has", "at once", "y_held, y_shift, cols", "y_held, 0, cols"),
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


def test_turns_spare_bank_conflicts() -> None:
    def conflicts(*edits: tuple[str, str, int]) -> int:
        return sum(t["bank_conflicts"] for t in run("wide", *edits).traffic.shared.values())

    assert conflicts() < conflicts(("turn = lane / (32", "turn = 0 * lane / (32", 1)) / 2
