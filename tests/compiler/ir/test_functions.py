"""If these fail, exp, tanh, erf or a relative has lost accuracy, monotony, special values, bits or slope.

An op is tried in every version of its equations: ``exp`` in the first, ``exp v2`` in another.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest

import sampling
from lngen.compiler.graphs import GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import F32, Builder, D, Graph, M, Value, parse, real
from lngen.compiler.ir.functions import EXPANSIONS, FUNCTIONS, ULPS, reciprocal
from lngen.compiler.ir.numerics import Array
from lngen.compiler.lower import lower
from lngen.compiler.passes import decompose
from lngen.compiler.problem import problem
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import parse_spec
from lngen.proof.check.differences import gradient_excess, result_excess
from lngen.proof.check.inputs import mismatches, random_inputs, same_bits
from lngen.proof.ptx import run_plan
from own_graphs import Expression, own, rms
from schedules import registers

VERSIONED = (*ULPS, *(f"{op} {version}" for version, own in EXPANSIONS.items() for op in own))
MONOTONE = tuple(op for op in VERSIONED if op not in ("gelu", "gelu_tanh", "silu", "decay"))
ODD = ("tanh", "erf")
COUNTS = [2**17, pytest.param(2**20, marks=pytest.mark.full)]  # of random arguments
INF, NAN = np.inf, np.nan

# Where an expansion changes its formula, or a result saturates or becomes subnormal.
BREAKS = {
    "exp": (-104.0, -87.34, 88.73, 89.0), "exp2": (-150.0, -149.0, -126.0, 127.5, 128.0), "log": (2 / 3, 4 / 3, 1.0),
    "decay": (-88.0, -87.683, -87.34, 88.0),
    "tanh": (0.1733, 0.5199, 9.01, 10.0), "sigmoid": (-87.25, -18.0, 17.33, 40.0),
    "softplus": (-104.0, -87.34, 0.0, 18.0), "erf": (1.0, 3.95), "normal_cdf": (-15.0, -14.17, -13.0, 0.0, 5.4),
}  # fmt: skip


def of(op: str, x: Array, graph: Graph | None = None) -> Array:
    """The function of f32 numbers, by the interpreter."""
    return interpret(graph or alone(op), {"x": np.asarray(x, np.float32)[None]})["y"][0]


def alone(op: str) -> Graph:
    op, version = named(op)
    b = Builder("alone")
    graph = b.build(b.emit(op, "y", (b.param("x", F32, M, D),)))
    return graph if version == FUNCTIONS[0] else decompose(graph, 1, version)


def named(op: str) -> tuple[str, str]:
    """The op and its version."""
    op, _, version = op.partition(" ")
    return op, version or FUNCTIONS[0]


def arguments(count: int, seed: int = 0) -> Array:
    """Half with any bits: all exponents, both signs, infinities, NaN; half where functions are not constant."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count // 2, np.uint64).astype(np.uint32).view(np.float32)
    some = np.exp2(rng.uniform(-30, 7.5, count - count // 2)) * rng.choice([-1, 1], count - count // 2)
    return np.concatenate([bits, some.astype(np.float32)])


def near(op: str, count: int = 4096) -> Array:
    """The floats around the breaks of an op, in order, one row a break and sign."""
    op, _ = named(op)
    centres = np.array([s * p for p in BREAKS[op] for s in ((1, -1) if op in ODD else (1,))], np.float32)
    bits = centres.view(np.int32)[:, None] + np.arange(-count, count, dtype=np.int32)
    bits = np.where((bits & 0x7FFFFFFF) > 0x7F000000, 0, bits).astype(np.int32)  # next to 0: its other side
    return np.sort(bits.view(np.float32), axis=1)


def ulps(op: str, x: Array, y: Array) -> Array:
    """The error in units in the last place of the exact result, 2^-149 for subnormal ones; 0 for equal infinities."""
    with np.errstate(all="ignore"):
        exact = in_float64(op)(x.astype(np.float64))
        unit = np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 24, -149))
        error = np.abs(y.astype(np.float64) - exact) / unit
        rounded = exact.astype(np.float32)
    same = (y == rounded) | (np.isnan(y) & np.isnan(exact))
    return np.where(same & ~np.isfinite(rounded), 0.0, np.where(np.isnan(error), INF, error))


def in_float64(op: str) -> Any:
    """The function on float64 arrays."""
    op, _ = named(op)
    return getattr(real, op, None) or getattr(np, op)


