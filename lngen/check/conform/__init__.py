"""The conformance suite: one adversarial list for lngen's kernels and for anybody's normalisation.

::

    for outcome in conform(NumpyTarget("mine", forward, backward), Contract.of("layernorm", DType.F32)):
        print(outcome.name, outcome.status, outcome.detail)
"""

from lngen.check.conform.conformance import Case, Outcome, conform, conform_graph, select
from lngen.check.conform.implementations import LngenTarget, find_target
from lngen.check.conform.suites import Contract, GraphSuite

__all__ = [
    "Case",
    "Contract",
    "GraphSuite",
    "LngenTarget",
    "Outcome",
    "conform",
    "conform_graph",
    "find_target",
    "select",
]
