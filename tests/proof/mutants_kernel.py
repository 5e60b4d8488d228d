"""Mutants of what the templates lay out: the kernels themselves, their policies, plans, launches, passes.

Left out, being equivalent: numbers that say how and not what (prefetch, access halved, how many loads are under way), a
grid one long where the kernel asks for its rows or columns (what lies beyond stores nothing), a shorter grid or fewer
threads of a finish (its loops make up for it), column threads past the end that do not return (their accesses are
masked), and a schedule's acquire scope.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

import lngen.lower
from lngen import passes
from lngen.ir import F32, Eqn, Graph
from lngen.lower import Argument, Kernel, Plan
from lngen.lower.parts import Statement
from lngen.passes.edit import substitute
from mutants import Edit, Mutant

Text = tuple[str, str]
Row = tuple[str, str, Text | tuple[Text, ...]]

# ---- templates ----

PHASES = "{% for phase in kernel.phases %}\n\n// ---- {{ phase.title }} ----\n"
NEXT = "while (stream_.next()) {\n"
WAIT, LET = "pdl_wait();\n", "pdl_trigger();\n"
SCALARS = "\n{{ scalars(kernel) }}\n{% if row.row_inputs_ahead %}"
PARTIAL = "{{ sum.name }}_partials_ + {{ row.partial_row_offset }}, sums_buffer_"
FENCED = "tma_store_fence();\nrow_barrier<Row>();\nstore_();"
FREE = "stream_.release(copy_to_stage_);\n{% endif %}\n"
RELEASE = "{% if phase.releases %}\n{% if s.threads <= 32 %}\n__syncwarp();\n{% endif %}\n" + FREE
INPUT_PLACE = "const auto* {{ place.name }}_shared_ = stream_.shared<{{ place.ctype }}>({{ place.offset }})"
RESULT_PLACE = INPUT_PLACE.replace("const auto*", "{% for place in row.results %}\nauto*")
MISALIGNED = "{{ row.misalignment_term(place) }};"
REDUCES = "{% for reduce in phase.reduces %}\n{{ reduction(reduce) }}"
STORED = "stream_.row * {{ place.name }}_stride_ + Row::first_column(), stream_.shared"
LOADED = "row_ * {{ place.name }}_stride_ + Row::first_column(), Row::columns() * {{ place.element }}, full_"
AHEAD = "{{ tensor.name }}_ptr_ + stream_.valid(stream_.row + stream_.STEP));"

TEMPLATES: dict[str, list[Row]] = {
    "row.cu.jinja": [
        ("a wait behind the loads of a row", "small", ((WAIT + LET + SCALARS, LET + SCALARS), (PHASES, WAIT + PHASES))),
        *[
            (f"a wait behind the first rows: {subject}", subject, ((WAIT + LET + SCALARS, LET + SCALARS), (NEXT,
             WAIT + NEXT)))
            for subject in ("rounds", "tma", "cp_async", "cluster cached", "dynamic", "unaligned")
        ],
        ("a wait behind the rows", "multipass", ((WAIT + LET + SCALARS, LET + SCALARS), ("{{ flush() }}\n}",
         WAIT + "{{ flush() }}\n}"))),
        ("rows past the last prefetched", "small", ("group_first_ < rows_) {\n", "group_first_ <= rows_) {\n")),
        ("prefetched from the second element", "small",
         ("prefetch_l2<Row>({{ tensor.name }}_ptr_ + Row::first_column(), Row::columns())",
         "prefetch_l2<Row>({{ tensor.name }}_ptr_ + Row::first_column() + 64, Row::columns())")),
        ("cached weights of the first vector", "early", ("{{ row.cached_load(tensor) }}>({{ tensor.name }}_ptr_, v_)",
         "{{ row.cached_load(tensor) }}>({{ tensor.name }}_ptr_, 0)")),
        ("beta cached for gamma", "early", ("{{ row.cached_load(tensor) }}>({{ tensor.name }}_ptr_, v_)",
         "{{ row.cached_load(tensor) }}>({{ kernel.columns[-1].name }}_ptr_, v_)")),
        ("cached weights of the first vector: a cluster", "cluster cached",
         ("{{ row.cached_load(tensor) }}>({{ tensor.name }}_ptr_, v_)",
          "{{ row.cached_load(tensor) }}>({{ tensor.name }}_ptr_, 0)")),
        ("widened weights of the first vector", "widened", ("widened({{ tensor.name }}_cached_[v_])",
         "widened({{ tensor.name }}_cached_[0])")),
        ("loads of 16 bits for an offset", "block", ("_ptr_ + {{ row_ }} * {{ tensor.name }}_stride_, v_);",
         "_ptr_ + static_cast<short>({{ row_ }} * {{ tensor.name }}_stride_), v_);")),
        ("loads of rows D apart", "small", ("_ptr_ + {{ row_ }} * {{ tensor.name }}_stride_, v_);",
         "_ptr_ + {{ row_ }} * Row::D, v_);")),
        ("a vector loaded for all", "small", ("_ptr_ + {{ row_ }} * {{ tensor.name }}_stride_, v_);",
         "_ptr_ + {{ row_ }} * {{ tensor.name }}_stride_, 0);")),
        ("rows past the last loaded", "small", ('load("_row_", "stream_.valid_row()")',
         'load("_row_", "stream_.row")')),
        ("rows past the last loaded: column sums", "late", ('load("_row_", "stream_.valid(stream_.row)")',
         'load("_row_", "stream_.row + stream_.STEP")')),
        ("numbers of the first row", "most", ("_ptr_ + {{ row_ }});\n{% endfor %}\n{% endmacro %}",
         "_ptr_);\n{% endfor %}\n{% endmacro %}")),
        ("numbers of rows past the last", "most", ('row_inputs("stream_.valid_row()")', 'row_inputs("stream_.row")')),
        ("blocks send before others are there", "cluster registers", ("cluster_barrier();\n{% endif %}",
         "{% endif %}")),
        ("the row after the next prefetched", "rounds", ("load_(stream_.valid(stream_.row + stream_.STEP));",
         "load_(stream_.valid(stream_.row + stream_.STEP + 1));")),
        ("the same row prefetched", "rounds", ("load_(stream_.valid(stream_.row + stream_.STEP));",
         "load_(stream_.valid(stream_.row));")),
        ("the first row not prefetched", "rounds", ("if (stream_.block_first_row < rows_) load_(",
         "if (false) load_(")),
        ("rows prefetched where there are none", "single launch, no rows",
         ("if (stream_.block_first_row < rows_) load_(",
         "load_(")),
        ("the first vector prefetched for all", "rounds", ("{{ tensor.name }}_row_[v_] = {{ tensor.name }}_next_[v_];",
         "{{ tensor.name }}_row_[v_] = {{ tensor.name }}_next_[0];")),
        ("a number of this row for the next", "tma most", (AHEAD,
         "{{ tensor.name }}_ptr_ + stream_.valid(stream_.row));")),
        ("a number past the last row", "tma most", (AHEAD, "{{ tensor.name }}_ptr_ + stream_.row + stream_.STEP);")),
        ("a first number past the last row", "cluster groups",
         ("_ptr_ + stream_.valid(group_first_));\n{% endfor %}\nasm",
         "_ptr_ + group_first_);\n{% endfor %}\nasm")),
        ("a number where there are no rows", "tma, no rows",
         ("if (stream_.block_first_row < rows_) {{ tensor.name }}_next_",
         "{{ tensor.name }}_next_")),
        ("a parity that depends on numbers", "tma columns", ("static_cast<unsigned>(rows_ >> 63)",
         "static_cast<unsigned>(rows_ >> 63 | 1)")),
        ("rows not awaited", "tma", ("stream_.wait();\n", "")),
        ("rows not awaited: cp.async", "cp_async", ("stream_.wait();\n", "")),
        ("held rows not awaited", "unaligned, wider", ("stream_.wait();\n", "")),
        ("an unaligned row begins at its stage", "unaligned",
         (INPUT_PLACE + MISALIGNED,
          INPUT_PLACE + ";")),
        ("an unaligned result begins at its stage", "unaligned",
         (RESULT_PLACE + MISALIGNED,
          RESULT_PLACE + ";")),
        ("the misalignment of the first row", "unaligned",
         (INPUT_PLACE + MISALIGNED,
          INPUT_PLACE + " + misalignment({{ place.name }}_ptr_);")),
        ("one vector held for all", "tma early", ("load<Row, PlainLoad>({{ tensor.name }}_shared_, v_);",
         "load<Row, PlainLoad>({{ tensor.name }}_shared_, 0);")),
        ("a stage free before all have read it: rows without sums", "tma rounded",
         ("row_barrier<Row>();\nstream_.release(copy_to_stage_);", "stream_.release(copy_to_stage_);")),
        ("a stage free before all have read it", "tma block", ((RELEASE, ""), (REDUCES, RELEASE + REDUCES))),
        ("a stage free before all hold the row", "tma early", ((RELEASE, ""), (REDUCES, RELEASE + REDUCES))),
        ("stages never free", "tma", (RELEASE, "")),
        ("stages never free: cp.async", "cp_async", (RELEASE, "")),
        ("the next row not broadcast", "dynamic cluster", ("stream_.broadcast(exchange_);\n", "")),
        ("numbers of rows past the last stored", "small", ("if ({{ row.writer_condition }}) ",
         "if (Row::thread() == 0) ")),
        ("numbers of a row stored by no thread", "small", ("if ({{ row.writer_condition }}) ",
         "if (stream_.live() && Row::thread() == Row::THREADS) ")),
        ("numbers of a row stored by every thread", "small",
         ("if ({{ row.writer_condition }}) {{ tensor.name }}_ptr_[stream_.row] =",
         "if (stream_.live()) {{ tensor.name }}_ptr_[stream_.row + Row::thread()] =")),
        ("numbers of a row stored by every block", "cluster", ("if ({{ row.writer_condition }}) ",
         "if (stream_.live() && Row::thread() == 0) ")),
        ("numbers of a row stored by every block: registers", "cluster registers", ("if ({{ row.writer_condition }}) ",
         "if (stream_.live() && Row::thread() == 0) ")),
        ("no fence before the store", "tma groups", (FENCED, FENCED.replace("tma_store_fence();\n", ""))),
        ("a fence of one thread", "tma groups", (FENCED, "if (Row::thread() == 0) " + FENCED)),
        ("no barrier before the store", "tma groups", (FENCED, FENCED.replace("row_barrier<Row>();\n", ""))),
        ("the store before the fence", "tma groups", (FENCED, "store_();\ntma_store_fence();\nrow_barrier<Row>();")),
        ("no barrier before an unaligned store", "unaligned", (FENCED, FENCED.replace("row_barrier<Row>();\n", ""))),
        ("rows past the last stored", "tma groups", ("if (!stream_.live()) return;\n", "")),
        ("rows past the last stored: unaligned", "unaligned", ("if (!stream_.live()) return;\n", "")),
        ("every thread stores", "tma groups", ("if (Row::thread() != 0) return;\n", "")),
        ("the next row stored", "tma groups", (STORED, STORED.replace("stream_.row", "(stream_.row + 1)", 1))),
        ("the first column forgotten in a store", "cluster", (STORED, STORED.replace(" + Row::first_column()", ""))),
        ("16 bytes too few stored", "tma groups",
         ("Row::columns() * {{ place.element }});\n{% endfor %}\ntma_store_commit",
         "Row::columns() * {{ place.element }} - 16);\n{% endfor %}\ntma_store_commit")),
        ("16 bytes too many stored", "tma groups",
         ("Row::columns() * {{ place.element }});\n{% endfor %}\ntma_store_commit",
         "Row::columns() * {{ place.element }} + 16);\n{% endfor %}\ntma_store_commit")),
        ("stores not committed", "tma groups", ("tma_store_commit();\n{% else %}", "{% else %}")),
        ("unaligned stores not committed", "unaligned", ("if (Row::thread() == 0) tma_store_commit();\n", "")),
        ("a stage filled before its results have left", "tma groups",
         ("{% if s.tma_store %}\ntma_store_wait();  // the", "{% if s.tma_store %}\n;  // the")),
        ("an unaligned stage filled before its results have left", "unaligned",
         ("full_) {\ntma_store_wait();  // the", "full_) {\n;  // the")),
        ("stores not awaited at the end", "tma groups", ("if (Row::thread() == 0) tma_store_wait();\n", "")),
        ("bytes of one of two inputs expected", "tma columns",
         ('({{ row.places | map(attribute="element") | join(" + ") }})', "{{ row.places[0].element }}")),
        ("16 bytes too many expected", "tma", ("mbarrier_arrive_expect(full_, Row::columns()",
         "mbarrier_arrive_expect(full_, 16 + Row::columns()")),
        ("16 bytes too few copied", "tma", (LOADED, LOADED.replace(", full_", " - 16, full_"))),
        ("elements copied for bytes", "tma", (LOADED, LOADED.replace(" * {{ place.element }}", ""))),
        ("the first column forgotten in a copy", "cluster", (LOADED, LOADED.replace(" + Row::first_column()", ""))),
        ("all inputs in one place", "tma columns", ("tma_load(stage_ + {{ place.offset }},", "tma_load(stage_,")),
        ("all inputs in one place: cp.async", "cp_async columns of two",
         ("(stage_ + {{ place.offset }}), {{ place.name }}_ptr_", "(stage_), {{ place.name }}_ptr_")),
        ("the bytes of the last input expected", "unaligned, sums", ("bytes_ += load_tail", "bytes_ = load_tail")),
        ("no row is the last", "unaligned", ("last_ = row_ == rows_ - 1;", "last_ = row_ == rows_;")),
        ("the last row but one is the last", "unaligned", ("last_ = row_ == rows_ - 1;", "last_ = row_ == rows_ - 2;")),
        ("no block barrier before the first column sums: ring", "tma columns", ("(ring_);\n__syncthreads();",
         "(ring_);")),
        ("no block barrier before the first column sums: cp.async", "cp_async columns", ("(ring_);\n__syncthreads();",
         "(ring_);")),
        ("no block barrier behind the column sums: ring", "tma columns", ("{% endfor %}\n__syncthreads();\n{% for sum",
         "{% endfor %}\n{% for sum")),
        ("no block barrier before the next column sums", "backward",
         ("{% for sum in kernel.accumulators %}\n__syncthreads();\nshare",
         "{% for sum in kernel.accumulators %}\nshare")),
        ("no block barrier behind the column sums", "backward",
         ("sums_buffer_, {{ sum.name }}_sums_);\n__syncthreads();", "sums_buffer_, {{ sum.name }}_sums_);")),
        ("units of another size shared", "backward", ("share_column_sums<Row, {{ row.unit }}>(sums_buffer_, {{",
         "share_column_sums<Row, {{ row.unit // 2 }}>(sums_buffer_, {{")),
        ("the partial sums of the first block", "backward", (PARTIAL + ");",
         PARTIAL.replace(" + {{ row.partial_row_offset }}", "") + ");")),
        ("the partial sums of the first block: threads", "rounds", ("_partials_ + {{ row.partial_row_offset }}, {{ sum",
         "_partials_, {{ sum")),
        ("the partial sums of each block of a cluster", "cluster columns", (PARTIAL + " +",
         PARTIAL.replace("{{ row.partial_row_offset }}", "static_cast<long long>(blockIdx.x) * {{ row.problem.d }}")
         + " +")),
        ("column sums start at +0", "backward of zeros", ("= {{ op }}::neutral<real>();", "= real(0);")),
        ("column maxima start at -0", "columns and numbers", ("= {{ op }}::neutral<real>();",
         "= Add::neutral<real>();")),
        ("no grid barrier", "single launch", ("grid_barrier(arrivals_);\n", "")),
        ("a block barrier for the grid's", "single launch", ("grid_barrier(arrivals_);\n", "__syncthreads();\n")),
    ],
    "phase.cu.jinja": [
        ("rows past the last stored", "small", ("if (stream_.live()) store<Row", "store<Row")),
        ("rows past the last stored: staged", "tma", ("if (stream_.live()) store<Row", "store<Row")),
        ("rows D apart stored", "small", ("stream_.row * {{ tensor.name }}_stride_, v_,", "stream_.row * Row::D, v_,")),
        ("stores of 16 bits for an offset", "block", ("stream_.row * {{ tensor.name }}_stride_, v_,",
         "static_cast<short>(stream_.row * {{ tensor.name }}_stride_), v_,")),
        ("one vector stored for all", "small", ("{{ tensor.name }}_stride_, v_, {{",
         "{{ tensor.name }}_stride_, 0, {{")),
        ("one vector stored for all: staged", "tma groups", ("_shared_, v_, {{", "_shared_, 0, {{")),
    ],
    "columns.cu.jinja": [
        ("a wait behind the loads", "columns", ((WAIT + LET + "{% if kernel", LET + "{% if kernel"),
         ("{% for sum in kernel.accumulators %}\nstore",
         WAIT + "{% for sum in kernel.accumulators %}\nstore"))),
        ("sums start at +0", "columns of zeros", ("= {{ op }}::neutral<real>();", "= real(0);")),
        ("column maxima start at -0", "columns and numbers, multipass", ("= {{ op }}::neutral<real>();",
         "= Add::neutral<real>();")),
        ("a row too many", "columns, rounds", ("row_ < rows_;", "row_ <= rows_;")),
        ("a row too few", "columns, rounds", ("row_ < rows_;", "row_ < rows_ - 1;")),
        ("rows of neighbours", "columns, rounds",
         ("row_ = {{ first }}; row_ < rows_; row_ += {{ kernel.row_step }}",
          "row_ = 2 * blockIdx.y; row_ < min(rows_, 2ll * blockIdx.y + 2); row_ += 1")),
        ("rows of another group", "columns of groups",
         ("* Row::ROWS + Row::group()", "* Row::ROWS + Row::group() / 2 + Row::group() % 2 * (Row::ROWS / 2)")),
        ("row groups apart", "columns of groups",
         ("reduce_row_groups<{{ sum.op }}, Row>(upper_, {{ sum.name }}_sums_);", "")),
        ("column maxima of row groups added", "columns and numbers of groups", ("reduce_row_groups<{{ sum.op }},",
         "reduce_row_groups<Add,")),
        ("every row group stores", "columns of groups", ("if (Row::group() > 0) return;\n", "")),
        ("the last vectors return", "columns", ("if (!Row::holds(0, 0)) return;",
         "if (!Row::holds(0, Row::N)) return;")),
        ("the partial sums of block x", "columns", ("partials_ + static_cast<long long>(blockIdx.y)",
         "partials_ + static_cast<long long>(blockIdx.x)")),
        ("rows of another stride", "columns", ("row_ * {{ tensor.name }}_stride_, 0);",
         "row_ * {{ kernel.wide_inputs[0].name }}_stride_, 0);")),
        ("the numbers of the first row", "columns", ("_ptr_ + row_);", "_ptr_);")),
    ],
    "numbers.cu.jinja": [
        ("a wait behind the loads", "columns and numbers", ((WAIT + "{{ scalars(kernel) }}", "{{ scalars(kernel) }}"),
         ("{% if kernel.numbers.stored %}\n", WAIT + "{% if kernel.numbers.stored %}\n"))),
        ("no barrier between reductions", "columns and numbers", ("__syncthreads();  // all threads have",
         "// all threads have")),
        ("elements past the end", "columns and numbers", ("if (!Row::holds(v_, i_)) continue;\n", "")),
        ("the first element of a vector for all", "columns and numbers", ("Row::column(v_, i_);",
         "Row::column(v_, 0);")),
        ("the last column not stored", "columns and numbers", ("at_ < {{ kernel.d }};", "at_ < {{ kernel.d }} - 1;")),
        ("columns skipped", "columns and numbers", ("at_ += {{ kernel.block }}", "at_ += {{ kernel.block + 1 }}")),
        ("numbers not stored", "columns and numbers", ("if (threadIdx.x == 0) {", "if (threadIdx.x == blockDim.x) {")),
    ],
    "finish_kernel.cu.jinja": [
        ("a wait behind the sums", "few", (WAIT + "{{ scalars(kernel) }}\n{{ finish(kernel.finish) }}\n",
         "{{ scalars(kernel) }}\n{{ finish(kernel.finish) }}\n" + WAIT)),
    ],
    "finish.cu.jinja": [
        ("owners rounded down", "backward", ("(rows_ + {{ f.rows_per_block }} - 1) /", "rows_ /")),
        ("owners not limited", "rounds",
         ("blocks_with_rows_ < {{ f.partials }} ? static_cast<int>(blocks_with_rows_) : {{ f.partials }}",
         "static_cast<int>(blocks_with_rows_)")),
        ("interleaved sums overlap", "few", ("from_ = threadIdx.x / THREADS_;",
         "from_ = threadIdx.x / THREADS_ / 2;")),
        ("interleaved sums left out", "single launch, interleaved", ("from_ += blockDim.x / THREADS_",
         "from_ += blockDim.x / THREADS_ + 1")),
        ("columns past the end read", "backward", ("from_ < INTERLEAVE_ && first_ < {{ f.d }};",
         "from_ < INTERLEAVE_;")),
        ("neighbouring columns past the end read", "neighbours", ("from_ < INTERLEAVE_ && first_ < {{ f.d }};",
         "from_ < INTERLEAVE_;")),
        ("columns past the end stored", "backward", ("threadIdx.x < COLUMNS_ && col_ < {{ f.d }}",
         "threadIdx.x < COLUMNS_")),
        ("a column not stored", "backward", ("threadIdx.x < COLUMNS_ && col_ < {{ f.d }}",
         "threadIdx.x < COLUMNS_ - 1 && col_ < {{ f.d }}")),
        ("column maxima finished as sums", "columns and numbers", ("interleaved_sums<{{ op }}, ",
         "interleaved_sums<Add, ")),
        ("column maxima added in the end", "columns and numbers", ("column_total<{{ sum.op }}, ",
         "column_total<Add, ")),
        ("column maxima in the place of sums", "columns and numbers", ("({{ sums[0].index }} + n_)", "n_")),
        ("the sums in one place", "backward", ("({{ sums[0].index }} + n_)", "0")),
        ("the sums exchanged", "backward", ("(totals_, {{ sum.index }},", "(totals_, {{ 1 - sum.index }},")),
        ("neighbouring columns begin one apart", "neighbours", ("% THREADS_ * COLUMNS_PER_THREAD_;",
         "% THREADS_;")),
        ("neighbouring columns in one place", "neighbours", ("COLUMNS_ + column_ + e_]", "COLUMNS_ + column_]")),
        ("no barrier before the totals", "backward", ("__syncthreads();\nconst int col_", "const int col_")),
        ("no barrier behind a tile", "single launch", ("__syncthreads();\n}\n{% endmacro %}", "}\n{% endmacro %}")),
        ("tiles two grids apart", "single launch", ("column_tile_ += gridDim.x", "column_tile_ += 2 * gridDim.x")),
        ("tiles overlap", "single launch", ("first_ = column_tile_ * COLUMNS_ + column_;",
         "first_ = column_tile_ * (COLUMNS_ - 1) + column_;")),
    ],
}  # fmt: skip
OFFSETS = {"x": 1 << 14, "y": 1 << 14}  # strides of which 16 bits are too few: a buffer of 2^31 elements takes too long


def of_templates() -> list[Mutant]:
    """A mutant for each row of the tables."""
    return [
        Mutant(name, subject, files=_edits(file, texts), strides=OFFSETS if "16 bits" in name else {})
        for file, rows in TEMPLATES.items()
        for name, subject, texts in rows
    ]


def _edits(file: str, texts: Text | tuple[Text, ...]) -> tuple[Edit, ...]:
    pairs = (texts,) if isinstance(texts[0], str) else texts
    return tuple(Edit(file, *pair) for pair in pairs)  # type: ignore[misc]


# ---- plans ----


def halved(n: int) -> int:
    return n // 2


def doubled(n: int) -> int:
    return 2 * n


def less(n: int) -> int:
    return n - 1


def more(n: int) -> int:
    return n + 1


def in_kernel(role: str, **changes: Callable[[Kernel], Any]) -> Callable[[Plan], Plan]:
    """A plan edit: fields of the kernel whose name ends with ``role``, computed from the kernel."""

    def edit(plan: Plan) -> Plan:
        kernels = tuple(
            replace(k, **{n: f(k) for n, f in changes.items()}) if k.name.endswith(f"__{role}") else k
            for k in plan.kernels
        )
        return replace(plan, kernels=kernels)

    return edit


def plan(name: str, subject: str, role: str = "rows", **changes: Callable[[Kernel], Any]) -> Mutant:
    """A mutant of the fields of a kernel."""
    return Mutant(name, subject, plan=in_kernel(role, **changes))


def policy(name: str, value: Callable[[int], int]) -> Callable[[Kernel], Any]:
    """The policies with another number behind the comment ``name``."""
    number = re.compile(rf"(/\* {name} \*/ )(\d+)")
    return lambda k: tuple(number.sub(lambda m: f"{m[1]}{value(int(m[2]))}", line) for line in k.policies)


def spelled(old: str, new: str, where: str = "phases") -> Callable[[Kernel], Any]:
    """A field of a kernel with every statement spelled in another way."""
    return lambda k: _respelled(getattr(k, where), old, new)


def _respelled(thing: Any, old: str, new: str) -> Any:
    if isinstance(thing, Statement):
        return replace(thing, text=thing.text.replace(old, new))
    if isinstance(thing, tuple):
        return tuple(_respelled(item, old, new) for item in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: _respelled(getattr(thing, f.name), old, new) for f in fields(thing) if f.init})
    return thing


def without(begin: str, where: str = "phases") -> Callable[[Kernel], Any]:
    """A field of a kernel without the statements that begin with ``begin``."""
    return lambda k: _without(getattr(k, where), begin)


def _without(thing: Any, begin: str) -> Any:
    if isinstance(thing, tuple):
        kept = (i for i in thing if not (isinstance(i, Statement) and i.text.startswith(begin)))
        return tuple(_without(item, begin) for item in kept)
    if is_dataclass(thing) and not isinstance(thing, type | Statement):
        return replace(thing, **{f.name: _without(getattr(thing, f.name), begin) for f in fields(thing) if f.init})
    return thing


def without_field(name: str, number: int) -> Callable[[Kernel], Any]:
    return lambda k: tuple(replace(p, **{name: getattr(p, name)[:-1]}) if p.number == number else p for p in k.phases)


def first_grid(**changes: Any) -> Callable[[Kernel], Any]:
    return lambda k: (replace(k.grid[0], **changes), k.grid[1])


def second_grid(**changes: Any) -> Callable[[Kernel], Any]:
    return lambda k: (k.grid[0], replace(k.grid[1], **changes))


def finish(**changes: Callable[[int], int]) -> Callable[[Kernel], Any]:
    """How column sums are completed, with other numbers."""
    return lambda k: replace(k.finish, **{n: f(getattr(k.finish, n)) for n, f in changes.items()})  # type: ignore[type-var]


def row(**changes: Callable[[Any], Any]) -> Callable[[Kernel], Any]:
    """What the text of the row kernel depends on, changed."""
    return lambda k: replace(k.row, **{n: f(getattr(k.row, n)) for n, f in changes.items()})  # type: ignore[type-var]


def moved(number: int, by: int) -> Callable[[Any], Any]:
    """Places of a stage, one of them somewhere else."""
    return lambda places: tuple(replace(p, offset=p.offset + by) if n == number else p for n, p in enumerate(places))


def buffers(**changes: Callable[[int], int]) -> Callable[[Plan], Plan]:
    def edit(plan: Plan) -> Plan:
        smaller = (replace(b, **{n: f(getattr(b, n)) for n, f in changes.items()}) for b in plan.workspace)
        return replace(plan, workspace=tuple(smaller))

    return edit


def swapped(a: str, b: str, kind: str) -> Callable[[Kernel], tuple[Argument, ...]]:
    """The arguments of one kind that belong to two tensors exchanged: each gets the other's."""
    other = {a: b, b: a}
    return lambda k: tuple(
        replace(x, tensor=other[x.tensor]) if x.kind == kind and x.tensor in other else x for x in k.arguments
    )


