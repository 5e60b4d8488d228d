"""What a backward exchanges: what it takes from forward, and the gradients that it stores or adds to."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from lngen.compiler.ir import WIDE, Axis, Builder, D, Eqn, Graph, M, Value, derived_axes, print_eqn
from lngen.compiler.ir.places import downstream, extract, upstream
from lngen.compiler.passes.edit import dce, eqn_key
from lngen.errors import SpecError


def save(graph: Graph, forward: Graph, names: tuple[str, ...], demanded: Collection[str] = ()) -> Graph:
    """Take the values called ``names`` from the forward run instead of computing them again.

    before:  graph @f_bwd(%dy, %x) ... %rstd = rsqrt %veps ...
    after:   graph @f_bwd(%dy, %x, %rstd) ...        (what only %rstd needed is gone)

    A result of ``forward`` that is saved stands for what it was rounded from:

    before:  graph @f_bwd(%dy, %x, %residual) ... %sum = add %x32, %residual32 ...
    after:   graph @f_bwd(%dy, %h) ... %sum = cast %h {to=f32} ...

    If backward then still needs an input of the rows, sums and products with weights and statistics are undone:

    before:  graph @f_bwd(%dy, %x, %rstd, ...) ... %xhat = mul %xc, %rstd ...
    after:   graph @f_bwd(%dy, %y, %rstd, ...) ... %scaled = sub %y32, %beta32; %xhat = div %scaled, %gamma_divisor ...

    Where a weight is 0, the quotient is 0 (the divisor is 1): a clamp for the division alone, so that the products with
    the weight stay right. The error of the quotient is that of the rounded result over the weight (lngen/docs/family.md
    has the bound). This is done for the results ``demanded``; SpecError if backward needs inputs of the rows all the
    same. Of other results only the rounding is undone. Where backward needs an input of the rows besides (x for the
    gradient of a factor of x), it takes that input, too.

    Values that are not saved are rematerialised: their forward equations are kept. Unused parameters are dropped,
    except those that alone give the length of an axis; one gives the rows, also of gradients that are zeros.
    """
    run = _Save(graph, forward, tuple(v for v in forward.values().values() if v.name in names))
    for value in run.saved:
        if value in forward.results and value.type.along(D):
            run.stand_in(value) if value.name in demanded else run.stand_for_sum(value)
    return run.graph()


def rebuilt(graph: Graph, forward: Graph) -> Graph | None:
    """From a backward after ``save``, the graph of the value that a saved result stands in for through weights.

    Its parameters are the result, weights and statistics; None if no result has to be divided by or freed of them.
    """
    found = undone(graph, forward)
    if all(e.op == "cast" for e in found):
        return None
    return extract(graph, f"{forward.name.removesuffix('_fwd')}_rebuilt", graph.params, (found[-1].out,))


def undone(graph: Graph, forward: Graph) -> list[Eqn]:
    """The equations that undo forward: they compute an operand of a forward equation from its result.

    An equation that backward only repeats may differ from forward's as well: of equal constants it reads the first.
    """
    before = forward.producers()

    def is_undone(eqn: Eqn) -> bool:
        return eqn != before[eqn.out] and not downstream(forward.eqns, [eqn.out]).isdisjoint(eqn.args)

    return [e for e in graph.eqns if e.out in before and e.out.type.along(D) and is_undone(e)]


class _Save:
    """One run; ``eqns`` are the definitions of all values that backward may compute, and change as results stand in."""

    def __init__(self, graph: Graph, forward: Graph, saved: tuple[Value, ...]) -> None:
        self.before, self.saved = graph, saved
        self.eqns = {**forward.producers(), **graph.producers()}
        self.forward = forward.producers()
        self.inputs = tuple(p for p in forward.params if p.type.axes == WIDE)
        self.of_rows = tuple(p for p in forward.params if p.type.along(M) is not None)  # of sets of them, too
        for value in saved:
            self.eqns.pop(value, None)

    def graph(self) -> Graph:
        """The graph with these definitions, in the former order where there was one."""
        done: dict[Value, Eqn] = {}

        def define(value: Value) -> None:
            if value in self.eqns and value not in done:
                for arg in self.eqns[value].args:
                    define(arg)
                done[value] = self.eqns[value]

        live = self._live()
        for eqn in self.before.eqns:
            if eqn.out in live:
                define(eqn.out)
        kept = tuple(done.values())
        params = (*self.before.params, *(v for v in self.saved if v not in self.before.params))
        sizes = (a for e in kept for _, a in e.attrs if isinstance(a, Axis) and (e.op == "size" or a.base is not None))
        for axis in (M, *(a for e in kept for a in e.out.type.axes), *sizes):
            axis = axis if axis.base is None or isinstance(axis.number, str) else axis.base
            having = [p for p in params if axis in p.type.axes]
            if live.isdisjoint(having):
                live.update(having[:1])
        return replace(self.before, params=tuple(p for p in params if p in live and p not in self.eqns), eqns=kept)

    def _live(self) -> set[Value]:
        return self._needed(self.before.results)

    def _needed(self, values: Iterable[Value]) -> set[Value]:
        """The values and all that they are computed from."""
        found: set[Value] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                waiting += self.eqns[value].args if value in self.eqns else ()
        return found

    def _replaced(self, result: Value) -> set[Value]:
        """The inputs of the rows that ``result`` is computed from."""
        return {p for p in self.inputs if p in upstream(self.forward.values(), [result])}

    def _needs(self, inputs: set[Value]) -> set[Value]:
        """Those of the ``inputs`` that backward would read."""
        return {p for p in inputs & self._live() if p not in self.eqns}

    def stand_for_sum(self, result: Value) -> None:
        """Take ``result`` for what it was rounded from, if backward then needs fewer inputs of the rows.

        Otherwise backward computes the result again, as forward does.
        """
        if result not in self.forward or self.forward[result].op != "cast":
            return
        replaced, taken = self._replaced(result), dict(self.eqns)
        self.eqns = computed = {**taken, result: self.forward[result]}
        needed = self._needs(replaced)
        self.eqns = taken
        self._inverse(self.forward[result], result)
        if len(self._needs(replaced)) == len(needed):
            self.eqns = computed

    def stand_in(self, result: Value) -> None:
        """Compute from ``result`` what backward needs, as far back as it takes to need no input of the rows.

        A result that is an input stands for nothing.
        """
        replaced, value = self._replaced(result), result
        if result not in self.forward:
            return
        while self._needs(replaced):
            eqn = self.forward[value]
            inverse = self._inverse(eqn, value)
            if inverse is None:
                raise SpecError(self._why(result, eqn, replaced))
            value = inverse

    def _why(self, result: Value, eqn: Eqn, replaced: set[Value]) -> str:
        needed = ", ".join(f"'{p.name}'" for p in self.inputs if p in self._needs(replaced))
        return (
            f"save={result.name}: '{result.name}' cannot stand for {needed}, which backward needs: this equation "
            f"cannot be undone with weights and saved statistics alone; save other results.\n    {print_eqn(eqn)}"
        )

    def _inverse(self, eqn: Eqn, value: Value) -> Value | None:
        """Redefine an operand of ``eqn`` by ``value``, its result; the operand, or None if there is no such inverse."""
        if eqn.op == "cast":
            (operand,) = eqn.args
            self.eqns[operand] = Eqn(operand, "cast", (value,), (("to", operand.type.dtype),))
            return operand
        if eqn.op == "neg":
            self.eqns[eqn.args[0]] = Eqn(eqn.args[0], "neg", (value,))
            return eqn.args[0]
        if eqn.op not in ("add", "sub", "mul", "div"):
            return None
        for place, operand in enumerate(eqn.args):
            other = eqn.args[1 - place]
            if operand.type == value.type and self._needed([other]).isdisjoint((*self.of_rows, operand)):
                self._undo(eqn.op, place, operand, other, value)
                return operand
        return None

    def _undo(self, op: str, place: int, operand: Value, other: Value, value: Value) -> None:
        """``operand`` such that ``op`` with ``other`` gives ``value``; it is the operand number ``place``."""
        first = place == 0
        match op:
            case "add":
                self.eqns[operand] = Eqn(operand, "sub", (value, other))
            case "sub":
                self.eqns[operand] = Eqn(
                    operand, "add" if first else "sub", (value, other) if first else (other, value)
                )
            case "mul":
                self.eqns[operand] = Eqn(operand, "div", (value, self._divisor(other)))
            case "div":
                args = (value, other) if first else (other, value)
                self.eqns[operand] = Eqn(operand, "mul" if first else "div", args)

    def _divisor(self, factor: Value) -> Value:
        """The factor, and 1 where a weight is 0: there the product is 0, and so is its quotient by 1."""
        if factor.type.along(D) is None:
            return factor
        b = Builder(self.before.name, taken=(*self.before.values(), *(v.name for v in self.eqns)))
        zero, one = b.const("zero", 0.0, factor.type.dtype), b.const("one", 1.0, factor.type.dtype)
        found = b.add(f"{factor.name}_divisor", factor, b.select_eq(f"{factor.name}_zero", factor, zero, one))
        self.eqns |= {e.out: e for e in b.eqns}
        return found


def share_results(graph: Graph) -> Graph:
    """Store results with rows and features that are the same value once.

    before:  %dx = cast %dx32 {to=bf16}                   after:  graph @f_bwd {dresidual=%dx} ...
             %dresidual = cast %dx32 {to=bf16}                    %dx = cast %dx32 {to=bf16}
             return %dx, %dresidual                               return %dx

    The attribute of the graph says which result stands for the one that is gone. Smaller results are not worth it:
    where a cotangent is absent, several of them may be zeros.
    """
    producer = graph.producers()
    first: dict[tuple[object, ...], Value] = {}
    same: dict[str, str] = {}
    for result in (r for r in graph.results if r.type.axes == WIDE):
        eqn = producer[result]
        kept = first.setdefault((eqn_key(eqn, eqn.args), result.type), result)
        if kept != result:
            same[result.name] = str(kept)
    if not same:
        return graph
    results = tuple(r for r in graph.results if r.name not in same)
    attrs = tuple(sorted({**dict(graph.attrs), **same}.items()))
    return dce(replace(graph, results=results, attrs=attrs))


def accumulated(name: str) -> str:
    """The input to which the result ``name`` is added, and which it may overwrite."""
    return f"{name}_in"


def accumulate(graph: Graph, names: tuple[str, ...]) -> Graph:
    """Add the results called ``names`` to inputs, as a caller would add them afterwards.

    before:  %dgamma = cast %dgamma32 {to=f32}            after:  graph @f_bwd(..., %dgamma_in: f32[D]) ...
                                                                  %dgamma_sum = cast %dgamma32 {to=f32}
                                                                  %dgamma = add %dgamma_in, %dgamma_sum
    """
    b = Builder(graph.name, params=graph.params, taken=graph.values())
    b.axes = {a.name: a for a in derived_axes(graph)}
    for eqn in graph.eqns:
        if eqn.out in graph.results and eqn.out.name in names:
            before = b.param(accumulated(eqn.out.name), eqn.out.type.dtype, *eqn.out.type.axes)
            total = b.emit(eqn.op, f"{eqn.out.name}_sum", eqn.args, **dict(eqn.attrs))
            b.eqns.append(replace(eqn, op="add", args=(before, total), attrs=()))
        else:
            b.eqns.append(eqn)
    return b.build(*graph.results, stage="accumulate")
