"""How the equations of a kernel came about: the forward, the derivative of each equation, the identities that acted.

All of it is read from the graphs after the passes and from their log. Every text in ``data`` is in the notation of
``lngen.explain.notation``, so both sides of each statement can be evaluated: ``names`` has the value of each name.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

from lngen.explain.notation import RESERVED, Notation, forward_names
from lngen.explain.section import WIDTH, Block, Lines, Section, Table, Text
from lngen.explain.subject import Subject
from lngen.ir import WIDE, Graph, Value, is_row_fold
from lngen.ir.builder import fresh
from lngen.passes import IDENTITIES, Trace, downstream
from lngen.problem import depths
from lngen.spec import Spec

EXAMPLES = 2  # steps of one identity that are printed; ``data`` has all

PASSES: Mapping[str, str] = {
    "decompose": "means, reciprocal roots and functions are written as the equations that they stand for",
    "place_fma": "a product that is only added or summed is added without a rounding of its own",
    "place_spread": "each segment of a long row is measured from its own mean, so that one exchange gives all sums",
    "compensate": "a mean whose distances are squared is corrected by their mean, and so is the sum of the squares",
    "order_sums": "each sum has one order, which its attributes spell",
}


def derivation(subject: Subject) -> Section:
    """The derivation of a backward; of a forward its equations, and what the passes made of them."""
    return derivation_of(subject.plan.spec)


def derivation_of(spec: Spec) -> Section:
    """The same, which no schedule changes."""
    return _forward(spec) if spec.direction == "fwd" else _Derivation(spec).section()


def _forward(spec: Spec) -> Section:
    trace = spec.trace()
    graph = trace["build"]
    names = forward_names(graph)
    rows = _equations(graph, names)
    note = f"The gradients are derived from these equations: lngen explain {spec.graph_name}.bwd:d={spec.d},..."
    blocks = (
        Lines(_wrapped(f"{r['name']} = {r['equation']}" for r in rows), "Equations, without roundings"),
        Lines(_passes(trace, names), "What the passes changed, in their order"),
        Text(note),
    )
    return _section(blocks, {"names": _by_text(names), "forward": rows, "passes": _changed(trace)})


class _Derivation:
    """One backward: names of its values, and the statements about them."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.trace, self.log = spec, spec.trace(), spec.trace().log
        self.forward, self.raw, self.saved = (self.trace[name] for name in ("build", "vjp", "save"))
        self.values = forward_names(self.forward)
        self.totals = {self.values[v]: ct for v, ct in self.log.cotangents.items()}  # by the values they belong to
        given = {p: p.name for p in self.raw.params if p not in self.values}
        given |= {e.out: e.args[0].name for e in self.raw.eqns if e.op == "cast" and e.args[0] in given}
        seeds = {self.values[r]: f"d{r.name}" for r in self.forward.results if r.name in spec.differentiated}
        self.names = self.values | given
        self.labels: dict[str, str] = {}  # of the totals
        for name, ct in self.totals.items():
            taken = {*self.names.values(), *self.labels.values()}
            label = fresh(f"d{name}_total" if name in seeds else f"d{name}", taken)
            self.labels[name] = seeds[name] if name in seeds and ct in given else label
            self.names.setdefault(ct, self.labels[name])

    # ---- statements ----

    @cached_property
    def derivatives(self) -> list[dict[str, str]]:
        """What each equation adds to the cotangents of its operands."""
        found = []
        for c in self.log.contributions:
            out, operand = self.values[c.eqn.out], self.values[c.operand]
            if out != operand:  # else it is a cast
                given, to = self.labels[out], self.labels[operand]
                text = Notation({**self.values, c.given: given}, self.raw).text(c.added)
                statement = {"of": out, "by": operand, "given": given, "to": to, "adds": text}
                found.append(statement | {"value": c.added.name})
        return found

    @cached_property
    def cotangents(self) -> list[dict[str, str]]:
        """Each cotangent as the sum of what equations add to it, and as the polynomial that simplify read."""
        raw = Notation(self.names, self.raw)
        return [
            {
                "cotangent": label,
                "value": ct.name,
                "before": raw.definition(ct),
                "after": self.polynomials.polynomial(poly),
            }
            for label, ct in zip(self.labels.values(), self.totals.values(), strict=True)
            if (poly := self.log.polys.get(ct, {}).items()) and self.names[ct] == label
        ]

    @cached_property
    def steps(self) -> list[dict[str, str]]:
        """The identities, in the order in which they acted; equal steps once."""
        notation = self.polynomials
        undone = Notation(self.values, self.saved)
        found = []
        for s in self.log.steps:
            step = {"identity": s.identity, "on": self._owner.get(s.at, s.at.name), "value": s.at.name}
            if s.before:
                step |= {"before": notation.product(s.before), "after": notation.product(s.after)}
            elif s.identity == "undone":
                step |= {"before": self.values[s.at], "after": undone.definition(s.at)}
            if step not in found:
                found.append(step)
        return found

    @cached_property
    def _owner(self) -> dict[Value, str]:
        """The name of each value, or of the cotangent that an unnamed one becomes a part of."""
        owner = {**self.names}
        for eqn in reversed(self.raw.eqns):
            for arg in eqn.args:
                if arg not in self.names and eqn.out in owner:
                    owner[arg] = owner[eqn.out]
        return owner

    @cached_property
    def shared(self) -> dict[Value, str]:
        """Names of values that forward does not have: those used more than once, and factors of cotangents."""
        own = [e for e in self.saved.eqns if e.out not in self.names and e.op not in ("const", "size", "cast")]
        linear = downstream(self.saved.eqns, (p for p in self.saved.params if p not in self.values))
        uses = Counter(a for e in self.saved.eqns if e.out not in self.values for a in e.args)
        of_linear = {a for e in own if e.out in linear for a in e.args}
        found: dict[Value, str] = {}
        for value in (e.out for e in own):
            if uses[value] > 1 or (value in of_linear and value not in linear):
                short = "g" if value.type.axes == WIDE else "s"
                taken = {*RESERVED, *self.names.values(), *found.values()}
                found[value] = fresh(short if value in linear else value.name, taken)
        return found

    @cached_property
    def polynomials(self) -> Notation:
        """The notation of polynomials, which have values of the graphs before and after simplify."""
        graphs = self.raw, self.trace["simplify"], self.saved
        return Notation(self.names | self.shared, *graphs, shared=self.shared)

    @cached_property
    def closed(self) -> Notation:
        """The notation of the closed form: cotangents of results, forward's values and shared values have names."""
        given = {v: text for v, text in self.names.items() if v not in self.log.polys}
        return Notation(given | self.shared, self.saved, self.raw)

    @cached_property
    def gradients(self) -> dict[str, str]:
        """The closed form of each result; of equal ones the first has it."""
        producer, first = self.saved.producers(), dict[Value, str]()
        found = {}
        for result in self.saved.results:
            source = producer[result].args[0]
            found[result.name] = first.get(source) or self.closed.text(source)
            first.setdefault(source, result.name)
        return found

    @cached_property
    def phases(self) -> list[list[str]]:
        """The reductions of a row, by the number of reductions that each has to wait for."""
        graph = self.trace["decompose"]
        levels, found = depths(graph), dict[int, list[str]]()
        notation = Notation(self.closed.names, graph)
        for eqn in filter(is_row_fold, graph.eqns):
            found.setdefault(levels[eqn.out], []).append(notation.definition(eqn.out))
        return [found[level] for level in sorted(found)]

    # ---- the section ----

    def section(self) -> Section:
        """All of it."""
        equations = _equations(self.forward, self.values)
        cotangents = {self.labels[name]: ct.name for name, ct in self.totals.items()}
        data = {
            "names": _by_text(self.names) | cotangents | _by_text(self.shared),
            "forward": equations,
            "derivatives": self.derivatives,
            "cotangents": self.cotangents,
            "steps": self.steps,
            "identities": {key: IDENTITIES[key] for key in IDENTITIES if key in {s["identity"] for s in self.steps}},
            "shared": {name: self.closed.definition(v) for v, name in self.shared.items()},
            "gradients": self.gradients,
            "phases": self.phases,
            "passes": _changed(self.trace),
        }
        acted = {s["on"] for s in self.steps if s["identity"] != "repeated"}
        lines = [f"{c['cotangent']} = {c['after']}" for c in self.cotangents if c["cotangent"] in acted]
        blocks = (
            Table(
                ("equation", "adds to the cotangents"),
                tuple(self._rows(equations)),
                "Forward, and the derivative of each equation (dv is the cotangent of v)",
            ),
            Lines((*self._with(), *_wrapped(lines)), "Cotangents as sums of products, where more than that acted"),
            Lines(tuple(self._identities()), "Identities that acted, and where"),
            Lines(tuple(self._closed_form()), "The gradients"),
        )
        return _section(blocks, data)

    def _rows(self, equations: Iterable[Mapping[str, str]]) -> Iterable[tuple[str, str]]:
        """The equations, and what each adds to the cotangents of its operands."""
        left = {e["name"]: f"{e['name']} = {e['equation']}" for e in equations}
        width = max(WIDTH // 2, WIDTH - 4 - max(map(len, left.values()), default=0))
        for name, equation in left.items():
            adds = ";  ".join(f"{d['to']} += {d['adds']}" for d in self.derivatives if d["of"] == name)
            first, *more = textwrap.wrap(adds, width, break_on_hyphens=False) or ["-"]
            yield from [(equation, first), *(("", part) for part in more)]

    def _identities(self) -> Iterable[str]:
        for key, why in IDENTITIES.items():
            acted = [s for s in self.steps if s["identity"] == key]
            if acted:
                on = ", ".join(dict.fromkeys(s["on"] for s in acted))
                yield from _wrapped([f"{key} ({on}): {why}"])
                equations = [s for s in acted if "before" in s]
                yield from (line for s in equations[:EXAMPLES] for line in _both_sides(s))
                yield from [f"  and {len(equations) - EXAMPLES} more"] if len(equations) > EXAMPLES else []

    def _with(self) -> tuple[str, ...]:
        return _wrapped(f"with {name} = {self.closed.definition(v)}" for v, name in self.shared.items())

    def _closed_form(self) -> Iterable[str]:
        yield from _wrapped(f"{name} = {text}" for name, text in self.gradients.items())
        for number, sums in enumerate(self.phases, 1):
            what = "Sums of a row" if len(self.phases) == 1 else f"Sums of a row, phase {number}"
            one = "" if len(sums) == 1 else ": none waits for another, so they are one reduction phase"
            yield from _wrapped([f"{what}: {', '.join(sums)}{one}"])


# ---- parts ----


def _section(blocks: Iterable[Block], data: Mapping[str, Any]) -> Section:
    kept = tuple(b for b in blocks if not isinstance(b, Lines) or b.lines)
    return Section("derivation", "Derivation", kept, data)


def _by_text(names: Mapping[Value, str]) -> dict[str, str]:
    """The value of each name: the first of those that are casts of one another."""
    return {text: value.name for value, text in reversed([*names.items()])}


def _equations(graph: Graph, names: Mapping[Value, str]) -> list[dict[str, str]]:
    """The equations of a forward, less the casts of values that have the same name."""
    notation = Notation(names, graph)
    return [
        {"name": names[e.out], "equation": notation.definition(e.out), "value": e.out.name}
        for e in graph.eqns
        if e.out in names and e.op != "cast"
    ]


def _changed(trace: Trace) -> dict[str, list[str]]:
    """The values that each pass computes by another equation than the pass before."""
    found = {}
    for before, after in pairwise(trace):
        was = trace[before].producers()
        found[after] = [e.out.name for e in trace[after].eqns if was.get(e.out, e) != e]
    return {key: found[key] for key in PASSES if found.get(key)}


def _passes(trace: Trace, names: Mapping[Value, str]) -> tuple[str, ...]:
    named = {v.name: text for v, text in names.items()}
    return _wrapped(
        f"{key} ({', '.join(named.get(v, v) for v in values)}): {PASSES[key]}"
        for key, values in _changed(trace).items()
    )


def _both_sides(step: Mapping[str, str]) -> tuple[str, ...]:
    """An equation on one line, or on two if that is too long."""
    line = f"  {step['before']} = {step['after']}"
    return _wrapped([line] if len(line) <= WIDTH - 2 else [f"  {step['before']}", f"    = {step['after']}"])


def _wrapped(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines that fit the section; what continues one is indented."""
    found: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        parts = textwrap.wrap(line.lstrip(), WIDTH - 2 - len(indent), subsequent_indent="    ", break_on_hyphens=False)
        found += [indent + part for part in parts]
    return tuple(found)
