"""If these fail, the text of a graph loses what a launch passes by value."""

import re

import pytest

from lngen.ir import F32, RULES, Builder, ByValue, D, M, Type, Value, bits_of, parse, values_of
from lngen.passes import extract

TEXT = """\
graph @f(%x: f32[M, D], %eps: f32[] by value of eps, %least: f32[] by value of eps_squared) -> (f32[M, D]) {
  %z : f32[M, D] = maximum %x, %least
  %y : f32[M, D] = add %z, %eps
  return %y
}
"""


def test_a_text_with_numbers_by_value_parses_to_what_prints_it() -> None:
    graph = parse(TEXT)
    assert str(graph) == TEXT
    assert graph.by_value == (ByValue("eps", Type(F32), "eps"), ByValue("least", Type(F32), "eps_squared"))
    assert [p.name for p in graph.tensors] == ["x"]


def test_a_number_by_value_is_not_the_input_of_its_name() -> None:
    plain = TEXT.replace(" by value of eps,", ",")
    assert parse(plain) != parse(TEXT)
    assert parse(plain).by_value == parse(TEXT).by_value[1:]


def test_what_does_not_need_a_number_does_not_take_it() -> None:
    graph = parse(TEXT)
    part = extract(graph, "part", graph.params, (graph.eqns[0].out,))
    assert [v.name for v in part.by_value] == ["least"]


def test_a_builder_gives_each_rule_one_parameter_with_a_name_that_is_free() -> None:
    b = Builder("f")
    b.param("eps", F32, M, D)
    first = b.by_value("eps", F32, "eps")
    assert first == ByValue("eps_1", Type(F32), "eps")
    assert b.by_value("other", F32, "eps") is first
    assert b.by_value("least", F32, "eps_squared") != first
    assert [p.name for p in b.params] == ["eps", "eps_1", "least"]
    assert not isinstance(b.params[0], ByValue)
    assert Value("eps_1", Type(F32)) != first


@pytest.mark.parametrize("eps", [1e-5, 0.0, -0.25, 0.1, 1e-30, 3e38])
def test_the_text_of_a_rule_says_what_it_computes(eps: float) -> None:
    """The expression in C is one in Python, but for the number in hexadecimal."""
    for rule in RULES.values():
        text = re.sub(r"0x1p(-?\d+)", r"2.0**\1", rule.text)
        assert rule.of(eps) == eval(text, {"eps": eps, "max": max})


def test_the_bits_of_a_number_are_those_of_its_dtype() -> None:
    single = values_of(parse(TEXT), 1.0)["eps"]
    double = values_of(parse(TEXT.replace("f32", "f64")), 1.0)["eps"]
    assert (bits_of(single), bits_of(double)) == (0x3F800000, 0x3FF0000000000000)
    assert bits_of(values_of(parse(TEXT), -0.5)["eps"]) == 0xBF000000
