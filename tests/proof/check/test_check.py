"""If these fail, ``lngen check`` passes what is wrong, refuses what is right, or does not say why."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import sampling
from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import BF16, F64, OPS, D, Graph, M, Value, parse
from lngen.compiler.ir.evaluate import evaluate
from lngen.compiler.ir.numerics import Array
from lngen.compiler.ir.real import Real, Setting
from lngen.compiler.passes.instance import lengths
from lngen.compiler.problem import Schedule
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.compiler.toolchain import Binary, Resources
from lngen.dtypes import FLOATS
from lngen.errors import LowerError, MissingError, VerifyError
from lngen.proof.check import matrix
from lngen.proof.check import spec_checks as check
from lngen.proof.check.differences import gradient_excess
from lngen.proof.check.inputs import POISON, forward_inputs, random_inputs, same_bits
from lngen.proof.check.matrix import Entry
from lngen.proof.check.oracles import closed_form
from own_graphs import Expression, own

OPTIONS = ("d=1,dtype=f32", "d=33,dtype=bf16,weight=f32", "d=768,dtype=f64", "d=64,gamma=no,save=none")


@sampling.grid(("norm", "way", "options"), product(("layernorm", "rmsnorm"), ("fwd", "bwd"), OPTIONS))
def test_what_is_right_passes(norm: str, way: str, options: str) -> None:
    pytest.importorskip("cupy")
    spec = parse_spec(f"{norm}.{way}:{options}")
    results = list(check.check_spec(spec, on="interpreter", rows=(0, 17)))
    assert [r.what for r in results].count("oracle") == 1
    assert {r.what for r in results} >= {"oracle", "compile"}
    assert all(r.ok for r in results)


@pytest.mark.parametrize("text", ["layernorm.fwd:d=33,eps=run", "l2norm.bwd:d=8,guard=max,eps=run,save=none"])
def test_an_eps_at_run_time_is_checked_with_several_values(text: str) -> None:
    """The oracle's bounds are for the default; bits are compared for others as well, 0 among them."""
    pytest.importorskip("cupy")
    results = list(check.check_spec(parse_spec(text), on="ptx", rows=(0, 3)))
    assert all(r.ok for r in results), [r for r in results if not r.ok]
    passed = [(r.rows, r.detail.partition(":")[0]) for r in results if r.what == "ptx"]
    assert passed == [(0, "eps=1e-05"), (3, "eps=1e-05"), (3, "eps=0"), (3, "eps=1e-12"), (3, "eps=0.5")]
    assert [r.rows for r in results if r.what in ("oracle", "float64")] == [3]


def test_a_kernel_that_ignores_the_eps_of_a_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr("lngen.proof.ptx.call.bits_of", lambda value: int(np.float32(1e-5).view(np.uint32)))
    results = list(check.check_spec(parse_spec("rmsnorm.fwd:d=33,eps=run"), on="ptx", rows=(3,)))
    assert [r.detail.partition(":")[0] for r in results if not r.ok] == ["eps=0", "eps=1e-12", "eps=0.5"]


# ---- results against a closed form, or against the graph in float64 ----


def two_outputs(b: GraphBuilder) -> None:
    """Kinks, an input of a dtype of its own, two outputs, a statistic."""
    x, r = b.input("x", M, D), b.cast("r32", b.param("residual", F64, M, D), to=F64)
    h = b.add("h", b.cast("x64", x, to=F64), r)
    most = b.reduce_max("most", h, axis=D)
    b.output("y", b.relu("kept", b.sub("below", h, b.mul("half", most, b.const("part", 0.5, F64)))))
    b.output("h_out", h)
    b.statistic(most)


def graph(name: str, way: str = "fwd", d: int = 64, dtype: str = "f32") -> Spec:
    """A norm as a graph of one's own, or one of two others."""
    keys = {"d": d, "dtype": dtype}
    if name == "scaled":
        return own(lambda b, x, gamma=D: x / (b.mean(x * x) + 1) * gamma, way, **keys)
    describe = two_outputs if name == "two_outputs" else GRAPHS[name].describe
    return make_spec(Definition("own", describe), way, keys)


