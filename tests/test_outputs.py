"""Graphs of several outputs: their names, their cotangents, and gradients that vanish."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lngen.check.inputs import mismatches, random_inputs
from lngen.errors import VerifyError
from lngen.graphs import Definition, GraphBuilder
from lngen.interpret import interpret
from lngen.ir import D, M
from lngen.lower import lower
from lngen.ptx import run_plan
from lngen.runtime.choose import default_schedule
from lngen.schedule import Schedule, problem, space
from lngen.spec import Spec, make_spec

Describe = Callable[[GraphBuilder], None]


def spec_of(describe: Describe, direction: str = "fwd", **options: object) -> Spec:
    """The spec of a graph of one's own, of 37 features in f32 unless ``options`` say otherwise."""
    return make_spec(Definition(describe.__name__, describe), direction, {"d": 37, "dtype": "f32", **options})


def runs(spec: Spec, rows: int = 3, schedule: Schedule | None = None) -> None:
    """What the PTX of a spec computes, under its default schedule, has the interpreter's bits and breaks no rule."""
    inputs = random_inputs(spec, rows)
    outcome = run_plan(lower(spec, schedule or default_schedule(spec)), inputs, rows=rows)
    assert not outcome.findings, outcome.findings[0]
    assert not mismatches(outcome.results, interpret(spec.graph(), inputs))


# ---- names ----


def stream(b: GraphBuilder) -> None:
    """A result called as kernels used to call the chunk of another one."""
    h = b.add("total", b.input("x", M, D), b.input("residual", M, D))
    b.output("h", h)
    b.output("h_out", b.mul("square", h, h))


@pytest.mark.parametrize(
    ("d", "form", "bulk_store"),
    [(64, "registers", False), (64, "stream", False), (64, "bulk", False), (64, "bulk", True), (37, "ragged", True)],
)
def test_an_output_has_the_name_it_asks_for(d: int, form: str, bulk_store: bool) -> None:
    spec = spec_of(stream, d=d)
    assert [r.name for r in spec.graph().results] == ["h", "h_out"]
    listed = space(problem(spec.graph(), d))
    runs(spec, schedule=next(s for s in listed if (s.form, s.bulk_store) == (form, bulk_store)))


def once(b: GraphBuilder, name: str) -> None:
    """An output called ``name`` after an input x and another output y."""
    x = b.input("x", M, D)
    b.output("y", b.neg("minus", x))
    b.output(name, b.mul("square", x, x))


TAKEN = "graph @own_fwd: an output is expected to be called '{0}', but another value is; rename one of them."
NEEDED = "graph @own_fwd: an output is expected to be called '{0}', a name that C and the kernels need; choose another."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("y", TAKEN),  # another output
        ("minus", TAKEN),  # a value on the way
        ("x", TAKEN),  # an input
        ("rows", NEEDED),
        ("y_ptr", NEEDED),
    ],
)
def test_an_output_that_cannot_have_its_name_is_an_error(name: str, message: str) -> None:
    with pytest.raises(VerifyError) as error:
        make_spec(Definition("own", lambda b: once(b, name)), "fwd", {"d": 8})
    assert str(error.value) == message.format(name)


def twice(b: GraphBuilder) -> None:
    """A value and an input, each returned twice under names of their own."""
    x = b.input("x", M, D)
    square = b.mul("square", x, x)
    for name, v in {"y": square, "z": square, "p": x, "q": b.params[0]}.items():
        b.output(name, v)


def test_a_value_may_be_returned_under_several_names() -> None:
    spec = spec_of(twice, dtype="bf16")
    assert [r.name for r in spec.graph().results] == ["y", "z", "p", "q"]
    runs(spec)
