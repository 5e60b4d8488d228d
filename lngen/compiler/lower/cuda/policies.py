"""The types of a kernel: the layout of rows over threads, reductions, exchanges, streams, and their objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lngen.compiler.ir import DType, ctype
from lngen.compiler.problem import STAGED, Problem, Schedule
from lngen.compiler.problem.footprint import (
    column_threads,
    exchanged_values,
    groups_of_a_block,
    met_bytes,
    met_numbers,
    ring_shared,
    row_blocks,
    row_numbers,
    scratch_numbers,
    stage_bytes,
    vector_chunks,
)
from lngen.rules import Stretch


def row_types(s: Schedule, p: Problem, exact: bool, overtaken: bool) -> tuple[str, ...]:
    """The types of the kernel, one line each.

    exact      the vectors of all threads cover a row exactly
    overtaken  a block reads an element of the row, and another block may store a result there
    """
    return tuple(f"using {name} = {text};" for name, text in _types(s, p, exact, overtaken))


def _types(s: Schedule, p: Problem, exact: bool, overtaken: bool) -> list[tuple[str, str]]:
    threads = _template("Block", threads=s.threads, rows=s.rows_per_block)
    if s.cluster > 1:
        threads = _template("Cluster", blocks=s.cluster, threads=s.threads, rows=s.rows_per_block)
    if (chunks := vector_chunks(s, p)) > 1:
        names = {"D": p.d, "segment": p.segment, "head": p.halved, "vector": p.chunk * chunks, "access": s.vec}
        row = _template("HeadRowLayout", threads, **names)
    elif exact:
        row = _template("RowLayout", threads, D=p.d, segment=p.segment, vector=p.chunk, access=s.vec)
    else:
        row = _template("PartialRowLayout", threads, D=p.d, segment=p.segment, vector=p.chunk, run=p.run, access=s.vec)
    types = [("Row", row)]
    if p.row_sums:
        kind = "BlockReduce" if s.threads > 32 else "WarpReduce"
        values = p.row_sums * (1 if s.form == "multipass" else -(-p.segments // s.cluster))
        types.append(("Reduce", f"{kind}<Row, {real(p)}, /* values */ {values}>" if s.threads > 32 else f"{kind}<Row>"))
    if exchanged_values(s, p):
        acquire = "AcquireAll" if overtaken or (p.column_sums and not s.acquire_shared) else "AcquireShared"
        values = exchanged_values(s, p) // s.cluster
        types.append(("Exchange", f"ClusterExchange<Row, {real(p)}, /* values */ {values}, {acquire}>"))
    return [*types, *([("Cut", cut_type(p.stretch))] if p.stretch and p.column_sums else []), ("Stream", _stream(s, p))]


def cut_type(stretch: Stretch) -> str:
    """How sets of rows are cut into stretches."""
    return _template("Stretch", **stretch._asdict())


def _stream(s: Schedule, p: Problem) -> str:
    grid = row_blocks(s, p) if p.column_sums else s.grid
    ring = {"grid": grid, "stages": s.stages, "stage_bytes": stage_bytes(s, p)}
    if p.stretch and p.column_sums and s.form != "multipass":
        return _stretch_stream(s, ring)
    if s.form not in STAGED:
        return _template("StaticRows", "Row", grid=grid) if p.column_sums and s.form == "registers" else "OneRow<Row>"
    if s.form == "cp_async":
        return _template("CpAsyncStream", "Row", **ring)
    name = "ClusterDynamicTmaStream" if s.broadcast else "DynamicTmaStream" if s.dynamic else "TmaStream"
    return _template(name, "Row", **ring, early_release=str(s.early_release).lower())


def _stretch_stream(s: Schedule, ring: dict[str, int]) -> str:
    if s.form == "registers":
        return f"StretchRows<Row, /* grid */ {ring['grid']}, Cut>"
    if s.form == "cp_async":
        return _template("StretchCpAsyncStream", "Row", **ring).replace(">", ", Cut>")
    stream = _template("StretchTmaStream", "Row", **ring, early_release=str(s.early_release).lower())
    return stream.replace(">", ", Cut>")


def _template(name: str, *types: str, **values: int | str) -> str:
    """A template with its arguments, each value after a comment with its meaning."""
    listed = (f"/* {key.replace('_', ' ')} */ {value}" for key, value in values.items())
    return f"{name}<{', '.join([*types, *listed])}>"


def row_objects(
    s: Schedule, p: Problem, shared_sums: int, of_vectors: Iterable[str], of_elements: Iterable[tuple[str, DType]]
) -> tuple[str, ...]:
    """The declarations of shared memory and of the policies' objects; ``shared_sums`` numbers are shared.

    ``of_vectors``: the arrays in which the numbers of vectors meet, ``of_elements`` those of elements of rotated heads.
    """
    lines, numbers = [], "[Row::ROWS][Row::BLOCK_COLUMNS / Row::N]"
    if shared_sums:  # shared by rows, column sums and their totals, one after the other
        lines.append(f"__shared__ __align__(16) {real(p)} sums_buffer_[{max(shared_sums, row_numbers(s, p))}];")
    begin, each = scratch_numbers(s, p), met_numbers(s, p) // max(p.block_folds, 1)
    for n, name in enumerate(of_vectors):
        place = f"sums_buffer_[/* {real(p)}s */ {begin + n * each}]"
        shared = f"auto& {name} = reinterpret_cast<{real(p)} (&){numbers}>({place});"
        lines.append(shared if shared_sums else f"__shared__ {real(p)} {name}{numbers};")
    lines += _of_elements(s, p, of_elements)
    if p.row_sums and s.threads > 32 and shared_sums:
        lines += ["Reduce reduce_{*reinterpret_cast<Reduce::Buffers*>(sums_buffer_)};"]
    elif p.row_sums and s.threads > 32:
        lines += ["__shared__ Reduce::Buffers reduce_buffers_;", "Reduce reduce_{reduce_buffers_};"]
    elif p.row_sums:
        lines += ["Reduce reduce_;"]
    if exchanged_values(s, p):
        lines += ["__shared__ Exchange::Buffers exchange_buffers_;", "Exchange exchange_{exchange_buffers_};"]
    arguments = ["rows_", *["inner_"] * (p.stretch is not None and p.column_sums > 0)]
    if s.form in STAGED:
        arguments.append("ring_")
    if s.form in ("tma", "tma_unaligned"):
        lines.append("__shared__ Stream::Buffers stages_;")
        arguments.append("stages_")
    if s.dynamic:
        arguments.append("counter_")
    return (*lines, f"Stream stream_{{{', '.join(arguments)}}};")


def _of_elements(s: Schedule, p: Problem, arrays: Iterable[tuple[str, DType]]) -> Iterator[str]:
    """The declarations of the arrays in which elements meet, in dynamic shared memory behind the stages."""
    offset = ring_shared(s, p)
    for n, (name, dtype) in enumerate(arrays):
        if n == 0 and s.form not in STAGED:
            yield "extern __shared__ __align__(128) unsigned char ring_[];"
        yield f"auto& {name} = *reinterpret_cast<Elements<Row, {ctype(dtype)}>*>(ring_ + /* bytes */ {offset});"
        offset += met_bytes(dtype.size, s, p)


def real(p: Problem) -> str:
    """The C type of sums."""
    return "double" if p.real_size == 8 else "float"


def column_types(s: Schedule, p: Problem) -> tuple[str, ...]:
    """The types of the kernel that only adds columns, one line each."""
    return (_column_type(s, p), *([f"using Cut = {cut_type(p.stretch)};"] if p.stretch else []))


def _column_type(s: Schedule, p: Problem) -> str:
    threads, groups = column_threads(s, p), groups_of_a_block(s, p)
    vector = f"/* vector */ {p.chunk}, /* access */ {s.vec}"
    if groups == 1:
        return f"using Row = ColumnLayout</* D */ {p.d}, /* threads */ {threads}, {vector}>;"
    block = f"Block</* threads */ {threads}, /* rows */ {groups}>"
    return f"using Row = GroupedColumnLayout<{block}, /* D */ {p.d}, {vector}>;"
