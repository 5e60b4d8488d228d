"""The peers: PyTorch itself, and other people's kernels with the graphs that each library has.

Signatures are those of the libraries' public sources of August 2026. What a peer computes is compared with lngen's
graph before it is timed, so a signature that has changed is reported, not timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from lngen.bench.argument_sets import Case, Prepared, Tensors
from lngen.bench.torch_gpu import Array
from lngen.bench.torch_graph import torch_function
from lngen.ir import DType
from lngen.passes import accumulated
from lngen.spec import Spec

Call = Callable[[Tensors], Sequence[Array]]
"""Results in order, of tensors by name: of a forward the outputs of its graph, differentiable."""


def installed(module: str) -> bool:
    """True for a module that could be imported; does not import it."""
    return importlib.util.find_spec(module) is not None


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


def is_plain(spec: Spec) -> bool:
    """True for a spec of one dtype, also of its gradients, whose graph has its default options."""
    return spec.weight is spec.dtype and spec.out is spec.dtype and spec.grad is None and not spec.chosen


def own_form(spec: Spec) -> Call | None:
    """A graph of lngen's as a user of PyTorch writes it, with PyTorch's own functions; None where it has none.

    Cross-entropy takes logits and class probabilities in f32, as training programs call it: of bf16 its loss and its
    gradient would be outside of the bounds.
    """
    outputs = spec.definition.outputs(spec.options)
    if not (spec.builtin and is_plain(spec) and {*spec.differentiated} <= {*outputs}):
        return None
    import torch

    f, shape, eps = torch.nn.functional, (spec.d,), spec.eps

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
        "cross_entropy": lambda t: (f.cross_entropy(t["x"].float(), t["target"].float(), reduction="none"),),
    }.get(spec.definition.name)


def forward_of(case: Case, compiled: bool = False) -> Call:
    """The case's forward in PyTorch: its own functions or a call for each equation, also through torch.compile."""
    import torch

    own, expression = own_form(case.spec), torch_function(case.forward)
    names, count = [p.name for p in case.forward.params], len(case.differentiable)

    def outputs(*inputs: Array) -> tuple[Array, ...]:
        results = own(dict(zip(names, inputs, strict=True))) if own else expression(*inputs)
        return tuple(results)[:count]  # statistics are lngen's choice, PyTorch saves what it wants

    call = torch.compile(outputs, dynamic=False) if compiled else outputs
    return lambda t: call(*(t[name] for name in names))


class Torch:
    """PyTorch, eager or, with ``compiled``, through torch.compile: its own functions, else the graph's expression."""

    needs = "PyTorch with CUDA"
    checked = True

    def __init__(self, name: str = "torch", compiled: bool = False) -> None:
        self.name, self._compiled = name, compiled
        mode = "torch.compile(dynamic=False)" if compiled else "eager"
        self.settings = f"PyTorch's functions where the graph is made of them, else its expression; autograd; {mode}"

    def available(self) -> bool:
        return installed("torch")

    def covers(self, spec: Spec) -> bool:
        return True

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


def importable(module: str) -> bool:
    """True for a module that can be imported: an extension may be installed and not fit the PyTorch beside it."""
    try:
        importlib.import_module(module)
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class Member:
    """A graph that a library has: its module, and a function of module and case that prepares the call."""

    module: str
    prepare: Callable[[ModuleType, Case], Prepared]
    directions: tuple[str, ...] = BOTH
    dtypes: tuple[DType, ...] = tuple(DType)


def differentiable(
    module: str,
    make: Callable[[ModuleType, Case], Call],
    directions: tuple[str, ...] = BOTH,
    dtypes: tuple[DType, ...] = tuple(DType),
) -> Member:
    """A member that autograd differentiates; ``make`` returns a function of the inputs that returns the outputs."""
    return Member(module, lambda m, case: autograd(case, make(m, case)), directions, dtypes)


