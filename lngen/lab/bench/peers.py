"""The peers: PyTorch itself, and other people's kernels with the graphs that each library has.

Signatures are those of the libraries' public sources of August 2026. What a peer computes is compared with lngen's
graph before it is timed, so a signature that has changed is reported, not timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from lngen.compiler.ir import DType
from lngen.compiler.passes import accumulated
from lngen.compiler.spec import Spec
from lngen.compiler.spec.spec import text_of
from lngen.dtypes import FLOATS
from lngen.lab.bench.argument_sets import Case, Prepared, Provider, Tensors
from lngen.lab.bench.torch_gpu import Array
from lngen.proof.torch_graph import torch_function

Call = Callable[[Tensors], Sequence[Array]]
"""Results in order, of tensors by name: of a forward the outputs of its graph, differentiable."""


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


def member_of(spec: Spec) -> str:
    """By what a library lists a graph: its name, and the options that are not the default ones.

    Empty for a graph of one's own, and for a spec of several dtypes, also of its gradients.
    """
    if not spec.builtin or spec.grad or {spec.weight, spec.out} != {spec.dtype}:
        return ""
    chosen = ",".join(f"{key}={text_of(value)}" for key, value in spec.chosen)
    return ":".join([spec.definition.name, *[chosen] * bool(chosen)])


def own_form(spec: Spec) -> Call | None:
    """A graph of lngen's as a user of PyTorch writes it, with PyTorch's own functions; None where it has none.

    Cross-entropy takes logits in f32, and class probabilities, as training programs call it: of bf16 its loss and its
    gradient would be outside of the bounds.
    """
    outputs = spec.definition.outputs(spec.options)
    return _own_forms(spec).get(member_of(spec)) if {*spec.differentiated} <= {*outputs} else None


def _own_forms(spec: Spec) -> dict[str, Call]:
    """PyTorch's own forms of rows of the spec's length, by the name of the graph."""
    import torch

    f, shape, eps = torch.nn.functional, (spec.d,), spec.eps_or_default

    def layer(x: Array, t: Tensors, suffix: str = "") -> Array:
        return f.layer_norm(x, shape, t[f"gamma{suffix}"], t[f"beta{suffix}"], eps)

    def rms(x: Array, t: Tensors, suffix: str = "") -> Array:
        return f.rms_norm(x, shape, t[f"gamma{suffix}"], eps)

    def of_sum(norm: Callable[..., Array], *suffixes: str) -> Call:
        def call(t: Tensors) -> Sequence[Array]:
            h = t["x"] + t["residual"]
            return [*(norm(h, t, suffix) for suffix in suffixes), h]

        return call

    return {
        "layernorm": lambda t: (layer(t["x"], t),),
        "rmsnorm": lambda t: (rms(t["x"], t),),
        "add_layernorm": of_sum(layer, ""),
        "add_rmsnorm": of_sum(rms, ""),
        "parallel_layernorm": of_sum(layer, "", "1"),
        "parallel_rmsnorm": of_sum(rms, "", "1"),
        "gated_layernorm": lambda t: (layer(t["x"], t) * f.silu(t["z"]),),
        "gated_rmsnorm": lambda t: (rms(t["x"], t) * f.silu(t["z"]),),
        "layernorm_sigmoid_mul": lambda t: (t["x"] * layer(t["x"], t).sigmoid(),),
        "rmsnorm_sigmoid_mul": lambda t: (t["x"] * rms(t["x"], t).sigmoid(),),
        "layernorm_act": lambda t: (f.silu(layer(t["x"], t)),),
        "rmsnorm_act": lambda t: (f.silu(rms(t["x"], t)),),
        "softmax": lambda t: (f.softmax(t["x"], dim=-1),),
        "log_softmax": lambda t: (f.log_softmax(t["x"], dim=-1),),
        "cross_entropy:target=index": lambda t: (f.cross_entropy(t["x"].float(), t["target"], reduction="none"),),
        "cross_entropy": lambda t: (f.cross_entropy(t["x"].float(), t["target"].float(), reduction="none"),),
    }


def forward_of(case: Case, compiled: bool = False) -> Call:
    """The case's forward in PyTorch: its own functions or a call for each equation, also through torch.compile."""
    import torch

    own, expression = own_form(case.spec), torch_function(case.forward)
    names, count = [p.name for p in case.forward.tensors], len(case.differentiable)

    def outputs(*inputs: Array) -> tuple[Array, ...]:
        results = own(dict(zip(names, inputs, strict=True))) if own else expression(*inputs)
        return tuple(results)[:count]  # statistics are lngen's choice, PyTorch saves what it wants

    call = torch.compile(outputs, dynamic=False) if compiled else outputs
    return lambda t: call(*(t[name] for name in names))


