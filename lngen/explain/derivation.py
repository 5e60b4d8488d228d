"""How the equations of a kernel came about: the forward, the derivative of each equation, the identities that acted.

All of it is read from the graphs after the passes and from their log. Every text in ``data`` is in the notation of
``lngen.explain.notation``, so both sides of each statement can be evaluated: ``names`` has the value of each name.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise

from lngen.explain.notation import RESERVED, Notation, forward_names
from lngen.explain.section import WIDTH, Lines, Section, Table, Text, wrapped
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


def derivation(spec: Spec) -> Section:
    """The derivation of a backward; of a forward its equations, and what the passes made of them."""
    return _forward(spec) if spec.direction == "fwd" else _Derivation(spec).section()


def _forward(spec: Spec) -> Section:
    graph, changed = spec.forward(), _changed(spec.trace())
    names = forward_names(graph)
    equations = _equations(graph, names)
    named = {v.name: text for v, text in names.items()}
    passes = (f"{key} ({', '.join(named.get(v, v) for v in vs)}): {PASSES[key]}" for key, vs in changed.items())
    blocks = (
        Lines(_continued(f"{e['name']} = {e['equation']}" for e in equations), "Equations, without roundings"),
        Lines(_continued(passes), "What the passes changed, in their order"),
        Text(f"lngen explain {spec.with_direction('bwd')} shows the gradients that are derived from these equations."),
    )
    data = {"names": _by_text(names), "forward": equations, "passes": changed}
    return Section("derivation", "Derivation", blocks, data)


class _Derivation:
    """One backward: names of its values, and the statements about them."""

    def __init__(self, spec: Spec) -> None:
        self.trace, self.log = spec.trace(), spec.trace().log
        self.forward, self.raw, self.saved = (self.trace[name] for name in ("build", "vjp", "save"))
        self.values = forward_names(self.forward)
        self.totals = {self.values[v]: ct for v, ct in self.log.cotangents.items()}  # by the values they belong to
        given = {p: p.name for p in self.raw.params if p not in self.values}
        given |= {e.out: e.args[0].name for e in self.raw.eqns if e.op == "cast" and e.args[0] in given}
        seeds = {self.values[r]: f"d{r.name}" for r in self.forward.results if r.name in spec.differentiated}
        self.names = self.values | given
        self.labels: dict[str, str] = {}  # of the totals
        for name, ct in self.totals.items():
            taken = {*RESERVED, *self.names.values(), *self.labels.values()}
            label = fresh(f"d{name}_total" if name in seeds else f"d{name}", taken)
            self.labels[name] = seeds[name] if name in seeds and ct in given else label
            self.names.setdefault(ct, self.labels[name])
        self.shared = self._shared()
        # Cotangents are not named in the closed form; in polynomials they are the atoms that simplify left as they are.
        closed = {v: text for v, text in self.names.items() if v not in self.log.polys} | self.shared
        self.closed = Notation(closed, self.saved, self.raw)
        graphs = self.raw, self.trace["simplify"], self.saved
        self.polynomials = Notation(self.names | self.shared, *graphs, shared=self.shared)

    def _shared(self) -> dict[Value, str]:
        """Names of values that forward does not have: those used more than once, and factors of cotangents."""
        own = [
            e for e in self.saved.eqns if e.out not in self.names and e.op not in ("const", "size", "cast", "expand")
        ]
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

    # ---- statements ----

    @cached_property
    def derivatives(self) -> list[dict[str, str]]:
        """What each equation adds to the cotangents of its operands; casts add what they are given."""
        found = []
        for c in self.log.contributions:
            of, by = self.values[c.eqn.out], self.values[c.operand]
            text = Notation({**self.values, c.given: self.labels[of]}, self.raw).text(c.added)
            statement = {"of": of, "by": by, "given": self.labels[of], "to": self.labels[by], "adds": text}
            found += [statement | {"value": c.added.name}] if of != by else []
        return found

    @cached_property
    def cotangents(self) -> list[dict[str, str]]:
        """Each cotangent as the sum of what equations add to it, and as the polynomial that simplify read."""
        raw, found = Notation(self.names, self.raw), []
        for name, ct in self.totals.items():
            if ct in self.log.polys and self.names[ct] == self.labels[name]:
                after = self.polynomials.polynomial(self.log.polys[ct].items())
                statement = {"cotangent": self.labels[name], "before": raw.definition(ct), "after": after}
                found.append(statement | {"value": ct.name})
        return found

    @cached_property
    def steps(self) -> list[dict[str, str]]:
        """The identities, in the order in which they acted; equal steps once."""
        owner = {**self.names}  # the cotangent that an unnamed value becomes a part of
        for eqn in reversed(self.raw.eqns):
            owner |= {a: owner[eqn.out] for a in eqn.args if a not in self.names and eqn.out in owner}
        undone, found = Notation(self.values, self.saved), []
        for s in self.log.steps:
            step = {"identity": s.identity, "on": owner.get(s.at, s.at.name), "value": s.at.name}
            if s.before:
                step |= {"before": self.polynomials.product(s.before), "after": self.polynomials.product(s.after)}
            elif s.identity == "undone":
                step |= {"before": self.values[s.at], "after": undone.definition(s.at)}
            found += [step] if step not in found else []
        return found

    @cached_property
    def gradients(self) -> dict[str, str]:
        """The closed form of each result; one that equals an earlier one is that one."""
        producer, first, found = self.saved.producers(), dict[Value, str](), dict[str, str]()
        for result in self.saved.results:
            source = producer[result].args[0]
            found[result.name] = first.get(source) or self.closed.text(source)
            first.setdefault(source, result.name)
        return found

    @cached_property
    def phases(self) -> list[list[str]]:
        """The reductions of a row, by the number of reductions that each has to wait for."""
        graph = self.trace["decompose"]
        levels, notation, found = depths(graph), Notation(self.closed.names, graph), dict[int, list[str]]()
        for eqn in filter(is_row_fold, graph.eqns):
            found.setdefault(levels[eqn.out], []).append(notation.definition(eqn.out))
        return [found[level] for level in sorted(found)]

    # ---- the section ----

    def section(self) -> Section:
        """All statements in ``data``, the telling ones in the blocks."""
        equations, acted = _equations(self.forward, self.values), {s["identity"] for s in self.steps}
        shared = {name: self.closed.definition(v) for v, name in self.shared.items()}
        totals = {self.labels[name]: ct.name for name, ct in self.totals.items()}
        data = {
            "names": _by_text(self.names) | totals | _by_text(self.shared),
            "forward": equations,
            "derivatives": self.derivatives,
            "cotangents": self.cotangents,
            "steps": self.steps,
            "identities": {key: why for key, why in IDENTITIES.items() if key in acted},
            "shared": shared,
            "gradients": self.gradients,
            "phases": self.phases,
            "passes": _changed(self.trace),
        }
        changed = {s["on"] for s in self.steps if s["identity"] != "repeated"}
        lines = [f"with {name} = {text}" for name, text in shared.items()]
        lines += [f"{c['cotangent']} = {c['after']}" for c in self.cotangents if c["cotangent"] in changed]
        head = "Forward, and the derivative of each equation (dv is the cotangent of v)"
        blocks = (
            Table(("equation", "adds to the cotangents"), tuple(self._rows(equations)), head),
            Lines(_continued(lines), "Cotangents as sums of products, where more than that acted"),
            Lines(_continued(self._identities()), "Identities that acted, and where"),
            Lines(_continued(self._closed_form()), "The gradients"),
        )
        return Section("derivation", "Derivation", blocks, data)

    def _rows(self, equations: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
        """The equations, and what each adds to the cotangents of its operands."""
        for e in equations:
            adds = (f"{d['to']} += {d['adds']}" for d in self.derivatives if d["of"] == e["name"])
            yield f"{e['name']} = {e['equation']}", ";  ".join(adds) or "-"

    def _identities(self) -> Iterator[str]:
        for key, why in IDENTITIES.items():
            acted = [s for s in self.steps if s["identity"] == key]
            if acted:
                yield f"{key} ({', '.join(dict.fromkeys(s['on'] for s in acted))}): {why}"
            for step in (shown := [s for s in acted if "before" in s])[:EXAMPLES]:
                line = f"  {step['before']} = {step['after']}"
                yield from [line] if len(line) <= WIDTH - 2 else [f"  {step['before']}", f"    = {step['after']}"]
            if len(shown) > EXAMPLES:
                yield f"  and {len(shown) - EXAMPLES} more"

    def _closed_form(self) -> Iterator[str]:
        yield from (f"{name} = {text}" for name, text in self.gradients.items())
        for number, sums in enumerate(self.phases, 1):
            what = f"Sums of a row{f', phase {number}' if len(self.phases) > 1 else ''}: {', '.join(sums)}"
            yield f"{what}: none waits for another, so they are one reduction phase" if len(sums) > 1 else what


def _by_text(names: Mapping[Value, str]) -> dict[str, str]:
    """The value of each name: the first of those that are casts of one another."""
    return {text: value.name for value, text in reversed([*names.items()])}


def _equations(graph: Graph, names: Mapping[Value, str]) -> list[dict[str, str]]:
    """The equations of a forward, less casts."""
    notation = Notation(names, graph)
    kept = [e.out for e in graph.eqns if e.out in names and e.op != "cast"]
    return [{"name": names[v], "equation": notation.definition(v), "value": v.name} for v in kept]


def _changed(trace: Trace) -> dict[str, list[str]]:
    """The values that each pass computes by another equation than the pass before."""
    found = {}
    for before, after in pairwise(trace):
        was = trace[before].producers()
        found[after] = [e.out.name for e in trace[after].eqns if was.get(e.out, e) != e]
    return {key: found[key] for key in PASSES if found.get(key)}


def _continued(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines that fit the section; what continues one is indented."""
    indented = ((line.lstrip(), " " * (len(line) - len(line.lstrip()))) for line in lines)
    return tuple(part for text, indent in indented for part in wrapped(text, indent, f"{indent}    "))
