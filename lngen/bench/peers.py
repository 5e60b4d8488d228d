"""Other people's kernels, and the choice among all providers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

from lngen.bench.cases import Case
from lngen.bench.overlapped import INPUTS as OVERLAPPED_INPUTS
from lngen.bench.overlapped import OverlappedCeiling
from lngen.bench.providers import Ceiling, Lngen, Prepared, Provider, Torch, autograd, installed
from lngen.bench.records import SERIAL, VARIANT
from lngen.bench.tasks import CEILINGS
from lngen.errors import LngenError, MissingError
from lngen.schedule import Schedule, parse_schedule
from lngen.spec import Spec

ANY = Schedule("registers", threads=32, rows_per_block=1, vec=1)  # a schedule for variants to change
ON_REQUEST = (SERIAL, "compile")  # not among the default providers
FAST_APEX = "apex.contrib.layer_norm.layer_norm"


def importable(module: str) -> bool:
    """True for a module that can be imported: an extension may be installed and not fit the PyTorch beside it."""
    try:
        importlib.import_module(module)
    except Exception:
        return False
    return True


class Liger:
    """Liger's Triton kernels, through their autograd functions."""

    name = "liger"
    needs = "liger-kernel"
    checked = True
    settings = "LigerLayerNormFunction; LigerRMSNormFunction with offset 0, casting mode llama, not in place"

    def available(self) -> bool:
        return installed("liger_kernel")

    def covers(self, spec: Spec) -> bool:
        return spec.definition.name in ("layernorm", "rmsnorm")

    def prepare(self, case: Case) -> Prepared:
        eps = case.spec.eps
        if case.spec.definition.name == "layernorm":
            layernorm = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
            return autograd(case, lambda x, gamma, beta: layernorm.apply(x, gamma, beta, eps))
        rmsnorm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        # The last argument: not in place, or backward would overwrite dy.
        return autograd(case, lambda x, gamma, beta: rmsnorm.apply(x, gamma, eps, 0.0, "llama", False))


class Quack:
    """QuACK's RMSNorm and the forward of its LayerNorm, which has no backward."""

    name = "quack"
    needs = "quack-kernels"
    checked = True
    settings = "quack.rmsnorm.rmsnorm; layernorm_fwd with weights in float32, converted once"

    def available(self) -> bool:
        return installed("quack")

    def covers(self, spec: Spec) -> bool:
        return spec.definition.name == "rmsnorm" or (spec.definition.name, spec.direction) == ("layernorm", "fwd")

    def prepare(self, case: Case) -> Prepared:
        eps, module = case.spec.eps, importlib.import_module("quack.rmsnorm")
        if case.spec.definition.name == "rmsnorm":
            return autograd(case, lambda x, gamma, beta: module.rmsnorm(x, gamma, eps=eps))
        # The weights must be float32. They are converted once here, since no user would convert them per call.
        weights = [case.sets[0][name].float() for name in ("gamma", "beta")]
        return autograd(case, lambda x, gamma, beta: module.layernorm_fwd(x, *weights, eps=eps))


class Apex:
    """Apex' kernels through their autograd functions; with ``fast``, LayerNorm is FastLayerNorm, for its widths."""

    needs = "NVIDIA Apex with its CUDA extensions"
    checked = True

    def __init__(self, fast: bool) -> None:
        self.name, self._fast = "apex-fast" if fast else "apex", fast
        self.settings = "FastLayerNormFN" if fast else "FusedLayerNormAffineFunction, FusedRMSNormAffineFunction"

    def available(self) -> bool:
        return installed("apex") and importable(FAST_APEX if self._fast else "fused_layer_norm_cuda")

    def covers(self, spec: Spec) -> bool:
        return spec.definition.name == "layernorm" or (spec.definition.name == "rmsnorm" and not self._fast)

    def prepare(self, case: Case) -> Prepared:
        eps, shape = case.spec.eps, (case.spec.d,)
        if self._fast:
            fast = importlib.import_module(FAST_APEX).FastLayerNormFN
            return autograd(case, lambda x, gamma, beta: fast.apply(x, gamma, beta, eps))
        module = importlib.import_module("apex.normalization.fused_layer_norm")
        if case.spec.definition.name == "layernorm":
            layernorm = module.FusedLayerNormAffineFunction
            return autograd(case, lambda x, gamma, beta: layernorm.apply(x, gamma, beta, shape, eps))
        rmsnorm = module.FusedRMSNormAffineFunction
        return autograd(case, lambda x, gamma, beta: rmsnorm.apply(x, gamma, shape, eps))


def known(schedules: Sequence[str] = ()) -> dict[str, Provider]:
    """Every provider by name, the ceilings first; lngen with the default schedule and with each of ``schedules``."""
    ceilings: list[Provider] = [Ceiling(direction) for direction in CEILINGS]
    ceilings += [OverlappedCeiling(direction) for direction in OVERLAPPED_INPUTS]
    peers: list[Provider] = [Torch(), Torch("compile", compiled=True), Liger(), Quack(), Apex(True), Apex(False)]
    variants = [Lngen(VARIANT + text, text) for text in schedules]
    own: list[Provider] = [Lngen(), *variants, Lngen(SERIAL, overlap=False)]
    return {p.name: p for p in (*ceilings, *own, *peers)}


def select(names: Sequence[str] = (), *, compiled: bool = False, schedules: Sequence[str] = ()) -> list[Provider]:
    """The named providers after the ceilings and lngen's variants; by default all that are available but ON_REQUEST.

    LngenError for an unknown name, ScheduleError for a text that is not a schedule, MissingError for a named provider
    that is not installed.
    """
    for text in schedules:
        parse_schedule(text, ANY)
    providers = known(schedules)
    for name in (*names, *(["compile"] if compiled else [])):
        if name not in providers:
            near = difflib.get_close_matches(name, providers, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise LngenError(f"There is no provider '{name}', expected some of {', '.join(providers)}{hint}")
        if not providers[name].available():
            needs = providers[name].needs
            raise MissingError(f"The provider '{name}' needs {needs}, which is not installed.")
    ceilings = [n for n, p in providers.items() if not p.checked and p.available()]
    named = names or [n for n, p in providers.items() if p.available() and n not in ON_REQUEST]
    wanted = {
        *named,
        *ceilings,
        *(["compile"] if compiled else []),
        *(VARIANT + text for text in schedules),
    }
    return [p for name, p in providers.items() if name in wanted]
