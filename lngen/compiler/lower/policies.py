"""What a schedule gives a row kernel: its C++ types, their objects, and the places of tensors in a stage."""

from __future__ import annotations

from dataclasses import dataclass

from lngen.compiler.ir import WIDE, Graph, Value, ctype
from lngen.compiler.problem import STAGED, Problem, Schedule
from lngen.compiler.problem.footprint import (
    exchanged_values,
    partial_rows,
    partial_values,
    scratch_numbers,
    stage_bytes,
    stage_share,
)


@dataclass(frozen=True)
class Place:
    """The place of a tensor's part of a row in a stage: IR name, C type, and the byte at which it starts.

    A stage is the shared memory of one row of one row group. A result may have the place of an input: a thread reads
    its part of the input before it writes its part of the result.
    """

    name: str
    ctype: str
    offset: int

    def __str__(self) -> str:
        return f"{self.name} at byte {self.offset}"

    @property
    def element(self) -> str:
        """The bytes of an element, in C."""
        return f"sizeof({self.ctype})"

    @property
    def start(self) -> str:
        """Where the part begins in a stage, in C."""
        return f"stage_ + /* bytes */ {self.offset}" if self.offset else "stage_"


def policies(s: Schedule, p: Problem) -> tuple[str, ...]:
    """The types of the kernel, one line each."""
    return tuple(f"using {name} = {text};" for name, text in _types(s, p))


def _types(s: Schedule, p: Problem) -> list[tuple[str, str]]:
    threads = _template("Block", threads=s.threads, rows=s.rows_per_block)
    if s.cluster > 1:
        threads = _template("Cluster", blocks=s.cluster, threads=s.threads, rows=s.rows_per_block)
    if is_exact(s, p):
        row = _template("RowLayout", threads, D=p.d, segment=p.segment, vector=p.chunk, access=s.vec)
    else:
        row = _template("PartialRowLayout", threads, D=p.d, segment=p.segment, vector=p.chunk, run=p.run, access=s.vec)
    types = [("Row", row)]
    if p.row_sums:
        kind = "BlockReduce" if s.threads > 32 else "WarpReduce"
        values = p.row_sums * (1 if s.form == "multipass" else -(-p.segments // s.cluster))
        types.append(("Reduce", f"{kind}<Row, {real(p)}, /* values */ {values}>" if s.threads > 32 else f"{kind}<Row>"))
    if exchanged_values(s, p):
        acquire = "AcquireAll" if p.column_sums and not s.acquire_shared else "AcquireShared"
        values = exchanged_values(s, p) // s.cluster
        types.append(("Exchange", f"ClusterExchange<Row, {real(p)}, /* values */ {values}, {acquire}>"))
    return [*types, ("Stream", _stream(s, p))]


def _stream(s: Schedule, p: Problem) -> str:
    grid = partial_rows(s, p) if p.column_sums else s.grid
    if s.form not in STAGED:
        return _template("StaticRows", "Row", grid=grid) if p.column_sums and s.form == "registers" else "OneRow<Row>"
    ring = {"grid": grid, "stages": s.stages, "stage_bytes": stage_bytes(s, p)}
    if s.form == "cp_async":
        return _template("CpAsyncStream", "Row", **ring)
    name = "ClusterDynamicTmaStream" if s.broadcast else "DynamicTmaStream" if s.dynamic else "TmaStream"
    return _template(name, "Row", **ring, early_release=str(s.early_release).lower())


def _template(name: str, *types: str, **values: int | str) -> str:
    """A template with its arguments, each value after a comment with its meaning."""
    listed = (f"/* {key.replace('_', ' ')} */ {value}" for key, value in values.items())
    return f"{name}<{', '.join([*types, *listed])}>"


def objects(s: Schedule, p: Problem, shared_sums: int) -> tuple[str, ...]:
    """The declarations of shared memory and of the policies' objects; ``shared_sums`` numbers are shared."""
    lines = []
    if shared_sums:  # shared by row reductions, column sums and their totals, one after the other
        numbers = max(shared_sums, scratch_numbers(s, p))
        lines.append(f"__shared__ __align__(16) {real(p)} sums_buffer_[{numbers}];")
    if p.row_sums and s.threads > 32 and shared_sums:
        lines += ["Reduce reduce_{*reinterpret_cast<Reduce::Buffers*>(sums_buffer_)};"]
    elif p.row_sums and s.threads > 32:
        lines += ["__shared__ Reduce::Buffers reduce_buffers_;", "Reduce reduce_{reduce_buffers_};"]
    elif p.row_sums:
        lines += ["Reduce reduce_;"]
    if exchanged_values(s, p):
        lines += ["__shared__ Exchange::Buffers exchange_buffers_;", "Exchange exchange_{exchange_buffers_};"]
    arguments = ["rows_"]
    if s.form in STAGED:
        arguments.append("ring_")
    if s.form in ("tma", "tma_unaligned"):
        lines.append("__shared__ Stream::Buffers stages_;")
        arguments.append("stages_")
    if s.dynamic:
        arguments.append("counter_")
    return (*lines, f"Stream stream_{{{', '.join(arguments)}}};")


def flush(s: Schedule, p: Problem) -> str:
    if not p.column_sums:
        return ""
    if s.form in STAGED:
        return "ring"
    return "in turn" if partial_values(s, p) else "threads"


def real(p: Problem) -> str:
    """The C type of sums."""
    return "double" if p.real_size == 8 else "float"


def unit(p: Problem) -> int:
    """Column sums in 16 bytes, if vectors are whole units."""
    count = 16 // p.real_size
    return count if p.chunk % count == 0 else 1


def leading_dimension(p: Problem) -> int:
    """The leading dimension of partial sums, in numbers: whole units."""
    return -(-p.d // unit(p)) * unit(p)


def is_exact(s: Schedule, p: Problem) -> bool:
    """True if the vectors of all threads cover a row exactly."""
    per_segment = -(-p.segment_chunks // s.threads)
    return p.segments * per_segment * s.threads * p.chunk == p.d


def places(
    graph: Graph, outputs: tuple[Value, ...], s: Schedule, p: Problem
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The places of the [M, D] inputs, and of the results that are stored by TMA, in a stage.

    A result takes the place of an input of its size, as long as there is one.
    """
    if s.form not in STAGED:
        return (), ()
    inputs = [v for v in graph.params if v.type.axes == WIDE]
    results = [v for v in outputs if v.type.axes == WIDE and s.tma_store]
    free, offset, at = list(inputs), 0, dict[Value, int]()
    for v in (*inputs, *results):
        size = v.type.dtype.size
        shares = v in results and s.form != "tma_unaligned"  # an unaligned result may have another misalignment
        same = next((u for u in free if u.type.dtype.size == size), None) if shares else None
        if same is not None:
            free.remove(same)
            at[v] = at[same]
        else:
            at[v] = offset
            offset += stage_share(size, s, p)

    def listed(values: list[Value]) -> tuple[Place, ...]:
        return tuple(Place(v.name, ctype(v.type.dtype), at[v]) for v in values)

    return listed(inputs), listed(results)
