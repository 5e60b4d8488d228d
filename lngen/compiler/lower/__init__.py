"""Lowering, from a spec and a schedule to a plan: the kernels, and what each reads, adds and stores."""

from __future__ import annotations

from dataclasses import replace

from lngen.compiler.ir import REDUCTIONS, WIDE, D, DType, Eqn, Graph, M, Value, compute_dtype
from lngen.compiler.ir.places import extract, upstream
from lngen.compiler.lower.finish import COLUMN_ROWS, column_policy, finish_of, in_single_launch, requested_shared
from lngen.compiler.lower.parts import (
    NUMBERS,
    ROWS,
    Argument,
    Inputs,
    Statement,
    Sum,
    at_two_distances,
    number,
    sharing,
    tensors,
    workspace,
)
from lngen.compiler.lower.phases import Accumulate, Style, before, named, phases, tensor, uniform
from lngen.compiler.lower.plan import Buffer, Extent, Kernel, Plan
from lngen.compiler.lower.policies import leading_dimension
from lngen.compiler.lower.rows import releasing, row_kernel, row_style, template_of
from lngen.compiler.lower.split import Split, column_graph, split
from lngen.compiler.lower.vectors import THREADS, number_kernel
from lngen.compiler.problem import STAGED, Problem, Schedule, check, problem
from lngen.compiler.problem.footprint import (
    COLUMN_THREADS,
    column_block,
    column_threads,
    dynamic_shared,
    groups_of_a_block,
    partial_rows,
)
from lngen.compiler.spec import Spec
from lngen.errors import LowerError

__all__ = [
    "NUMBERS", "Argument", "Buffer", "Extent", "Kernel", "Plan", "Statement", "lower", "number", "requested_shared",
    "structure",
]  # fmt: skip


def lower(spec: Spec, schedule: Schedule, graph: Graph | None = None, facts: Problem | None = None) -> Plan:
    """The plan of ``spec``, or of ``graph``, with other orders of sums; ScheduleError, or LowerError if none fits.

    ``facts``: those about the graph, if they are known.
    """
    graph = graph or spec.graph()
    facts = facts or problem(graph, spec.d, spec.strides)
    facts = facts if facts.strides == spec.strides else replace(facts, strides=spec.strides)
    check(schedule, facts)
    return _Lowering(spec, schedule, graph, facts).plan()


