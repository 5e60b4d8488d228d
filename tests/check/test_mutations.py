"""A graph cannot vouch for itself: each of a list of plausible mistakes in it is caught by the oracles."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from lngen import passes
from lngen.ir import BF16, F32, DType, Graph, parse, print_graph
from lngen.spec import Spec, parse_spec
from test_mathematics import Array, draw, excess

EPS = 0.1  # large enough that a misplaced eps shows
D, ROWS = 13, 13  # square, so that a row sum could pass for a column sum


@dataclass(frozen=True)
class Edit:
    """Replaces one equation's right side, with equations before it if need be, in the graph's text."""

    of: str  # the name the equation defines
    by: str  # its new right side
    first: tuple[str, ...] = ()  # equations to put before it

    def __call__(self, graph: Graph) -> Graph:
        text = print_graph(graph)
        line = re.search(rf"^( *%{self.of} +: \w+\[[\w, ]*\] += ).*$", text, re.MULTILINE)
        assert line, f"no equation %{self.of} in\n{text}"
        lines = "".join(f"  {e}\n" for e in self.first)
        edited = parse(text[: line.start()] + lines + line[1] + self.by + text[line.end() :])
        assert edited != graph
        return edited


@dataclass(frozen=True)
class Swap:
    """Exchanges what two results are rounded from."""

    a: str
    b: str

    def __call__(self, graph: Graph) -> Graph:
        eqns = {e.out.name: e for e in graph.eqns}
        args = {self.a: eqns[self.b].args, self.b: eqns[self.a].args}
        # Equations in another order, so that both sums are there first.
        moved = [e for e in graph.eqns if e.out.name not in args]
        moved += [replace(eqns[n], args=args[n]) for n in (self.a, self.b)]
        return replace(graph, eqns=tuple(moved))


Mutation = Edit | Swap

ZERO = "%zero : f32[] = const {dtype=f32, value=0.0}"
ONE = "%one : f32[] = const {dtype=f32, value=1.0}"
TWO = "%two : f32[] = const {dtype=f32, value=2.0}"
TWELVE = "%less : f32[] = const {dtype=f32, value=12.0}"

FORWARD: dict[str, Mutation] = {
    "drop gamma": Edit("scaled", "mul %xhat, %one", (ONE,)),
    "gamma twice": Edit("scaled", "mul %more, %gamma32", ("%more : f32[M, D] = mul %xhat, %gamma32",)),
    "gamma plus one": Edit("scaled", "add %more, %xhat", ("%more : f32[M, D] = mul %xhat, %gamma32",)),
    "divide by gamma": Edit("scaled", "div %xhat, %gamma32"),
    "drop beta": Edit("y32", "add %scaled, %zero", (ZERO,)),
    "subtract beta": Edit("y32", "sub %scaled, %beta32"),
    "beta twice": Edit("y32", "add %more, %beta32", ("%more : f32[M, D] = add %scaled, %beta32",)),
    "beta scaled, too": Edit("y32", "mul %more, %gamma32", ("%more : f32[M, D] = add %xhat, %beta32",)),
    "gamma and beta exchanged": Edit("y32", "add %more, %gamma32", ("%more : f32[M, D] = mul %xhat, %beta32",)),
    "forget the root": Edit("rstd", "div %one, %VEPS", (ONE,)),
    "a root for its reciprocal": Edit("rstd", "sqrt %VEPS"),
    "drop eps": Edit("VEPS", "add %VAR, %zero", (ZERO,)),
    "subtract eps": Edit("VEPS", "sub %VAR, %eps"),
    "eps squared": Edit("VEPS", "add %VAR, %eps2", ("%eps2 : f32[] = mul %eps, %eps",)),
    "eps outside the root": Edit(
        "rstd",
        "div %one, %below",
        (
            ONE,
            "%root : f32[M] = sqrt %VAR",
            "%below : f32[M] = add %root, %eps",
        ),
    ),
    "sum instead of mean of squares": Edit("VAR", "reduce_sum %SQUARE {axis=D}"),
    "D - 1": Edit("VAR", "div %total, %less", ("%total : f32[M] = reduce_sum %SQUARE {axis=D}", TWELVE)),
    "squares of x times two": Edit("VAR", "mul %half, %two", ("%half : f32[M] = reduce_mean %SQUARE {axis=D}", TWO)),
    "xhat without rstd": Edit("xhat", "add %CENTRED, %zero", (ZERO,)),
    "rstd twice": Edit("xhat", "mul %more, %rstd", ("%more : f32[M, D] = mul %CENTRED, %rstd",)),
    "xhat divided by rstd": Edit("xhat", "div %CENTRED, %rstd"),
    "the sign of xhat": Edit("xhat", "mul %minus, %rstd", ("%minus : f32[M, D] = neg %CENTRED",)),
}

ONLY_FORWARD: dict[str, dict[str, Mutation]] = {
    "layernorm": {
        "y is not centred": Edit("xhat", "mul %x32, %rstd"),
        "the variance is not centred": Edit("xc2", "mul %x32, %x32"),
        "add the mean": Edit("xc", "add %x32, %mean"),
        "the mean's sign": Edit("xc", "sub %mean, %x32"),
        "a sum for the mean": Edit("mean", "reduce_sum %x32 {axis=D}"),
        "the mean of the column": Edit(
            "xc", "sub %x32, %per_column", ("%per_column : f32[D] = reduce_mean %x32 {axis=M}",)
        ),
    },
    "rmsnorm": {
        "centred like LayerNorm": Edit(
            "xhat",
            "mul %xc, %rstd",
            ("%mean : f32[M] = reduce_mean %x32 {axis=D}", "%xc : f32[M, D] = sub %x32, %mean"),
        ),
        "a centred mean square": Edit(
            "x2",
            "mul %xc, %xc",
            ("%mean : f32[M] = reduce_mean %x32 {axis=D}", "%xc : f32[M, D] = sub %x32, %mean"),
        ),
        "x for its square": Edit("x2", "mul %x32, %one", (ONE,)),
    },
}

BACKWARD: dict[str, Mutation] = {
    "gamma forgotten": Edit("dy_gamma", "add %dy32, %zero", (ZERO,)),
    "gamma twice": Edit("dy_gamma", "mul %more, %gamma32", ("%more : f32[M, D] = mul %dy32, %gamma32",)),
    "the xhat term's sign": Edit("LAST", "add %BEFORE, %xhat_mean_dy_gamma_xhat"),
    "the xhat term dropped": Edit("LAST", "sub %BEFORE, %zero", (ZERO,)),
    "the xhat term doubled": Edit(
        "LAST",
        "sub %more, %xhat_mean_dy_gamma_xhat",
        ("%more : f32[M, D] = sub %BEFORE, %xhat_mean_dy_gamma_xhat",),
    ),
    "xc for xhat in the term": Edit("xhat_mean_dy_gamma_xhat", "mul %CENTRED, %mean_dy_gamma_xhat"),
    "xc for xhat in its mean": Edit("dy_gamma_xhat", "mul %dy_gamma, %CENTRED"),
    "xc for xhat in dgamma": Edit("dy_xhat", "mul %dy32, %CENTRED"),
    "xhat squared in the term": Edit(
        "xhat_mean_dy_gamma_xhat", "mul %more, %mean_dy_gamma_xhat", ("%more : f32[M, D] = mul %xhat, %xhat",)
    ),
    "dy for g in the term": Edit("dy_gamma_xhat", "mul %dy32, %xhat"),
    "a sum for the mean of g xhat": Edit("mean_dy_gamma_xhat", "reduce_sum %dy_gamma_xhat {axis=D}"),
    "the column's mean of g xhat": Edit(
        "xhat_mean_dy_gamma_xhat",
        "mul %xhat, %per_column",
        ("%per_column : f32[D] = reduce_mean %dy_gamma_xhat {axis=M}",),
    ),
    "dx without rstd": Edit("dx32", "add %LAST, %zero", (ZERO,)),
    "dx with rstd twice": Edit("dx32", "mul %more, %rstd", ("%more : f32[M, D] = mul %rstd, %LAST",)),
    "dx's sign": Edit("dx32", "mul %rstd, %minus", ("%minus : f32[M, D] = neg %LAST",)),
    "dgamma of g": Edit("dy_xhat", "mul %dy_gamma, %xhat"),
    "dgamma without xhat": Edit("sum_dy_xhat", "reduce_sum %dy32 {axis=M}"),
    "dgamma averaged": Edit("sum_dy_xhat", "reduce_mean %dy_xhat {axis=M}"),
    "dgamma with rstd again": Edit("dy_xhat", "mul %more, %rstd", ("%more : f32[M, D] = mul %dy32, %xhat",)),
    "dgamma's sign": Edit("sum_dy_xhat", "neg %more", ("%more : f32[D] = reduce_sum %dy_xhat {axis=M}",)),
    "xhat is x": Edit("xhat", "add %x32, %zero", (ZERO,)),
    "dgamma and dbeta exchanged": Swap("dgamma", "dbeta"),
    "dbeta of g": Edit("sum_dy", "reduce_sum %dy_gamma {axis=M}"),
    "dbeta averaged": Edit("sum_dy", "reduce_mean %dy32 {axis=M}"),
}

ONLY_BACKWARD: dict[str, dict[str, Mutation]] = {
    "layernorm": {
        "the mean term dropped": Edit("BEFORE", "sub %dy_gamma, %zero", (ZERO,)),
        "the mean term's sign": Edit("BEFORE", "add %dy_gamma, %mean_dy_gamma"),
        "the mean term doubled": Edit(
            "BEFORE",
            "sub %more, %mean_dy_gamma",
            ("%more : f32[M, D] = sub %dy_gamma, %mean_dy_gamma",),
        ),
        "the mean term of dy": Edit("mean_dy_gamma", "reduce_mean %dy32 {axis=D}"),
        "a sum for the mean of g": Edit("mean_dy_gamma", "reduce_sum %dy_gamma {axis=D}"),
        "the column's mean of g": Edit(
            "BEFORE", "sub %dy_gamma, %per_column", ("%per_column : f32[D] = reduce_mean %dy_gamma {axis=M}",)
        ),
        "xhat is not centred": Edit("xhat", "mul %x32, %rstd"),
        "the mean is added": Edit("xc", "add %x32, %mean"),
    },
    "rmsnorm": {
        "LayerNorm's mean term": Edit(
            "LAST",
            "sub %more, %xhat_mean_dy_gamma_xhat",
            ("%m : f32[M] = reduce_mean %dy_gamma {axis=D}", "%more : f32[M, D] = sub %dy_gamma, %m"),
        ),
        "xhat is centred": Edit(
            "xhat",
            "mul %xc, %rstd",
            ("%m : f32[M] = reduce_mean %x32 {axis=D}", "%xc : f32[M, D] = sub %x32, %m"),
        ),
    },
}

MUTATIONS = {
    (norm, way): {**shared, **own[norm]}
    for way, shared, own in (("fwd", FORWARD, ONLY_FORWARD), ("bwd", BACKWARD, ONLY_BACKWARD))
    for norm in ("layernorm", "rmsnorm")
}
CASES = [(norm, way, name) for (norm, way), mutations in MUTATIONS.items() for name in mutations]


def names_of(graph: Graph) -> dict[str, str]:
    """What the mutations call in capitals: the same values have other names in other graphs."""
    if graph.name.startswith("layernorm"):
        names = {"VEPS": "veps", "VAR": "var", "SQUARE": "xc2", "CENTRED": "xc"}
    else:
        names = {"VEPS": "mseps", "VAR": "ms", "SQUARE": "x2", "CENTRED": "x32"}
    eqns = {e.out.name: e for e in graph.eqns}
    if "dx32" in eqns:  # dx32 = rstd * LAST and LAST = BEFORE - xhat * mean(dy gamma xhat)
        names["LAST"] = eqns["dx32"].args[1].name
        names["BEFORE"] = eqns[names["LAST"]].args[0].name
    return names


def mutant(mutation: Mutation, graph: Graph) -> Graph:
    """The graph with one mistake."""
    if isinstance(mutation, Swap):
        return mutation(graph)
    names = names_of(graph)

    def spell(text: str) -> str:
        return re.sub("|".join(names), lambda m: names[m[0]], text)

    return Edit(spell(mutation.of), spell(mutation.by), tuple(map(spell, mutation.first)))(graph)


def spec_of(norm: str, way: str, dtype: DType) -> Spec:
    return parse_spec(f"{norm}.{way}:d={D},dtype={dtype},eps={EPS}" + ",beta=yes" * (norm == "rmsnorm"))


def before_finish(spec: Spec) -> Graph:
    """The graph that the mutations edit: forward as described, backward as derived."""
    return spec.trace()["build" if spec.direction == "fwd" else "save"]


def error(spec: Spec, graph: Graph, inputs: dict[str, Array]) -> float:
    """Error over bound of what is left of ``graph`` after the pipeline's other passes."""
    return excess(spec, inputs, passes.finish(graph, D))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("norm", "way"), MUTATIONS)
