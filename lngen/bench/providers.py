"""Providers, which are timed. Each prepares a launch for a case; the caller checks its results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lngen.bench.cases import Case, Tensors
from lngen.bench.engines import Array
from lngen.bench.timing import Launch
from lngen.bench.torch_graph import Function, torch_function
from lngen.compile import Compilation, KernelSet
from lngen.errors import MissingError
from lngen.ir import DType
from lngen.passes import accumulated
from lngen.runtime.launch import Launcher, device_arch
from lngen.spec import Spec
from lngen.toolchain import Binary

SOFTMAXES = ("softmax", "log_softmax", "cross_entropy")  # also the names of PyTorch's functions


@dataclass(frozen=True)
class Prepared:
    """A provider ready for a case: the launch, and the results that a launch with a set leaves."""

    launch: Launch
    results: Callable[[int], Tensors]
    schedule: str = ""


class Provider(Protocol):
    """An implementation. ``checked`` is False for a ceiling, which computes no norm.

    ``needs`` names what has to be installed, ``settings`` what is called, and how.
    """

    name: str
    needs: str
    checked: bool
    settings: str

    def available(self) -> bool:
        """True if it can be imported here."""

    def covers(self, spec: Spec) -> bool:
        """True if it computes this graph in this direction."""

    def prepare(self, case: Case) -> Prepared:
        """Compile and allocate everything that a launch needs; may raise any exception."""


def installed(module: str) -> bool:
    """True for a module that could be imported; does not import it."""
    return importlib.util.find_spec(module) is not None


class Lngen:
    """lngen's own kernels, with the default schedule or one that ``schedule`` changes.

    Each call waits for the end of the previous one; with ``overlap`` it starts while the previous one drains, where the
    GPU supports it.
    """

    needs = "a GPU"
    checked = True

    def __init__(self, name: str = "lngen", schedule: str = "", overlap: bool = False) -> None:
        self.name, self._schedule, self._overlap = name, schedule, overlap
        calls = "each call begins while the one before ends" if overlap else "each call waits for the end of the last"
        self.settings = f"{schedule or 'default schedule'}, {calls}"

    def available(self) -> bool:
        return True

    def covers(self, spec: Spec) -> bool:
        return True

    def prepare(self, case: Case) -> Prepared:
        device = case.engine.device()[0]
        arch = device_arch(device)
        # The only place that chooses a schedule.
        kernels = Compilation(case.spec).changed(self._schedule, arch, rows=case.rows)
        schedule = str(kernels.plan.schedule)
        launcher = Launcher(kernels.plan, self.compiled(kernels, arch).image, device, self._overlap)
        bound = launcher.bind(case.rows, dict.fromkeys(launcher.tensors, case.spec.d))
        # One workspace: in use it is equally warm.
        workspace = case.engine.empty((max(1, -(-bound.workspace_bytes // 8)),), DType.F64)
        address = case.engine.pointer(workspace)
        bound.prepare(address, case.engine.stream())
        pointers = [[case.engine.pointer(s[name]) for name in launcher.tensors] for s in case.sets]

        def launch(stream: int, index: int, keep: Any = (launcher, workspace)) -> None:
            bound(pointers[index], address, stream)

        return Prepared(launch, lambda index: {n: case.sets[index][n] for n in case.outputs}, schedule)

    def compiled(self, kernels: KernelSet, arch: str) -> Binary:
        """What is timed."""
        return kernels.cubin(arch)


Call = Callable[[Tensors], Sequence[Array]]


def keeping(call: Call, names: Sequence[str], sets: Sequence[Tensors], chain: str = "") -> Prepared:
    """A call that allocates its results, which are kept until its set is used again.

    Freed at once, the results would share memory with those of the next call, which a cache absorbs: such a call
    would look faster than one that writes to cold memory. With a ``chain``, the first result of a call is that input
    of the next one; the first set starts a new chain.
    """
    kept: list[Sequence[Array]] = [()] * len(sets)

    def launch(stream: int, index: int) -> None:
        linked = {chain: kept[index - 1][0]} if chain and index else {}
        kept[index] = call({**sets[index], **linked})

    def results(index: int) -> Tensors:
        return {n: a for n, a in zip(names, kept[index], strict=False) if a is not None}

    return Prepared(launch, results)


def is_native(spec: Spec) -> bool:
    """True for a norm that PyTorch has an operator for: of one dtype, with its usual weights, statistics saved."""
    named = spec.builtin and spec.definition.name in ("layernorm", "rmsnorm")
    return named and is_plain(spec) and spec.save == "stats" and not spec.accumulate


def is_plain(spec: Spec) -> bool:
    """True for a spec of one dtype, also of its gradients, whose graph has its default options."""
    return spec.weight is spec.dtype and spec.out is spec.dtype and spec.grad is None and not spec.chosen


def own_function(spec: Spec) -> Function | None:
    """PyTorch's own function of the inputs of softmax, log_softmax or cross_entropy; None for any other graph.

    Cross-entropy takes logits and class probabilities in f32, as training programs call it: of bf16 its loss and its
    gradient would be outside of the bounds.
    """
    name, outputs = spec.definition.name, spec.definition.outputs(spec.options)
    if name not in SOFTMAXES or not (spec.builtin and is_plain(spec) and {*spec.differentiated} <= {*outputs}):
        return None
    import torch

    function = getattr(torch.nn.functional, name)
    if name != "cross_entropy":
        return lambda x: (function(x, dim=-1),)
    return lambda x, target: (function(x.float(), target.float(), reduction="none"),)


def torch_call(case: Case) -> tuple[Call, tuple[str, ...]]:
    """PyTorch's own operator for a case of one of the two norms, and the names of its results."""
    import torch

    d, eps, aten = case.spec.d, case.spec.eps, torch.ops.aten
    if case.spec.definition.name == "layernorm":
        if case.spec.direction == "fwd":
            return lambda t: aten.native_layer_norm(t["x"], [d], t["gamma"], t["beta"], eps), ("y", "mean", "rstd")
        mask = [name in case.outputs for name in ("dx", "dgamma", "dbeta")]

        def layernorm_backward(t: Tensors) -> Sequence[Array]:
            mean, rstd = t["mean"].view(-1, 1), t["rstd"].view(-1, 1)
            result = aten.native_layer_norm_backward(t["dy"], t["x"], [d], mean, rstd, t["gamma"], t["beta"], mask)
            return tuple(result)

        return layernorm_backward, ("dx", "dgamma", "dbeta")
    if case.spec.direction == "fwd":
        return lambda t: (torch.nn.functional.rms_norm(t["x"], (d,), t["gamma"], eps),), ("y",)
    mask = [name in case.outputs for name in ("dx", "dgamma")]

    def rmsnorm_backward(t: Tensors) -> Sequence[Array]:
        rstd = t["rstd"].view(-1, 1)
        return tuple(aten._fused_rms_norm_backward(t["dy"], t["x"], [d], rstd, t["gamma"], mask))

    return rmsnorm_backward, ("dx", "dgamma")