# By subject, the numbers of its policies and what becomes of them.
POLICIES: dict[str, dict[str, list[Callable[[int], int]]]] = {
    "small": {"D": [less, more], "vector": [halved], "threads": [halved, doubled], "access": [doubled],
              "rows": [less, more, halved, doubled]},
    "groups": {"rows": [halved], "threads": [halved, doubled]},
    "groups of two sums": {"values": [halved]},
    "segments": {"segment": [halved, doubled], "threads": [halved]},
    "unaligned": {"run": [doubled], "D": [less], "stage bytes": [halved]},
    "multipass": {"segment": [halved, doubled], "threads": [halved, doubled], "access": [doubled]},
    "backward": {"rows": [halved, doubled], "D": [less, more]},
    "late": {"grid": [less, more, halved, doubled]},
    "tma": {"stages": [less, more], "stage bytes": [halved, more], "rows": [halved, doubled], "D": [less],
            "threads": [halved, doubled], "grid": [more]},
    "tma persistent": {"grid": [less, more, doubled]},
    "cluster": {"blocks": [halved, doubled], "segment": [halved, doubled], "D": [less], "values": [halved]},
    "cluster groups": {"values": [halved]},
    "cp_async": {"stages": [more], "stage bytes": [halved], "access": [doubled]},
    "dynamic": {"grid": [less, more], "stages": [less], "stage bytes": [halved]},
}  # fmt: skip
COLUMN_POLICIES: dict[str, dict[str, list[Callable[[int], int]]]] = {
    "columns": {"D": [halved, more], "threads": [halved, doubled], "vector": [halved], "access": [doubled]},
}
FINISH: dict[str, dict[str, list[Callable[[int], int]]]] = {
    "backward": {"d": [less, more], "rows_per_block": [doubled]},
    "rounds": {"partials": [less, halved], "interleave": [doubled]},
    "terms": {"rows_per_term": [halved, doubled], "partials": [halved]},
    "few": {"leading": [less, doubled], "interleave": [halved, less]},
}