@dataclass
class Library:
    """A provider of some graphs, with their default inputs and one dtype.

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
        return installed(self.package) and (not self.extension or importable(self.extension))

    def covers(self, spec: Spec) -> bool:
        member = self.members.get(spec.definition.name)
        if member is None or not (spec.builtin and is_plain(spec)):
            return False
        return spec.direction in member.directions and spec.dtype in member.dtypes

    def prepare(self, case: Case) -> Prepared:
        member = self.members[case.spec.definition.name]
        return member.prepare(importlib.import_module(member.module), case)


def _quack_layernorm(m: ModuleType, case: Case) -> Call:
    # The weights must be float32. They are converted once here, since no user would convert them per call.
    weights = [case.sets[0][name].float() for name in ("gamma", "beta")]
    return lambda t: (m.layernorm_fwd(t["x"], *weights, eps=case.spec.eps),)


def _flashinfer_layernorm(m: ModuleType, case: Case) -> Call:
    weights = [case.sets[0][name].float() for name in ("gamma", "beta")]  # which must be float32
    return lambda t: (m.layernorm(t["x"], *weights, case.spec.eps),)


def _flashinfer_add_rmsnorm(m: ModuleType, case: Case) -> Prepared:
    """In place: x becomes y, residual becomes h. So the call has arrays of its own, one set for a chain."""
    sources = case.sets[:1] if case.chain else case.sets
    own = [{name: t[name].clone() for name in ("x", "residual", "gamma")} for t in sources]

    def launch(stream: int, index: int) -> None:
        t = own[index % len(own)]
        m.fused_add_rmsnorm(t["x"], t["residual"], t["gamma"], case.spec.eps)

    def results(index: int) -> Tensors:
        t = own[index % len(own)]
        return {"y": t["x"], "h": t["residual"]}

    return Prepared(launch, results)


QUACK, FLASH = "quack.rmsnorm", "flash_attn.ops.triton.layer_norm"

LIGER = Library(
    "liger",
    "liger-kernel",
    "liger_kernel",
    "autograd functions of liger_kernel.ops; RMSNorm with offset 0, casting mode llama, not in place",
    {
        "layernorm": differentiable(
            "liger_kernel.ops.layer_norm",
            lambda m, c: lambda t: (m.LigerLayerNormFunction.apply(t["x"], t["gamma"], t["beta"], c.spec.eps),),
        ),
        # The last argument: not in place, or backward would overwrite dy.
        "rmsnorm": differentiable(
            "liger_kernel.ops.rms_norm",
            lambda m, c: lambda t: (m.LigerRMSNormFunction.apply(t["x"], t["gamma"], c.spec.eps, 0.0, "llama", False),),
        ),
        "add_rmsnorm": differentiable(
            "liger_kernel.ops.fused_add_rms_norm",
            lambda m, c: (
                lambda t: m.LigerFusedAddRMSNormFunction.apply(
                    t["x"], t["residual"], t["gamma"], c.spec.eps, 0.0, "llama", False
                )
            ),
        ),
        "dyt": differentiable(
            "liger_kernel.ops.dyt",
            lambda m, c: lambda t: (m.LigerDyTFunction.apply(t["x"], t["alpha"].reshape(1), t["gamma"], t["beta"]),),
        ),
        "softmax": differentiable(
            "liger_kernel.ops.softmax", lambda m, c: lambda t: (m.LigerSoftmaxFunction.apply(t["x"]),)
        ),
    },
)

QUACK_LIBRARY = Library(
    "quack",
    "quack-kernels",
    "quack",
    "quack.rmsnorm.rmsnorm, layernorm_fwd with weights in float32, converted once; softmax",
    {
        "layernorm": differentiable(QUACK, _quack_layernorm, FORWARD),
        "rmsnorm": differentiable(QUACK, lambda m, c: lambda t: (m.rmsnorm(t["x"], t["gamma"], eps=c.spec.eps),)),
        "add_rmsnorm": differentiable(
            QUACK,
            lambda m, c: lambda t: m.rmsnorm(t["x"], t["gamma"], residual=t["residual"], eps=c.spec.eps, prenorm=True),
        ),
        "softmax": differentiable("quack.softmax", lambda m, c: lambda t: (m.softmax(t["x"]),)),
    },
)

FLASH_ATTN = Library(
    "flash-attn",
    "flash-attn",
    "flash_attn",
    "flash_attn.ops.triton.layer_norm: layer_norm_fn and rms_norm_fn, with a residual prenorm",
    {
        "layernorm": differentiable(
            FLASH, lambda m, c: lambda t: (m.layer_norm_fn(t["x"], t["gamma"], t["beta"], eps=c.spec.eps),)
        ),
        "rmsnorm": differentiable(
            FLASH, lambda m, c: lambda t: (m.rms_norm_fn(t["x"], t["gamma"], None, eps=c.spec.eps),)
        ),
        "add_layernorm": differentiable(
            FLASH,
            lambda m, c: (
                lambda t: m.layer_norm_fn(
                    t["x"], t["gamma"], t["beta"], residual=t["residual"], eps=c.spec.eps, prenorm=True
                )
            ),
        ),
        "add_rmsnorm": differentiable(
            FLASH,
            lambda m, c: (
                lambda t: m.rms_norm_fn(t["x"], t["gamma"], None, residual=t["residual"], eps=c.spec.eps, prenorm=True)
            ),
        ),
    },
)

MAMBA = Library(
    "mamba",
    "mamba-ssm",
    "mamba_ssm",
    "mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn, flash-attn's kernels with a SiLU gate behind the norm",
    {
        "gated_rmsnorm": differentiable(
            "mamba_ssm.ops.triton.layernorm_gated",
            lambda m, c: lambda t: (m.rmsnorm_fn(t["x"], t["gamma"], None, z=t["z"], eps=c.spec.eps),),
        ),
    },
)

FLASHINFER = Library(
    "flashinfer",
    "flashinfer-python",
    "flashinfer",
    "flashinfer.norm: rmsnorm, layernorm with weights in float32, converted once, fused_add_rmsnorm in place; "
    "it decides about programmatic launch",
    {
        "layernorm": differentiable("flashinfer.norm", _flashinfer_layernorm, FORWARD, (DType.BF16,)),
        "rmsnorm": differentiable(
            "flashinfer.norm", lambda m, c: lambda t: (m.rmsnorm(t["x"], t["gamma"], c.spec.eps),), FORWARD, HALVES
        ),
        "add_rmsnorm": Member("flashinfer.norm", _flashinfer_add_rmsnorm, FORWARD, HALVES),
    },
)

FAST_APEX = "apex.contrib.layer_norm.layer_norm"
APEX_NORM = "apex.normalization.fused_layer_norm"
APEX_NEEDS = "NVIDIA Apex with its CUDA extensions"

APEX_FAST = Library(
    "apex-fast",
    APEX_NEEDS,
    "apex",
    "FastLayerNormFN",
    {
        "layernorm": differentiable(
            FAST_APEX, lambda m, c: lambda t: (m.FastLayerNormFN.apply(t["x"], t["gamma"], t["beta"], c.spec.eps),)
        ),
    },
    extension=FAST_APEX,
)

APEX = Library(
    "apex",
    APEX_NEEDS,
    "apex",
    "FusedLayerNormAffineFunction, FusedRMSNormAffineFunction",
    {
        "layernorm": differentiable(
            APEX_NORM,
            lambda m, c: (
                lambda t: (
                    m.FusedLayerNormAffineFunction.apply(t["x"], t["gamma"], t["beta"], (c.spec.d,), c.spec.eps),
                )
            ),
        ),
        "rmsnorm": differentiable(
            APEX_NORM,
            lambda m, c: lambda t: (m.FusedRMSNormAffineFunction.apply(t["x"], t["gamma"], (c.spec.d,), c.spec.eps),),
        ),
    },
    extension="fused_layer_norm_cuda",
)

LIBRARIES = (LIGER, QUACK_LIBRARY, FLASH_ATTN, MAMBA, FLASHINFER, APEX_FAST, APEX)