def test_the_true_graph_passes(norm: str, way: str, dtype: DType) -> None:
    spec = spec_of(norm, way, dtype)
    assert error(spec, before_finish(spec), draw(spec, ROWS)) <= 1


@pytest.mark.parametrize(("norm", "way", "name"), CASES)
def test_the_mutant_is_caught(norm: str, way: str, name: str) -> None:
    mutation = MUTATIONS[norm, way][name]
    for dtype in (F32, BF16):
        spec = spec_of(norm, way, dtype)
        graph = before_finish(spec)
        assert error(spec, mutant(mutation, renamed(graph)), draw(spec, ROWS)) > 3, dtype


def renamed(graph: Graph) -> Graph:
    """f32 graphs have no cast of dy, so 'dy' itself is what bf16 graphs call 'dy32'."""
    if "dy" not in graph.values() or "dy32" in graph.values():
        return graph
    text = print_graph(graph)
    head, _, body = text.partition("\n")
    return parse(f"{head}\n  %dy32 : f32[M, D] = cast %dy {{to=f32}}\n" + re.sub(r"%dy\b", "%dy32", body))


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 110
    for norm, way in MUTATIONS:
        graph = renamed(before_finish(spec_of(norm, way, F32)))
        mutants = [mutant(m, graph) for m in MUTATIONS[norm, way].values()]
        assert len(set(mutants)) == len(mutants)