def argument(op: str, x: Array) -> Array:
    """What the sigmoid in a function is of."""
    wide = x.astype(np.float64)
    return real.gelu_argument(wide) if op == "gelu_tanh" else wide


def allowed(op: str, x: Array) -> Array:
    """The bound of ``ULPS``, with what its comment adds."""
    op, _ = named(op)
    bound = np.full(x.shape, ULPS[op])
    with np.errstate(all="ignore"):
        if op == "decay":
            bound = real.decay_ulps(x.astype(np.float64))
        if op == "gelu_tanh":
            bound += 3 * np.abs(np.nan_to_num(real.gelu_argument(x.astype(np.float64))))
        if op in ("gelu", "gelu_tanh", "sigmoid", "silu"):
            tail = np.abs(np.nan_to_num(in_float64(op)(x.astype(np.float64)), posinf=1.0, neginf=1.0))
            unit = np.ldexp(1.0, np.maximum(np.frexp(tail)[1] - 24, -149))
            factor = {"sigmoid": 1.0, "gelu": 0.0}.get(op, np.abs(np.nan_to_num(x, posinf=0.0, neginf=0.0)))
            lost = np.where(real.sigmoid(argument(op, x)) < 1.3e-38, 1.3e-38 * factor, 0.0)
            bound = np.maximum(bound, np.maximum(lost, 2.0**-142) / unit)
    return bound


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("op", VERSIONED)
def test_no_error_is_larger_than_stated(op: str, count: int) -> None:
    x = np.concatenate([arguments(count), *(near(op) if named(op)[0] in BREAKS else [])])
    error = ulps(op, x, of(op, x)) / allowed(op, x)
    worst = int(np.argmax(error))
    assert error[worst] <= 1, f"{op}({x[worst]!r}) is {error[worst]:.2f} of its bound off"
    common = np.abs(x) < (10 if op != "gelu_tanh" else 1)
    assert error[common].max() > 0.5, "the bound is much too large"


SPECIAL = [-INF, -200.0, -0.0, 0.0, 200.0, INF]
HALF, LN2 = 0.5, float(np.float32(np.log(2)))
AT_SPECIAL: dict[str, list[float]] = {
    "exp": [0.0, 0.0, 1.0, 1.0, INF, INF],
    "decay": [0.0, 0.0, 1.0, 1.0, float(np.float32(np.exp(88.0))), float(np.float32(np.exp(88.0)))],
    "exp2": [0.0, 0.0, 1.0, 1.0, INF, INF],
    "log": [NAN, NAN, -INF, -INF, float(np.float32(np.log(200))), INF],
    "tanh": [-1.0, -1.0, -0.0, 0.0, 1.0, 1.0],
    "sigmoid": [0.0, 0.0, HALF, HALF, 1.0, 1.0],
    "softplus": [0.0, 0.0, LN2, LN2, 200.0, INF],
    "erf": [-1.0, -1.0, -0.0, 0.0, 1.0, 1.0],
    "normal_cdf": [0.0, 0.0, HALF, HALF, 1.0, 1.0],
    "gelu": [NAN, -0.0, -0.0, 0.0, 200.0, INF],
    "gelu_tanh": [NAN, -0.0, -0.0, 0.0, 200.0, INF],
    "silu": [NAN, -0.0, -0.0, 0.0, 200.0, INF],
}


@pytest.mark.parametrize("op", VERSIONED)
def test_infinities_zeros_nan_and_signs(op: str) -> None:
    assert same_bits(of(op, np.array(SPECIAL)), np.array(AT_SPECIAL[named(op)[0]], np.float32)).all()
    if op in ODD:
        x = arguments(2**16)
        assert same_bits(of(op, -x), -of(op, x)).all()
    every = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(of(op, every)).all()


def test_whole_powers_of_two_are_exact() -> None:
    n = np.arange(-149, 128)
    np.testing.assert_array_equal(of("exp2", n), np.ldexp(np.float32(1), n))
    np.testing.assert_array_equal(of("log", np.array([1.0])), [0.0])


@pytest.mark.parametrize("op", ["exp", "exp v2", "exp2", "softplus"])
def test_subnormal_results_are_rounded_once(op: str) -> None:
    x = np.linspace(-103.9, -87.4, 1 << 14) / (np.log(2) if op == "exp2" else 1)
    x = x.astype(np.float32)
    assert ulps(op, x, of(op, x)).max() < 1
    assert np.unique(of(op, x)).size > 5000


