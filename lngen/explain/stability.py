"""Where digits can be lost: facts and hazards of the graph, and what adversarial inputs do to its numbers."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from lngen.check.conform import CASES, answer
from lngen.check.conform.implementations import Found as Judged
from lngen.check.conform.implementations import Ran
from lngen.check.conform.number_cases import LARGEST, spread
from lngen.check.conform.suites import GraphSuite
from lngen.check.real import evaluate
from lngen.errors import SpecError
from lngen.explain.hazards import Hazard, hazards
from lngen.explain.ranges import Facts, largest
from lngen.explain.section import Lines, Section, Subject, Table, Text, wrapped
from lngen.interpret import interpret
from lngen.ir import F64, WIDE, D, Eqn, Type, print_eqn, values_of
from lngen.ir.numerics import Array

ROWS, ELEMENTS = 5, 2**16  # of a measurement; long rows are fewer
SHOWN = 10  # facts
# The cases of the conformance suite that show a hazard; of the means, the largest that the dtype can hold.
MEANS = ("large-mean-1e4", "large-mean-1e3", "large-mean-1e2")
CASES_OF = {"one-pass variance": MEANS, "mean removed": MEANS, "root of 0": ("tiny-variance", "constant-rows")}
CASES_OF |= {"division": ("gamma-zero",), **dict.fromkeys(("squares", "exponential", "f16 overflow"), ("huge",))}
Found = list[tuple[Eqn, Hazard]]


def stability(subject: Subject) -> Section:
    """What holds for the graph's numbers, what can go wrong with its guards, and measured conditions and errors."""
    facts = Facts(subject.compilation.spec, subject.rows)
    found = hazards(facts)
    ranges = [text for eqn, same in facts.eqns if (text := facts.ranges[same.out].text(str(eqn.out)))]
    measured = _measured(facts, found)
    more = f"; {len(ranges) - SHOWN} more with --json" if len(ranges) > SHOWN else ""
    known = Text(f"For any finite input, unless it is a NaN: {'; '.join(ranges[:SHOWN])}{more}.")
    listed = Lines(tuple(_listed(found)), "What can go wrong, for which inputs, and what stands against it:")
    table = Text(measured) if isinstance(measured, str) else _table(measured)
    findings = [{"value": e.out.name, "equation": print_eqn(e), **hazard._asdict()} for e, hazard in found]
    data = {"facts": ranges, "findings": findings, "measured": measured}
    return Section("stability", "Stability", (*[known] * bool(ranges), listed, table), data)


def _listed(found: Found) -> list[str]:
    """Each hazard once without a guard and once with one, at its first equation; the others by name."""
    groups: dict[tuple[str, bool], Found] = {}
    for e, hazard in found:
        groups.setdefault((hazard.name, bool(hazard.guard)), []).append((e, hazard))
    lines = []
    for (first, hazard), *others in groups.values():
        likewise = f"; likewise {', '.join(str(e.out) for e, _ in others)}" if others else ""
        guard = f"guard: {hazard.guard}" if hazard.guard else ""
        lines.append(f"{print_eqn(first)}   ({hazard.name})")
        lines += [line for text in (hazard.risk + likewise, guard) for line in wrapped(text, "  ", "  ")]
    return lines or ["none of the hazards that lngen looks for"]


