"""The compiler's table of contents: every stage in order, each computed once, and the module that computes it.

    spec        text -> Spec, what kernels are specialised on                     lngen.compiler.spec.parse_spec
    passes      Spec -> Graphs after each pass; the last defines every bit        lngen.compiler.passes
    problem     Graph, D -> Problem, the facts that a schedule has to fit         lngen.compiler.problem.problem
    schedule    Problem, GPU, rows -> Schedules, the first without spills taken   lngen.compiler.schedule.attempts
    plan        Spec, Graph, Schedule -> Plan, kernels with their policies        lngen.compiler.lower
    text        Plan -> CUDA, one translation unit                                lngen.compiler.emit
    ptx, cubin  CUDA, arch -> PTX, or machine code with its resources             lngen.compiler.toolchain

The function ``lngen.compile`` is that of lngen.launch.runtime.norm.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import cached_property
from itertools import product

from lngen import config
from lngen.compiler.devices import DEFAULT_ARCH, Device, oldest_first
from lngen.compiler.emit import commands, emit
from lngen.compiler.headers import bundled
from lngen.compiler.ir import D, Graph
from lngen.compiler.lower import Plan, lower, structure
from lngen.compiler.problem import ANY, Problem, Schedule, check_arch, complete, parse_schedule, problem
from lngen.compiler.schedule import attempts, known_clean
from lngen.compiler.spec import Spec
from lngen.compiler.toolchain import Binary, compile_cubin, compile_ptx
from lngen.errors import LowerError, MissingError, ScheduleError

# The graphs and dtypes of which a measured schedule of the table is known not to spill.
MEASURED = (("layernorm", "rmsnorm"), ("bf16", "f32", "f64"))


class KernelSet:
    """The kernels of one plan: their text and their binaries, ``cubins`` by arch as far as they are compiled."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cubins: dict[str, Binary] = {}
        self._lined: dict[str, Binary] = {}
        self._ptx: dict[tuple[str, bool], str] = {}

    @cached_property
    def text(self) -> str:
        """The CUDA source, which includes device headers; EmitError if it cannot be laid out."""
        return emit(self.plan)

    @property
    def bundle(self) -> str:
        """The text with its headers in it: one file that stands alone."""
        return bundled(self.text)

    def file(self, arch: str, *, bundle: bool = False) -> str:
        """The text, or the bundle, as a file to read: its commands are for ``arch`` and name the source of a graph."""
        own = commands(self.plan, arch, self.plan.spec.definition.source)
        text = self.text.replace(commands(self.plan), own, 1)
        return bundled(text) if bundle else text

    def ptx(self, arch: str, *, lines: bool = False) -> str:
        """What NVRTC makes of the text, with line numbers if ``lines``; errors as of ``cubin``."""
        if (arch, lines) not in self._ptx:
            check_arch(self.plan.schedule, arch)
            self._ptx[arch, lines] = compile_ptx(self.text, arch, name=f"{self.plan.name}.cu", lines=lines)
        return self._ptx[arch, lines]

    def cubin(self, arch: str, *, lines: bool = False) -> Binary:
        """The machine code, with line numbers if ``lines``.

        ScheduleError if ``arch`` lacks what the form needs, MissingError without a compiler.
        """
        cubins = self._lined if lines else self.cubins
        if arch not in cubins:
            check_arch(self.plan.schedule, arch)
            dump(self.plan, self.bundle)
            cubins[arch] = compile_cubin(self.text, arch, name=f"{self.plan.name}.cu", lines=lines)
        return cubins[arch]

    def spilled(self, *arches: str) -> int:
        """Bytes per thread that spill on the first of these archs where any do."""
        found = (sum(used.spilled for used in self.cubin(arch).resources.values()) for arch in arches)
        return next(filter(None, found), 0)

    def known_clean(self, arch: str) -> bool:
        """True if the spec and its schedule were measured on this arch, so that no compiler is asked about spills."""
        plan, spec = self.plan, str(self.plan.spec)
        measured = spec in {f"{g}.{plan.spec.direction}:d={plan.spec.d},dtype={t}" for g, t in product(*MEASURED)}
        return measured and known_clean(plan.schedule, plan.problem, arch)