GRAPHS_OF_ONES_OWN = ("scaled", "layernorm", "rmsnorm", "two_outputs")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("name", GRAPHS_OF_ONES_OWN)
def test_any_graph_is_held_against_itself_in_float64(name: str, dtype: str) -> None:
    for direction, d in product(("fwd", "bwd"), (1, 64, 4096)):
        spec = graph(name, direction, d, dtype)
        inputs = random_inputs(spec, 3)
        found = check.mathematics(spec, 3, inputs, interpret(spec.graph(), inputs))
        assert found.ok, found.detail
        assert found.what == "float64"
        formulas = check.formulas(spec) if direction == "bwd" else found
        assert formulas.ok, formulas.detail


def test_a_graph_of_ones_own_is_checked_in_both_ways() -> None:
    pytest.importorskip("cupy")
    results = list(check.check_spec(graph("two_outputs", "bwd"), on="interpreter", rows=(0, 3)))
    assert [r.what for r in results] == ["differences", "float64", "compile"]
    assert all(r.ok for r in results)


def test_a_graph_of_ones_own_that_is_called_like_a_norm_is_checked_as_itself() -> None:
    def layernorm(b: GraphBuilder) -> None:
        b.output("y", b.mul("nothing", b.input("x", M, D), b.number("zero", 0.0)))

    spec = make_spec(Definition("layernorm", layernorm), "fwd", {"d": 64})
    inputs = random_inputs(spec, 5)
    results = interpret(spec.graph(), inputs)
    assert check.mathematics(spec, 5, inputs, results).ok  # 0 is what it says
    builtin = parse_spec("layernorm.fwd:d=64,gamma=no,beta=no")
    zeros = {n: np.zeros_like(a) for n, a in interpret(builtin.graph(), inputs).items()}
    assert not check.mathematics(builtin, 5, inputs, zeros).ok


@pytest.mark.parametrize("spec", [
    *(graph(name, way, dtype="bf16") for name in ("scaled", "two_outputs") for way in ("fwd", "bwd")),
    *map(parse_spec, ("layernorm.fwd:d=64", "layernorm.bwd:d=64,dtype=bf16", "rmsnorm.bwd:d=64,dtype=f64")),
], ids=str)  # fmt: skip
def test_a_wrong_result_is_caught(spec: Spec) -> None:
    """Zeros in place of a result; one number that is 2 % off, or in an own graph by eight roundings of its dtype."""
    inputs = random_inputs(spec, 5)
    right = interpret(spec.graph(), inputs)
    assert check.mathematics(spec, 5, inputs, right).ok
    for name, value in right.items():
        off = value.copy()
        factor = 1.02 if spec.builtin else 1 + 8 * BF16.roundoff
        off.flat[-1 if spec.builtin else np.abs(off.astype(np.float64)).argmax()] *= off.dtype.type(factor)
        for wrong in (np.zeros_like(value), off):
            found = check.mathematics(spec, 5, inputs, right | {name: wrong})
            assert not found.ok
            assert name in found.detail


def test_a_pass_that_loses_a_term_is_caught() -> None:
    """A forward is held against what was described, not against what the passes made of it."""
    spec = graph("layernorm")
    made, inputs = spec.graph(), random_inputs(spec, 5)
    centred = next(e for e in made.eqns if e.op == "sub")
    kept = replace(made, eqns=tuple(replace(e, op="add") if e is centred else e for e in made.eqns))
    assert check.mathematics(spec, 5, inputs, interpret(made, inputs)).ok
    assert not check.mathematics(spec, 5, inputs, interpret(kept, inputs)).ok


@pytest.mark.parametrize("factor", [1 + 1e-4, 0.0])
@pytest.mark.parametrize("lost", ["dx", "dgamma"])
def test_differences_catch_a_wrong_derivative(monkeypatch: pytest.MonkeyPatch, lost: str, factor: float) -> None:
    spec = parse_spec("rmsnorm.bwd:d=64")
    true = gradient_excess(spec)
    assert set(true) == {"dx", "dgamma"}
    assert max(true.values()) < 1

    def forgetful(graph: Graph, inputs: Mapping[str, Array], **how: bool) -> dict[str, Real]:
        results = evaluate(graph, inputs, **how)
        return {n: Real(r.value * (factor if n == lost else 1), r.error) for n, r in results.items()}

    monkeypatch.setattr("lngen.proof.check.differences.evaluate", forgetful)
    assert {name for name, ratio in gradient_excess(spec).items() if ratio > 1} == {lost}


