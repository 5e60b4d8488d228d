"""If these fail, a description by operators means something else, or the line of a wrong one is not told."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import mul
from pathlib import Path

import numpy as np
import pytest

import lngen
import sampling
from lngen.compiler.graphs import Definition, GraphBuilder, Options
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import OPS, D, DType, Graph, M, Value, print_eqn
from lngen.compiler.lower import lower
from lngen.compiler.problem import problem
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import Spec, make_spec
from lngen.errors import VerifyError
from own_graphs import own, rms
from plans import run_checked

Describe = Callable[[GraphBuilder], None]


def spec_of(describe: Describe, direction: str = "fwd", **keys: object) -> Spec:
    return make_spec(Definition("own", describe), direction, {"d": 37, **keys})


def by_operators(b: GraphBuilder) -> None:
    """A norm of a sum, with gamma around zero."""
    h = b.input("x", M, D) + b.input("residual", M, D)
    b.output("y", h * rms(b, h) * (1 + b.input("gamma", D)))


def without_names(graph: Graph) -> list[tuple[object, ...]]:
    """The equations by the numbers of their values."""
    number = {value: n for n, value in enumerate((*graph.params, *(e.out for e in graph.eqns)))}
    return [(e.op, e.out.type, e.attrs, *(number[a] for a in e.args)) for e in graph.eqns]


@pytest.mark.parametrize("op", [name for name in vars(Value) if not name.startswith("_") and name != "clamp"])
def test_every_method_of_a_value_is_the_op_of_that_name(op: str) -> None:
    """It adds the equation of the builder's method, and has the docstring of the op's row."""

    def operator(b: GraphBuilder, x: Value) -> Value:
        return getattr(Value, op)(*[x] * OPS[op].arity)  # type: ignore[no-any-return]

    def method(b: GraphBuilder, x: Value) -> Value:
        return getattr(b, op)("f", *[x] * OPS[op].arity)  # type: ignore[no-any-return]

    assert without_names(own(operator).forward()) == without_names(own(method).forward())
    assert op in {e.op for e in own(operator).forward().eqns}
    assert getattr(Value, op).__doc__ == getattr(GraphBuilder, op).__doc__ is not None
    assert (getattr(Value, op).__name__, getattr(Value, op).__qualname__) == (op, f"Value.{op}")


FILE = Path(__file__).parent / "equations.txt"


def equation_of(code: str, dtype: DType) -> str:
    """The equation that an expression writes last."""

    def describe(b: GraphBuilder) -> None:
        x, z = b.input("x", M, D), b.input("z", M, D)
        b.output("y", b.input("x2", M, D) + eval(code, {"b": b, "x": x, "z": z, "D": D}))

    graph = Definition("own", describe).builder(Options(dtype, dtype, dtype))
    assert [str(a) for a in graph.eqns[-1].args] == ["%y32"]
    assert {e.attr("dtype") for e in graph.eqns if e.op == "const"} <= {dtype}
    (found,) = (e for e in graph.eqns if e.out == graph.eqns[-2].args[1])
    return re.sub(r" : \w+\[[\w, ]*\]| {to=\w+}|%", "", print_eqn(found))


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
def test_an_operator_is_an_equation_whose_name_says_what_it_is(dtype: DType, pytestconfig: pytest.Config) -> None:
    """``pytest --update`` writes what is behind the arrows."""
    text = FILE.read_text(encoding="utf-8")
    found = re.sub(r"(?m)^(.+) -> .*$", lambda m: f"{m[1]} -> {equation_of(m[1], dtype)}", text)
    if pytestconfig.option.update:
        FILE.write_text(found, encoding="utf-8")
    else:
        assert found == text


# ---- names of one's own ----


def test_a_value_is_named_wherever_it_is_used() -> None:
    def describe(b: GraphBuilder) -> None:
        h = b.input("x", M, D) * 2
        square = h * h
        assert b.named("h", h) == b.named("h", h) == h
        b.output("y", square + h)
        b.statistic(b.mean(h * h), "ms")

    graph = spec_of(describe).definition.builder(spec_of(by_operators).options)
    uses = {(e.op, *(a.name for a in e.args)) for e in graph.eqns}
    assert {("mul", "x32", "two"), ("mul", "h", "h"), ("add", "h_squared", "h"), ("reduce_mean", "h_squared")} <= uses
    assert [s.name for s in graph.statistics] == ["ms"]
    assert interpret(spec_of(describe).graph(), {"x": np.full((1, 37), 3, np.float32)})["y"][0, 0] == 42


def late_names(b: GraphBuilder) -> None:
    """Names that the operators before them might have taken; of equal equations the one with a name."""
    x, z = b.input("x", M, D), b.input("z", M, D)
    total, square = x + z + b.eps(), x * x
    assert b.mul("x_plus_z", x, x) != square
    b.output("y", total * square + b.input("x32", D) + b.input("eps", D) + b.input("y32", D))


def layernorm_of_one_s_own(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    centred = x - b.statistic(b.mean(x), "mean")
    b.statistic((b.mean(centred**2) + b.eps()).rsqrt(), "rstd")
    b.output("y", centred * (b.mean(centred * centred) + b.eps()).rsqrt())


def leaky(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    b.output("y", b.add("h", b.where_gt("leaky", x, 0.0, x, 0.01 * x), 0.0))


@pytest.mark.parametrize(("describe", "equations"), [
    (layernorm_of_one_s_own, """
     x32 = cast x; mean = reduce_mean x32; x_minus_mean = sub x32, mean
     x_minus_mean_squared = mul x_minus_mean, x_minus_mean
     mean_x_minus_mean_squared = reduce_mean x_minus_mean_squared; eps = const
     rstd_terms = add mean_x_minus_mean_squared, eps; rstd = rsqrt rstd_terms
     y32 = mul x_minus_mean, rstd; y = cast y32"""),
    (late_names, """
     x32_1 = cast x; z32 = cast z; x32_1_plus_z = add x32_1, z32; eps_1 = const
     x32_1_plus_z_plus_eps_1 = add x32_1_plus_z, eps_1; x_plus_z = mul x32_1, x32_1
     y_product = mul x32_1_plus_z_plus_eps_1, x_plus_z; x32_32 = cast x32
     y_product_plus_x32 = add y_product, x32_32; eps32 = cast eps
     y_product_plus_x_plus_eps = add y_product_plus_x32, eps32; y32_32 = cast y32
     y_terms = add y_product_plus_x_plus_eps, y32_32; y = cast y_terms"""),
    (leaky, """
     x32 = cast x; c0p01 = const; c0p01_x = mul c0p01, x32; zero = const
     leaky = where_gt x32, zero, x32, c0p01_x; h = add leaky, zero; y = cast h"""),
])  # fmt: skip
def test_a_name_of_one_s_own_goes_before_automatic_ones(describe: Describe, equations: str) -> None:
    found = [f"{e.out} = {e.op} {', '.join(map(str, e.args))}".strip() for e in spec_of(describe).forward().eqns]
    assert "; ".join(found).replace("%", "") == re.sub(r";?\n +", "; ", equations).removeprefix("; ")


# ---- where operators mean nothing ----


class SilentError(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise KeyError


def test_what_a_description_raises_is_said_with_its_line() -> None:
    def silent(b: GraphBuilder) -> None:
        raise SilentError

    with pytest.raises(VerifyError) as error:
        lngen.compile(silent, d=8)
    line = rf"\('{re.escape(__file__)}', line \d+: raise SilentError\)"
    assert re.fullmatch(rf"graph @silent_fwd: its function raised SilentError {line}\.", str(error.value))


@pytest.mark.parametrize(("dtype", "times"), [("f32", 1), ("bf16", 2)])
def test_a_graph_is_described_once_for_a_spec_and_anew_for_the_next(dtype: str, times: int) -> None:
    """With the default dtypes, for the keys that the spec may have, and with its own."""
    asked: list[object] = []

    def describe(b: GraphBuilder) -> None:
        asked.append(b.options)
        by_operators(b)

    definition = Definition("own", describe)
    for _ in range(2):
        asked.clear()
        spec = make_spec(definition, "bwd", {"d": 37, "dtype": dtype, "save": "y+rstd", "wrt": "x"})
        assert f"own@{spec.digest}.bwd" in str(spec)
        assert spec.trace()
        assert spec.with_direction("fwd").trace()
        assert len(asked) == times


def test_an_error_of_lngen_s_own_graphs_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphBuilder, "eps", lambda b: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lngen.compile("rmsnorm", d=8)


def test_a_description_within_another_has_its_own_equations() -> None:
    def outer(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        first = x * 2
        assert len(spec_of(by_operators).graph().results) == 2
        b.output("y", first + x)

    assert [e.op for e in spec_of(outer).definition.builder(spec_of(outer).options).eqns].count("add") == 1


def test_threads_describe_graphs_of_their_own() -> None:
    def describe(factors: int) -> list[str]:
        def product_of(b: GraphBuilder, x: Value) -> Value:
            return reduce(mul, [x] * (factors + 1))

        return [e.op for _ in range(10) for e in own(product_of).forward().eqns]

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(describe, range(1, 33))]
    assert [ops.count("mul") for ops in found] == [10 * n for n in range(1, 33)]


# ---- declared dtypes ----


def residual_in_f32(b: GraphBuilder) -> None:
    """A residual stream that is kept in f32, whatever the dtype of x."""
    h = b.input("x", M, D) + b.input("residual", M, D, dtype="f32")
    b.output("y", h * rms(b, h) * b.input("gamma", D, dtype=np.float16))
    b.output("h", h, dtype=DType.F32)


def test_inputs_outputs_cotangents_and_gradients_have_the_declared_dtype() -> None:
    forward, backward = (spec_of(residual_in_f32, way, dtype="bf16").graph() for way in ("fwd", "bwd"))
    types = {v.name: v.type.dtype.value for g in (forward, backward) for v in (*g.params, *g.results)}
    assert {name: types[name] for name in ("x", "y", "dy", "dx")} == dict.fromkeys(("x", "y", "dy", "dx"), "bf16")
    in_f32 = ("residual", "h", "dh", "dresidual", "rstd")
    assert {name: types[name] for name in in_f32} == dict.fromkeys(in_f32, "f32")
    assert types["gamma"] == types["dgamma"] == "f16"


@sampling.grid(
    ("direction", "d", "dtype"),
    [("bwd", 37, "f32"), ("fwd", 4104, "f32"), ("bwd", 96, "bf16"), ("fwd", 37, "bf16"), ("bwd", 4104, "bf16")],
    strength=1,
)
def test_kernels_of_declared_dtypes_have_the_interpreter_s_bits(direction: str, d: int, dtype: str) -> None:
    """The best schedule of each form."""
    pytest.importorskip("cupy")
    few = {"blocks": 3} if direction == "bwd" else {}
    spec = spec_of(residual_in_f32, direction, d=d, dtype=dtype, **few)
    best = {s.form: s for s in reversed(ranked(problem(spec.graph(), d)))}
    for schedule in best.values():
        run_checked(lower(spec, schedule), 3)


def test_the_thirty_second_value_of_a_name_has_a_name_too() -> None:
    def describe(b: GraphBuilder, h: Value) -> Value:
        for _ in range(70):
            h = h + h * 0.5
        return h

    assert "%y_terms_32_half " in str(own(describe).forward())