class Compilation:
    """One spec on its way to kernels, under any schedules.

    ``tried``: the schedules among which the last default was chosen, with the bytes a thread that each spills.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.tried: dict[Schedule, int] = {}
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
        return problem(self.graph, self.spec.d, self.spec.strides)

    @cached_property
    def refusal(self) -> LowerError | None:
        """Why no schedule has kernels for the graph, which the interpreter may compute all the same; None if one has.

        Nothing is lowered but a graph with column sums and values along segments or blocks: the first schedule decides
        whether it can.
        """
        try:
            parts, _ = structure(self.graph)
            if parts.sums and any(e.out.type.along(D) not in (None, D) for e in self.graph.eqns):
                self.kernels(next(attempts(self.problem, (DEFAULT_ARCH,))))
        except LowerError as error:
            return error
        return None

    def check(self) -> None:
        """LowerError if no schedule has kernels for the graph."""
        if self.refusal:
            raise self.refusal

    def warn(self) -> None:
        """Warn if no schedule has kernels for the graph; for callers who compute it without kernels."""
        if self.refusal:
            warnings.warn(str(self.refusal), stacklevel=3)

    def schedule(
        self,
        *arches: str,
        vec: int | None = None,
        rows: int | None = None,
        device: Device | None = None,
        compiled: bool = True,
    ) -> Schedule:
        """The schedule without tuning: the first that is tried and spills on none of these archs (default: one arch).

        ``vec``: its accesses are at most that many elements wide. ``rows``: the expected number, None for many.
        ``device``: the GPU; None for the one that represents the oldest arch. The compile log decides: if all schedules
        spill, the one that spills least is taken. Without a compiler it is the first. Without ``compiled``, a schedule
        that was measured is not compiled to learn that it does not spill. ScheduleError if none fits all.
        """
        arches = oldest_first(arches or (DEFAULT_ARCH,))
        tried = self.tried = {}
        for schedule in attempts(self.problem, arches, vec, rows, device):
            try:
                kernels = self.kernels(schedule)
                clean = not compiled and all(map(kernels.known_clean, arches))
                tried[schedule] = 0 if clean else kernels.spilled(*arches)
            except MissingError:
                tried[schedule] = 0  # without a compiler no schedule is known to spill
            except LowerError:
                if not tried:
                    raise
                continue  # form multipass, the last resort, does not have every graph's sums
            if not tried[schedule]:
                break
        if not tried:
            raise ScheduleError(f"no schedule for {self.spec} fits all of {', '.join(arches)}; build each alone.")
        best = min(tried, key=lambda s: tried[s])
        if tried[best] and config.debug_level() >= 1:
            print(f"lngen: {self.spec}: {spill_text(best, tried[best], len(tried))}", file=sys.stderr)
        return best

    def changed(
        self, text: str, *arches: str, rows: int | None = None, device: Device | None = None, compiled: bool = True
    ) -> KernelSet:
        """The kernels under that schedule changed by ``text``; a complete text replaces it and needs no compiler."""
        base = ANY if complete(text) else self.schedule(*arches, rows=rows, device=device, compiled=compiled)
        return self.kernels(parse_schedule(text, base))

    def kernels(self, schedule: Schedule) -> KernelSet:
        """The kernels under one schedule, lowered; ScheduleError if it is illegal, LowerError if no structure fits."""
        made = self._sets.get(schedule)
        return made or self._sets.setdefault(schedule, KernelSet(lower(self.spec, schedule, self.graph, self.problem)))


def spill_text(schedule: Schedule, bytes_: int, tried: int = 1) -> str:
    """The message that a schedule spills."""
    among = f", the least of {tried} schedules" if tried > 1 else ""
    return f"registers spill, {bytes_} bytes a thread{among}: {schedule}"


def dump(plan: Plan, source: str) -> None:
    """Print the graph after each pass (LNGEN_DEBUG=3), the plan and the CUDA (4); write all to LNGEN_DUMP.

    Without these variables nothing is written. The files of a plan are ``<name>/00-build.ir``, one for each pass, then
    ``plan.txt`` and ``kernel.cu``.
    """
    level, folder = config.debug_level(), config.dump_dir()
    if level < 3 and folder is None:
        return
    graphs = {f"{n:02}-{name}.ir": str(graph) for n, (name, graph) in enumerate(plan.spec.trace().items())}
    text = {"plan.txt": str(plan), "kernel.cu": source}
    printed = (graphs if level >= 3 else {}) | (text if level >= 4 else {})
    for name, content in printed.items():
        print(f"---- {plan.name}: {name} ----\n{content}", file=sys.stderr)
    if folder is None:
        return
    (folder / plan.name).mkdir(parents=True, exist_ok=True)
    for name, content in (graphs | text).items():
        (folder / plan.name / name).write_text(content)
