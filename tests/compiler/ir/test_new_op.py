"""If these fail, a new op takes more than its row in the table."""

from collections.abc import Iterator

import numpy as np
import pytest

from lngen.compiler.emit import emit
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import OPS, Value, real
from lngen.compiler.ir.ops import Ops, each, op
from lngen.compiler.ir.type_rules import arithmetic
from lngen.compiler.spec import Spec
from lngen.proof.check.inputs import random_inputs
from own_graphs import own
from plans import best, run_checked


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    """The row of softsign, as a program would add it."""

    @op(
        arithmetic,
        real.once(lambda x: real.Real(x.value / (1 + np.abs(x.value)), x.error)),  # no steeper than 1
        numpy=each(lambda x, out: np.divide(x, 1 + np.abs(x), out=out)),
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


def described(direction: str, **keys: object) -> Spec:
    """y = softsign(x) / rms(softsign(x))."""
    return own(lambda b, x: (s := b.record("softsign", x)) * (b.mean(s * s) + b.eps()).rsqrt(), direction, **keys)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_it_goes_from_its_row_to_kernels(direction: str) -> None:
    """Forward, derived backward, emitted CUDA and executed PTX have it, with the interpreter's bits."""
    pytest.importorskip("cupy")
    spec = described(direction, d=96)
    plan = best(spec)
    assert "/ (1.0f + fabsf(" in emit(plan)
    run_checked(plan, 5)


def test_its_gradient_is_that_of_its_differences() -> None:
    forward, backward = (described(way, d=16, dtype="f64") for way in ("fwd", "bwd"))
    inputs, step = random_inputs(backward, 2), 1e-6
    moved = np.zeros((2, 16))
    moved[:, 3] = step
    values = [interpret(forward.graph(), {"x": inputs["x"] + sign * moved})["y"] for sign in (1, -1)]
    slope = ((values[0] - values[1]) * inputs["dy"]).sum(1) / (2 * step)
    np.testing.assert_allclose(interpret(backward.graph(), inputs)["dx"][:, 3], slope, rtol=1e-6)
