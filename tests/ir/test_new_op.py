"""If these fail, a new op takes more than its row in the table."""

from collections.abc import Iterator

import numpy as np
import pytest

from lngen.check.inputs import mismatches, random_inputs
from lngen.emit import emit
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import OPS, D, M, Value, real
from lngen.ir.ops import Ops, each, op
from lngen.ir.type_rules import arithmetic
from lngen.lower import lower
from lngen.problem import problem
from lngen.ptx import run_plan
from lngen.schedule import ranked
from lngen.spec import make_spec


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    """The row of softsign, as a program would add it."""

    @op(
        arithmetic,
        real.once(lambda x: real.Real(x.value / (1 + np.abs(x.value)), x.error)),  # no steeper than 1
        numpy=each(lambda x: x / (1 + np.abs(x))),
        cuda="{0} / (1.0f + fabs{f}({0}))",
        vjp=lambda b, e, ct: (b.mul("ct", ct, slope(b, e.out)),),
    )
    def softsign(b: Ops, name: str, x: Value) -> Value:
        """x / (1 + |x|)."""
        return b.emit("softsign", name, (x,))

    def slope(b: Ops, y: Value) -> Value:
        rest = b.sub("rest", b.const("one", 1.0, y.type.dtype), b.abs("size", y))
        return b.mul("slope", rest, rest)

    yield
    del OPS["softsign"]


def described(b: GraphBuilder) -> None:
    """y = softsign(x) / rms(softsign(x))."""
    s = b.record("softsign", b.input("x", M, D))
    b.output("y", s * (b.mean(s * s) + b.eps()).rsqrt())


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_it_goes_from_its_row_to_kernels(direction: str) -> None:
    """Forward, derived backward, emitted CUDA and executed PTX have it, with the interpreter's bits."""
    pytest.importorskip("cupy")
    spec = make_spec(Definition("own", described), direction, {"d": 96})
    plan = lower(spec, ranked(problem(spec.graph(), spec.d))[0])
    assert "/ (1.0f + fabsf(" in emit(plan)
    inputs = random_inputs(spec, 5)
    outcome = run_plan(plan, inputs, rows=5)
    assert not outcome.findings
    assert not mismatches(outcome.results, interpret(spec.graph(), inputs))


def test_its_gradient_is_that_of_its_differences() -> None:
    forward, backward = (
        make_spec(Definition("own", described), way, {"d": 16, "dtype": "f64"}) for way in ("fwd", "bwd")
    )
    inputs, step = random_inputs(backward, 2), 1e-6
    moved = np.zeros((2, 16))
    moved[:, 3] = step
    values = [interpret(forward.graph(), {"x": inputs["x"] + sign * moved})["y"] for sign in (1, -1)]
    slope = ((values[0] - values[1]) * inputs["dy"]).sum(1) / (2 * step)
    np.testing.assert_allclose(interpret(backward.graph(), inputs)["dx"][:, 3], slope, rtol=1e-6)
