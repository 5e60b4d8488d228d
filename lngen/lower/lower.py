"""Spec and schedule -> plan: which kernels, what each holds, loads, adds and stores."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, count

from lngen.errors import LowerError
from lngen.ir import REDUCTIONS, WIDE, D, DType, Eqn, Graph, M, Value, print_eqn
from lngen.ir.ops import compute_dtype, ctype
from lngen.lower.arguments import tensors, workspace
from lngen.lower.constants import (
    COLUMN_THREADS,
    abreast,
    column_constants,
    finish_columns,
    finish_constants,
    narrow_constants,
    pitch,
    row_constants,
)
from lngen.lower.in_registers import in_registers
from lngen.lower.parts import Argument, Constant, Spell, Sum, aligned
from lngen.lower.phases import Style, before, phases, speller, tensor, uniform
from lngen.lower.plan import Buffer, Extent, Finish, Kernel, Plan
from lngen.lower.split import Split, column_graph, split
from lngen.lower.staged import staged
from lngen.passes.edit import extract
from lngen.schedule import (
    STAGED,
    Problem,
    Schedule,
    check,
    partial_numbers,
    partial_rows,
    problem,
    scratch_numbers,
)
from lngen.spec import Spec

MANY = 2**40  # more rows than any grid has owners for

NARROW = ("finish", "narrow")  # a thread of them has one column

# When a kernel adds to its column sums, and where it has them; a row group past the last row adds nothing.
ACCUMULATE = {
    "row_columns": ("if (live) ", "{0}_acc[k][i]"),
    "row_staged": ("if (live) ", "{0}_acc[k][i]"),
    "columns": ("", "{0}_acc[i]"),
}


def lower(spec: Spec, schedule: Schedule) -> Plan:
    """The plan of ``spec`` under ``schedule``; ScheduleError if it is illegal, LowerError if no structure fits."""
    graph = spec.graph()
    facts = problem(graph, spec.d)
    check(schedule, facts)
    return _Lowering(spec, schedule, graph, facts).plan()


class _Lowering:
    """One spec under one schedule."""

    def __init__(self, spec: Spec, schedule: Schedule, graph: Graph, facts: Problem) -> None:
        self.spec, self.schedule, self.graph, self.facts = spec, schedule, graph, facts
        self.parts: Split = split(graph)
        self.real = _real(graph)
        self.stem = f"{spec.slug}__{schedule.slug}"
        self.out = _chunk_suffix(graph)
        self.partials = {e.out: f"{e.out.name}_partial" for e in self.parts.sums}

    def plan(self) -> Plan:
        """The kernels in launch order and their workspace."""
        kernels: list[Kernel] = []
        buffers: list[Buffer] = []
        s, rows = self.schedule, tuple(r for r in self.graph.results if M in r.type.axes)
        if s.one_launch:
            buffers.append(Buffer("arrivals", DType.F32, fixed=1, zeroed=True))
        if s.claim:
            buffers.append(Buffer("claimed", DType.F64, fixed=1, zeroed=True))
        if self.parts.sums and s.form == "stream":
            columns, handed = column_graph(self.parts, self.graph)
            if rows or handed:
                kernels.append(self._rows(replace(self.graph, results=(*rows, *handed)), (), (*rows, *handed), handed))
            kernels.append(self._columns(columns, handed))
            buffers += [Buffer(v.name, v.type.dtype, per_row=1) for v in handed]
        elif self.parts.rows.results:
            kernels.append(self._rows(self.parts.rows, self.parts.sums, rows, ()))
        if self.parts.finish and not self.parts.sums:
            kernels.append(self._narrow(self.parts.finish))
        elif self.parts.finish:
            finish = self._finish(self.parts.finish)
            if s.one_launch:
                kernels[-1] = self._in_one_launch(kernels[-1], finish)
            else:
                kernels.append(finish)
            per_sum = partial_rows(s, self.facts) * pitch(self.facts)
            buffers += [Buffer(name, v.type.dtype, fixed=per_sum) for v, name in self.partials.items()]
        return Plan(self.spec, self.schedule, self.graph, tuple(kernels), tuple(buffers))

    # ---- the kernels ----

    def _rows(
        self, graph: Graph, sums: tuple[Eqn, ...], outputs: tuple[Value, ...], handed: tuple[Value, ...]
    ) -> Kernel:
        """Rows in registers, staged in shared memory, or streamed; with column sums the grid persists."""
        needed = tuple(dict.fromkeys((*outputs, *(a for e in sums for a in e.args))))
        graph = extract(graph, graph.name, graph.params, needed)
        s, p = self.schedule, replace(self.facts, column_sums=len(sums))
        others = {"registers": "row_columns" if sums else "row", "stream": "row_stream"}
        template = others.get(s.form, "row_claimed" if s.claim else "row_staged")
        kernel = self._kernel(
            "rows",
            template,
            graph,
            [
                *tensors(graph.params, "input"),
                *tensors(outputs, "output", handed),
                *(workspace(self.partials[e.out], self.real) for e in sums),
                *[Argument("claimed_ptr", "unsigned long long", "workspace", "claimed")] * s.claim,
            ],
            row_constants(s, p),
            sums,
            outputs,
            spell=speller("{0}[k][i]" if s.form == "registers" else "{0}[i]", graph),
            grid=(_row_grid(s, p), Extent()),
            block=s.block,
            shared=_scratch(s, p),
        )
        if s.form in STAGED:
            return staged(kernel, graph, outputs, s, p)
        return in_registers(kernel, s, p) if s.form == "registers" else replace(kernel, start="seg * SEGMENT")

    def _columns(self, graph: Graph, handed: tuple[Value, ...]) -> Kernel:
        """Column sums alone, a thread per chunk of columns: for rows too wide to keep their sums in one block."""
        s, p = self.schedule, self.facts
        partials = [workspace(self.partials[e.out], self.real) for e in self.parts.sums]
        return self._kernel(
            "columns",
            "columns",
            graph,
            [*tensors(graph.params, "input", handed), *partials],
            column_constants(s, p),
            self.parts.sums,
            (),
            spell=speller("{0}[i]", graph),
            grid=(Extent(-(-p.d // (COLUMN_THREADS * p.chunk))), Extent(per=1, limit=partial_rows(s, p))),
            block=COLUMN_THREADS,
        )

    def _finish(self, graph: Graph) -> Kernel:
        """The partial sums of all blocks added in their order, and what is computed from the totals."""
        s, p = self.schedule, self.facts
        columns = finish_columns(s, p)
        narrow = [v for v in graph.params if v not in self.partials]
        partials = [workspace(name, self.real, const=True) for v, name in self.partials.items() if v in graph.params]
        kernel = self._kernel(
            "finish",
            "finish",
            graph,
            [*tensors(narrow, "input"), *tensors(graph.results, "output"), *partials],
            finish_constants(s, p),
            (),
            graph.results,
            spell=speller("", graph, "{0}_ptr[col]", known=tuple(self.partials)),
            grid=(Extent(-(-p.d // columns)), Extent()),
            block=columns // abreast(s, p) * p.strands,
            shared=len(self.parts.sums) * p.strands * columns,
        )
        return replace(kernel, always=True, accumulators=_sums(self.parts.sums))

    def _narrow(self, graph: Graph) -> Kernel:
        """What has no rows and needs nothing of theirs, a thread per column."""
        kernel = self._kernel(
            "narrow",
            "narrow",
            graph,
            [*tensors(graph.params, "input"), *tensors(graph.results, "output")],
            narrow_constants(self.facts),
            (),
            graph.results,
            spell=speller("", graph, "{0}_ptr[col]"),
            grid=(Extent(-(-self.facts.d // COLUMN_THREADS)), Extent()),
            block=COLUMN_THREADS,
        )
        return replace(kernel, always=True)

    def _in_one_launch(self, rows: Kernel, finish: Kernel) -> Kernel:
        """The row kernel with the finish behind a grid barrier; it serves the finish with the memory it has."""
        named = {a.name for a in rows.arguments}
        own = {c.name for c in rows.constants}
        in_stages = rows.dynamic > 0
        grid, tiles = rows.grid[0], finish.grid[0](0)
        # Few rows have few blocks, but the finish has work for one a tile.
        least = min(grid(MANY), -(-tiles // rows.cluster) * rows.cluster)
        return replace(
            rows,
            # What an earlier block has written is read here: nothing in the workspace is constant.
            arguments=(
                *(replace(a, const=a.const and a.kind != "workspace") for a in rows.arguments),
                *(a for a in finish.arguments if a.name not in named),
                Argument("arrivals_ptr", "unsigned", "workspace", "arrivals"),
            ),
            constants=(*rows.constants, *(c for c in finish.constants if c.name not in own)),
            finish=Finish(
                finish.accumulators,
                finish.phases,
                scalars=tuple(t for t in finish.scalars if t not in rows.scalars),
                uniform=aligned(u for u in finish.uniform if u.text not in {v.text for v in rows.uniform}),
            ),
            grid=(replace(grid, least=least), rows.grid[1]),
            cooperative=True,
            always=True,
            shared=rows.shared if in_stages else max(rows.shared, finish.shared),
            dynamic=max(rows.dynamic, finish.shared * self.real.size) if in_stages else 0,
            totals="reinterpret_cast<real*>(staged)" if in_stages else "scratch",
        )

    def _kernel(
        self,
        role: str,
        template: str,
        graph: Graph,
        arguments: list[Argument],
        constants: list[Constant],
        sums: tuple[Eqn, ...],
        outputs: tuple[Value, ...],
        *,
        spell: Spell,
        grid: tuple[Extent, Extent],
        block: int,
        shared: int = 1,
    ) -> Kernel:
        """What every kernel has."""
        store = "{0}_ptr[col] = {1};" if template in NARROW else f"{{0}}_{self.out}[i] = {{1}};"
        in_stages = role == "rows" and self.schedule.form in STAGED
        last = in_stages and self.schedule.bulk_store
        keeps = role == "rows" and (self.schedule.hold or self.schedule.form == "registers")
        style = Style(spell, self._guard(), ACCUMULATE.get(template, ("", "")), store, in_stages, last, keeps)
        listed = phases(graph, sums, outputs, style)
        return Kernel(
            name=f"{self.stem}__{role}",
            template=f"{template}.cu.jinja",
            arguments=(Argument("rows", "long long", "rows"), *arguments),
            constants=tuple(constants),
            phases=listed,
            grid=grid,
            block=block,
            resident=self.schedule.resident if role == "rows" else 1,
            real=ctype(self.real),
            absent="-0.0f" if self.real is DType.F32 else "-0.0",
            uniform=uniform(graph, spell),
            per_row=before(graph, spell),
            tiles=tuple(tensor(v) for v in graph.params if v.type.axes == WIDE),
            columns=tuple(tensor(v) for v in graph.params if v.type.axes == (D,)),
            row_inputs=tuple(tensor(v) for v in graph.params if v.type.axes == (M,)),
            scalars=tuple(tensor(v) for v in graph.params if not v.type.axes),
            accumulators=_sums(sums),
            most=max((len(f.sums) for p in listed for f in p.folds), default=0) or 1,
            shared=shared,
            out=self.out,
        )

    def _guard(self) -> str:
        """When a chunk takes a term: not beyond the end of a row that ends within it."""
        return "if (behind<RUN, JUMP>(i) < D - col) " if self.facts.d % self.facts.chunk else ""


def _row_grid(s: Schedule, p: Problem) -> Extent:
    """As many owners as share the rows: persistent with column sums and with stages, else a block for its rows."""
    if p.column_sums:
        return Extent(per=s.rows, limit=partial_rows(s, p), times=s.cluster)
    if s.form in STAGED:
        return Extent(per=s.rows, limit=s.owners, times=s.cluster)
    return Extent(per=s.rows, times=s.cluster)


def _scratch(s: Schedule, p: Problem) -> int:
    """Numbers of static shared memory for what is folded at once, at least one where a kernel names it."""
    return max(1, scratch_numbers(s, p), 0 if s.form in STAGED else partial_numbers(s, p))


def _sums(eqns: tuple[Eqn, ...]) -> tuple[Sum, ...]:
    return tuple(Sum(e.out.name, n, print_eqn(e)) for n, e in enumerate(eqns))


def _chunk_suffix(graph: Graph) -> str:
    """What the name of a result gets for the chunk it is stored from, so that no value is called the same."""
    names = graph.values()
    suffixes = chain(["out"], (f"out_{n}" for n in count(1)))
    return next(s for s in suffixes if not any(f"{r.name}_{s}" in names for r in graph.results))


def _real(graph: Graph) -> DType:
    """The one dtype sums are added in."""
    dtypes = {e.out.type.dtype for e in graph.eqns if e.op in REDUCTIONS}
    if len(dtypes) > 1:
        raise LowerError(f"graph @{graph.name} reduces in f32 and in f64; cast the operands to one dtype.")
    computed = (compute_dtype(p.type.dtype) for p in graph.params)
    return next(iter(dtypes), max(computed, key=lambda t: t.size, default=DType.F32))
