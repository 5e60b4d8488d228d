"""What ``lngen check`` checks of a spec: mathematics against the oracles, compilation, and bits.

The bits are the interpreter's: those of a launch on a GPU, or without one of the PTX executed on NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite

from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import DEFAULT_ARCH, device_for
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import DEFAULT_EPS, RUN, M, compute_dtype
from lngen.compiler.ir.numerics import Array
from lngen.compiler.lower import Plan
from lngen.compiler.problem import Schedule, fits
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import SAVES, Spec
from lngen.compiler.toolchain import Binary
from lngen.errors import LngenError, LowerError, MissingError
from lngen.launch.runtime.launcher import Launcher, device_arch, device_count
from lngen.launch.runtime.norm import Norm
from lngen.launch.runtime.numpy_arrays import launch_numpy
from lngen.proof.check.differences import HELD, ROWS, compared, gradient_excess, real_results, without_bound
from lngen.proof.check.inputs import (
    POISON,
    distances,
    forward_inputs,
    launch_apart,
    mismatches,
    random_inputs,
)
from lngen.proof.check.oracles import NORMS, NormName, closed_form
from lngen.proof.ptx import run_plan

UNDEFINED = (
    "; inf, nan: a result is no number for the inputs drawn; if some inputs have to be positive, declare them: "
    "b.input(name, ..., positive=True)"
)


@dataclass(frozen=True)
class Result:
    """One check. ``what``: oracle, float64, differences, compile, bits or ptx; ``detail`` gives the errors.

    ``rows`` is None for a compilation, which is of no number of rows.
    """

    spec: str
    schedule: str
    rows: int | None
    what: str
    ok: bool
    detail: str


# With eps=run: the default, to which the oracles apply, then those with which bits alone are compared.
RUN_EPS = (DEFAULT_EPS, 0.0, 1e-12, 0.5)


def check_spec(
    spec: Spec,
    *,
    on: str = "auto",
    rows: Sequence[int] = (0, 1, 3, 133),
    schedules: int = 1,
    arch: str = "sm_90",
) -> Iterator[Result]:
    """Check one spec: the default schedule and ``schedules - 1`` others spread over the legal ones.

    The interpreter is compared with float64: closed forms (lngen's norms) or the graph without its roundings (other
    graphs), and the gradients' formulas with central differences of the forward. Every schedule is compiled for
    ``arch`` (a GPU's own if there is one); the default must not spill. With a GPU (``on`` gpu or auto) each is launched
    on poisoned outputs and its bits are compared with the interpreter's; without one (``on`` ptx or auto) its PTX is
    executed on NumPy, with every access checked. A spec with ``eps=run`` has its bits compared for several eps, but the
    default for the most rows alone. A graph that no kernels compute is refused; with ``on=interpreter`` that is a
    warning, and the mathematics alone is checked. MissingError for ``on=gpu`` without a GPU; also the errors of
    ``lngen.compile``, which makes the norm first.
    """
    compilation = compilation_of(spec)
    gpu = on in ("auto", "gpu") and device_count() > 0
    if on == "gpu" and not gpu:
        raise MissingError("on=gpu expects a GPU, none was found; use --on interpreter, or run `lngen doctor`.")
    if on == "interpreter":
        compilation.warn()
    else:
        compilation.check()
    if spec.direction == "bwd":
        yield formulas(spec)
    wanted: list[tuple[int, str, dict[str, Array], dict[str, Array]]] = []
    for m, eps in _calls(spec, rows):
        inputs = random_inputs(spec, m, eps=eps)
        m = next((len(inputs[p.name]) for p in compilation.graph.tensors if M in p.type.axes), m)
        wanted.append((m, f"eps={eps:g}: " if spec.eps == RUN else "", inputs, interpret(compilation.graph, inputs)))
        if m and eps == spec.eps_or_default:
            yield mathematics(spec, m, *wanted[-1][2:])
    if compilation.refusal:
        return
    target = device_arch(0) if gpu else arch
    chosen = [compilation.schedule(target), *others(compilation, schedules - 1, target)]
    for number, schedule in enumerate(dict.fromkeys(chosen)):
        kernels = compilation.kernels(schedule)
        binary = kernels.cubin(target)
        yield compiled(spec, schedule, binary, may_spill=number > 0)
        for m, said, inputs, want in wanted:
            if on == "interpreter" and not gpu:
                continue
            found = bits(kernels.plan, binary, m, inputs, want) if gpu else executed(kernels, target, m, inputs, want)
            yield replace(found, detail=said + found.detail)


def _calls(spec: Spec, rows: Sequence[int]) -> list[tuple[int, float]]:
    """The numbers of rows and the eps of the calls that are compared."""
    calls = [(m, spec.eps_or_default) for m in rows]
    return calls + [(max(rows), eps) for eps in RUN_EPS if spec.eps == RUN and eps != DEFAULT_EPS]


def compilation_of(spec: Spec) -> Compilation:
    """That of the norm which ``lngen.compile`` makes, with its errors; a forward may lack a backward."""
    try:
        norm = Norm(spec.with_direction("fwd"), spec.with_direction("bwd"), {}, kernels=False)
    except LowerError:  # which is the refusal of the compilation
        return Compilation(spec)
    except LngenError:
        if spec.direction == "bwd":
            raise
        return Compilation(spec)
    return norm.compilation(spec.direction)


def others(compilation: Compilation, count: int, arch: str = DEFAULT_ARCH) -> list[Schedule]:
    """``count`` schedules that fit ``arch``: kinds take turns, and those of each kind are spread over all of it.

    The first kind depends on the spec, so that a grid of specs covers every kind even where each spec has room for
    few.
    """
    if count < 1:
        return []
    kinds: dict[tuple[object, ...], list[Schedule]] = {}
    facts = compilation.problem
    device = device_for(arch)
    for s in space(facts):
        if fits(s, facts, device):
            kinds.setdefault(s.kind, []).append(s)
    ordered = list(kinds.values())
    if not ordered:
        return []
    first = sum(str(compilation.spec).encode()) % len(ordered)
    chosen: dict[Schedule, None] = {}
    for turn in range(count):
        for number, listed in enumerate((*ordered[first:], *ordered[:first])):
            # Steps of the golden ratio leave no large gap, whatever their number.
            chosen[listed[int((0.618 * turn + 0.382 * number + 0.5) % 1 * len(listed))]] = None
    return list(chosen)[:count]


def compiled(spec: Spec, schedule: Schedule, binary: Binary, *, may_spill: bool) -> Result:
    """Whether the compiler kept everything in registers, which only the default schedule has to satisfy."""
    texts = [f"{r.registers} registers in kernel {name.rpartition('__')[2]}" for name, r in binary.resources.items()]
    spilled = any(r.spills for r in binary.resources.values())
    detail = f"{binary.arch}: {', '.join(texts)}{', spills' if spilled else ''}"
    return Result(str(spec), str(schedule), None, "compile", may_spill or not spilled, detail)


def bits(plan: Plan, binary: Binary, rows: int, inputs: Mapping[str, Array], want: Mapping[str, Array]) -> Result:
    """One launch on poisoned outputs and workspace against the interpreter's results.

    With strides=2 its rows lie at two distances, and the bytes between them have to stay as they are.
    """
    launcher = _launcher(plan, binary.image)
    if plan.spec.strides == 2:
        results, complaints = launch_apart(launcher, rows, inputs)
    else:
        results, complaints = launch_numpy(launcher, rows, inputs, POISON), []
    parts = [*mismatches(results, want), *complaints]
    detail = "; ".join(parts) or f"{sum(a.size for a in want.values())} numbers equal"
    return Result(str(plan.spec), str(plan.schedule), rows, "bits", not parts, detail)


@lru_cache(maxsize=8)
def _launcher(plan: Plan, image: bytes) -> Launcher:
    return Launcher(plan, image, 0, overlap=True)  # which allows a launch more than the default


def executed(
    kernels: KernelSet, arch: str, rows: int, inputs: Mapping[str, Array], want: Mapping[str, Array]
) -> Result:
    """One call of the ``kernels`` on ``arch``: equal bits and no finding, or the first finding.

    With strides=2 its rows lie at two distances.
    """
    plan, ptx = kernels.plan, kernels.ptx(arch, lines=True)
    strides, inner = distances(plan)
    outcome = run_plan(plan, inputs, source=kernels.text, ptx=ptx, rows=rows, strides=strides, inner=inner)
    parts = [*mismatches(outcome.results, want), *(str(f) for f in outcome.findings[:1])]
    detail = "; ".join(parts) or f"{sum(a.size for a in want.values())} numbers equal, nothing found"
    return Result(str(plan.spec), str(plan.schedule), rows, "ptx", not parts, detail)


def mathematics(spec: Spec, rows: int, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Result:
    """The interpreter's results against an oracle in float64; 1.0 is the bound.

    For layernorm and rmsnorm the oracle is a closed form, which shares nothing with the IR. For any other graph, and
    for options that the closed form lacks, it is the graph itself without its roundings, and for its gradients the
    differences of that. Numbers of such a graph that have no error bound are skipped, and the detail says how many.
    """
    norm = next((n for n in NORMS if spec.builtin and n == spec.definition.name), None)
    if norm is not None and has_closed_form(spec):
        return _judged(spec, rows, "oracle", closed_form_excess(norm, spec, inputs, results))
    wanted = real_results(spec, inputs)
    lost = {name: int(without_bound(wanted[name]).sum()) for name in results}
    said = [f"{lost[name]} of {results[name].size} numbers of {name}" for name in results if lost[name]]
    notes = [f"no bound, skipped: {', '.join(said)}"] if said else []
    return _judged(spec, rows, "float64", compared(wanted, results), notes)


def has_closed_form(spec: Spec) -> bool:
    """True for the keys that the closed forms know: without results that stand for inputs, sums, and other options."""
    optional = all(name in ("gamma", "beta") for name, _ in spec.chosen)
    whole = spec.save in SAVES and not spec.accumulate and spec.of is None and spec.dx_quant is None
    return optional and (whole or spec.direction == "fwd")


def formulas(spec: Spec) -> Result:
    """The gradients' formulas of a backward against differences of the forward."""
    held = {e.op for e in spec.forward().eqns if e.op in HELD}
    notes = [f"held at its numbers, {why}: {op}" for op, why in HELD.items() if op in held]
    return _judged(spec, ROWS, "differences", gradient_excess(spec), notes)


def _judged(spec: Spec, rows: int, what: str, excess: Mapping[str, float], notes: Sequence[str] = ()) -> Result:
    listed = "error / bound: " + ", ".join(f"{name} {value:.2g}" for name, value in excess.items())
    positive = spec.positive_inputs()
    drawn = [f"drawn positive: {', '.join(positive)}"] if positive else []
    detail = "; ".join([listed, *notes, *drawn])
    detail += "" if all(map(isfinite, excess.values())) else UNDEFINED
    return Result(str(spec), "", rows, what, all(value <= 1 for value in excess.values()), detail)


def closed_form_excess(
    norm: NormName, spec: Spec, inputs: Mapping[str, Array], results: Mapping[str, Array]
) -> dict[str, float]:
    """For each result its largest error against the float64 closed form, in units of its derived bound."""
    rows = len(inputs["dy"]) if "dy" in inputs else 0
    stored = {r.name: r.type.dtype for r in spec.graph().results}
    compute = compute_dtype(spec.dtype, spec.weight, spec.out)
    expected = closed_form(norm, {**forward_inputs(spec, rows), **inputs}, stored, spec.eps_or_default, compute)
    return {name: expected[name].excess(got) for name, got in results.items()}