def reciprocal_of(x: Array) -> Array:
    b = Builder("alone")
    return interpret(b.build(reciprocal(b, b.param("x", F32, M, D))), {"x": x[None]})["reciprocal"][0]


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.full)])
def test_a_reciprocal_is_monotone_within_its_range_and_almost_correctly_rounded(step: int) -> None:
    octave = np.arange(0, 2**23 + 1, step, dtype=np.float32) * np.float32(2**-23) + np.float32(1)
    y = reciprocal_of(octave)
    assert (y[1:] <= y[:-1]).all()
    error = np.abs(y[:-1].astype(np.float64) * octave[:-1] - 1) / octave[:-1]  # half a unit of 1 / x below 1 is 2^-25
    assert 2**-25 < error[1:].max() <= 0.6 * 2**-24
    some = octave[::997]
    for k in (-126, -1, 1, 64, 124):
        np.testing.assert_array_equal(reciprocal_of(np.ldexp(some, k)), np.ldexp(reciprocal_of(some), -k))
    last = np.float32(1.89 * 2.0**125)
    assert abs(float(reciprocal_of(np.array([last]))[0]) * float(last) - 1) < 2**-23


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("op", MONOTONE)
def test_monotone_around_breaks_and_on_random_neighbours(op: str, count: int) -> None:
    for x in near(op):
        y = of(op, x)
        y = y[~np.isnan(y)]
        assert (y[1:] >= y[:-1]).all(), x[0]
    bits = arguments(count, seed=1).view(np.uint32)
    x = bits[(bits & 0x7FFFFFFF) < 0x7F800000].view(np.float32)
    if op == "log":
        x = np.abs(x)
    above = np.nextafter(x, np.float32(INF))
    assert (of(op, above) >= of(op, x)).all()


def test_decay_falls_by_a_unit_at_most_and_never_beyond_1() -> None:
    x = -np.abs(arguments(2**20, seed=1))
    x = x[x > -100]
    y, above = of("decay", x), of("decay", np.nextafter(x, np.float32(INF)))
    fallen = above < y
    assert fallen.mean() < 1e-4
    assert (y - above <= np.spacing(above)).all()
    assert y.min() >= 0
    assert y.max() == 1


@pytest.mark.parametrize("op", VERSIONED)
def test_an_expansion_is_the_function_to_the_bit_after_every_pass(op: str) -> None:
    x, (plain, version) = arguments(2**14), named(op)
    spec = own(lambda b, x: b.emit(plain, "f", (x,)), d=x.size, functions=version)
    assert plain not in {e.op for e in spec.graph().eqns}
    assert same_bits(of(op, x), of(op, x, spec.graph())).all()
    assert same_bits(of(op, x), of(op, x, decompose(alone(op), x.size))).all()


@pytest.mark.parametrize("version", FUNCTIONS)
def test_a_version_is_a_key_of_the_spec_and_in_the_graph_unless_it_is_the_first(version: str) -> None:
    spec = parse_spec(f"softmax.bwd:d=24,functions={version}")
    first = parse_spec("softmax.bwd:d=24")
    assert (spec == first) is (version == FUNCTIONS[0])
    assert dict(spec.graph().attrs).get("functions", FUNCTIONS[0]) == version
    assert parse(str(spec.graph())) == spec.graph()
    assert parse_spec(str(spec)) == spec == spec.with_direction("fwd").with_direction("bwd")


def test_a_version_replaces_functions_of_the_first_by_other_equations() -> None:
    x = arguments(2**10)
    for version, replaced in EXPANSIONS.items():
        assert replaced.keys() <= ULPS.keys()
        for op in replaced:
            assert not same_bits(of(op, x), of(f"{op} {version}", x)).all()


