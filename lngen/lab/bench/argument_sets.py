"""A case: a spec with the argument sets that launches rotate, and the float64 results that providers must match.

The float64 results are those of the forward graph as it is described, in PyTorch and differentiated by autograd, which
shares nothing with lngen's derivation. The bounds are loose because peers round their statistics and partial sums to 16
bits. ``lngen check`` is strict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lngen.compiler.ir import WIDE, DType, Graph, M, Value, independent_rows
from lngen.compiler.passes import accumulated
from lngen.compiler.passes.instance import indexed
from lngen.compiler.spec import Spec
from lngen.dtypes import QUANTISED
from lngen.errors import LngenError
from lngen.lab.bench.tasks import LATENCY, Task, value_bytes
from lngen.lab.bench.timing import Launch
from lngen.lab.bench.torch_gpu import Array, Gpu
from lngen.proof.torch_graph import torch_function

Tensors = dict[str, Array]

MEAN = 0.5  # of inputs; of cotangents it is 0, because a sum of others over the rows would overflow in f16
CHUNK = 1 << 22  # elements for which float64 values are computed at a time
ONE = ("x_grad_factor",)  # inputs that peers take for 1
TINY = 1e-30  # so that zeros have a relative error
BOUNDS = {DType.F16: 1e-2, DType.BF16: 2e-2, DType.F32: 1e-3, DType.F64: 1e-6}
BOUNDS |= {DType.E4M3: 2.0**-4, DType.E5M2: 2.0**-3, DType.INT8: 2.0**-2}


@dataclass(frozen=True)
class Case:
    """The input of ``Provider.prepare``.

    chain  the input in which a launch takes the main result of the previous launch, or an empty text
    """

    spec: Spec
    rows: int
    graph: Graph
    gpu: Gpu
    sets: Sequence[Tensors]
    chain: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs."""
        return tuple(v.name for v in self.graph.tensors)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's results, the main one first."""
        return tuple(v.name for v in self.graph.results)

    @property
    def forward(self) -> Graph:
        """The forward graph as described, whose inputs every set holds."""
        return self.spec.with_direction("fwd").forward()

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the forward graph's outputs, and also of its statistics if one of them has a cotangent."""
        outputs = self.spec.definition.outputs(self.spec.options)
        return outputs if {*self.spec.differentiated} <= {*outputs} else tuple(r.name for r in self.forward.results)


@dataclass(frozen=True)
class Prepared:
    """A provider ready for a case: the launch, and the results that a launch with a set leaves.

    ends  the first [M, D] array read and the [M, D] array written, if they differ from the set's input and main result
    """

    launch: Launch
    results: Callable[[int], Tensors]
    schedule: str = ""
    ends: Callable[[int], tuple[Array, Array]] | None = None


class Provider:
    """An implementation. ``checked`` is False for a ceiling, which computes no norm.

    ``needs`` names what has to be installed, ``settings`` what is called, and how.
    """

    name: str
    needs: str
    settings: str
    checked: bool = True

    def available(self) -> bool:
        """True if it can be used here."""
        return True

    def covers(self, spec: Spec) -> bool:
        """True if it computes this graph in this direction."""
        return True

    def left_out(self, spec: Spec) -> str:
        """Why it is not timed, though it computes this graph; empty if it is."""
        return ""

    def prepare(self, case: Case) -> Prepared:
        """Compile and allocate everything that a launch needs; may raise any exception."""
        raise NotImplementedError


# ---- argument sets ----


def set_bytes(task: Task) -> int:
    """The bytes of one set."""
    return sum(value_bytes(v, task.rows, task.d) for v in _values(task).values())


def make_cases(task: Task, count: int, gpu: Gpu) -> list[Case]:
    """A case per spec of the task over the same ``count`` sets; LngenError for a latency of a graph without a chain.

    The sets hold equal values in different memory. Those of a latency are two in turn, the main result of each an input
    of the other, so that no launch can overtake another.
    """
    graphs = [spec.graph() for spec in task.specs]
    first, chain = _first_set(task, gpu), ""
    if task.kind == LATENCY:
        chain, main = _chain(task, graphs[0]), graphs[0].results[0].name
        other = {**first, chain: first[main], main: first[chain]}
        sets = [other if i % 2 else first for i in range(count)]
    else:
        given = {v.name for graph in graphs for v in graph.tensors}  # a forward's statistics are its backward's inputs
        room = {v.name for graph in graphs for v in graph.results} - given
        sets = [first, *(_another(first, room) for _ in range(count - 1))]
    return [Case(spec, task.rows, graph, gpu, sets, chain) for spec, graph in zip(task.specs, graphs, strict=True)]