class _Few(GraphSuite):
    """Cases on few rows for the interpreter; in place of a verdict their inputs and results are kept."""

    def __init__(self, facts: Facts) -> None:
        self.name, self.specs = str(facts.spec), tuple(dict.fromkeys((facts.spec.with_direction("fwd"), facts.spec)))
        self.gradients: tuple[str, ...] = ()  # no case asks for them
        super().__init__(self, facts.spec)

    def rows(self, most: int, d: int | None = None) -> int:
        return max(1, min(most, ROWS, ELEMENTS // (d or self.d)))

    def run(self, inputs: Mapping[str, Array]) -> Ran:
        """The results of the spec, a backward's after those of forward."""
        known = {**inputs, **values_of(self.forward, self.spec.eps_or_default)}
        for spec in self.specs:
            known |= (results := interpret(spec.graph(), known))
        return Ran(results, dict)

    def judged(self, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Judged:
        self.last = inputs, results
        return Judged("")


def _measured(facts: Facts, found: Found) -> list[dict[str, Any]] | str:
    """The condition numbers and errors of each case that shows a hazard, or why there are none; None for infinity."""
    try:
        suite = _Few(facts)
    except SpecError as error:
        return f"Nothing is measured: {error}"
    if any(suite.type_of(name).dtype is F64 for name in suite.matrices):
        return "Nothing is measured: float64, in which the errors of other dtypes are measured, is not wider."
    runs = {case.name: partial(case.of_graph, suite) for case in CASES if callable(case.of_graph)}
    runs["huge"] = partial(spread, suite, std=LARGEST[str(suite.dtype)] / 6)
    measured: list[dict[str, Any]] = []
    for name in dict.fromkeys(("ordinary", *(case for _, hazard in found for case in CASES_OF.get(hazard.name, ())))):
        known = name in MEANS and any(row["inputs"] in MEANS for row in measured)
        if not known and answer(runs[name])[0] == "pass":
            measured.append({"inputs": name, **_numbers(suite, found)})
    return measured


def _numbers(suite: _Few, found: Found) -> dict[str, dict[str, float | None]]:
    """Condition numbers and errors against float64, which begins at the inputs, by name of the value."""
    inputs, results = suite.last
    sums = {e.out.name: e for e, _ in found if e.op == "sub"}
    sums = sums or {e.out.name: e for e, hazard in found if hazard.name == "row sum"}
    known = {**inputs, **values_of(suite.forward, suite.spec.eps_or_default)}
    for spec in suite.specs:
        graph = spec.trace()["cse"]
        operands = {v: 1 for e in sums.values() for v in e.args if spec == suite.spec}
        graph = replace(graph, results=tuple(dict.fromkeys((*graph.results, *operands))))
        known |= {name: real.value for name, real in evaluate(graph, known).items()}
    conditions = {name: _condition(e, known) for name, e in sums.items()}
    errors = {name: _error(suite.type_of(name), got, known[name]) for name, got in results.items()}
    return {
        kind: {name: n if isfinite(n) else None for name, n in numbers.items()}
        for kind, numbers in (("conditions", conditions), ("errors", errors))
    }


def _condition(e: Eqn, known: Mapping[str, Array]) -> float:
    """The sum of |terms| over |sum|, the largest of a row; differences are added along the row."""
    args = [known[v.name][tuple(slice(None) if a in v.type.axes else None for a in WIDE)] for v in e.args]
    size = np.abs(args[0]) + (np.abs(args[1]) if e.op == "sub" else 0)
    rest = np.abs(args[0] - args[1] if e.op == "sub" else args[0].sum(axis=1, keepdims=True))
    with np.errstate(all="ignore"):
        ratio = size.sum(axis=1) / rest.sum(axis=1)
    return float(np.nan_to_num(ratio, nan=1.0, posinf=np.inf).max(initial=1.0))


def _error(typ: Type, got: Array, want: Array) -> float:
    """The largest error in units in the last place of the row's largest number that ``typ`` has; infinite for a NaN."""
    held = np.abs(want) <= largest(typ.dtype)
    size = np.where(held, np.abs(want), 0.0)
    most = size.max(axis=-1, keepdims=True) if D in typ.axes else size
    unit = np.maximum(np.ldexp(typ.dtype.roundoff, np.frexp(most)[1]), 2 * typ.dtype.floor)
    with np.errstate(all="ignore"):
        error = np.where(held, np.abs(got.astype(np.float64) - want), np.where(np.isnan(got), np.inf, 0.0))
    return float(np.nan_to_num(error / unit, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _table(measured: list[dict[str, Any]]) -> Table:
    def cell(n: float | None) -> str:
        return "inf" if n is None else f"{round(n, 2):.2g}"

    names, rows = tuple(measured[0]["errors"]), []
    for row in measured:
        name, worst = max(row["conditions"].items(), key=lambda item: item[1] or np.inf, default=("", 0.0))
        where = f"{cell(worst)} at %{name}" if name else "-"
        rows.append((row["inputs"], where, *(cell(row["errors"][name]) for name in names)))
    heading = (
        "Measured with inputs of lngen conform, against float64: the largest sum of |terms| / |sum| of a row, and\n"
        "errors in units in the last place of the largest number of a row:"
    )
    return Table(("inputs", "condition", *names), tuple(rows), heading)
