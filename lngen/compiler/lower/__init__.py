"""Lowering, from a spec and a schedule to a plan: the kernels, and what each reads, adds and stores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lngen.compiler.ir import (
    FOLDS,
    D,
    DType,
    Eqn,
    Graph,
    M,
    Value,
    compute_dtype,
    is_of_set,
    is_over_heads,
    is_over_sets,
)
from lngen.compiler.ir.places import extract, upstream
from lngen.compiler.lower.arguments import (
    ROWS,
    Argument,
    at_two_distances,
    sharing,
    tensors,
    workspace,
)
from lngen.compiler.lower.cuda.column_text import (
    SetFinish,
    column_spelling,
    column_sum_spelling,
    head_spelling,
    set_spelling,
)
from lngen.compiler.lower.cuda.fragments import Statement, Sum
from lngen.compiler.lower.cuda.maxima_text import Maxima
from lngen.compiler.lower.cuda.number_text import STYLE, THREADS, number_spelling, shared_numbers
from lngen.compiler.lower.cuda.policies import cut_type
from lngen.compiler.lower.cuda.row_text import row_spelling
from lngen.compiler.lower.cuda.spelling import Spelling, named, phase_texts, tables
from lngen.compiler.lower.cut import Parts, column_graph, cut
from lngen.compiler.lower.finish import (
    column_kernel,
    columns_of_a_set,
    finish_of,
    grid_of_sets,
    in_single_launch,
    requested_shared,
    set_threads,
)
from lngen.compiler.lower.nest import Nest, Style, nest
from lngen.compiler.lower.plan import Buffer, Kernel, Plan, by_level
from lngen.compiler.lower.rows import releasing, row_kernel, row_style, template_of
from lngen.compiler.problem import STAGED, Problem, Schedule, check, problem
from lngen.compiler.problem.facts import WARP
from lngen.compiler.problem.footprint import (
    COLUMN_THREADS,
    column_block,
    column_threads,
    dynamic_shared,
    groups_of_a_block,
    leading_dimension,
    partial_rows,
    row_blocks,
)
from lngen.compiler.spec import Spec
from lngen.errors import LowerError
from lngen.rules import Extent, Stretch

__all__ = [
    "Argument", "Buffer", "Extent", "Kernel", "Plan", "Statement", "lower", "requested_shared",
    "structure",
]  # fmt: skip

WORDS = ("arrivals_", "begun_")  # of the workspace, by which the blocks that take maxima over all rows meet
WHOLE_SET = Stretch(2**30, 2**30, 1, 1)


def lower(spec: Spec, schedule: Schedule, graph: Graph | None = None, facts: Problem | None = None) -> Plan:
    """The plan of ``spec``, or of ``graph``, with other orders of sums; ScheduleError, or LowerError if none fits.

    ``facts``: those about the graph, if they are known.
    """
    graph = graph or spec.graph()
    facts = facts or problem(graph, spec.d, spec.strides)
    facts = facts if facts.strides == spec.strides else replace(facts, strides=spec.strides)
    check(schedule, facts)
    return _Lowering(spec, schedule, graph, facts).plan()


def structure(graph: Graph) -> tuple[Parts, DType]:
    """The parts of ``graph`` and the dtype of its sums, which no schedule changes; LowerError if no kernels have them.

    The schedule decides one more thing: form=multipass refuses column sums of values along segments or blocks.
    """
    return cut(graph), accumulator(graph)


class _Lowering:
    """One spec under one schedule."""

    def __init__(self, spec: Spec, schedule: Schedule, graph: Graph, facts: Problem) -> None:
        self.spec, self.schedule, self.graph, self.facts = spec, schedule, graph, facts
        self.parts, self.real = structure(graph)
        self.stem = f"{spec.slug}__{schedule.slug}"
        self.partials = {e.out: f"{e.out.name}_partials_" for e in self.parts.sums}

    def plan(self) -> Plan:
        """The kernels in launch order and their workspace."""
        kernels: list[Kernel] = []
        buffers: list[Buffer] = []
        s, rows = self.schedule, tuple(r for r in self.graph.results if M in r.type.axes)
        if s.single_launch:
            buffers.append(Buffer("arrivals_", DType.F32, fixed=1, zeroed=True))
        if s.dynamic:
            buffers.append(Buffer("counter_", DType.F64, fixed=1, zeroed=True))
        handed = tuple(v for v in self.parts.handed if M in v.type.axes)
        if self.parts.sums and s.form == "multipass":
            apart = self.facts.blocks_meet or column_threads(s, self.facts) < WARP
            columns, feeding = column_graph(self.parts, self.graph, apart)
            handed = tuple(dict.fromkeys((*handed, *(v for v in feeding if v not in rows))))
            if rows or handed:
                kernels.append(self._rows(replace(self.graph, results=(*rows, *handed)), (), (*rows, *handed), handed))
            kernels.append(self._columns(columns, handed))
        elif self.parts.rows.results:
            kernels.append(self._rows(self.parts.rows, self.parts.sums, (*rows, *handed), handed))
        buffers += [Buffer(v.name, v.type.dtype, per_row=1) for v in handed]
        if self.parts.finish and not self.parts.sums:
            kernels.append(self._elementwise(self.parts.finish))
        elif self.parts.finish:
            finish = self._finish(self.parts.finish)
            if s.single_launch:
                kernels[-1] = in_single_launch(kernels[-1], finish, self.facts)
            else:
                kernels.append(finish)
            buffers += [self._partials(name, v.type.dtype) for v, name in self.partials.items()]
        if self.parts.over_sets:
            kernels.append(self._over_sets(self.parts.over_sets))
            buffers += [self._to_be_added(v) for v in self.parts.of_sets]
        if self.parts.maxima and self.parts.numbers:
            kernels[0] = self._with_maxima(kernels[0], self.parts.numbers)
            buffers += [Buffer(name, DType.F32, fixed=1, zeroed=True) for name in WORDS]
        elif self.parts.numbers:
            kernels.append(self._numbers(self.parts.numbers))
            columns_handed = (v for v in self.parts.handed if M not in v.type.axes)
            buffers += [Buffer(v.name, v.type.dtype, fixed=self.facts.d) for v in columns_handed]
        return Plan(self.spec, self.schedule, self.graph, self.facts, tuple(kernels), tuple(buffers), self.real)

    def _partials(self, name: str, dtype: DType) -> Buffer:
        """The partial rows of a column sum: one for each block, or for each stretch of the rows of a set."""
        leading, stretch = leading_dimension(self.facts), self.facts.stretch
        if stretch is not None:
            return Buffer(name, dtype, per_stretch=leading, stretch=stretch)
        return Buffer(name, dtype, fixed=partial_rows(self.schedule, self.facts) * leading)

    def _to_be_added(self, value: Value) -> Buffer:
        """The sums of each set, which are one stretch long here, or those that have the columns of all heads."""
        if not is_of_set(value):
            return Buffer(value.name, value.type.dtype, fixed=self.facts.d)
        return Buffer(value.name, value.type.dtype, per_stretch=self.facts.d, stretch=WHOLE_SET)

    def _rows(
        self, graph: Graph, sums: tuple[Eqn, ...], outputs: tuple[Value, ...], handed: tuple[Value, ...]
    ) -> Kernel:
        """Rows in registers, staged in shared memory, or read in several passes; with column sums the grid persists."""
        partial = (*sums, *(m.term for m in self.parts.maxima))
        needed = tuple(dict.fromkeys((*outputs, *(a for e in partial for a in e.args))))
        graph = extract(graph, graph.name, graph.params, needed)
        s, p = self.schedule, replace(self.facts, column_sums=len(sums))
        row = row_kernel(graph, outputs, s, p)
        placed = nest(graph, outputs, partial, row_style(row))
        arguments = [
            *tensors(graph.params, "input"),
            *tensors(outputs, "output", handed),
            *(workspace(self.partials[e.out], self.real) for e in sums),
            *[Argument("counter_", "unsigned long long", "workspace", "counter_")] * s.dynamic,
            *(a for a in self._arguments_of_maxima() if a.tensor not in {p.name for p in graph.params}),
        ]
        kernel = self._kernel("rows", graph, arguments, placed, row_spelling(graph, row), _row_grid(s, p), s.block)
        return replace(
            kernel,
            template=f"{template_of(row)}.cu.jinja",
            phases=releasing(kernel.phases, row),
            blocks_per_sm=s.blocks_per_sm,
            accumulators=self._accumulators(sums),
            dynamic=dynamic_shared(s, p),
            cluster=s.cluster,
            row=row,
        )

    def _arguments_of_maxima(self) -> list[Argument]:
        """What the maxima over all rows take."""
        graph, maxima = self.parts.numbers, {m.eqn.out for m in self.parts.maxima}
        if not maxima or not graph:
            return []
        words = (replace(workspace(name, DType.F32), ctype="unsigned") for name in WORDS)
        given = (p for p in graph.params if p not in maxima)
        return [*tensors(given, "input"), *tensors(graph.results, "output"), *words]

    def _with_maxima(self, rows: Kernel, graph: Graph) -> Kernel:
        """The kernel of the rows, which joins the maxima over all rows to the results that follow from them."""
        assert rows.row is not None
        eqns, terms = zip(*((m.eqn, m.term) for m in self.parts.maxima), strict=True)
        spelling, known = row_spelling(graph, rows.row), {*rows.inputs.launch, *rows.uniform}
        given = by_level(p for p in graph.tensors if p not in {e.out for e in eqns}).launch
        needed = [upstream(graph.eqns, [r]) for r in graph.results]
        maxima = Maxima(
            maxima=named(eqns),
            taken_into=tuple(t.accumulator for t in named(terms)),
            taken=tuple(spelling.taken(e) for e in terms if D not in e.args[0].type.axes),
            scalars=tuple(t for t in given if t not in known),
            statements=tuple(u for u in spelling.statements(nest(graph, ()).launch) if u not in known),
            results=tuple(
                (t, next(n for n, e in enumerate(eqns) if e.out in v))
                for t, v in zip(by_level(graph.results).launch, needed, strict=True)
            ),
        )
        grid = rows.grid[0]._replace(least=rows.cluster), rows.grid[1]  # without rows, the results are what is given
        return replace(rows, maxima=maxima, grid=grid, always=True)

    def _columns(self, graph: Graph, handed: tuple[Value, ...]) -> Kernel:
        """Column sums alone, a thread per vector of columns: for rows too wide to keep their sums in one block."""
        s, p, sums = self.schedule, self.facts, self.parts.sums
        arguments = [
            *tensors(graph.params, "input", handed, self.graph.results),
            *(workspace(self.partials[e.out], self.real) for e in sums),
        ]
        kernel = self._kernel(
            "columns",
            graph,
            arguments,
            nest(graph, (), sums, Style(vectors=True)),
            column_sum_spelling(graph, p.lanes),
            Extent(-(-p.d // (column_threads(s, p) * p.chunk))),
            column_block(s, p),
        )
        per = 1 if p.stretch else groups_of_a_block(s, p)
        grid = kernel.grid[0], Extent(per=per, limit=row_blocks(s, p))
        return replace(
            kernel,
            template="columns_of_sets.cu.jinja" if p.stretch else kernel.template,
            grid=grid,
            accumulators=self._accumulators(sums),
            column=column_kernel(s, p),
        )

    def _accumulators(self, sums: tuple[Eqn, ...]) -> tuple[Sum, ...]:
        """The column sums; one that is only added up to a number says why it is not a number itself."""
        finish = self.parts.finish or self.graph  # without a finish there are no sums
        needed = upstream(finish.eqns, {*finish.results} - {*self.parts.handed})
        order = f"order={self.spec.order}, which fixes its bits, adds rows first."
        why = f"Only a sum over these columns is a result. {order}"
        return tuple(replace(s, why="" if e.out in needed else why) for e, s in zip(sums, named(sums), strict=True))

    def _finish(self, graph: Graph) -> Kernel:
        """The partial sums of all blocks added in their order, and the results computed from them."""
        s, p, sums = self.schedule, self.facts, self.parts.sums
        narrow = [v for v in graph.params if v not in self.partials]
        arguments = [
            *tensors(narrow, "input"),
            *tensors(graph.results, "output", (*self.parts.handed, *self.parts.of_sets)),
            *(workspace(name, self.real, const=True) for v, name in self.partials.items() if v in graph.params),
        ]
        placed, spelling = nest(graph, graph.results), (set_spelling if p.stretch else column_spelling)(narrow)
        kernel = self._kernel("finish", graph, arguments, placed, spelling, Extent(), 0)
        if p.stretch is not None:
            return self._finish_of_sets(kernel, named(sums), p.stretch)
        finish = finish_of(s, p, named(sums), kernel.phases[0].loops[0].element)
        block = finish.columns // finish.columns_per_thread * finish.interleave
        grid = Extent(-(-p.d // finish.columns)), Extent()
        return replace(kernel, phases=(), grid=grid, block=block, always=True, finish=finish)

    def _finish_of_sets(self, kernel: Kernel, sums: tuple[Sum, ...], stretch: Stretch) -> Kernel:
        """The finish of sums by sets, some threads per column of a set; blocks take sets in turn."""
        p, statements = self.facts, kernel.phases[0].loops[0].element
        handed, threads = tuple(v.name for v in self.parts.of_sets), set_threads(p.interleave)
        lanes = COLUMN_THREADS // threads
        each = columns_of_a_set(p, threads)
        return replace(
            kernel,
            template="finish_of_sets.cu.jinja",
            phases=(),
            grid=grid_of_sets(p, lanes * each),
            block=COLUMN_THREADS,
            finish=SetFinish(
                sums,
                statements,
                p.interleave,
                cut_type(stretch),
                leading_dimension(p),
                handed,
                threads=threads,
                lanes=lanes,
                each=each,
                shared=len(sums) * COLUMN_THREADS * each,
            ),
        )

    def _over_sets(self, graph: Graph) -> Kernel:
        """Sums over all sets of rows, or heads, a thread per column, and the results computed from these."""
        folds = tuple(e for e in graph.eqns if is_over_sets(e) or is_over_heads(e))
        columns = folds[0].to.period if folds[0].to else 0  # of a head
        arguments = [
            *tensors(graph.params, "input", self.parts.of_sets, self.graph.results),
            *tensors(graph.results, "output"),
        ]
        terms = extract(graph, graph.name, graph.params, tuple(dict.fromkeys(a for e in folds for a in e.args)))
        narrow = tuple(p for p in graph.params if not is_of_set(p) and p not in self.parts.of_sets)
        after = extract(graph, graph.name, (*(e.out for e in folds), *narrow), graph.results)
        spelling, grid = column_spelling(narrow), Extent(-(-(columns or self.facts.d) // COLUMN_THREADS))
        kernel = self._kernel(
            "heads" if columns else "sets", graph, arguments, nest(after, after.results), spelling, grid, COLUMN_THREADS
        )
        of_one = head_spelling(graph.params, columns) if columns else set_spelling(graph.params)
        of_set = phase_texts(terms, nest(terms, (), folds), of_one)
        finish = SetFinish(
            named(folds),
            phase_texts(after, nest(after, after.results), spelling)[0].loops[0].element,
            folds[0].int_attr("interleave") if "interleave" in dict(folds[0].attrs) else 1,
            handed=tuple(v.name for v in self.parts.of_sets if is_of_set(v)),
            terms=of_set[0].loops[0].element,
            heads=self.facts.d // columns if columns else 0,
        )
        uniform = spelling.statements(e for e in graph.eqns if not e.out.type.axes)
        template = "sums_of_sets.cu.jinja"
        kernel = replace(kernel, d=columns or kernel.d)
        return replace(kernel, template=template, uniform=uniform, phases=(), always=True, finish=finish)

    def _elementwise(self, graph: Graph) -> Kernel:
        """Results that are independent of rows, a thread per column."""
        arguments = [*tensors(graph.params, "input"), *tensors(graph.results, "output")]
        placed, spelling = nest(graph, graph.results), column_spelling(graph.params)
        grid = Extent(-(-self.facts.d // COLUMN_THREADS))
        kernel = self._kernel("elementwise", graph, arguments, placed, spelling, grid, COLUMN_THREADS)
        return replace(kernel, always=True)

    def _numbers(self, graph: Graph) -> Kernel:
        """Vectors reduced to numbers by one block, and the results computed from these."""
        arguments = [
            *tensors(graph.params, "input", self.parts.handed, self.graph.results),
            *tensors(graph.results, "output"),
        ]
        spelling, placed = number_spelling(graph, self.facts.d), nest(graph, graph.results, style=STYLE)
        kernel = self._kernel("numbers", graph, arguments, placed, spelling, Extent(), THREADS)
        return replace(kernel, always=True, shared=shared_numbers(kernel.phases))

    def _kernel(
        self,
        role: str,
        graph: Graph,
        arguments: list[Argument],
        placed: Nest,
        spelling: Spelling,
        grid: Extent,
        block: int,
    ) -> Kernel:
        """What every kernel has."""
        shared = sharing(arguments)
        far = self.facts.stretch is not None or any(a.kind in ("stride", "outer_stride") for a in shared)
        strides = self.spec.strides if far else 1
        inputs = by_level(graph.tensors)._replace(table=tuple(tables(graph).values()))
        return Kernel(
            name=f"{self.stem}__{role}",
            template=f"{role}.cu.jinja",
            arguments=(ROWS, *(shared if strides == 1 else at_two_distances(shared))),
            grid=(grid, Extent()),
            block=block,
            d=self.facts.d,
            inputs=inputs,
            nest=placed,
            uniform=spelling.statements(placed.launch),
            per_row=spelling.statements(placed.row),
            phases=phase_texts(graph, placed, spelling),
            strides=strides,
        )


def _row_grid(s: Schedule, p: Problem) -> Extent:
    """Blocks or clusters that share the rows: persistent with column sums or stages, else one per group of rows."""
    if p.column_sums and p.stretch:  # a stretch has one row at least
        return Extent(per=1, limit=row_blocks(s, p), times=s.cluster)
    if p.column_sums:
        return Extent(per=s.rows_per_block, limit=partial_rows(s, p), times=s.cluster)
    if s.form in STAGED:
        return Extent(per=s.rows_per_block, limit=s.grid, times=s.cluster)
    return Extent(per=s.rows_per_block, times=s.cluster)


def accumulator(graph: Graph) -> DType:
    """The one dtype in which sums are added."""
    dtypes = {e.out.type.dtype for e in graph.eqns if e.op in FOLDS}
    if len(dtypes) > 1:
        raise LowerError(f"graph @{graph.name} reduces in f32 and in f64; cast the operands to one dtype.")
    computed = (compute_dtype(p.type.dtype) for p in graph.params)
    return next(iter(dtypes), max(computed, key=lambda t: t.size, default=DType.F32))