def _values(task: Task) -> dict[str, Value]:
    """What a set holds, by name: all inputs and results of the task's graphs, and the inputs of its forward graph."""
    graphs = [task.specs[0].with_direction("fwd").forward(), *(spec.graph() for spec in task.specs)]
    inputs = [v for graph in graphs for v in graph.tensors]
    return {v.name: v for v in (*inputs, *(v for graph in graphs[1:] for v in graph.results))}


def _chain(task: Task, graph: Graph) -> str:
    """The first input that the main result can take the place of."""
    main = graph.results[0]
    found = next((p.name for p in graph.tensors if p.type == main.type and main.type.axes == WIDE), "")
    if not found:
        raise LngenError(
            f"a latency is that of a chain, in which a call reads the main result of the one before; {task.spec} has "
            f"no input of the type of '{main.name}', {main.type}: leave --latency out."
        )
    return found


def _first_set(task: Task, gpu: Gpu) -> Tensors:
    """Normal inputs, the statistics that a backward takes from forward, and memory for the results."""
    spec = task.specs[0].with_direction("fwd")
    given, made = ({v.name for v in values} for values in (spec.forward().tensors, spec.forward().results))
    inputs = {v.name for s in task.specs for v in s.graph().tensors}
    positive, values = {n for s in task.specs for n in s.positive_inputs()} | {*spec.positive_inputs()}, _values(task)
    below = dict.fromkeys(spec.classes, task.d)
    below |= {p.name: task.rows for p, axis in indexed(spec.forward()).items() if axis.of_table}
    first: Tensors = {}
    for seed, (name, value) in enumerate(values.items()):
        shape, dtype = value.type.shape(task.rows, task.d), value.type.dtype
        if name in below:
            first[name] = gpu.whole(shape, dtype, below[name], seed)
        elif name in ONE:
            first[name] = gpu.empty(shape, dtype).fill_(1.0)
        elif name in given or name in inputs - made:
            mean = MEAN if name in given else 0.0
            first[name] = gpu.normal(shape, dtype, mean, seed, positive=name in positive)
        else:
            first[name] = gpu.empty(shape, dtype)
    saved = {name: value for name, value in values.items() if name in inputs & made}
    for rows in parts(spec, task.rows) if saved else []:
        found = wide_results(spec, first, rows)
        for name, value in saved.items():
            part = first[name][rows] if M in value.type.axes else first[name][...]
            part[...] = found[name].reshape(part.shape)
    return first


def _another(first: Tensors, room: set[str]) -> Tensors:
    """The same inputs in different memory, and memory for the results ``room``."""
    return {name: array.new_empty(array.shape) if name in room else array.clone() for name, array in first.items()}


def poison(case: Case, index: int) -> None:
    """Fill the results of a set with values that no kernel computes."""
    for value in case.graph.results:
        result = case.sets[index][value.name]
        if value.type.dtype in QUANTISED:
            result.view(case.gpu.torch.uint8).fill_(0x7F)
        else:
            result.fill_(math.nan)


# ---- float64 results ----


