"""Plausible mistakes in the graphs of the family, each caught by the formulas in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

import sampling
from family import results
from lngen.check.real import evaluate
from lngen.graphs import GRAPHS
from lngen.ir import Graph
from lngen.spec import Spec, parse_spec
from test_family import RELATIVE, Exact, distance, own_keys, text
from test_mutations import Edit, Mutation, Swap

CAUGHT = 1e-3  # an error this large is caught under any rounding

SIZES = [[1.0], [0.1], [0.03], [2.0]]  # of rows: some are shorter than eps

BOTH = ("%mutant : f32[M, D] = add %dy32, %dh32",)
ONE = "%mutant_one : f32[] = const {dtype=f32, value=1.0}"


def drop(of: str, kept: str) -> Edit:
    """The value ``of`` is ``kept`` alone."""
    return Edit(of, f"mul %{kept}, %mutant_one", (ONE,))


def double(of: str, kept: str, term: str, op: str = "add", axes: str = "M, D") -> Edit:
    """The term of a sum twice."""
    return Edit(of, f"{op} %mutant, %{term}", (f"%mutant : f32[{axes}] = {op} %{kept}, %{term}",))


NORM_FORWARD: dict[str, Mutation] = {
    "drop gamma": drop("scaled", "xhat"),
    "no root": Edit("rstd", "div %mutant_one, %veps", (ONE,)),
    "rstd twice": Edit("xhat", "mul %mutant, %rstd", ("%mutant : f32[M, D] = mul %xc, %rstd",)),
    "the variance is not centred": Edit("xc2", "mul %BASE, %BASE"),
    "the mean is added": Edit("xc", "add %BASE, %mean"),
    "drop the mean": drop("xc", "BASE"),
}
SQUARE_FORWARD: dict[str, Mutation] = {
    "drop gamma": drop("scaled", "xhat"),
    "no root": Edit("rstd", "div %mutant_one, %mseps", (ONE,)),
    "a sum for the mean": Edit("ms", "reduce_sum %x2 {axis=D}"),
    "centred": Edit(
        "xhat",
        "mul %mutant, %rstd",
        ("%mutant_mean : f32[M] = reduce_mean %BASE {axis=D}", "%mutant : f32[M, D] = sub %BASE, %mutant_mean"),
    ),
}
SUM_FORWARD: dict[str, Mutation] = {
    "the residual is subtracted": Edit("total", "sub %branches, %residual32"),
    "the residual is dropped": drop("total", "branches"),
    "the residual twice": double("total", "branches", "residual32"),
    "x1 is dropped": drop("branches", "x_columns"),
    "the row's factor is dropped": drop("x_rows", "x32"),
    "the feature's factor is dropped": drop("x_columns", "x_rows"),
    "h is without the residual": Edit("h", "cast %branches {to=bf16}"),
    "h is x": Edit("h", "cast %x32 {to=bf16}"),
}
WHOLE = "x1=yes,rowscale=yes,colscale=yes,dtype=bf16"


def of(base: str, mutations: dict[str, Mutation]) -> dict[str, Mutation]:
    """The same for a norm of the value called ``base``."""
    return {
        name: Edit(m.of, m.by.replace("BASE", base), tuple(f.replace("BASE", base) for f in m.first))
        if isinstance(m, Edit)
        else m
        for name, m in mutations.items()
    }


def mean_term(before: str, mean: str, g: str) -> dict[str, Mutation]:
    """The mean of the gradient before the norm, which LayerNorm subtracts."""
    return {
        "the mean term is dropped": drop(before, g),
        "the mean term is added": Edit(before, f"add %{g}, %{mean}"),
        "the mean term is doubled": double(before, g, mean, "sub"),
        "a sum for the mean": Edit(mean, f"reduce_sum %{g} {{axis=D}}"),
    }


def xhat_term(last: str, before: str, term: str, centred_too: str = "") -> dict[str, Mutation]:
    """The projection on the row itself."""
    found: dict[str, Mutation] = {
        "the xhat term is dropped": drop(last, before),
        "the xhat term is added": Edit(last, f"add %{before}, %{term}"),
        "the xhat term is doubled": double(last, before, term, "sub"),
    }
    if centred_too:
        found["LayerNorm's mean term"] = Edit(
            last,
            f"sub %mutant, %{term}",
            (
                f"%mutant_mean : f32[M] = reduce_mean %{centred_too} {{axis=D}}",
                f"%mutant : f32[M, D] = sub %{before}, %mutant_mean",
            ),
        )
    return found


ADDED_LAYERNORM = {
    **mean_term("dx32_part_part", "mean_dy_scale", "dy_scale"),
    **xhat_term("dx32_part_part_1", "dx32_part_part", "xhat_mean_dy_scale_xhat"),
    "the 1 of gamma is forgotten in dx": drop("scale", "gamma32"),
    "the stream's gradient is dropped": drop("dresidual32", "dresidual32_part"),
    "the stream's gradient twice": double("dresidual32", "dresidual32_part", "dh32"),
    "the stream's gradient goes through the norm": Edit("dy_scale", "mul %mutant, %scale", BOTH),
    "dx without the row's factor": drop("rowscale_rstd", "rstd"),
    "dx without the feature's factor": drop("dx32_part", "dx32_part_part_2"),
    "dx without the factors of dh": Edit("dx32", "add %dx32_part, %dh32"),
    "dx1 is dx": Edit("dx1", "cast %dx32 {to=bf16}"),
    "dx and dresidual exchanged": Swap("dx", "dresidual"),
    "dgamma and dbeta exchanged": Swap("dgamma", "dbeta"),
    "dgamma and dcolscale exchanged": Swap("dgamma", "dcolscale"),
    "drowscale of x alone": Edit("colscale_x", "mul %x32, %mutant_one", (ONE,)),
    "drowscale without the norm": drop("drowscale32", "sum_terms"),
    "drowscale averaged": Edit("sum_terms", "reduce_mean %terms {axis=D}"),
    "dcolscale without dh": drop("terms_1", "terms_part_2"),
    "dcolscale of x without the row's factor": Edit("terms_part_2", "mul %x32, %dresidual32_part"),
    "dbeta of g": Edit("sum_dy", "reduce_sum %dy_scale {axis=M}"),
}  # fmt: skip

MUTATIONS: dict[tuple[str, str, str], dict[str, Mutation]] = {
    ("layernorm", "fwd", "zero_centred=yes,dtype=bf16"): {
        "the 1 of gamma is forgotten": drop("scale", "gamma32"),
        "1 minus gamma": Edit("scale", "sub %one, %gamma32"),
        "the 1 is added to beta": Edit("y32", "add %mutant, %beta32", ("%mutant : f32[M, D] = add %scaled, %one",)),
    },
    ("layernorm", "bwd", "zero_centred=yes,dtype=bf16"): {
        "the 1 of gamma is forgotten": drop("scale", "gamma32"),
        "dgamma has the 1": Edit("dgamma", "cast %mutant {to=bf16}", ("%mutant : f32[D] = add %sum_dy_xhat, %one",)),
        "dgamma and dbeta exchanged": Swap("dgamma", "dbeta"),
    },
    ("layernorm", "bwd", "save=y,dtype=bf16"): {
        "beta is not undone": drop("scaled", "y32"),
        "beta is added": Edit("scaled", "add %y32, %beta32"),
        "gamma is not undone": drop("xhat", "scaled"),
        "gamma is multiplied": Edit("xhat", "mul %scaled, %gamma32_divisor"),
        "y for xhat": drop("xhat", "y32"),
    },
    ("rmsnorm", "fwd", "casts=gemma,dtype=bf16"): {
        "the 1 of gamma is forgotten": drop("scale", "gamma32"),
        **of("x32", SQUARE_FORWARD),
    },
    ("rmsnorm", "bwd", "casts=gemma,dtype=bf16"): {
        "the 1 of gamma is forgotten": drop("scale", "gamma32"),
        "dx of gamma alone": Edit("dy_scale", "mul %dy32, %gamma32"),
        "dgamma averaged": Edit("sum_dy_xhat", "reduce_mean %dy_xhat {axis=M}"),
    },
    ("l2norm", "fwd", "eps=0.3,dtype=bf16"): {
        "no root": Edit("rnorm", "div %mutant_one, %square_eps", (ONE,)),
        "a mean for the sum": Edit("square", "reduce_mean %x2 {axis=D}"),
        "drop eps": drop("square_eps", "square"),
        "the least divisor": Edit("square_eps", "maximum %square, %eps"),
        "the absolute value": Edit("x2", "abs %x32"),
    },
    ("l2norm", "fwd", "guard=max,eps=3e-1,dtype=bf16"): {
        "eps is added": Edit("square_eps", "add %square, %eps2"),
        "no root": Edit("rnorm", "div %mutant_one, %square_eps", (ONE,)),
        "the smaller one": Edit("square_eps", "minimum %square, %eps2"),
    },
    ("add_layernorm", "fwd", f"zero_centred=yes,{WHOLE}"): {**of("total", NORM_FORWARD), **SUM_FORWARD},
    ("add_layernorm", "bwd", f"zero_centred=yes,{WHOLE}"): ADDED_LAYERNORM,
    ("add_rmsnorm", "fwd", WHOLE): {**of("total", SQUARE_FORWARD), **SUM_FORWARD},
    ("add_rmsnorm", "bwd", "dtype=bf16"): {
        **xhat_term("dx32_part_part", "dy_gamma", "xhat_mean_dy_gamma_xhat", "dy_gamma"),
        "the stream's gradient is dropped": drop("dx32", "dx32_part"),
        "the stream's gradient twice": double("dx32", "dx32_part", "dh32"),
        "the stream's gradient is subtracted": Edit("dx32", "sub %dx32_part, %dh32"),
        "the stream's gradient before the norm": Edit("dy_gamma", "mul %mutant, %gamma32", BOTH),
        "the stream's gradient in dgamma": Edit("dy_xhat", "mul %mutant, %xhat", BOTH),
    },
    ("parallel_layernorm", "fwd", "dtype=bf16"): {
        **of("total", NORM_FORWARD),
        "y1 with the other gamma": Edit("scaled1", "mul %xhat, %gamma32"),
        "y1 with the other beta": Edit("y132", "add %scaled1, %beta32"),
        "y and y1 exchanged": Swap("y", "y1"),
        "y1 of y": Edit("scaled1", "mul %y32, %gamma132"),
    },
    ("parallel_rmsnorm", "bwd", "dtype=bf16"): {
        **xhat_term("dx32_part_part_1", "dx32_part_part", "xhat_mean_terms", "dx32_part_part"),
        "dy1 is dropped": drop("dx32_part_part", "dy_gamma"),
        "dy is dropped": drop("dx32_part_part", "dy1_gamma1"),
        "dy1 by the other gamma": Edit("dy1_gamma1", "mul %dy132, %gamma32"),
        "dgamma and dgamma1 exchanged": Swap("dgamma", "dgamma1"),
        "the stream's gradient is dropped": drop("dx32", "dx32_part"),
        "the stream's gradient before the norm": Edit(
            "dx32_part_part", "add %mutant, %dh32", ("%mutant : f32[M, D] = add %dy_gamma, %dy1_gamma1",)
        ),
    },
    ("gated_layernorm", "fwd", "dtype=bf16"): {
        **of("x32", NORM_FORWARD),
        "the gate is dropped": drop("gated", "y32"),
        "sigmoid for silu": Edit("gate", "sigmoid %z32"),
        "the gate of x": Edit("gate", "silu %x32"),
        "the gate before beta": Edit("gated", "add %mutant, %beta32", ("%mutant : f32[M, D] = mul %scaled, %gate",)),
        "the gate is added": Edit("gated", "add %y32, %gate"),
    },
    ("gated_layernorm", "bwd", "dtype=bf16"): {
        **mean_term("dx32_part", "mean_dy_gamma_gate", "dy_gamma_gate"),
        **xhat_term("dx32_part_1", "dx32_part", "xhat_mean_dy_gamma_gate_xhat"),
        "dx without the gate": drop("dy_gamma_gate", "dy_gamma"),
        "dgamma without the gate": drop("dy_gate", "dy32"),
        "dbeta without the gate": Edit("sum_dy_gate", "reduce_sum %dy32 {axis=M}"),
        "dz without beta": Edit("dy_y", "mul %dy32, %scaled"),
        "the slope of sigmoid": drop("slope", "part"),
        "dx and dz exchanged": Swap("dx", "dz"),
    },
    ("gated_rmsnorm", "fwd", "gate=before,dtype=bf16"): {
        **of("gated", SQUARE_FORWARD),
        "the gate is dropped": drop("gated", "x32"),
        "the gate behind the norm": Edit("xhat", "mul %x32, %rstd"),
        "the square of x": Edit("x2", "mul %x32, %x32"),
    },
    ("gated_rmsnorm", "bwd", "gate=before,dtype=bf16"): {
        **xhat_term("dx32_part", "dy_gamma", "xhat_mean_dy_gamma_xhat", "dy_gamma"),
        "dx without the gate": drop("dx32", "dx32_part_1"),
        "dz without x": drop("dz32_part_2", "dx32_part_1"),
        "dz by the gate": Edit("dz32", "mul %gate, %dz32_part_2"),
        "dx and dz exchanged": Swap("dx", "dz"),
    },
    ("layernorm_sigmoid_mul", "fwd", "dtype=bf16"): {
        **of("x32", NORM_FORWARD),
        "the norm for x": Edit("gated", "mul %y32, %sigmoid_y"),
        "x is dropped": drop("gated", "sigmoid_y"),
        "tanh for sigmoid": Edit("sigmoid_y", "tanh %y32"),
    },
    ("layernorm_sigmoid_mul", "bwd", "dtype=bf16"): {
        "the gradient past the norm is dropped": drop("dx32", "dx32_part"),
        "the gradient past the norm is dy": Edit("dx32", "add %dx32_part, %dy32"),
        "the mean term is dropped": drop("dx32_part_part", "dy_gamma_x_slope"),
        "the slope is sigmoid": drop("slope", "sigmoid_y"),
        "1 + sigmoid": Edit("slope", "add %sigmoid_y, %square"),
        "x is forgotten in dgamma": drop("dy_x", "dy32"),
        "dgamma and dbeta exchanged": Swap("dgamma", "dbeta"),
    },
    ("rmsnorm_sigmoid_mul", "fwd", "dtype=bf16"): {
        **of("x32", SQUARE_FORWARD),
        "the norm for x": Edit("gated", "mul %scaled, %sigmoid_scaled"),
        "x is dropped": drop("gated", "sigmoid_scaled"),
    },
    ("layernorm_act", "fwd", "act=gelu,dtype=bf16"): {
        **of("x32", NORM_FORWARD),
        "tanh's curve": Edit("gelu_y", "silu %y32"),
        "no activation": drop("gelu_y", "y32"),
        "the activation before beta": Edit("gelu_y", "add %mutant, %beta32", ("%mutant : f32[M, D] = gelu %scaled",)),
    },
    ("rmsnorm_act", "fwd", "act=relu,dtype=bf16"): {
        **of("x32", SQUARE_FORWARD),
        "no activation": drop("relu_scaled", "scaled"),
        "the absolute value": Edit("relu_scaled", "abs %scaled"),
    },
    ("dyt", "fwd", "dtype=bf16"): {
        "alpha is dropped": drop("ax", "x32"),
        "alpha behind tanh": Edit("t", "mul %mutant, %alpha32", ("%mutant : f32[M, D] = tanh %x32",)),
        "gamma is dropped": drop("scaled", "t"),
        "beta inside": Edit("t", "tanh %mutant", ("%mutant : f32[M, D] = add %ax, %beta32",)),
        "sigmoid for tanh": Edit("t", "sigmoid %ax"),
    },
    ("softmax", "fwd", "scale=0.5,dtype=bf16"): {
        "a mean for the sum": Edit("rowsum", "reduce_mean %e {axis=D}"),
        "the scale is dropped": drop("x_scaled", "x32"),
        "the scale behind the maximum": Edit("shifted", "sub %x32, %rowmax"),
        "a sum of the shifted": Edit("rowsum", "reduce_sum %shifted {axis=D}"),
        "base 2": Edit("e", "exp2 %shifted"),
        "not divided": drop("p", "e"),
    },
    ("softmax", "bwd", "scale=0.5,dtype=bf16"): {
        "the row's term is dropped": drop("dx32_part", "dy32"),
        "the row's term is added": Edit("dx32_part", "add %dy32, %sum_dy_p"),
        "the row's term is doubled": double("dx32_part", "dy32", "sum_dy_p", "sub"),
        "a mean for the sum of dy p": Edit("sum_dy_p", "reduce_mean %dy_p {axis=D}"),
        "the scale is dropped": drop("dx32_part_1", "dx32_part"),
        "not by p": drop("dx32", "dx32_part_1"),
    },
    ("log_softmax", "fwd", "scale=0.5,dtype=bf16"): {
        "the logarithm is dropped": Edit("y32", "sub %shifted, %rowsum"),
        "added": Edit("y32", "add %shifted, %logsum"),
        "the maximum is not subtracted": Edit("y32", "sub %x_scaled, %logsum"),
        "a mean for the sum": Edit("rowsum", "reduce_mean %e {axis=D}"),
    },
    ("log_softmax", "bwd", "scale=0.5,dtype=bf16"): {
        "the row's term is dropped": drop("dx32_part", "dy32"),
        "a mean for the sum of dy": Edit("sum_dy", "reduce_mean %dy32 {axis=D}"),
        "not divided": drop("sum_dy_rowsum", "sum_dy"),
        "the scale is dropped": drop("dx32", "dx32_part"),
    },
    ("cross_entropy", "fwd", "scale=0.5,dtype=bf16"): {
        "the sign": Edit("loss32", "sub %hit, %mass_logsum"),
        "the mass is taken for 1": drop("mass_logsum", "logsum"),
        "the target is forgotten": Edit("hit", "reduce_sum %shifted {axis=D}"),
        "a mean of the row": Edit("hit", "reduce_mean %target_x {axis=D}"),
        "x that is not shifted": Edit("target_x", "mul %target_constant, %x_scaled"),
    },
    ("cross_entropy", "bwd", "scale=0.5,dtype=bf16"): {
        "the target is dropped": drop("dx32_part", "e_mass_rowsum"),
        "the mass is taken for 1": Edit("mass_rowsum", "div %mutant_one, %rowsum", (ONE,)),
        "the target twice": double("dx32_part", "e_mass_rowsum", "target_constant", "sub"),
        "the scale is dropped": Edit("dx32", "mul %dloss, %dx32_part"),
        "dloss is dropped": Edit("dx32", "mul %scale, %dx32_part"),
    },
}  # fmt: skip
CASES = [(*where, label) for where, mutations in MUTATIONS.items() for label in mutations]


def prepared(name: str, way: str, keys: str) -> tuple[Spec, Graph]:
    spec = parse_spec(text(name, way, keys))
    return spec, spec.forward() if way == "fwd" else spec.trace()["cse"]


def error(spec: Spec, graph: Graph) -> float:
    """The distance of ``graph``'s results from the formula's."""
    exact = Exact.of(spec)
    if spec.definition.name == "l2norm":
        inputs = {"x": exact.inputs["x"] * SIZES}
        exact = replace(exact, inputs=inputs, results=results("l2norm", own_keys(spec), inputs))
    if spec.direction == "bwd":
        return distance(exact.backward(graph, spec.differentiated), exact.gradients(spec.differentiated))
    return distance({n: r.value for n, r in evaluate(graph, exact.inputs).items()}, exact.results)


@pytest.mark.parametrize(("name", "way", "keys"), MUTATIONS)
def test_the_true_graph_passes(name: str, way: str, keys: str) -> None:
    assert error(*prepared(name, way, keys)) < RELATIVE


@sampling.rotating(("name", "way", "keys", "label"), CASES)
def test_the_mutant_is_caught(name: str, way: str, keys: str, label: str) -> None:
    spec, graph = prepared(name, way, keys)
    assert error(spec, MUTATIONS[name, way, keys][label](graph)) > CAUGHT


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 150
    assert {name for name, *_ in CASES} == {*GRAPHS}
    for name in GRAPHS:
        assert sum(case[0] == name for case in CASES) >= 3
    for where, mutations in MUTATIONS.items():
        graph = prepared(*where)[1]
        assert len({m(graph) for m in mutations.values()}) == len(mutations)
