"""One case of bits: a spec under a schedule for some rows, on the PTX executor, against the interpreter."""

from dataclasses import dataclass, replace
from functools import cache

from bit_graphs import DEFINITIONS
from lngen.compiler.contract import described
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import WIDE, Graph
from lngen.compiler.ir.numerics import Array
from lngen.compiler.lower import Plan, lower
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import Spec, parse_spec
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan
from lngen.rules import Distance

UNUSED_READS = {"global-race", "async-read", "proxy"}  # what an alias may cause: reads of elements that go unused
MANY = 200  # more than the outer rows of any case


@dataclass(frozen=True)
class Case:
    """What runs: a spec, also of a graph in ``bit_graphs``, a schedule, numbers of rows, and how.

    ``gaps``: rows and pointers at other distances than D, odd ones where the plan takes any. ``inner``: rows at two
    distances, so many in a row. ``alias``: "y=x" stores y over x. ``order``: another order of blocks for each number
    of rows. ``times``: calls on one workspace. ``eps``: by value, against the graph with it baked in.
    """

    spec: str
    schedule: Schedule
    rows: tuple[int, ...]
    gaps: bool = False
    inner: int = 0
    alias: str = ""
    order: int = 0
    times: int = 1
    eps: float | None = None
    arch: str = "sm_90"

    @property
    def text(self) -> str:
        """The spec with the keys that follow from how it runs."""
        return f"{self.spec}{',strides=2' * bool(self.inner)}{',eps=run' * (self.eps is not None)}"

    @property
    def plan(self) -> Plan:
        return plan_of(self.text, self.schedule)

    @property
    def how(self) -> str:
        """What is not the default of how it runs, in words."""
        words = (
            "gaps" * self.gaps, f"inner {self.inner}" * (self.inner > 0), self.alias,
            f"order {self.order}" * (self.order > 0), f"{self.times} times" * (self.times > 1),
            f"eps {self.eps}" * (self.eps is not None), self.arch * (self.arch != "sm_90"),
        )  # fmt: skip
        return " ".join(filter(None, words))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.spec, self.schedule.slug, self.how)))


@cache
def plan_of(text: str, schedule: Schedule) -> Plan:
    return lower(spec_of(text), schedule)


def spec_of(text: str) -> Spec:
    """The spec of a text, also of a graph of one's own."""
    name = text.partition(".")[0]
    return parse_spec(text, {name: DEFINITIONS[name]} if name in DEFINITIONS else None)


def distances(plan: Plan, inner: int) -> dict[str, Distance]:
    """Distances of which no two tensors have the same, as the plan allows: packed with gaps, or inner rows first."""
    unit, found = unit_of(plan), dict[str, Distance]()
    d = -(-plan.spec.d // unit) * unit
    for n, v in enumerate(v for v in (*plan.inputs, *plan.outputs) if v.type.axes == WIDE):
        near = d + (n + 1) * unit
        if not inner:
            found[v.name] = near
        elif n % 2 == 0:
            found[v.name] = inner * near + (2 * n + 1) * unit, near
        else:
            found[v.name] = near, MANY * near + n * unit
    return found


def unit_of(plan: Plan) -> int:
    """Elements of which every distance is a multiple."""
    return max(plan.alignment(v) // v.type.dtype.size for v in (*plan.inputs, *plan.outputs) if v.type.axes == WIDE)


def wanted(case: Case, graph: Graph, inputs: dict[str, Array]) -> dict[str, Array]:
    """What the interpreter makes of the inputs; with an eps by value, of the graph that has it as a constant."""
    if case.eps is None:
        return interpret(graph, inputs)
    fixed = replace(spec_of(case.text), eps=case.eps).graph()
    return interpret(fixed, {v.name: inputs[v.name] for v in graph.tensors})


def check(case: Case) -> None:
    """Bits are those of the interpreter; nothing is out of bounds, left out, raced for or waited for in vain."""
    plan = case.plan
    pairs = [part.split("=") for part in case.alias.split()]
    for n, rows in enumerate(case.rows):
        inputs = random_inputs(plan.spec, rows, **({} if case.eps is None else {"eps": case.eps}))
        outcome = run_plan(
            plan, inputs, rows=rows, arch=case.arch, times=case.times, order=case.order and case.order + n,
            strides=distances(plan, case.inner) if case.gaps or case.inner else None, inner=case.inner or 1,
            offset=unit_of(plan) * (1 + 2 * n) if case.gaps else 0,
            alias={result: (over, 0) for result, over in pairs},
        )  # fmt: skip
        found = [str(f) for f in outcome.findings if not (pairs and f.kind in UNUSED_READS)]
        assert not found, (str(case), rows, found[:3])
        assert not mismatches(outcome.results, wanted(case, plan.graph, inputs)), (str(case), rows)
    allowed = described(plan)["in_place"]["outputs"]
    assert all(over in allowed[result] for result, over in pairs), "the description allows it"
