"""If these fail, a graph from a file, a module or a ``Graph`` is not that graph."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lngen
from commands import call
from lngen.compiler.graphs import Definition
from lngen.compiler.ir import parse
from lngen.compiler.spec import make_spec, parse_spec

MODULE = """
from lngen import D, Definition, M


def add_rmsnorm(b):
    h = b.input("x", M, D) + b.input("residual", M, D, dtype="f32")
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    b.output("y", h * rstd * b.input("gamma", D))
    b.output("h", h, dtype="f32")
    b.statistic(rstd, "rstd")


named = Definition("another_name", add_rmsnorm)
"""


def built(text: str) -> str:
    """The graph of a spec as it is described."""
    return str(parse_spec(text).trace()["build"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file and a module."""
    (tmp_path / "my.graph").write_text(built("layernorm.fwd:d=37,dtype=bf16"))
    (tmp_path / "layernorm@2.graph").write_text(built("rmsnorm.fwd:d=37"))
    (tmp_path / "its_norms.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", [
    "layernorm.fwd:d=37,dtype=bf16", "layernorm.fwd:d=37,dtype=f16,weight=f32,out=f32",
    "layernorm.fwd:d=96,gamma=no,beta=no", "rmsnorm.fwd:d=96,dtype=f64", "rmsnorm.fwd:d=4096,beta=yes",
])  # fmt: skip
def test_the_text_of_a_graph_is_that_graph(text: str) -> None:
    """For both directions and any D, with the same statistics."""
    own = parse_spec(text)
    definition = Definition.from_graph(parse(built(text)))
    for d in (own.d, 12296):
        for direction in ("fwd", "bwd"):
            keys = ",".join(key for key in text.partition(":")[2].split(",") if not key.startswith("d="))
            want = parse_spec(f"{own.definition.name}.{direction}:d={d}{',' * bool(keys)}{keys}")
            found = make_spec(definition, direction, {"d": d})
            assert str(found.graph()) == str(want.graph())
            assert (found.dtype, found.weight, found.out) == (want.dtype, want.weight, want.out)
            assert found.definition.saved(found.options) == want.definition.saved(want.options)
            assert not found.builtin


def test_a_text_with_equal_and_unused_equations_stays_as_it_is() -> None:
    text = built("rmsnorm.fwd:d=37").replace("  return", "  %u : f32[M, D] = mul %x32, %x32\n  return")
    graph = parse(text)
    assert make_spec(Definition.from_graph(graph), "fwd", {"d": 8}).forward() == graph


def test_roles_of_results() -> None:
    """Statistics lack D and are used: neither a sum that nothing uses, nor the sum that y is computed from."""
    text = """graph @roles_fwd(%x: f32[M, D], %z: f32[M, D]) -> (f32[M, D], f32[M], f32[M], f32[M, D]) {
        %h : f32[M, D] = add %x, %z
        %total : f32[M] = reduce_sum %h {axis=D}
        %mean : f32[M] = reduce_mean %x {axis=D}
        %y : f32[M, D] = mul %h, %mean
        return %y, %total, %mean, %h
    }"""
    spec = make_spec(Definition.from_graph(parse(text)), "bwd", {"d": 8})
    assert spec.definition.outputs(spec.options) == ("y", "total", "h")
    assert spec.definition.saved(spec.options) == ("mean",)
    assert [p.name for p in spec.graph().params][:3] == ["dy", "dtotal", "dh"]


def test_compile_takes_a_file_a_module_and_a_graph(folder: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 37)).astype(np.float32)
    gamma, beta = rng.normal(size=(2, 37)).astype(np.float32)
    want, _ = lngen.compile("layernorm", d=37).forward(x, gamma, beta)
    text = built("layernorm.fwd:d=37")
    (folder / "in_f32.graph").write_text(text)
    for graph in (parse(text), "in_f32.graph", str(folder / "in_f32.graph")):
        y, saved = lngen.compile(graph, d=37).forward(x, gamma, beta)
        assert y.tobytes() == want.tobytes()
        assert len(lngen.compile(graph, d=37).backward(y, saved)) == 3
    for name in ("its_norms:add_rmsnorm", "its_norms:named"):
        (y, h), _ = lngen.compile(name, d=37).forward(x, 2 * x, gamma)
        np.testing.assert_allclose(h, 3 * x, rtol=1e-6)
        np.testing.assert_allclose(y, 3 * x * gamma / np.sqrt((9 * x * x).mean(1, keepdims=True) + 1e-5), rtol=1e-5)


@pytest.mark.parametrize(("spec", "name"), [
    ("my.graph.fwd:d=96", "layernorm@"),
    ("./my.graph.bwd:d=96,wrt=x", "layernorm@"),
    ("its_norms:add_rmsnorm.fwd:d=96,dtype=bf16", "add_rmsnorm@"),
    ("its_norms:named.bwd:d=96,save=none", "another_name@"),
])  # fmt: skip
def test_commands_take_them(folder: Path, spec: str, name: str) -> None:
    pytest.importorskip("cupy")
    text = call("show", spec, "--stage", "cuda").output
    assert f"//   spec       : {name}" in text
    checked = call("check", spec, "--on", "ptx", "--rows", "0,5", "--schedules", "1")
    assert checked.exit_code == 0, checked.output
    made = call("build", spec, "--arch", "sm_90", "--emit", "cubin", "--out", "made")
    assert made.exit_code == 0, made.output
    assert name.replace("@", "_") in made.output
    assert [p.suffix for p in sorted((folder / "made").iterdir())].count(".cubin") == 1


def test_another_process_has_them(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As the workers of lngen tune, which start in another folder. A file may be called like a graph of lngen's."""
    texts = (
        "my.graph.bwd:d=8",
        "its_norms:add_rmsnorm.fwd:d=8",
        "its_norms:named.bwd:d=8",
        "layernorm@2.graph.fwd:d=8",
    )
    specs = [parse_spec(text) for text in texts]
    assert specs[-1].definition.name == "rmsnorm"
    code = "import pickle, sys; print(*(spec.graph() for spec in pickle.load(sys.stdin.buffer)), sep='')"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(specs), capture_output=True, cwd=elsewhere)
    assert done.stdout.decode() == "".join(str(spec.graph()) for spec in specs) + "\n", done.stderr.decode()