def numbers() -> list[Mutant]:
    """A mutant for each wrong number of a policy, and of how column sums are completed."""
    listed = [
        plan(f"{role}: {name} {edit.__name__}", subject, role, policies=policy(name, edit))
        for role, table in (("rows", POLICIES), ("columns", COLUMN_POLICIES))
        for subject, names in table.items()
        for name, edits in names.items()
        for edit in edits
    ]
    listed += [
        plan(f"finish: {name} {edit.__name__}", subject, "finish", finish=finish(**{name: edit}))
        for subject, names in FINISH.items()
        for name, edits in names.items()
        for edit in edits
    ]
    return listed


def other_policy(old: str, new: str) -> Callable[[Kernel], Any]:
    return lambda k: tuple(line.replace(old, new) for line in k.policies)


STATEMENTS = [
    plan("operands exchanged", "small", phases=spelled("x32 - mean;", "mean - x32;")),
    plan("a division by a product", "small", phases=spelled("mean_sum / d_size", "mean_sum * (1.0f / 100.0f)")),
    plan("an fma torn apart", "groups", phases=spelled("fmaf(xhat, gamma32, beta32)", "xhat * gamma32 + beta32")),
    plan("a product of a row sum rounded alone", "groups of two sums",
         phases=spelled("fmaf(dy_gamma, xhat, sum_[0])", "sum_[0] + dy_gamma * xhat")),
    plan("a product of a column sum rounded alone", "batches",
         phases=spelled("fmaf(dy_row_[v_][i_], xhat, sum_dy_xhat_sums_[v_][i_])",
                        "sum_dy_xhat_sums_[v_][i_] + dy_row_[v_][i_] * xhat")),
    plan("terms past the end of a row added", "small", phases=spelled("if (Row::holds(v_, i_)) sum_", "sum_")),
    plan("a maximum past the end of a row", "most of negatives", phases=spelled("if (Row::holds(v_, i_)) sum_",
         "sum_")),
    plan("terms past the end of a row are +0", "small of zeros",
         phases=spelled("if (Row::holds(v_, i_)) sum_[0] = sum_[0] + x32;",
                        "sum_[0] = sum_[0] + (Row::holds(v_, i_) ? x32 : 0.0f);")),
    plan("what lies past the end of a row makes a sum absent", "small",
         phases=spelled("if (Row::holds(v_, i_)) sum_[0] = sum_[0] + x32;",
                        "sum_[0] = Row::holds(v_, i_) ? sum_[0] + x32 : Add::neutral<real>();")),
    plan("columns of rows that are not there", "backward", phases=spelled("if (stream_.live()) sum_dy", "sum_dy")),
    plan("columns of rows that are not there: TMA", "tma columns", phases=spelled("if (stream_.live()) sum_dy",
         "sum_dy")),
    plan("columns of rows that are not there: cp.async", "cp_async columns",
         phases=spelled("if (stream_.live()) sum_dy", "sum_dy")),
    plan("columns of each row twice", "backward", phases=spelled("sum_dy_sums_[v_][i_] + dy32;",
         "sum_dy_sums_[v_][i_] + dy32 + dy32;")),
    plan("the mean of the other sum", "backward", phases=spelled("mean_dy_gamma_sum = sums_0_[0]",
         "mean_dy_gamma_sum = sums_0_[1]")),
    plan("vectors right to left", "groups", phases=spelled("x_row_[v_][i_]", "x_row_[v_][Row::N - 1 - i_]")),
    plan("gamma for beta", "small", phases=spelled("load<Row, ReadOnlyLoad>(beta_ptr_",
         "load<Row, ReadOnlyLoad>(gamma_ptr_")),
    plan("gamma of the vector before", "small",
         phases=spelled("load<Row, ReadOnlyLoad>(gamma_ptr_, v_)",
         "load<Row, ReadOnlyLoad>(gamma_ptr_, v_ > 0 ? v_ - 1 : 0)")),
    plan("a term dropped", "small", phases=without("if (Row::holds(v_, i_)) sum_")),
    plan("a definition dropped", "small", phases=without("const float xc")),
    plan("a result dropped", "small", phases=without("y_out_")),
    plan("a column sum dropped", "backward", phases=without("if (stream_.live()) sum_dy_sums_")),
    plan("a result of the columns dropped", "backward", "finish", finish=without("dbeta_ptr", "finish")),
]  # fmt: skip