# ---- where a graph is defined ----


def root_of_input(b: GraphBuilder) -> None:
    b.output("y", b.input("x", M, D).sqrt())


def logarithm(b: GraphBuilder) -> None:
    x, w = b.input("x", M, D), b.input("w", D)
    b.output("y", (x * w).log() + b.input("row", M).rsqrt())


def root_of_difference(b: GraphBuilder) -> None:
    """An input is at least 0.25 if it is positive; this no rule finds."""
    b.output("y", (b.input("x", M, D, positive=True) - 0.125).log())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("describe", "drawn", "found"), [
    (root_of_input, "x", "x"), (logarithm, "x, w, row", "x, w, row"), (root_of_difference, "x", ""),
])  # fmt: skip
def test_inputs_are_drawn_where_the_graph_is_defined(describe: object, drawn: str, found: str, dtype: str) -> None:
    """A declaration is no part of a graph's text; what is found from the equations is."""
    for direction in ("fwd", "bwd"):
        spec = make_spec(Definition("own", describe), direction, {"d": 37, "dtype": dtype})  # type: ignore[arg-type]
        inputs = random_inputs(spec, 5)
        results = [check.mathematics(spec, 5, inputs, interpret(spec.graph(), inputs))]
        for result in [*results, *([check.formulas(spec)] if direction == "bwd" else [])]:
            assert result.ok, result.detail
            assert result.detail.endswith(f"; drawn positive: {drawn}")
        given = forward_inputs(spec, 5)
        assert all((given[n] > 0.2).all() for n in drawn.split(", "))
    text = str(make_spec(Definition("own", describe), "fwd", {"d": 8}).forward())  # type: ignore[arg-type]
    assert ", ".join(make_spec(Definition.from_graph(parse(text)), "bwd", {"d": 8}).positive_inputs()) == found


# What has to be positive where the logarithm of an expression is taken.
DOMAINS: dict[str, tuple[Expression, str]] = {
    "sum": (lambda b, x, z: x + z, "xz"),
    "difference": (lambda b, x, z: x - z, ""),
    "sum with a difference": (lambda b, x, z: x + (z - 1), ""),
    "positive number": (lambda b, x, z: x + 1, "x"),
    "negative number": (lambda b, x, z: x + -1.0, ""),
    "square": (lambda b, x, z: x * x + 1e-5, ""),
    "squares": (lambda b, x, z: b.mean(x * x) + z, "z"),
    "product": (lambda b, x, z: x * b.mean(z), "xz"),
    "quotient": (lambda b, x, z: 1 / x, "x"),
    "exponential": (lambda b, x, z: b.sum((x - z).exp()), ""),
    "absolute value": (lambda b, x, z: x.abs() * z, "z"),
    "clamp": (lambda b, x, z: x.clamp(low=0.5, high=2.0), ""),
    "clamp through zero": (lambda b, x, z: x.clamp(low=-0.5, high=2.0), ""),
    "maximum with a number": (lambda b, x, z: x.maximum(0.5), ""),
    "maximum with zero": (lambda b, x, z: x.maximum(0.0), "x"),
    "minimum": (lambda b, x, z: x.minimum(z), "xz"),
    "negative": (lambda b, x, z: -x, ""),
    "root of a root": (lambda b, x, z: x.sqrt(), "x"),
    "dot": (lambda b, x, z: b.reduce_dot("dot", x, z, axis=D), "xz"),
    "dot with itself": (lambda b, x, z: b.reduce_dot("dot", x, x, axis=D), ""),
}


@pytest.mark.parametrize("argument", DOMAINS)
def test_what_has_to_be_positive(argument: str) -> None:
    expression, positive = DOMAINS[argument]
    spec = own(lambda b, x, z: {"y": expression(b, x, z).log(), "sum": x + z}, d=8)
    assert spec.positive_inputs() == tuple(positive)