class Torch(Provider):
    """PyTorch, eager or, with ``compiled``, through torch.compile: its own functions, else the graph's expression."""

    def __init__(self, name: str = "torch", compiled: bool = False) -> None:
        self.name, self._compiled = name, compiled
        mode = "torch.compile(dynamic=False)" if compiled else "eager"
        self.settings = f"PyTorch's functions where the graph is made of them, else its expression; autograd; {mode}"

    def prepare(self, case: Case) -> Prepared:
        import torch

        if self._compiled:
            torch.compiler.reset()  # without it dynamo stops specialising after a few shapes and runs eagerly
        return autograd(case, forward_of(case, self._compiled))


def autograd(case: Case, forward: Call) -> Prepared:
    """A peer that is a differentiable function; a backward differentiates what a forward recorded for each set."""
    import torch

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


# ---- libraries ----

BOTH, FORWARD = ("fwd", "bwd"), ("fwd",)
HALVES = (DType.F16, DType.BF16)


@dataclass(frozen=True)
class Member:
    """A graph that a library has: its module, and a function of module, tensors and spec that returns the outputs.

    wide      gamma and beta must be float32; they are converted once, since no user would convert them per call
    in_place  results and the inputs that they overwrite; so the call has arrays of its own, one set for a chain
    left_out  why it is not timed
    """

    module: str
    call: Callable[[ModuleType, Tensors, Spec], Any]
    directions: tuple[str, ...] = BOTH
    dtypes: tuple[DType, ...] = FLOATS
    wide: bool = False
    in_place: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""

    def prepare(self, case: Case) -> Prepared:
        """The call for a case; autograd differentiates it."""
        module = importlib.import_module(self.module)
        if self.in_place:
            return self._in_place(module, case)
        if self.wide:  # of each set, since a weight that all share would be in the cache
            case = replace(case, sets=[t | {n: t[n].float() for n in ("gamma", "beta")} for t in case.sets])

        def forward(t: Tensors) -> Sequence[Array]:
            outputs = self.call(module, t, case.spec.baked)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return autograd(case, forward)

    def _in_place(self, module: ModuleType, case: Case) -> Prepared:
        sources = case.sets[:1] if case.chain else case.sets
        own = [t | {name: t[name].clone() for name in case.inputs} for t in sources]

        def launch(stream: int, index: int) -> None:
            self.call(module, own[index % len(own)], case.spec.baked)

        def results(index: int) -> Tensors:
            t = own[index % len(own)]
            return {name: t[self.in_place.get(name, name)] for name in case.differentiable}

        def ends(index: int) -> tuple[Array, Array]:
            return own[index % len(own)]["x"], results(index)[case.outputs[0]]

        return Prepared(launch, results, ends=ends)


@dataclass
class Library(Provider):
    """A provider of some graphs of one dtype; ``members`` has them by name and options, as ``member_of`` says.

    ``package`` is what has to be importable; ``extension`` a compiled module of it, which has to fit PyTorch's version.
    """

    name: str
    needs: str
    package: str
    settings: str
    members: Mapping[str, Member]
    extension: str = ""
    checked: bool = True

    def available(self) -> bool:
        if importlib.util.find_spec(self.package) is None:
            return False
        try:
            return not self.extension or bool(importlib.import_module(self.extension))
        except Exception:  # an extension may be installed and not fit the PyTorch beside it
            return False

    def covers(self, spec: Spec) -> bool:
        member = self.members.get(member_of(spec))
        return member is not None and spec.direction in member.directions and spec.dtype in member.dtypes

    def left_out(self, spec: Spec) -> str:
        return self.members[member_of(spec)].left_out

    def prepare(self, case: Case) -> Prepared:
        return self.members[member_of(case.spec)].prepare(case)


def _prenorm(t: Tensors, spec: Spec) -> dict[str, Any]:
    """The arguments of a norm of a sum that also returns the sum."""
    return {"residual": t["residual"], "eps": spec.eps, "prenorm": True}


def _liger_loss(module: ModuleType, t: Tensors) -> Array:
    """The losses of rows; ignored: class -100, z-loss and smoothing: 0."""
    return module.LigerCrossEntropyFunction.apply(t["x"], t["target"], None, -100, 0.0, 0.0, "none")[0]