def parts(spec: Spec, rows: int) -> Iterator[slice]:
    """Rows in chunks whose results can be computed apart: all rows, if an equation of the graph joins them."""
    graph = spec.with_direction("fwd").forward()
    apart = independent_rows(graph) and not any(v.type.by_columns for v in graph.results)
    step = max(1, CHUNK // spec.d) if apart else rows
    return (slice(start, min(start + step, rows)) for start in range(0, rows, max(step, 1)))


def expected(case: Case, index: int = 0) -> Tensors:
    """The results of a set in float64, computed once for all providers, because all sets hold equal values."""
    results, inputs = case.graph.results, case.sets[index]
    want = {v.name: case.gpu.empty(v.type.shape(case.rows, case.spec.d), DType.F64) for v in results}
    sums = [v.name for v in results if M not in v.type.axes]
    columns = [v.name for v in results if v.type.by_columns]
    for name in sums:
        want[name].zero_()
    for rows in parts(case.spec, case.rows):
        for name, values in wide_results(case.spec, inputs, rows).items():
            if name in sums:
                want[name] += values.reshape(want[name].shape)
            elif name in columns:  # of all rows: ``parts`` makes one part then
                want[name][...] = values
            elif name in want:
                want[name][rows] = values.reshape(want[name][rows].shape)
    for name in (f"d{n}" for n in case.spec.accumulate):
        want[name] += inputs[accumulated(name)].double()
    if case.spec.dx_quant is not None:
        given = inputs["dx_scale"] if case.spec.dx_scales == "tensor" else None
        _quantise(case.spec.dx_quant.largest, want, given)
    return want


def _quantise(largest: float, want: Tensors, given: Array | None) -> None:
    """dx over its scale: one that is given, or that of each of its blocks."""
    dx = want["dx"]
    if given is None:
        blocks = dx.unflatten(1, (want["dx_scale"].shape[1], -1))
        want["dx_scale"] = blocks.abs().amax(2) / largest
        dx = (blocks / want["dx_scale"].unsqueeze(2)).flatten(1)
    else:
        dx = dx / given.double()
    want["dx"] = dx.clamp(-largest, largest)


def wide_results(spec: Spec, inputs: Mapping[str, Array], rows: slice) -> Tensors:
    """The spec's results for some rows in float64, by name; of a result without rows, what these rows contribute."""
    import torch

    forward, graph = spec.with_direction("fwd").forward(), spec.graph()
    needed = {v.name: v for g in (forward, graph) for v in g.tensors if v.name in inputs}
    cut = {n: (inputs[n][rows] if M in v.type.axes else inputs[n]).detach().double() for n, v in needed.items()}
    function = torch_function(forward, wide=True)
    leaves = {n: cut[n].requires_grad_() for n in spec.differentiates} if spec.direction == "bwd" else {}
    values = function(*(cut[p.name] for p in forward.tensors))
    results = dict(zip((r.name for r in forward.results), values, strict=True))
    if spec.direction == "fwd":
        return results
    taken = [n for n in spec.differentiated if results[n].requires_grad]
    cotangents = [cut[f"d{n}"] for n in taken]
    given = torch.autograd.grad([results[n] for n in taken], [*leaves.values()], cotangents, allow_unused=True)
    found = zip(leaves.items(), given, strict=True)
    return {f"d{n}": torch.zeros_like(leaf) if g is None else g for (n, leaf), g in found}


def complaint(case: Case, want: Tensors, results: Mapping[str, Array]) -> str:
    """The reason why results are wrong, or an empty text; LngenError if the main result is missing."""
    if case.outputs[0] not in results:
        raise LngenError(f"'{case.outputs[0]}' is missing among the results.")
    dtypes = {v.name: v.type.dtype for v in case.graph.results}
    # A scale is of numbers that x's dtype rounds, and peers round a loss of classes to that.
    loose = any(t in QUANTISED for t in dtypes.values()) or bool(case.spec.classes)
    for name, error in errors(case, want, results).items():
        bound = max(BOUNDS[dtypes[name]], BOUNDS[case.spec.dtype] if loose else 0.0)
        if not error <= bound:  # a NaN fails
            return f"{name} is off by {error:.1e} of its size"
    return ""


def errors(case: Case, want: Tensors, results: Mapping[str, Array]) -> dict[str, float]:
    """By result: the larger of the relative errors in the 2-norm and in the maximum norm, against float64."""
    found = {}
    for name in (n for n in case.outputs if n in results):
        ideal, got = want[name], results[name].detach().reshape(want[name].shape)
        rows = CHUNK // case.spec.d or 1
        pairs = zip(got.split(rows), ideal.split(rows), strict=True) if ideal.ndim == 2 else [(got, ideal)]
        found[name] = _error(pairs)
    return found


def _error(pairs: Iterable[tuple[Array, Array]]) -> float:
    """The larger relative error of pairs of parts, results and what they should be; a NaN if there is one."""
    import torch

    measured = (v for got, want in pairs for v in (got.double() - want, want))
    sizes = [float(size) for v in measured for size in ((v * v).sum(), v.abs().amax())]
    off, off_peak, size, size_peak = torch.tensor(sizes, dtype=torch.float64).reshape(-1, 4).T
    norm = (off.sum() / size.sum().clamp(min=TINY * TINY)).sqrt()
    return float(torch.stack((norm, off_peak.amax() / size_peak.amax().clamp(min=TINY))).amax())
