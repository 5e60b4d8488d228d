"""If these fail, the description of a call says other shapes or numbers than the compiler means."""

import pytest

from bit_graphs import block_scaled
from graph_names import whole_heads
from lngen.compiler.contract import call
from lngen.compiler.graphs import GRAPHS
from lngen.compiler.ir import D, Lengths, M, bits_of, sets_of, values_of
from lngen.compiler.spec import make_spec, parse_spec
from lngen.errors import LngenError
from lngen.launch.runtime.norm import definition_of
from lngen.launch.signature import Signature, Tensor, length

LENGTHS = [
    ("M", 7), ("D", 256), ("5", 5), ("D / 128", 2), ("ceil(M / 4)", 2), ("roundup(M, 4)", 8), ("roundup(D, 1)", 256),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), LENGTHS)
def test_a_length(text: str, wanted: int) -> None:
    assert length(text, 7, 256) == wanted


@pytest.mark.parametrize("text", ["", "N", "D / 0", "D/2", "ceil(M, 4)", "roundup(M / 4)", "-1", "D / 2 / 2", "M\n"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match="is no length"):
        length(text, 7, 256)


def test_leading_dimensions_are_rows() -> None:
    tensor = Tensor("scale", "f32", 4, ("M", "B"), ("M", "D / 128"))
    assert tensor.shape((2, 3), 256) == (2, 3, 2)
    assert tensor.shape(6, 256) == (6, 2)
    assert Tensor("x", "f32", 4, ("M", "D")).shape((), 256) == (256,)


def specs() -> list[str]:
    return [f"{graph}.{way}:d={whole_heads(graph, 64)},eps=run" for graph in GRAPHS for way in ("fwd", "bwd")]


@pytest.mark.parametrize("text", specs())
def test_a_call_is_that_of_its_graph(text: str) -> None:
    """Names, dtypes, shapes, the numbers of an eps, and what a backward returns."""
    try:
        spec = parse_spec(text)
    except LngenError:
        spec = parse_spec(text.removesuffix(",eps=run"))
    graph = spec.graph()
    signature = Signature.of(call(spec, graph))
    for tensors, values in ((signature.inputs, graph.tensors), (signature.outputs, graph.results)):
        assert [(t.name, t.dtype, t.size) for t in tensors] == [
            (v.name, str(v.type.dtype), v.type.dtype.size) for v in values
        ]
        sets = sets_of(graph)
        sizes = Lengths({M: 6, D: spec.d, **({sets: 2} if sets else {})})
        assert [t.shape(6, spec.d, 2) for t in tensors] == [tuple(sizes[a] for a in v.type.axes) for v in values]
    assert M in graph.tensors[signature.leader].type.axes
    stored = {t.name for t in signature.outputs}
    assert {signature.same.get(name, name) for name in signature.returned} <= stored
    for eps in (1e-5, 0.1, -1.0, 0.0, 1e30, 5e-324) if signature.numbers else ():
        found, wanted = signature.values(eps).bits, values_of(graph, eps)
        assert {n: f % 2 ** (8 * wanted[n].itemsize) for n, f in found.items()} == {
            n: bits_of(v) for n, v in wanted.items()
        }


def test_blocks_of_features_have_a_length() -> None:
    spec = make_spec(definition_of(block_scaled), "fwd", {"d": 256, "dtype": "bf16"})
    outputs = {t.name: t for t in Signature.of(call(spec, spec.graph())).outputs}
    blocks = [t for t in outputs.values() if len(t.axes) == 2 and not t.wide]
    assert [t.shape(3, 256) for t in blocks] == [(3, 256 // 32)]
