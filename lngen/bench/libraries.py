"""Other people's kernels: which of lngen's graphs each library has, and how it is called.

Signatures are those of the libraries' public sources of August 2026. What a library computes is compared with lngen's
graph before it is timed, so a signature that has changed is reported, not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from lngen.bench.cases import Case, Tensors
from lngen.bench.providers import Forward, Prepared, autograd, installed, is_plain, need_torch
from lngen.ir import DType
from lngen.spec import Spec

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
    make: Callable[[ModuleType, Case], Forward],
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


def _quack_layernorm(m: ModuleType, case: Case) -> Forward:
    # The weights must be float32. They are converted once here, since no user would convert them per call.
    weights = [case.sets[0][name].float() for name in ("gamma", "beta")]
    return lambda t: (m.layernorm_fwd(t["x"], *weights, eps=case.spec.eps),)


def _flashinfer_layernorm(m: ModuleType, case: Case) -> Forward:
    weights = [case.sets[0][name].float() for name in ("gamma", "beta")]  # which must be float32
    return lambda t: (m.layernorm(t["x"], *weights, case.spec.eps),)


def _flashinfer_add_rmsnorm(m: ModuleType, case: Case) -> Prepared:
    """In place: x becomes y, residual becomes h. So the call has arrays of its own, one set for a chain."""
    need_torch(case)
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
