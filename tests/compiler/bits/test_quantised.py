"""If these fail, a cast to e4m3, e5m2 or int8, or from them, is not the one that ``lngen help graph`` defines."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from float8 import SHAPES, boundaries, nearest, table, tried
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, DType, M
from lngen.compiler.ir.numerics import NUMPY_DTYPE, round_to
from lngen.compiler.lower import lower
from lngen.compiler.problem import problem
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import Spec, make_spec
from lngen.dtypes import QUANTISED
from lngen.proof.check.inputs import mismatches, random_inputs
from lngen.proof.ptx import run_plan

ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def bits(a: Any) -> Any:
    return np.asarray(a).view(np.uint8)


def spec_of(describe: Any, d: int, dtype: str = "f32", way: str = "fwd") -> Spec:
    return make_spec(Definition("own", describe), way, {"d": d, "dtype": dtype})


def first_plan(spec: Spec) -> Any:
    return lower(spec, next(iter(space(problem(spec.graph(), spec.d)))))


# ---- the definition ----

# What cvt.rn.satfinite and cvt.rni.sat of PTX give: the bits of e4m3, those of e5m2, and the number of int8.
KNOWN = [
    (-0.0, 0x80, 0x80, 0), (2.0**-10, 0x00, 0x14, 0), (2.0**-10 + 2.0**-33, 0x01, 0x14, 0),
    (1.5 * 2.0**-9, 0x02, 0x1A, 0), (2.5 * 2.0**-9, 0x02, 0x1D, 0), (7.5 * 2.0**-9, 0x08, 0x24, 0),
    (1.0625, 0x38, 0x3C, 1), (1.1875, 0x3A, 0x3D, 1), (432.0, 0x7E, 0x5F, 127), (464.0, 0x7E, 0x5F, 127),
    (480.0, 0x7E, 0x60, 127), (1e30, 0x7E, 0x7B, 127), (61440.0, 0x7E, 0x7B, 127), (np.inf, 0x7E, 0x7B, 127),
    (-np.inf, 0xFE, 0xFB, -128), (np.nan, 0x7F, 0x7F, 0), (-np.nan, 0x7F, 0x7F, 0), (0.5, 0x30, 0x38, 0),
    (1.5, 0x3C, 0x3E, 2), (2.5, 0x42, 0x41, 2), (-0.5, 0xB0, 0xB8, 0), (-2.5, 0xC2, 0xC1, -2), (126.5, 0x70, 0x58, 126),
    (-129.0, 0xF0, 0xD8, -128),
]  # fmt: skip


@pytest.mark.parametrize(("x", "e4m3", "e5m2", "int8"), KNOWN)
def test_known_casts(x: float, e4m3: int, e5m2: int, int8: int) -> None:
    given = np.array([x], np.float32)
    found = [int(bits(round_to(given, t))[0]) for t in (DType.E4M3, DType.E5M2, DType.INT8)]
    assert found == [e4m3, e5m2, int8 & 0xFF]
    assert found == [int(nearest(given, t)[0]) for t in (DType.E4M3, DType.E5M2, DType.INT8)]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_cast_is_to_the_next_number_of_the_table(dtype: DType) -> None:
    given = tried(1_000_000)
    assert np.array_equal(bits(round_to(given, dtype)), nearest(given, dtype))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_f64_is_rounded_once(dtype: DType) -> None:
    """Also next to an edge, where a step by f32 would meet a tie."""
    edges = boundaries(dtype).astype(np.float64)
    given = np.concatenate([edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf), [1e300, -1e300, np.nan]])
    with np.errstate(over="ignore"):
        found = round_to(given, dtype)
    assert np.array_equal(bits(found), nearest(given, dtype))


@pytest.mark.parametrize("dtype", [*SHAPES])
def test_the_table_is_that_of_ml_dtypes(dtype: DType) -> None:
    """Every number goes back to f32 exactly, and where nothing overflows their cast is the same."""
    own = getattr(ml_dtypes, dtype.library)
    numbers = table(dtype)
    assert np.array_equal(np.arange(len(numbers), dtype=np.uint8).view(own).astype(np.float64), numbers)
    given = np.array([x for x in boundaries(dtype) if abs(x) <= dtype.largest])
    assert np.array_equal(bits(round_to(given, dtype)), bits(given.astype(own)))


# ---- kernels ----


def cast_to_all(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    for t in QUANTISED:
        b.output(str(t), x, dtype=t)


def numbers_of(b: GraphBuilder) -> None:
    for t in QUANTISED:
        b.output(f"from_{t}", b.input(str(t), M, D, dtype=t))


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_cast_to_the_same_bits(arch: str) -> None:
    d, count = 512, 100_000
    given = tried(count)
    x = np.concatenate([given, np.zeros(-len(given) % d, np.float32)]).reshape(-1, d)
    found = run_plan(first_plan(spec_of(cast_to_all, d)), {"x": x}, arch=arch)
    assert found.findings == ()
    for t in QUANTISED:
        assert np.array_equal(bits(found.results[str(t)]).reshape(-1), nearest(x.reshape(-1), t)), t


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_cast_f64_to_the_same_bits(arch: str) -> None:
    edges = np.concatenate([boundaries(t) for t in QUANTISED]).astype(np.float64)
    around = np.concatenate([np.nextafter(edges, 1e300), np.nextafter(edges, -1e300), [1e300, -1e300, np.nan]])
    x = np.resize(around, -(-around.size // 16) * 16)
    found = run_plan(first_plan(spec_of(cast_to_all, 16, "f64")), {"x": x.reshape(-1, 16)}, arch=arch)
    for t in QUANTISED:
        assert np.array_equal(bits(found.results[str(t)]).reshape(-1), nearest(x, t)), t


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_read_every_byte_exactly(arch: str, dtype: str) -> None:
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    spec = spec_of(numbers_of, 16, dtype)
    inputs = {str(t): every.view(NUMPY_DTYPE[t]) for t in QUANTISED}
    found = run_plan(first_plan(spec), inputs, arch=arch).results
    assert mismatches(found, interpret(spec.graph(), inputs)) == []
    for t, size in ((t, table(t)) for t in SHAPES):
        assert np.array_equal(found[f"from_{t}"].reshape(-1)[: len(size)], size)
        assert np.array_equal(found[f"from_{t}"].reshape(-1)[128 : 128 + len(size)], -size)
    assert np.array_equal(found["from_int8"].reshape(-1), np.arange(256).astype(np.int8))


def scaled(dtype: DType) -> Any:
    """A norm whose quantised result has a scale for each row, and what that result stands for."""

    def describe(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        y = x * (b.mean(x * x) + b.eps()).rsqrt() * b.input("gamma", D)
        scale = b.stop_gradient(b.max(abs(y)).maximum(1e-12) / dtype.largest)
        q = b.output("q", y / scale, dtype=dtype)
        b.output("scale", scale, dtype=b.compute)
        b.output("held", b.cast("q_again", q, to=b.compute) * scale)

    return describe


@pytest.mark.parametrize(("d", "x", "dtype"), [
    (64, "bf16", "e4m3"), (64, "bf16", "int8"), (261, "f32", "e5m2"), (40, "f16", "e5m2"), (37, "f64", "int8"),
    (37, "f64", "e4m3"), (8208, "bf16", "e4m3"),
], ids=str)  # fmt: skip
def test_every_form_stores_the_interpreters_bits(d: int, x: str, dtype: str) -> None:
    spec = spec_of(scaled(DType(dtype)), d, x)
    inputs = random_inputs(spec, 3)
    wanted = interpret(spec.graph(), inputs)
    forms = {(s.form, s.tma_store, s.cluster > 1): s for s in space(problem(spec.graph(), d))}
    for schedule in forms.values():
        outcome = run_plan(lower(spec, schedule), inputs)
        assert mismatches(outcome.results, wanted) == [], schedule
        assert outcome.findings == ()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_quantised_input_scales_in_every_place(dtype: DType) -> None:
    """Over each set of axes, as inputs of whole numbers are; without a gradient, as those."""

    def describe(b: GraphBuilder) -> None:
        x, q = b.input("x", M, D), b.input("q", M, D, dtype=dtype)
        row, column = b.input("row", M, dtype=dtype), b.input("column", D, dtype=dtype)
        h = x + q * row * column * b.input("number", dtype=dtype)
        b.output("y", h - b.mean(h))

    for d, way in ((64, "fwd"), (37, "bwd")):
        spec = spec_of(describe, d, "bf16", way)
        inputs = random_inputs(spec, 5)
        outcome = run_plan(first_plan(spec), inputs)
        assert mismatches(outcome.results, interpret(spec.graph(), inputs)) == []
        assert outcome.findings == ()
        assert way == "fwd" or {*outcome.results} == {"dx"}