def test_named_graphs_have_no_domain() -> None:
    """Their inputs are drawn as ever."""
    for definition in GRAPHS.values():
        assert make_spec(definition, "bwd", {"d": 8}).positive_inputs() == ()


@pytest.mark.parametrize(("expression", "ok", "detail"), [
    # The scale of a quantiser moves every element of its row over a jump of rint.
    (
        lambda b, x: (x / (scale := b.reduce_max("most", abs(x), axis=D) / 127.0)).rint() * scale, True,
        "; held at its numbers, between which it jumps: rint",
    ),
    # Also where a number comes first.
    (
        lambda b, x, z: {"y": x * 2, "w": (z - 2).log()}, False,
        " have to be positive, declare them: b.input(name, ..., positive=True)",
    ),
], ids=["jumps", "undefined"])  # fmt: skip
def test_what_differences_say_of_a_graph(expression: Expression, ok: bool, detail: str) -> None:
    found = check.formulas(own(expression, "bwd", d=1024))
    assert (found.ok, found.detail[-len(detail) :]) == (ok, detail)
    assert ok or "; inf, nan: a result is no number for the inputs drawn; if some inputs" in found.detail


def test_numbers_without_a_bound_are_skipped_and_said() -> None:
    """The sum of a centred row is 0 within its error: a quotient by it may be any number."""
    spec = own(lambda b, x: {"y": x / b.sum(x - b.mean(x)), "z": x * 2.0}, d=37)
    inputs = random_inputs(spec, 3)
    results = interpret(spec.graph(), inputs)
    found = check.mathematics(spec, 3, inputs, results)
    assert (found.ok, found.detail) == (True, "error / bound: y 0, z 0; no bound, skipped: 111 of 111 numbers of y")
    assert not check.mathematics(spec, 3, inputs, results | {"z": -results["z"]}).ok


# ---- its parts ----


@sampling.grid(("op", "direction"), product([o.name for o in OPS.values() if o.cuda and o.vjp is None], ("fwd", "bwd")))
def test_operations_on_the_bits_of_f32_have_no_error_bound_but_that_of_a_sign(op: str, direction: str) -> None:
    """They have a number all the same, so a graph of one is checked, and its backward if no gradient passes there."""

    def graph(b: GraphBuilder, x: Value, z: Value) -> Value:
        return x * b.stop_gradient(getattr(b, op)("bits", *(z.abs() + 0.5, z)[: OPS[op].arity]))

    spec = own(graph, direction, d=8, **({"wrt": "x"} if direction == "bwd" else {}))
    inputs = random_inputs(spec, 3)
    result = check.mathematics(spec, 3, inputs, interpret(spec.graph(), inputs))
    assert result.ok
    assert ("no bound" in result.detail) == (op != "copysign")


def test_a_sign_is_in_doubt_where_its_number_may_be_zero() -> None:
    number, sign = Real(np.full((1, 3), 2.0), np.full((1, 3), 0.5)), np.array([[-1e-9, -1.0, -0.0]])
    eqn, setting = own("product").forward().eqns[0], Setting(lengths(own("product").forward()))
    found = OPS["copysign"].real((number, Real(sign, np.array([[1e-8, 1e-8, 0.0]]))), eqn, setting)
    assert (found.value.tolist(), found.error.tolist()) == ([[-2.0] * 3], [[4.5, 0.5, 0.5]])


