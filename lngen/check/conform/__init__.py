"""The conformance suite: one adversarial list for lngen's kernels and for anybody's normalisation.

::

    for outcome in conform(NumpyTarget("mine", forward, backward), Contract("layernorm", DType.F32)):
        print(outcome.name, outcome.status, outcome.detail)
"""

from lngen.check.conform.adapters import ADAPTERS, find_target
from lngen.check.conform.case import Case
from lngen.check.conform.cases import CASES, select
from lngen.check.conform.contract import Contract, Outcome
from lngen.check.conform.graph_suite import GraphSuite
from lngen.check.conform.run import conform, conform_graph
from lngen.check.conform.targets import LngenTarget, NumpyTarget, Target, TorchTarget

__all__ = [
    "ADAPTERS",
    "CASES",
    "Case",
    "Contract",
    "GraphSuite",
    "LngenTarget",
    "NumpyTarget",
    "Outcome",
    "Target",
    "TorchTarget",
    "conform",
    "conform_graph",
    "find_target",
    "select",
]