def test_the_reference_is_as_exact_as_float64_allows() -> None:
    mp = pytest.importorskip("mpmath")
    mp.mp.dps = 40
    exact = {
        "exp": mp.exp, "decay": mp.exp, "exp2": lambda x: mp.mpf(2) ** x, "log": mp.log, "tanh": mp.tanh, "erf": mp.erf,
        "sigmoid": lambda x: 1 / (1 + mp.exp(-x)), "softplus": lambda x: mp.log1p(mp.exp(x)),
        "normal_cdf": lambda x: mp.erfc(-x / mp.sqrt(2)) / 2, "gelu": lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2,
        "gelu_tanh": lambda x: x / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3))),
        "silu": lambda x: x / (1 + mp.exp(-x)),
    }  # fmt: skip
    assert exact.keys() == ULPS.keys()
    for op, function in exact.items():
        x = np.concatenate([np.linspace(-12, 12, 97), 2.0 ** -np.arange(1.0, 40.0, 5.0)])
        x = x[x > 0] if op == "log" else x
        want = np.array([float(function(mp.mpf(float(v)))) for v in x])
        np.testing.assert_allclose(in_float64(op)(x), want, rtol=3e-13, err_msg=op)


# ---- gradients ----


def behind_rmsnorm(op: str) -> Expression:
    """A function of RMSNorm, weighted; of its square, where it has to be positive."""

    def expression(b: GraphBuilder, x: Value, gamma: Any = D) -> Value:
        h = x * rms(b, x) * gamma
        return b.emit(op, "f", (h * h + 0.5 if op == "log" else h,))

    return expression


@pytest.mark.parametrize("op", ULPS)
def test_gradients_are_those_of_differences_and_results_within_rounding(op: str) -> None:
    assert max(gradient_excess(own(behind_rmsnorm(op), "bwd", d=13)).values()) < 1
    for way in ("fwd", "bwd"):
        spec = own(behind_rmsnorm(op), way, d=40)
        inputs = random_inputs(spec, 5)
        assert max(result_excess(spec, inputs, interpret(spec.graph(), inputs)).values()) < 1


# ---- kernels ----


def every_function(b: GraphBuilder, x: Value, z: Value) -> dict[str, Value]:
    """Every function, and the ops beside them."""
    results = {f"y{op.replace('_', '')}": b.emit(op, "f", (x,)) for op in (*ULPS, "abs", "rint")}
    kept = z.detach()
    results |= {"ykept": x + kept - kept, "ymin": x.minimum(z), "yclamp": x.clamp(-0.5, 1.5)}
    return results | {"ywhere": b.where_gt("chosen", x, z, z, x)}


def odd(inputs: dict[str, Array]) -> dict[str, Array]:
    """The first rows of x and z hold special numbers."""
    special = np.array([*SPECIAL, NAN, 1e-40, -1e-40, 3e38, -3e38, 88.8, -88.5, -103.5, 18.0, -18.0, 0.6, 4.0, -13.0])
    for name, values in (("x", special), ("z", special[::-1])):
        with np.errstate(over="ignore"):
            inputs[name][0, : special.size] = values.astype(inputs[name].dtype)
    return inputs


KERNELS = product(("fwd", "bwd"), (37, 264), ("f32", "bf16", "f16"), FUNCTIONS)


@sampling.grid(("way", "d", "dtype", "version"), KERNELS, strength=1)
def test_kernels_have_the_interpreter_s_bits(way: str, d: int, dtype: str, version: str) -> None:
    """The best schedule of each form."""
    pytest.importorskip("cupy")
    spec = own(every_function, way, d=d, dtype=dtype, functions=version)
    best = {s.form: s for s in reversed(ranked(problem(spec.graph(), d)))}
    assert len(best) >= (3 if dtype == "f32" else 1)
    inputs = random_inputs(spec, 2)
    inputs = odd(inputs) if way == "fwd" else inputs
    expected = interpret(spec.graph(), inputs)
    for schedule in best.values():
        outcome = run_plan(lower(spec, schedule), inputs, rows=2)
        assert not outcome.findings, outcome.findings[0]
        assert not mismatches(outcome.results, expected)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86"])  # maxima and clamps are written otherwise for each
def test_a_clamp_has_the_same_bits_on_every_arch(arch: str) -> None:
    pytest.importorskip("cupy")
    spec = own(lambda b, x: b.emit("exp", "f", (x,)), d=64, functions="v2")
    numbers = [*SPECIAL, NAN, -NAN, 1e-40, -1e-40, 88.8, 103.9, 104.0, 104.1, -103.9, -104.1, 3e38, -3e38]
    inputs = {"x": np.resize(np.array(numbers, np.float32), (2, 64))}
    outcome = run_plan(lower(spec, registers(32, 1, 1)), inputs, arch=arch)
    assert not outcome.findings
    assert not mismatches(outcome.results, interpret(spec.graph(), inputs))