def _liger_gradient(module: ModuleType, t: Tensors, spec: Spec) -> None:
    """The same with the gradient over x, which forward writes if that requires one."""
    t["x"].requires_grad_()
    t["loss"] = _liger_loss(module, t).detach()


OPS, QUACK, FLASH = "liger_kernel.ops", "quack.rmsnorm", "flash_attn.ops.triton.layer_norm"
FAST_APEX, APEX_NORM = "apex.contrib.layer_norm.layer_norm", "apex.normalization.fused_layer_norm"
APEX_NEEDS = "NVIDIA Apex with its CUDA extensions"
COUNTS = "it counts the targets on the host (.item()), which a CUDA graph cannot hold"
NOT_IN_PLACE = 0.0, "llama", False  # offset, casting mode; in place, a backward would overwrite dy

# fmt: off
LIGER = Library(
    "liger", "liger-kernel", "liger_kernel",
    "autograd functions of liger_kernel.ops; RMSNorm with offset 0, casting mode llama, not in place; cross-entropy "
    "with its gradient in place",
    {
        "layernorm": Member(
            f"{OPS}.layer_norm", lambda m, t, s: m.LigerLayerNormFunction.apply(t["x"], t["gamma"], t["beta"], s.eps)
        ),
        "rmsnorm": Member(
            f"{OPS}.rms_norm", lambda m, t, s: m.LigerRMSNormFunction.apply(t["x"], t["gamma"], s.eps, *NOT_IN_PLACE)
        ),
        "add_rmsnorm": Member(
            f"{OPS}.fused_add_rms_norm",
            lambda m, t, s: m.LigerFusedAddRMSNormFunction.apply(
                t["x"], t["residual"], t["gamma"], s.eps, *NOT_IN_PLACE
            ),
        ),
        "dyt": Member(
            f"{OPS}.dyt",
            lambda m, t, s: m.LigerDyTFunction.apply(t["x"], t["alpha"].reshape(1), t["gamma"], t["beta"]),
        ),
        "softmax": Member(f"{OPS}.softmax", lambda m, t, s: m.LigerSoftmaxFunction.apply(t["x"])),
        "cross_entropy:target=index": Member(
            f"{OPS}.cross_entropy", lambda m, t, s: _liger_loss(m, t), FORWARD, left_out=COUNTS
        ),
        "cross_entropy:target=index,x_grad=yes": Member(
            f"{OPS}.cross_entropy", _liger_gradient, FORWARD, in_place={"x_grad": "x"}, left_out=COUNTS
        ),
    },
)
QUACK_LIBRARY = Library(
    "quack", "quack-kernels", "quack",
    "quack.rmsnorm.rmsnorm, layernorm_fwd with weights in float32, converted once; softmax; cross_entropy, and "
    "cross_entropy_fwd with return_dx",
    {
        "layernorm": Member(
            QUACK, lambda m, t, s: m.layernorm_fwd(t["x"], t["gamma"], t["beta"], eps=s.eps), FORWARD, wide=True
        ),
        "rmsnorm": Member(QUACK, lambda m, t, s: m.rmsnorm(t["x"], t["gamma"], eps=s.eps)),
        "add_rmsnorm": Member(QUACK, lambda m, t, s: m.rmsnorm(t["x"], t["gamma"], **_prenorm(t, s))),
        "softmax": Member("quack.softmax", lambda m, t, s: m.softmax(t["x"])),
        "cross_entropy:target=index": Member(
            "quack.cross_entropy", lambda m, t, s: m.cross_entropy(t["x"], t["target"], reduction="none")
        ),
        "cross_entropy:target=index,x_grad=yes": Member(
            "quack.cross_entropy", lambda m, t, s: m.cross_entropy_fwd(t["x"], t["target"], return_dx=True), FORWARD
        ),
    },
)
FLASH_ATTN = Library(
    "flash-attn", "flash-attn", "flash_attn",
    "flash_attn.ops.triton.layer_norm: layer_norm_fn and rms_norm_fn, with a residual prenorm",
    {
        "layernorm": Member(FLASH, lambda m, t, s: m.layer_norm_fn(t["x"], t["gamma"], t["beta"], eps=s.eps)),
        "rmsnorm": Member(FLASH, lambda m, t, s: m.rms_norm_fn(t["x"], t["gamma"], None, eps=s.eps)),
        "add_layernorm": Member(
            FLASH, lambda m, t, s: m.layer_norm_fn(t["x"], t["gamma"], t["beta"], **_prenorm(t, s))
        ),
        "add_rmsnorm": Member(FLASH, lambda m, t, s: m.rms_norm_fn(t["x"], t["gamma"], None, **_prenorm(t, s))),
    },
)
MAMBA = Library(
    "mamba", "mamba-ssm", "mamba_ssm",
    "mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn, flash-attn's kernels with a SiLU gate behind the norm",
    {
        "gated_rmsnorm": Member(
            "mamba_ssm.ops.triton.layernorm_gated",
            lambda m, t, s: m.rmsnorm_fn(t["x"], t["gamma"], None, z=t["z"], eps=s.eps),
        ),
    },
)
APEX_FAST = Library(
    "apex-fast", APEX_NEEDS, "apex", "FastLayerNormFN",
    {
        "layernorm": Member(
            FAST_APEX, lambda m, t, s: m.FastLayerNormFN.apply(t["x"], t["gamma"], t["beta"], s.eps)
        ),
    },
    FAST_APEX,
)
APEX = Library(
    "apex", APEX_NEEDS, "apex", "FusedLayerNormAffineFunction, FusedRMSNormAffineFunction",
    {
        "layernorm": Member(
            APEX_NORM,
            lambda m, t, s: m.FusedLayerNormAffineFunction.apply(t["x"], t["gamma"], t["beta"], (s.d,), s.eps),
        ),
        "rmsnorm": Member(
            APEX_NORM, lambda m, t, s: m.FusedRMSNormAffineFunction.apply(t["x"], t["gamma"], (s.d,), s.eps)
        ),
    },
    "fused_layer_norm_cuda",
)
# fmt: on