PLANS = [
    plan("numbers of a row dropped", "small", phases=without_field("row_outputs", 1)),
    plan("numbers that are handed on dropped", "columns", phases=without_field("row_outputs", 1)),
    plan("an output dropped", "most", phases=without_field("outputs", 1)),
    plan("inputs exchanged", "most", arguments=swapped("x", "z", "input")),
    plan("outputs exchanged", "backward", "finish", arguments=swapped("dgamma", "dbeta", "output")),
    plan("partial sums exchanged", "backward", "finish",
         arguments=swapped("sum_dy_partials_", "sum_dy_xhat_partials_", "workspace")),
    plan("partial sums exchanged: rows", "backward", arguments=swapped("sum_dy_partials_", "sum_dy_xhat_partials_",
         "workspace")),
    plan("statistics exchanged", "columns", "columns", arguments=swapped("mean", "rstd", "workspace")),
    plan("strides exchanged: inputs", "most", arguments=swapped("x", "z", "stride")),
    plan("strides exchanged: input, output", "small", arguments=swapped("x", "y", "stride")),
    plan("strides exchanged: backward", "backward", arguments=swapped("dy", "dx", "stride")),
    plan("too many rows a block in the grid", "small", grid=first_grid(per=13)),
    plan("half of the blocks", "small", grid=first_grid(per=16)),
    plan("a grid that is not limited", "late", grid=first_grid(limit=None)),
    plan("a grid limited too low", "late", grid=first_grid(limit=125)),
    plan("a column grid one short", "columns", "columns", grid=first_grid(fixed=16)),
    plan("a column grid that is not limited", "columns, rounds", "columns", grid=second_grid(limit=None)),
    plan("a column grid of every second row", "columns", "columns", grid=second_grid(per=2)),
    plan("fewer rows of partial sums than blocks", "columns, rounds", "columns", row_step=lambda k: k.row_step // 2),
    plan("rows of partial sums overlap", "columns", "columns", leading=lambda k: k.leading - 4),
    plan("no finish block", "backward", "finish", grid=first_grid(fixed=0)),
    plan("half of a block", "small", block=lambda k: k.block // 2),
    plan("two blocks in one", "small", block=lambda k: 2 * k.block),
    plan("half of a multipass block", "multipass", block=lambda k: k.block // 2),
    plan("half of a column block", "columns", "columns", block=lambda k: k.block // 2),
    plan("no finish without rows", "backward, no rows", "finish", always=lambda k: False),
    plan("a block reduced as a warp", "block", policies=other_policy("BlockReduce<Row, real, /* values */ 1>",
         "WarpReduce<Row>")),
    plan("rows of blocks that come and go", "late", policies=lambda k: tuple(re.sub(r"StaticRows<.*>", "OneRow<Row>",
         t) for t in k.policies)),
    plan("early release of rows that are not held", "tma block", policies=other_policy("early release */ false",
         "early release */ true")),
    plan("blocks of a cluster forgotten", "cluster registers", grid=first_grid(times=1)),
    plan("half the stages' memory", "tma", dynamic=lambda k: k.dynamic // 2),
    plan("a line too little of the stages' memory", "tma groups", dynamic=lambda k: k.dynamic - 128),
    plan("a line too little of the stages' memory: cp.async", "cp_async", dynamic=lambda k: k.dynamic - 128),
    plan("no room for the column sums", "cluster groups", dynamic=lambda k: k.dynamic // 4),
    plan("no room for the column sums: cp.async", "cp_async columns", dynamic=lambda k: k.dynamic // 4),
    plan("no room for the totals: TMA", "tma, no rows", dynamic=lambda k: 2048),
    plan("no clusters", "cluster", cluster=lambda k: 1),
    plan("clusters of clusters", "cluster", cluster=lambda k: 4),
    plan("a block of each cluster", "cluster", grid=first_grid(times=1)),
    plan("two clusters for one", "cluster", grid=first_grid(times=4)),
    plan("more blocks than owners", "tma persistent", grid=first_grid(limit=3)),
    plan("fewer blocks than owners", "tma persistent", grid=first_grid(limit=1)),
    plan("more clusters than owners", "cluster", grid=first_grid(limit=2)),
    plan("no block for no rows", "single launch, no rows", grid=first_grid(least=0)),
    plan("no launch for no rows", "single launch, no rows", always=lambda k: False),
    plan("inputs in one place", "tma columns", row=row(places=moved(1, -512))),
    plan("an input off its line", "tma columns", row=row(places=moved(1, 8))),
    plan("a result on another input", "tma most", row=row(results=moved(0, 256))),
    plan("a result in the next stage", "tma groups", row=row(results=moved(0, 4096))),
    Mutant("a counter that is not zero at first", "single launch",
           plan=lambda p: replace(p, workspace=tuple(replace(b, zeroed=False) for b in p.workspace))),
    Mutant("workspace halved", "rounds", plan=buffers(fixed=halved)),
    Mutant("workspace one short", "rounds", plan=buffers(fixed=less)),
    Mutant("workspace for statistics gone", "columns", plan=buffers(per_row=halved)),
    Mutant("sums in f32", "double", plan=lambda p: replace(p, accumulator=F32)),
]  # fmt: skip

LAUNCHES = [
    Mutant(
        f"{role} grid {dx:+} x {dy:+}",
        subject,
        grid=lambda k, n, role=role, dx=dx, dy=dy: (
            (k.grid[0](n) + dx, k.grid[1](n) + dy) if k.name.endswith(f"__{role}") else (k.grid[0](n), k.grid[1](n))
        ),
    )
    for subject, role, dx, dy in [
        ("small", "rows", -1, 0),
        ("block", "rows", -1, 0),
        ("block", "rows", 1, 0),
        ("multipass", "rows", 1, 0),
        ("small", "rows", 0, 1),
        ("backward", "rows", -1, 0),
        ("late", "rows", 1, 0),
        ("columns", "columns", -1, 0),
        ("columns", "columns", 0, -1),
        ("columns, rounds", "columns", 0, 1),
        ("columns", "rows", -1, 0),
    ]
]

PTX = [
    Mutant("division that is not rounded", "small", ptx=(("div.rn.f32", "div.approx.f32", 2),)),
    Mutant("a root that is not rounded", "small", ptx=(("sqrt.rn.f32", "sqrt.approx.f32", 1),)),
    Mutant("subnormals flushed", "small", ptx=(("sub.rn.f32", "sub.ftz.f32", 16),)),
]

# ---- passes and lowering ----

Patch = Callable[[], AbstractContextManager[Any]]


def after(name: str, change: Callable[[Graph], Graph]) -> Patch:
    """The pass ``name`` with a change to what it returns."""
    whole: Callable[..., Graph] = getattr(passes, name)
    return lambda: patch.object(passes, name, lambda *args: change(whole(*args)))


def instead(name: str, other: Callable[..., Graph]) -> Patch:
    return lambda: patch.object(passes, name, other)


def each(change: Callable[[Eqn], Eqn]) -> Callable[[Graph], Graph]:
    return lambda g: replace(g, eqns=tuple(map(change, g.eqns)))


def merged(a: str, b: str) -> Callable[[Graph], Graph]:
    """Uses of ``b`` become uses of ``a``, defined before it."""
    return lambda g: substitute(g, {g.values()[b]: g.values()[a]})


def unsigned(graph: Graph) -> Graph:
    """Every negated value by the value."""
    return substitute(graph, {e.out: e.args[0] for e in graph.eqns if e.op == "neg"})


def permuted(op: str, *order: int) -> Callable[[Graph], Graph]:
    return each(lambda e: replace(e, args=tuple(e.args[n] for n in order)) if e.op == op else e)


def renamed(op: str, new: str) -> Callable[[Graph], Graph]:
    return each(lambda e: replace(e, op=new) if e.op == op else e)


LOWERING = [importlib.import_module(f"lngen.lower.{m.name}") for m in pkgutil.iter_modules(lngen.lower.__path__)]


def lowered(name: str, subject: str, what: str, other: Callable[..., Any]) -> Mutant:
    """Lowering with another function called ``what``, which gets the whole one first."""
    homes = [m for m in LOWERING if hasattr(m, what)]
    whole = getattr(homes[0], what)

    def patched() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for home in homes:
            stack.enter_context(patch.object(home, what, lambda *args: other(whole, *args)))
        return stack

    return Mutant(name, subject, patch=patched)


def seen(**changes: Callable[[int], int]) -> Callable[..., Any]:
    """Lowering sees another chunk, segment, ... than the graph spells."""
    return lambda f, *args: replace(f(*args), **{n: c(getattr(f(*args), n)) for n, c in changes.items()})


PASSES = [
    Mutant("fma without its sign", "backward", patch=after("place_fma", unsigned)),
    Mutant("fma with factor for addend", "small", patch=after("place_fma", permuted("fma", 0, 2, 1))),
    Mutant("no fma", "groups", patch=instead("place_fma", lambda g: g)),
    Mutant("subtraction turned round", "small", patch=after("cse", permuted("sub", 1, 0))),
    Mutant("cse merges two means", "backward", patch=after("cse", merged("mean_dy_gamma", "mean_dy_gamma_xhat"))),
    Mutant("cse merges x and its centred", "small", patch=after("cse", merged("x32", "xc"))),
    Mutant("cse merges the column sums", "backward", patch=after("cse", merged("sum_dy_xhat", "sum_dy"))),
    Mutant("a mean over D + 1", "small", patch=instead("decompose", lambda g, d, p=passes.decompose: p(g, d + 1))),
    Mutant("a sum for a mean", "small", patch=after("cse", renamed("reduce_mean", "reduce_sum"))),
    Mutant("a root for its reciprocal", "small", patch=after("cse", renamed("rsqrt", "sqrt"))),
    Mutant("a maximum for a sum", "most", patch=after("cse", renamed("maximum", "add"))),
    lowered("chunk halved", "small", "problem", seen(chunk=halved)),
    lowered("chunk doubled", "small", "problem", seen(chunk=doubled)),
    lowered("segment halved", "segments", "problem", seen(segment=halved)),
    lowered("segment doubled", "segments", "problem", seen(segment=doubled)),
    lowered("segment halved: multipass", "multipass", "problem", seen(segment=halved)),
    lowered("blocks halved", "rounds", "problem", seen(blocks=halved)),
    lowered("a block less", "columns, rounds", "problem", seen(blocks=less)),
    lowered("sums of another dtype", "double", "accumulator", lambda f, g: F32),
    lowered("stages without lines", "cluster columns", "stage_share", lambda f, size, s, p: size * p.d // 4),
    lowered("stages of half a row", "tma columns", "stage_bytes", lambda f, s, p: f(s, p) // 2),
    lowered("room for half of the row groups", "backward", "partial_values", lambda f, s, p: f(s, p) // 2),
    lowered("row groups share nothing", "backward", "partial_values", lambda f, s, p: 0),
    lowered("room for half of what is exchanged", "cluster", "exchanged_values", lambda f, s, p: f(s, p) // 2),
    lowered("rows of partial sums that are not whole units", "backward", "leading_dimension", lambda f, p: f(p) - 1),
    lowered("vectors that cover a row taken for partial", "small", "is_exact", lambda f, s, p: True),
]  # fmt: skip

KERNELS = {
    "templates": of_templates(), "numbers": numbers(), "statements": STATEMENTS, "plans": PLANS, "launches": LAUNCHES,
    "ptx": PTX, "passes": PASSES,
}  # fmt: skip
