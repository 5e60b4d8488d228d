"""Spec and schedule -> plan: which kernels, what each holds, loads, adds and stores."""

from __future__ import annotations

from dataclasses import replace

from lngen.errors import LowerError
from lngen.ir import D, DType, Eqn, Graph, M, Value, print_eqn
from lngen.ir.ops import compute_dtype
from lngen.lower.phases import Spell, Style, before, phases, tensor, uniform
from lngen.lower.plan import Argument, Buffer, Constant, Extent, Finish, Kernel, Place, Plan, Sum, aligned, ctype
from lngen.lower.split import Split, column_graph, split
from lngen.passes.edit import extract
from lngen.schedule import (
    STAGED,
    Problem,
    Schedule,
    check,
    dynamic_shared,
    folds_blocks,
    met_numbers,
    partial_numbers,
    piece,
    problem,
    scratch_numbers,
    slots,
    stage_bytes,
    stage_share,
)
from lngen.spec import Spec

FINISH_COLUMNS = 32
COLUMN_THREADS = 128

# How a kernel adds to its column sums; a row group past the last row adds nothing.
ACCUMULATE = {
    "row_columns": "if (live) {0}_acc[k][i] = {0}_acc[k][i] + {1};",
    "row_staged": "if (live) {0}_acc[k][i] = {0}_acc[k][i] + {1};",
    "columns": "{0}_acc[i] = {0}_acc[i] + {1};",
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
        self.partials = {e.out: f"{e.out.name}_partial" for e in self.parts.sums}
        # Blocks that write a partial row each, or one for every ``folded`` of them.
        self.folded = folds_blocks(schedule, facts)

    def plan(self) -> Plan:
        """The kernels in launch order and their workspace."""
        kernels: list[Kernel] = []
        buffers: list[Buffer] = []
        s, rows = self.schedule, tuple(r for r in self.graph.results if M in r.type.axes)
        if s.one_launch:
            buffers.append(Buffer("arrivals", DType.F32, fixed=1, zeroed=True))
        if self.parts.sums and s.form == "stream":
            columns, handed = column_graph(self.parts, self.graph)
            if rows or handed:
                kernels.append(self._rows(replace(self.graph, results=(*rows, *handed)), (), (*rows, *handed), handed))
            kernels.append(self._columns(columns, handed))
            buffers += [Buffer(v.name, v.type.dtype, per_row=1) for v in handed]
        elif self.parts.rows.results:
            kernels.append(self._rows(self.parts.rows, self.parts.sums, rows, ()))
        if self.parts.finish:
            if s.one_launch:
                kernels[-1] = self._in_one_launch(kernels[-1], self._finish(self.parts.finish))
            else:
                kernels.append(self._finish(self.parts.finish))
            per_sum = self._partial_rows() * self.spec.d
            buffers += [Buffer(name, v.type.dtype, fixed=per_sum) for v, name in self.partials.items()]
        return Plan(self.spec, self.schedule, self.graph, tuple(kernels), tuple(buffers))

    def _partial_rows(self) -> int:
        return -(-self.facts.blocks // self.folded)

    # ---- the kernels ----

    def _rows(
        self, graph: Graph, sums: tuple[Eqn, ...], outputs: tuple[Value, ...], scratch: tuple[Value, ...]
    ) -> Kernel:
        """Rows in registers, staged in shared memory, or streamed; with column sums the grid persists."""
        graph = _needed(graph, (*outputs, *(e.args[0] for e in sums)))
        s, p = self.schedule, replace(self.facts, column_sums=len(sums))
        template = {"registers": "row_columns" if sums else "row", "stream": "row_stream"}.get(s.form, "row_staged")
        arguments = [*_inputs(graph), *_outputs(outputs, scratch)]
        arguments += [_workspace(self.partials[e.out], self.real) for e in sums]
        kernel = self._kernel(
            "rows", template, graph, arguments, self._row_constants(p), sums, outputs,
            spell=_speller("[k][i]" if s.form == "registers" else "[i]", graph),
            grid=(self._row_grid(p), Extent()),
            block=s.block,
            shared=_scratch(s, p),
        )  # fmt: skip
        kernel = replace(kernel, stashes=partial_numbers(s, p) > 0)
        if s.form not in STAGED:
            return kernel
        places, results = _places(graph, outputs, s, p)
        return replace(
            kernel,
            dynamic=dynamic_shared(s, p),
            cluster=s.cluster * self.folded,
            copy=f"_copy_{s.form}.cuh.jinja",
            places=places,
            results=results,
            barriers=s.form == "bulk",
            shares=s.cluster > 1,
            exchanged=met_numbers(s, p),
            folds_blocks=self.folded > 1,
        )

    def _row_constants(self, p: Problem) -> list[Constant]:
        """The numbers of a row kernel."""
        s = self.schedule
        sums, staged, streamed = p.column_sums > 0, s.form in STAGED, s.form == "stream"
        per_segment = -(-p.segment_chunks // s.threads)
        exact = p.segments * per_segment * s.threads * p.chunk == p.d
        constants = [
            Constant("D", p.d, "features per row"),
            Constant("CHUNK", p.chunk, "consecutive elements a thread owns, added left to right"),
            Constant("THREADS", s.threads, "threads per row" + " and block" * (s.cluster > 1)),
            Constant("SLOTS", slots(s, p), "chunks per thread" + (" and segment" if streamed else "")),
            Constant("SEGMENT", p.segment, "elements per segment of a row"),
            Constant("VEC", s.vec, "elements per memory access"),
            Constant("EXACT", int(exact), "1 if the chunks of all threads cover the row exactly"),
        ]
        if not streamed:
            constants.append(Constant("ROWS", s.rows, "rows a block works on side by side"))
            constants.append(Constant("SEGMENT_SLOTS", per_segment, "chunks per thread and segment"))
        if staged:
            constants += [
                Constant("CLUSTER", s.cluster, "blocks that share a row"),
                Constant("STAGES", s.stages, "rows in flight per row group"),
                Constant("STAGE_BYTES", stage_bytes(s, p), "shared memory of a row"),
                Constant("BULK_STORE", int(s.bulk_store), "1 if results leave through shared memory"),
                Constant("KEEP", int(s.keep), "1 to keep [D] inputs in registers"),
                Constant("BOUND", p.d if not exact else 2**31 - 1, "columns from here on are not there"),
            ]
        if sums or staged:
            owners = p.blocks if sums else s.owners
            fixed = "; fixed by the graph" if sums else ""
            constants.append(Constant("OWNERS", owners, f"blocks or clusters that share the rows{fixed}"))
        if staged or sums:
            constants.append(Constant("PIECE", piece(s, p), "elements of a row a block has"))
        if sums and not streamed:
            constants.append(Constant("UNIT", _unit(p), "column sums moved together"))
            constants.append(Constant("FOLDED", self.folded, "blocks that fold their column sums"))
        if sums and s.form == "registers":
            constants.append(Constant("PREFETCH", int(s.prefetch), "1 to load the next row while computing this one"))
        return constants

    def _row_grid(self, p: Problem) -> Extent:
        s = self.schedule
        if p.column_sums and s.form != "stream":
            return Extent(per=s.rows, limit=p.blocks, times=s.cluster, multiple=self.folded)
        if s.form in STAGED:
            return Extent(per=s.rows, limit=s.owners, times=s.cluster)
        return Extent(per=s.rows)

    def _columns(self, graph: Graph, handed: tuple[Value, ...]) -> Kernel:
        """Column sums alone, a thread per chunk of columns: for rows too wide to keep their sums in one block."""
        p = self.facts
        columns_per_block = COLUMN_THREADS * p.chunk
        constants = [
            Constant("D", p.d, "features per row"),
            Constant("CHUNK", p.chunk, "consecutive columns a thread owns"),
            Constant("THREADS", COLUMN_THREADS, "threads per block"),
            Constant("VEC", self.schedule.vec, "elements per memory access"),
            Constant("OWNERS", p.blocks, "blocks that share the rows; fixed by the graph"),
        ]
        arguments = [
            *_inputs(graph, handed),
            *(_workspace(self.partials[e.out], self.real) for e in self.parts.sums),
        ]
        return self._kernel(
            "columns", "columns", graph, arguments, constants, self.parts.sums, (),
            spell=_speller("[i]", graph),
            grid=(Extent(-(-p.d // columns_per_block)), Extent(per=1, limit=p.blocks)),
            block=COLUMN_THREADS,
            shared=1,
        )  # fmt: skip

    def _finish(self, graph: Graph) -> Kernel:
        """The partial sums of all blocks added in their order, and what is computed from the totals."""
        p = self.facts
        constants = [
            Constant("D", p.d, "features per row"),
            Constant("SUMS", len(self.parts.sums), "column sums"),
            Constant("COLUMNS", FINISH_COLUMNS, "columns per block"),
            Constant("STRANDS", p.strands, "threads that share a column"),
            Constant("PARTIALS", self._partial_rows(), "partial rows at most"),
            Constant("TOGETHER", p.cluster // self.folded, "partial rows that are folded first"),
            Constant("PER_PARTIAL", p.groups * self.folded, "rows side by side behind a partial row"),
        ]
        inputs = [a for a in _inputs(graph) if a.tensor not in [v.name for v in self.partials]]
        partials = [_workspace(name, self.real, const=True) for v, name in self.partials.items() if v in graph.params]
        return self._kernel(
            "finish", "finish", graph,
            [*inputs, *_outputs(graph.results, ()), *partials], constants, (), graph.results,
            spell=_speller("", graph, pointer="[col]", known=tuple(self.partials)),
            grid=(Extent(-(-p.d // FINISH_COLUMNS)), Extent()),
            block=FINISH_COLUMNS * p.strands,
            shared=len(self.parts.sums) * p.strands * FINISH_COLUMNS,
            always=True,
        )  # fmt: skip

    def _in_one_launch(self, rows: Kernel, finish: Kernel) -> Kernel:
        """The row kernel with the finish behind a grid barrier."""
        known = {a.name for a in rows.arguments}
        own = {c.name for c in rows.constants}
        computed = {u.text for u in rows.uniform}
        return replace(
            rows,
            scalars=(*rows.scalars, *(t for t in finish.scalars if t not in rows.scalars)),
            uniform=aligned((*rows.uniform, *(u for u in finish.uniform if u.text not in computed))),
            arguments=(
                *(replace(a, const=a.const and a.kind != "workspace") for a in rows.arguments),
                *(a for a in finish.arguments if a.name not in known),
                Argument("arrivals_ptr", "unsigned", "workspace", "arrivals"),
            ),
            constants=(*rows.constants, *(c for c in finish.constants if c.name not in own)),
            finish=Finish(finish.accumulators, finish.phases),
            grid=(replace(rows.grid[0], least=max(self.folded, self.schedule.cluster)), rows.grid[1]),
            cooperative=True,
            always=True,
            shared=rows.shared if rows.dynamic else max(rows.shared, finish.shared),
            dynamic=max(rows.dynamic, finish.shared * self.real.size) if rows.dynamic else 0,
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
        shared: int,
        always: bool = False,
    ) -> Kernel:
        store = "{0}_ptr[col] = {1};" if template == "finish" else "{0}_out[i] = {1};"
        staged = template == "row_staged"
        last = staged and self.schedule.bulk_store
        style = Style(spell, self._guard, ACCUMULATE.get(template, ""), store, staged, last)
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
            tiles=tuple(tensor(v) for v in graph.params if v.type.axes == (M, D)),
            columns=tuple(tensor(v) for v in graph.params if v.type.axes == (D,) and v not in self.partials),
            row_inputs=tuple(tensor(v) for v in graph.params if v.type.axes == (M,)),
            scalars=tuple(tensor(v) for v in graph.params if not v.type.axes),
            accumulators=tuple(
                Sum(e.out.name, n, print_eqn(e))
                for n, e in enumerate(sums if template != "finish" else self.parts.sums)
            ),
            most=max((len(f.sums) for p in listed for f in p.folds), default=0) or 1,
            shared=shared,
            always=always,
        )

    def _guard(self, term: str, absent: str) -> str:
        """A term of a row sum or maximum, absent beyond the end of a row that ends within a chunk."""
        return f"(i < D - col ? {term} : {absent})" if self.facts.d % self.facts.chunk else term


def _scratch(s: Schedule, p: Problem) -> int:
    """Numbers of static shared memory for what is folded at once, at least one where a kernel names it."""
    return max(1, scratch_numbers(s, p), 0 if s.form in STAGED else partial_numbers(s, p))


def _unit(p: Problem) -> int:
    """Column sums that are 16 bytes, if rows are whole units."""
    unit = 16 // p.real_size
    return unit if p.d % unit == 0 and p.chunk % unit == 0 else 1


def _places(
    graph: Graph, outputs: tuple[Value, ...], s: Schedule, p: Problem
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Where the [M, D] inputs, and the results that leave in bulk, lie in a stage.

    A result takes the place of an input of its size: a thread has read a chunk before it writes one.
    """
    inputs = [v for v in graph.params if v.type.axes == (M, D)]
    wide = [v for v in outputs if v.type.axes == (M, D)] if s.bulk_store else []
    at, offset, free = {}, 0, list(inputs)
    for v in inputs:
        at[v] = offset
        offset += stage_share(v.type.dtype.size, s, p)
    for v in wide:
        same = next((u for u in free if u.type.dtype.size == v.type.dtype.size), None)
        if same is None:
            at[v] = offset
            offset += stage_share(v.type.dtype.size, s, p)
        else:
            free.remove(same)
            at[v] = at[same]
    placed = {v: Place(v.name, ctype(v.type.dtype), at[v]) for v in at}
    return tuple(placed[v] for v in inputs), tuple(placed[v] for v in wide)


def _real(graph: Graph) -> DType:
    """The one dtype sums are added in."""
    dtypes = {e.out.type.dtype for e in graph.eqns if e.op in ("reduce_sum", "reduce_max")}
    if len(dtypes) > 1:
        raise LowerError(f"graph @{graph.name} reduces in f32 and in f64; cast the operands to one dtype.")
    computed = (compute_dtype(p.type.dtype) for p in graph.params)
    return next(iter(dtypes), max(computed, key=lambda t: t.size, default=DType.F32))


def _needed(graph: Graph, results: tuple[Value, ...]) -> Graph:
    return extract(graph, graph.name, graph.params, tuple(dict.fromkeys(results)))


def _inputs(graph: Graph, scratch: tuple[Value, ...] = ()) -> list[Argument]:
    arguments = []
    for v in graph.params:
        kind = "workspace" if v in scratch else "input"
        arguments.append(Argument(f"{v.name}_ptr", ctype(v.type.dtype), kind, v.name, const=True))
        if v.type.axes == (M, D):
            arguments.append(Argument(f"{v.name}_stride", "long long", "stride", v.name))
    return arguments


def _outputs(values: tuple[Value, ...], scratch: tuple[Value, ...]) -> list[Argument]:
    arguments = []
    for v in values:
        kind = "workspace" if v in scratch else "output"
        arguments.append(Argument(f"{v.name}_ptr", ctype(v.type.dtype), kind, v.name))
        if v.type.axes == (M, D):
            arguments.append(Argument(f"{v.name}_stride", "long long", "stride", v.name))
    return arguments


def _workspace(name: str, dtype: DType, const: bool = False) -> Argument:
    return Argument(f"{name}_ptr", ctype(dtype), "workspace", name, const)


def _speller(tile: str, graph: Graph, pointer: str = "", known: tuple[Value, ...] = ()) -> Spell:
    """How a value is spelled in C: inputs by their array element, everything else by its name."""
    inputs = {p for p in graph.params if D in p.type.axes and p not in known}

    def spell(v: Value) -> str:
        if v not in inputs:
            return v.name
        if pointer:
            return f"{v.name}_ptr{pointer}"
        return v.name + (tile if M in v.type.axes else "[i]")

    return spell