def _flashinfer(pdl: bool) -> Library:
    """FlashInfer with programmatic launch or without; its public layernorm has no such argument, its kernel has."""

    def layernorm(m: ModuleType, t: Tensors, s: Spec) -> Array:
        if not pdl:
            return m.layernorm(t["x"], t["gamma"], t["beta"], s.eps)
        m.layernorm_cute(y := t["x"].new_empty(t["x"].shape), t["x"], t["gamma"], t["beta"], s.eps, enable_pdl=True)
        return y

    def rmsnorm(m: ModuleType, t: Tensors, s: Spec) -> Array:
        return m.rmsnorm(t["x"], t["gamma"], s.eps, enable_pdl=pdl)

    def add_rmsnorm(m: ModuleType, t: Tensors, s: Spec) -> None:
        m.fused_add_rmsnorm(t["x"], t["residual"], t["gamma"], s.eps, enable_pdl=pdl)

    def rmsnorm_quant(m: ModuleType, t: Tensors, s: Spec) -> Array:
        m.rmsnorm_quant(t["q"], t["x"], t["gamma"], t["q_scale"], s.eps, enable_pdl=pdl)
        return t["q"]

    def add_rmsnorm_quant(m: ModuleType, t: Tensors, s: Spec) -> None:
        m.fused_add_rmsnorm_quant(t["q"], t["x"], t["residual"], t["gamma"], t["q_scale"], s.eps, enable_pdl=pdl)

    norm, residual = "flashinfer.norm", {"h": "residual"}
    quantised = {
        f"{name}:quant={q},scales=tensor{apply}": member
        for name, member in (
            ("rmsnorm", Member(norm, rmsnorm_quant, FORWARD, HALVES)),
            ("add_rmsnorm", Member(norm, add_rmsnorm_quant, FORWARD, HALVES, in_place=residual)),
        )
        for q in ("e4m3", "e5m2")
        for apply in (",apply=mul", "")  # theirs multiplies by 1 / q_scale; bounds do not tell the two apart
    }
    return Library(
        "flashinfer-pdl" if pdl else "flashinfer",
        "flashinfer-python",
        "flashinfer",
        "flashinfer.norm: rmsnorm, layernorm with weights in float32, converted once, fused_add_rmsnorm in place, "
        "rmsnorm_quant and fused_add_rmsnorm_quant by a given scale; "
        f"{'with' if pdl else 'without'} programmatic launch",
        {
            "layernorm": Member(norm, layernorm, FORWARD, (DType.BF16,), wide=True),
            "rmsnorm": Member(norm, rmsnorm, FORWARD, HALVES),
            "add_rmsnorm": Member(norm, add_rmsnorm, FORWARD, HALVES, in_place={"y": "x", **residual}),
            **quantised,
        },
    )


FLASHINFER, FLASHINFER_PDL = _flashinfer(False), _flashinfer(True)
LIBRARIES = (LIGER, QUACK_LIBRARY, FLASH_ATTN, MAMBA, FLASHINFER, FLASHINFER_PDL, APEX_FAST, APEX)