Forward = Callable[[Tensors], Sequence[Array]]
"""The outputs of a case's graph, in order, of its inputs by name; differentiable."""


def forward_of(case: Case, compiled: bool = False) -> Forward:
    """The case's forward in PyTorch: its own function or a call for each equation, also through torch.compile."""
    import torch

    graph = case.forward
    function = own_function(case.spec) or torch_function(graph)
    names, count = [p.name for p in graph.params], len(case.differentiable)

    def outputs(*inputs: Array) -> tuple[Array, ...]:
        return function(*inputs)[:count]  # statistics are lngen's choice, PyTorch saves what it wants

    call = torch.compile(outputs, dynamic=False) if compiled else outputs
    return lambda t: call(*(t[name] for name in names))


class Torch:
    """PyTorch, eager or, with ``compiled``, through torch.compile: its own function, else the graph's expression."""

    needs = "PyTorch with CUDA"
    checked = True

    def __init__(self, name: str = "torch", compiled: bool = False) -> None:
        self.name, self._compiled = name, compiled
        self.settings = "aten's fused norms, F.softmax, F.log_softmax, F.cross_entropy, else the expression; autograd"
        self.settings += ", through torch.compile(dynamic=False)" if compiled else ", eager"

    def available(self) -> bool:
        return installed("torch")

    def covers(self, spec: Spec) -> bool:
        return True

    def prepare(self, case: Case) -> Prepared:
        import torch

        need_torch(case)
        if self._compiled:
            torch.compiler.reset()  # without it dynamo stops specialising after a few shapes and runs eagerly
        if not is_native(case.spec):
            return autograd(case, forward_of(case, self._compiled))
        call, names = torch_call(case)
        if self._compiled:
            return keeping(torch.compile(call, dynamic=False), names, case.sets, case.chain)
        backward_of_rms = case.spec.definition.name == "rmsnorm" and case.spec.direction == "bwd"
        if backward_of_rms and not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
            d, eps = case.spec.d, case.spec.eps
            return autograd(case, lambda t: (torch.nn.functional.rms_norm(t["x"], (d,), t["gamma"], eps),))
        return keeping(call, names, case.sets, case.chain)


def need_torch(case: Case) -> None:
    """MissingError if the arrays are not PyTorch's."""
    if case.engine.name != "torch":
        raise MissingError("PyTorch is installed, but without CUDA.")


def autograd(case: Case, forward: Forward) -> Prepared:
    """A peer that is a differentiable function; a backward differentiates what a forward recorded for each set."""
    import torch

    need_torch(case)
    if case.spec.direction == "fwd":

        def run(t: Tensors) -> Sequence[Array]:
            with torch.no_grad():
                return forward(t)

        return keeping(run, case.differentiable, case.sets, case.chain)
    wrt, summed = case.spec.differentiates, case.spec.accumulate
    recorded: dict[int, Tensors] = {}  # by set: the links of a chain are few sets, used many times
    for t in case.sets:
        if id(t) not in recorded:
            leaves = {name: t[name].detach().requires_grad_() for name in wrt}
            outputs = zip(case.differentiable, forward({**t, **leaves}), strict=False)
            held = {name: y for name, y in outputs if name in case.spec.differentiated and y.requires_grad}
            cotangents = {f"d{name}": t[f"d{name}"] for name in held}
            before = {name: t[name] for name in map(accumulated, (f"d{name}" for name in summed))}
            recorded[id(t)] = held | cotangents | before | {f"d{name}": leaf for name, leaf in leaves.items()}
    taken = [name for name in case.spec.differentiated if name in recorded[id(case.sets[0])]]

    def differentiate(t: Tensors) -> Sequence[Array]:
        outputs, inputs = [t[name] for name in taken], [t[f"d{name}"] for name in wrt]
        cotangents = [t[f"d{name}"] for name in taken]
        found = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)
        return [t[accumulated(f"d{n}")] + g if n in summed else g for n, g in zip(wrt, found, strict=True)]

    return keeping(differentiate, [f"d{name}" for name in wrt], [recorded[id(t)] for t in case.sets], case.chain)
