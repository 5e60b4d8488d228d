"""The compiler's table of contents: every stage in order, each computed once, and the module that computes it.

    spec        text -> Spec, what kernels are specialised on                     lngen.spec.parse_spec
    passes      Spec -> Graphs after each pass; the last defines every bit        lngen.graphs, lngen.passes
    problem     Graph, D -> Problem, the facts that a schedule has to fit         lngen.schedule.problem
    schedule    Problem, GPU, rows -> Schedule, how rows lie over threads         lngen.schedule.choose
    plan        Spec, Graph, Schedule -> Plan, kernels with their policies        lngen.lower
    text        Plan -> CUDA, one translation unit                                lngen.emit
    ptx, cubin  CUDA, arch -> PTX, or machine code with its resources             lngen.toolchain

The function ``lngen.compile`` is that of lngen.runtime.norm; this module is for ``from lngen.compile import ...``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from lngen.devices import DEFAULT_ARCH, Device
from lngen.dump import dump
from lngen.emit import emit
from lngen.headers import bundled
from lngen.ir import Graph
from lngen.lower import Plan, lower
from lngen.schedule import ANY, Problem, Schedule, check_arch, choose, complete, parse_schedule, problem
from lngen.spec import Spec
from lngen.toolchain import Binary, compile_cubin, compile_ptx


class KernelSet:
    """The kernels of one plan: their text and their binaries, ``cubins`` by arch as far as they are compiled."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cubins: dict[str, Binary] = {}
        self._ptx: dict[tuple[str, bool], str] = {}

    @cached_property
    def text(self) -> str:
        """The CUDA source, which includes device headers; EmitError if it cannot be laid out."""
        return emit(self.plan)

    @property
    def bundle(self) -> str:
        """The text with its headers in it: one file that stands alone."""
        return bundled(self.text)

    def ptx(self, arch: str, *, lines: bool = False) -> str:
        """What NVRTC makes of the text, with line numbers if ``lines``; errors as of ``cubin``."""
        if (arch, lines) not in self._ptx:
            check_arch(self.plan.schedule, arch)
            self._ptx[arch, lines] = compile_ptx(self.text, arch, name=f"{self.plan.name}.cu", lines=lines)
        return self._ptx[arch, lines]

    def cubin(self, arch: str) -> Binary:
        """The machine code; ScheduleError if ``arch`` lacks what the form needs, MissingError without a compiler."""
        if arch not in self.cubins:
            check_arch(self.plan.schedule, arch)
            dump(self.plan, self.bundle)
            self.cubins[arch] = compile_cubin(self.text, arch, name=f"{self.plan.name}.cu")
        return self.cubins[arch]

    def spilled(self, *arches: str) -> int:
        """Bytes per thread that spill on the first of these archs where any do."""
        found = (sum(used.spilled for used in self.cubin(arch).resources.values()) for arch in arches)
        return next(filter(None, found), 0)


class Compilation:
    """One spec on its way to kernels, under any schedules."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._sets: dict[Schedule, KernelSet] = {}

    @cached_property
    def passes(self) -> Mapping[str, Graph]:
        """The graph after every pass, by the pass' name."""
        return self.spec.trace()

    @cached_property
    def graph(self) -> Graph:
        """The graph that fixes every bit."""
        return self.spec.graph()

    @cached_property
    def problem(self) -> Problem:
        """The facts about the graph; LowerError for an order of sums that no kernel has."""
        return problem(self.graph, self.spec.d)

    def schedule(
        self, *arches: str, vec: int | None = None, rows: int | None = None, device: Device | None = None
    ) -> Schedule:
        """The schedule without tuning, one for all these archs (none: the default arch); see ``choose``."""
        arches = arches or (DEFAULT_ARCH,)
        return choose(self.spec, self.problem, lambda s, on: self.kernels(s).spilled(*on), arches, vec, rows, device)

    def changed(self, text: str, *arches: str, rows: int | None = None, device: Device | None = None) -> KernelSet:
        """The kernels under that schedule changed by ``text``; a complete text replaces it and needs no compiler."""
        base = ANY if complete(text) else self.schedule(*arches, rows=rows, device=device)
        return self.kernels(parse_schedule(text, base))

    def kernels(self, schedule: Schedule) -> KernelSet:
        """The kernels under one schedule, lowered; ScheduleError if it is illegal, LowerError if no structure fits."""
        made = self._sets.get(schedule)
        return made or self._sets.setdefault(schedule, KernelSet(lower(self.spec, schedule, self.graph, self.problem)))