def structure(graph: Graph) -> tuple[Split, DType]:
    """The parts of ``graph`` and the dtype of its sums, which no schedule changes; LowerError if no kernels have them.

    Only sums along S, under form=multipass, depend on the schedule besides.
    """
    return split(graph), accumulator(graph)


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
            columns, feeding = column_graph(self.parts, self.graph)
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
            per_sum = partial_rows(s, self.facts) * leading_dimension(self.facts)
            buffers += [Buffer(name, v.type.dtype, fixed=per_sum) for v, name in self.partials.items()]
        if self.parts.numbers:
            kernels.append(self._numbers(self.parts.numbers))
            columns_handed = (v for v in self.parts.handed if M not in v.type.axes)
            buffers += [Buffer(v.name, v.type.dtype, fixed=self.facts.d) for v in columns_handed]
        return Plan(self.spec, self.schedule, self.graph, self.facts, tuple(kernels), tuple(buffers), self.real)

    def _rows(
        self, graph: Graph, sums: tuple[Eqn, ...], outputs: tuple[Value, ...], handed: tuple[Value, ...]
    ) -> Kernel:
        """Rows in registers, staged in shared memory, or read in several passes; with column sums the grid persists."""
        needed = tuple(dict.fromkeys((*outputs, *(a for e in sums for a in e.args))))
        graph = extract(graph, graph.name, graph.params, needed)
        s, p = self.schedule, replace(self.facts, column_sums=len(sums))
        row = row_kernel(graph, outputs, s, p)
        style = row_style(graph, row)
        arguments = [
            *tensors(graph.params, "input"),
            *tensors(outputs, "output", handed),
            *(workspace(self.partials[e.out], self.real) for e in sums),
            *[Argument("counter_", "unsigned long long", "workspace", "counter_")] * s.dynamic,
        ]
        grid = _row_grid(s, p), Extent()
        kernel = self._kernel("rows", template_of(row), graph, arguments, style.inputs, grid, s.block)
        return replace(
            kernel,
            phases=releasing(phases(graph, sums, outputs, style), row),
            blocks_per_sm=s.blocks_per_sm,
            policies=row.policies,
            accumulators=self._accumulators(sums),
            dynamic=dynamic_shared(s, p) if s.form in STAGED else 0,
            cluster=s.cluster,
            row=row,
        )

    def _columns(self, graph: Graph, handed: tuple[Value, ...]) -> Kernel:
        """Column sums alone, a thread per vector of columns: for rows too wide to keep their sums in one block."""
        s, p, sums = self.schedule, self.facts, self.parts.sums
        inputs = _of_vector(graph)
        arguments = [
            *tensors(graph.params, "input", handed, self.graph.results),
            *(workspace(self.partials[e.out], self.real) for e in sums),
        ]
        threads, groups = column_threads(s, p), groups_of_a_block(s, p)
        grid = Extent(-(-p.d // (threads * p.chunk))), Extent(per=groups, limit=partial_rows(s, p))
        kernel = self._kernel("columns", "columns", graph, arguments, inputs, grid, column_block(s, p))
        return replace(
            kernel,
            phases=phases(graph, sums, (), Style(inputs, accumulate=Accumulate(target="{0}_sums_[i_]"))),
            policies=(column_policy(s, p),),
            accumulators=self._accumulators(sums),
            groups=groups,
            row_step=partial_rows(s, p) * groups,
            unroll=max(COLUMN_ROWS // groups, 1),
            leading=leading_dimension(p),
            evict_last=f"EvictLastStore{min(16, s.vec * p.real_size)}",
        )

    def _accumulators(self, sums: tuple[Eqn, ...]) -> tuple[Sum, ...]:
        """The column sums; one that is only added up to a number says why it is not a number itself."""
        finish = self.parts.finish or self.graph  # without a finish there are no sums
        needed = upstream(finish.eqns, {*finish.results} - {*self.parts.handed})
        order = f"order={self.spec.order}, which fixes its bits, adds rows first."
        why = f"Only a sum over these columns is a result. {order}"
        return tuple(replace(named(e, n), why="" if e.out in needed else why) for n, e in enumerate(sums))

    def _finish(self, graph: Graph) -> Kernel:
        """The partial sums of all blocks added in their order, and the results computed from them."""
        s, p, sums = self.schedule, self.facts, self.parts.sums
        inputs = _of_column(graph, tuple(self.partials))
        narrow = [v for v in graph.params if v not in self.partials]
        arguments = [
            *tensors(narrow, "input"),
            *tensors(graph.results, "output", self.parts.handed),
            *(workspace(name, self.real, const=True) for v, name in self.partials.items() if v in graph.params),
        ]
        finish = finish_of(s, p, tuple(named(e, n) for n, e in enumerate(sums)), _stored(graph, inputs))
        grid = Extent(-(-p.d // finish.columns)), Extent()
        block = finish.columns // finish.columns_per_thread * finish.interleave
        kernel = self._kernel("finish", "finish", graph, arguments, inputs, grid, block)
        return replace(kernel, always=True, finish=finish)

    def _elementwise(self, graph: Graph) -> Kernel:
        """Results that are independent of rows, a thread per column."""
        inputs = _of_column(graph, ())
        arguments = [*tensors(graph.params, "input"), *tensors(graph.results, "output")]
        grid = Extent(-(-self.facts.d // COLUMN_THREADS)), Extent()
        kernel = self._kernel("elementwise", "elementwise", graph, arguments, inputs, grid, COLUMN_THREADS)
        return replace(kernel, always=True, statements=_stored(graph, inputs))

    def _numbers(self, graph: Graph) -> Kernel:
        """Vectors reduced to numbers by one block, and the results computed from these."""
        arguments = [
            *tensors(graph.params, "input", self.parts.handed, self.graph.results),
            *tensors(graph.results, "output"),
        ]
        kernel = self._kernel("numbers", "numbers", graph, arguments, Inputs({}), (Extent(), Extent()), THREADS)
        numbers = number_kernel(graph, self.facts.d)
        return replace(kernel, always=True, per_row=(), numbers=numbers)

    def _kernel(
        self,
        role: str,
        template: str,
        graph: Graph,
        arguments: list[Argument],
        inputs: Inputs,
        grid: tuple[Extent, Extent],
        block: int,
    ) -> Kernel:
        """The common part of every kernel."""
        shared = sharing(arguments)
        strides = self.spec.strides if any(a.kind == "stride" for a in shared) else 1
        return Kernel(
            name=f"{self.stem}__{role}",
            template=f"{template}.cu.jinja",
            arguments=(ROWS, *(shared if strides == 1 else at_two_distances(shared))),
            phases=(),
            grid=grid,
            block=block,
            d=self.facts.d,
            uniform=uniform(graph, inputs),
            per_row=before(graph, inputs),
            wide_inputs=tuple(tensor(v) for v in graph.params if v.type.axes == WIDE),
            columns=tuple(tensor(v) for v in graph.params if v.type.axes == (D,)),
            row_inputs=tuple(tensor(v) for v in graph.params if v.type.axes == (M,)),
            scalars=tuple(tensor(v) for v in graph.tensors if not v.type.axes),
            strides=strides,
        )


def _of_vector(graph: Graph) -> Inputs:
    """Inputs of which a thread has one vector: [M, D] and [D] by element."""
    plain = Inputs({})
    return Inputs({v: f"{plain.spell(v)}[i_]" for v in graph.params if D in v.type.axes})


def _of_column(graph: Graph, totals: tuple[Value, ...]) -> Inputs:
    """Inputs of which a thread has one column, from memory; ``totals`` are numbers."""
    return Inputs({v: f"{v.name}_ptr_[col_]" for v in graph.params if v.type.axes == (D,) and v not in totals})


def _stored(graph: Graph, inputs: Inputs) -> tuple[Statement, ...]:
    """The [D] equations of ``graph``, and the stores of its results."""
    computed = [inputs.statement(e) for e in graph.eqns if e.out.type.axes == (D,)]
    stores = [Statement(f"{v.name}_ptr_[col_] = {inputs.spell(v)};") for v in graph.results]
    return (*computed, *stores)


def _row_grid(s: Schedule, p: Problem) -> Extent:
    """Blocks or clusters that share the rows: persistent with column sums or stages, else one per group of rows."""
    if p.column_sums:
        return Extent(per=s.rows_per_block, limit=partial_rows(s, p), times=s.cluster)
    if s.form in STAGED:
        return Extent(per=s.rows_per_block, limit=s.grid, times=s.cluster)
    return Extent(per=s.rows_per_block, times=s.cluster)


def accumulator(graph: Graph) -> DType:
    """The one dtype in which sums are added."""
    dtypes = {e.out.type.dtype for e in graph.eqns if e.op in REDUCTIONS}
    if len(dtypes) > 1:
        raise LowerError(f"graph @{graph.name} reduces in f32 and in f64; cast the operands to one dtype.")
    computed = (compute_dtype(p.type.dtype) for p in graph.params)
    return next(iter(dtypes), max(computed, key=lambda t: t.size, default=DType.F32))