@pytest.mark.parametrize("d", [17, 4096, 40_000])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_real_numbers_are_the_closed_form_within_their_bound(direction: str, d: int) -> None:
    """Of f32 results no error is more than the bound, and no bound is much more than what rounding can do."""
    spec = parse_spec(f"layernorm.{direction}:d={d}")
    inputs = random_inputs(spec, 3)
    found = evaluate(spec.graph(), inputs)
    forward = {**forward_inputs(spec, 3), **inputs}
    expected = closed_form("layernorm", forward, dict.fromkeys(found, F64), spec.eps, F64)
    for name, real in found.items():
        scale = np.abs(expected[name].value).max()
        assert np.abs(real.value - expected[name].value).max() < 1e-5 * scale  # statistics were rounded
        assert 0 < real.error.max() < 3e-4 * scale


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_norm_is_made_as_a_user_makes_it(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """An error of lngen in what only ``lngen.compile`` does is not passed over."""

    def fails(spec: Spec) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lngen.launch.runtime.norm.Rebuilt.of", fails)
    with pytest.raises(ZeroDivisionError):
        list(check.check_spec(parse_spec(f"rmsnorm.{direction}:d=8,save=y"), on="interpreter", rows=(1,)))


def test_a_forward_without_a_backward_is_checked() -> None:
    """A value has the name of a gradient."""
    pytest.importorskip("cupy")
    spec = own(lambda b, x: b.neg("dx", x), d=8)
    assert all(r.ok for r in check.check_spec(spec, on="interpreter", rows=(1,)))
    with pytest.raises(VerifyError):
        list(check.check_spec(spec.with_direction("bwd"), on="interpreter", rows=(1,)))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_of_a_graph_without_kernels_the_interpreter_checks_the_mathematics(direction: str) -> None:
    spec = own(lambda b, x, gamma=D: x * b.sum(gamma), direction, d=8)
    why = f"^graph @own_{direction}: '%sum_gamma' reduces over D a value that has no rows, and rows depend on it; pass"
    with pytest.warns(UserWarning, match=why):
        found = list(check.check_spec(spec, on="interpreter", rows=(3,)))
    assert [r.what for r in found] == ["differences"] * (direction == "bwd") + ["float64"]
    assert all(r.ok for r in found)
    with pytest.raises(LowerError, match=why):
        next(check.check_spec(spec, on="ptx", rows=(3,)))


def test_only_the_default_schedule_must_not_spill() -> None:
    binary = Binary("sm_90", b"", "", {"k__rows": Resources(255, 8, 8, 16, 0, None, 1)})
    spec, schedule = parse_spec("layernorm.fwd:d=64"), Schedule("registers", 32, 4, 4)
    assert not check.compiled(spec, schedule, binary, may_spill=False).ok
    result = check.compiled(spec, schedule, binary, may_spill=True)
    assert (result.ok, result.detail) == (True, "sm_90: 255 registers in kernel rows, spills")
    assert result.rows is None, "it is of no number of rows"


def test_bits_zeros_and_poison() -> None:
    """NaNs are one value and zeros two; no result has the bits of memory that nothing wrote."""
    a = np.array([np.nan, 0.0, 1.0, -0.0], np.float32)
    assert same_bits(a, np.array([-np.nan, -0.0, 1.0, -0.0], np.float32)).tolist() == [True, False, True, True]
    spec = parse_spec("layernorm.fwd:d=16,dtype=bf16")
    for want in interpret(spec.graph(), random_inputs(spec, 7)).values():
        fresh = np.full(want.nbytes, POISON, np.uint8).view(want.dtype).reshape(want.shape)
        assert not same_bits(fresh, want).any()


# ---- kernels without a GPU: the PTX on NumPy ----


def test_without_a_gpu_the_ptx_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr(check, "device_count", lambda: 0)
    spec = parse_spec("rmsnorm.bwd:d=96,dtype=bf16,blocks=2")
    for on, schedules in (("auto", 1), ("ptx", 2)):
        results = list(check.check_spec(spec, on=on, rows=(0, 3), schedules=schedules))
        assert [r.what for r in results].count("ptx") == 2 * schedules
        assert all(r.ok for r in results)
    with pytest.raises(MissingError, match="on=gpu expects a GPU, none was found"):
        list(check.check_spec(spec, on="gpu"))


def test_wrong_bits_and_findings_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    spec = parse_spec("layernorm.fwd:d=4096")
    kernels = Compilation(spec).kernels(Schedule("registers", 128, 1, 4))
    inputs = random_inputs(spec, 2)
    want = interpret(spec.graph(), inputs)
    assert check.executed(kernels, "sm_90", 2, inputs, want).ok
    y = want["y"].copy()
    y[1, 7] = np.nextafter(y[1, 7], np.float32(np.inf))
    wrong = check.executed(kernels, "sm_90", 2, inputs, want | {"y": y})
    assert (wrong.ok, wrong.detail) == (False, "y: 1 of 8192 differ")
    other = KernelSet(kernels.plan)
    monkeypatch.setattr(other, "text", kernels.bundle.replace("__syncthreads();", ";"))
    racy = check.executed(other, "sm_90", 2, inputs, want)
    assert not racy.ok
    assert "shared-race" in racy.detail


def test_the_schedules_tried_are_of_every_kind() -> None:
    """Of each spec as many kinds as there is room for, over the grid all of them that an arch has."""
    texts = [text for text, _ in matrix.specs() if "weight" not in text]
    seen, options = set(), set()
    for text in texts[::10]:
        tried = check.others(Compilation(parse_spec(text)), 5)
        assert len(tried) == len(set(tried)) == 5
        for s in tried:
            seen.add((s.form, s.cluster > 1, s.single_launch and ".bwd" in text))
            words = ("row_in_registers", "early_release", "dynamic", "acquire_shared")
            options |= {(s.form, word) if word == words[0] else word for word in words if getattr(s, word)}
    staged = ("tma", "tma_unaligned", "cp_async")
    kinds = {*((form, False) for form in ("registers", *staged)), ("tma", True)}
    assert {s[:2] for s in seen} >= {*kinds, ("multipass", False)}
    assert {s[:2] for s in seen if s[2]} >= kinds
    in_registers = {(form, "row_in_registers") for form in staged}
    assert options == {*in_registers, "early_release", "dynamic", "acquire_shared"}
    wide = check.others(Compilation(parse_spec("layernorm.fwd:d=131072,dtype=bf16")), 9)
    assert {s.cluster for s in wide} >= {8, 16}
    assert all(check.others(Compilation(parse_spec("layernorm.fwd:d=8")), n) == [] for n in (0, -1))
    columns = Compilation(parse_spec("layernorm.bwd:d=8192,dtype=bf16"))
    for arch, forms in (("sm_75", {"registers", "multipass"}), ("sm_86", {"registers", "multipass", "cp_async"})):
        assert {s.form for s in check.others(columns, 30, arch)} == forms


# ---- the matrix, without its GPU ----


def test_the_matrix_covers_the_grid() -> None:
    """Every length, the largest first, every dtype, graph and direction; and more elements than 32 bits count."""
    texts = [text for text, _ in matrix.specs()]
    assert len(texts) == 2 * 2 * len(matrix.DTYPES) * len(matrix.FEATURES) + len(matrix.EXTREMES)
    listed = [*matrix.specs((8, 96))]
    assert listed[: len(matrix.EXTREMES)] == [(text, (rows,)) for text, rows in matrix.EXTREMES]
    assert any(parse_spec(text).d * max(rows) > 2**31 for text, rows in listed)
    grid = listed[len(matrix.EXTREMES) :]
    assert len({*grid}) == len(grid) == 2 * 10 * 2 * 2
    assert {rows for _, rows in grid} == {matrix.ROWS}
    read = [parse_spec(text) for text, _ in grid]
    assert [s.d for s in read] == [96] * 40 + [8] * 40
    assert {s.dtype for s in read} == {*FLOATS}
    assert sum(s.weight is not s.dtype for s in read) == 48
    heads = {text.partition(":")[0] for text, _ in grid}
    assert heads == {f"{graph}.{way}" for graph in ("layernorm", "rmsnorm") for way in ("fwd", "bwd")}


def test_the_totals_of_the_matrix_are_those_of_all_entries() -> None:
    entries = [
        Entry("b", ["s", "t", "u"], [1, 2, 3], numbers=10, differ=1),
        Entry("a", ["s", "t"], [1], numbers=5),
        replace(matrix.check_entry("layernorm.fwd:d=8", (1,), 5, deadline=0.0), spec="c"),
    ]
    assert entries[2].notes == ["not reached within the budget"]
    found = json.loads(matrix.to_json(entries, {"device": "a GPU"}))
    assert [entry.pop("spec") for entry in found.pop("entries")] == ["a", "b", "c"]
    assert found["conditions"] == {"device": "a GPU"}
    totals = {key: found[key] for key in ("specs", "launches", "numbers_compared", "numbers_that_differ")}
    assert totals == {"specs": 3, "launches": 11, "numbers_compared": 15, "numbers_that_differ": 1}
    assert (found["not_reached"], found["fewest_schedules"]) == (["c"], 2)
