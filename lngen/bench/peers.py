"""Other people's kernels, and the choice among all providers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

from lngen.bench.cases import Case
from lngen.bench.providers import CEILINGS, Ceiling, Lngen, Prepared, Provider, Torch, autograd, installed
from lngen.errors import LngenError, MissingError
from lngen.spec import Spec


class Liger:
    """Liger's Triton kernels, through their autograd functions."""

    name = "liger"
    needs = "liger-kernel"
    checked = True

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
    """QuACK's RMSNorm."""

    name = "quack"
    needs = "quack-kernels"
    checked = True

    def available(self) -> bool:
        return installed("quack")

    def covers(self, spec: Spec) -> bool:
        return spec.definition.name == "rmsnorm"

    def prepare(self, case: Case) -> Prepared:
        rmsnorm = importlib.import_module("quack.rmsnorm").rmsnorm
        return autograd(case, lambda x, gamma, beta: rmsnorm(x, gamma, eps=case.spec.eps))


def known(schedule: str = "") -> dict[str, Provider]:
    """Every provider by name, the ceilings first; ``schedule`` is for lngen."""
    ceilings: list[Provider] = [Ceiling(name, direction) for direction, name in CEILINGS.items()]
    peers: list[Provider] = [Torch(), Torch("compile", compiled=True), Liger(), Quack()]
    return {p.name: p for p in (*ceilings, Lngen(schedule=schedule), *peers)}


def select(names: Sequence[str] = (), *, compiled: bool = False, schedule: str = "") -> list[Provider]:
    """The named providers, or all that are available (torch.compile only if asked for), after the ceilings.

    LngenError for an unknown name, MissingError for a named one that is not installed.
    """
    providers = known(schedule)
    for name in (*names, *(["compile"] if compiled else [])):
        if name not in providers:
            near = difflib.get_close_matches(name, providers, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise LngenError(f"There is no provider '{name}', expected some of {', '.join(providers)}{hint}")
        if not providers[name].available():
            needs = providers[name].needs
            raise MissingError(f"The provider '{name}' needs {needs}, which is not installed.")
    named = names or [n for n, p in providers.items() if p.available() and n != "compile"]
    wanted = {*named, *CEILINGS.values(), *(["compile"] if compiled else [])}
    return [p for name, p in providers.items() if name in wanted]
