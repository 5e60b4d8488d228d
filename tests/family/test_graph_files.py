"""If these fail, a graph from a file, a module or a ``Graph`` is not that graph, or what is none gets no sentence."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lngen
from commands import call
from lngen.errors import SpecError
from lngen.graphs import Definition
from lngen.graphs.definition import LARGEST
from lngen.ir import parse
from lngen.spec import make_spec, parse_spec

BUILTIN = [
    "layernorm.fwd:d=37,dtype=bf16", "layernorm.fwd:d=37,dtype=f16,weight=f32,out=f32",
    "layernorm.fwd:d=96,gamma=no,beta=no", "rmsnorm.fwd:d=96,dtype=f64", "rmsnorm.fwd:d=4096,beta=yes",
]  # fmt: skip
MODULE = """
from lngen import D, Definition, M


def add_rmsnorm(b):
    h = b.input("x", M, D) + b.input("residual", M, D, dtype="f32")
    rstd = (b.mean(h * h) + b.eps()).rsqrt()
    b.output("y", h * rstd * b.input("gamma", D))
    b.output("h", h, dtype="f32")
    b.statistic(rstd, "rstd")


named = Definition("another_name", add_rmsnorm)


def leave(b):
    raise SystemExit(0)
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


@pytest.mark.parametrize("text", BUILTIN)
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


def test_a_file_may_have_any_name(folder: Path) -> None:
    """Also one that looks like a graph of lngen's with a digest."""
    spec = parse_spec("layernorm@2.graph.bwd:d=8,wrt=x")
    assert (spec.definition.name, spec.direction, spec.wrt) == ("rmsnorm", "bwd", ("x",))


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


@pytest.mark.parametrize("spec", ["my.graph.bwd:d=8", "its_norms:add_rmsnorm.fwd:d=8", "its_norms:named.bwd:d=8"])
def test_another_process_has_them(folder: Path, tmp_path_factory: pytest.TempPathFactory, spec: str) -> None:
    """As the workers of lngen tune, which start in another folder."""
    own = parse_spec(spec)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).graph())"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(own), capture_output=True, cwd=elsewhere)
    assert done.stdout.decode() == f"{own.graph()}\n", done.stderr.decode()


NO_FILE = "is expected to be a file with a graph, but"


@pytest.mark.parametrize(("spec", "message"), [
    ("none.graph.fwd:d=4", f"'none.graph' {NO_FILE} No such file or directory."),
    ("folder.graph.fwd:d=4", f"'folder.graph' {NO_FILE} Is a directory."),
    ("large.graph.fwd:d=4", f"'large.graph' {NO_FILE} it is larger than {LARGEST} bytes."),
    ("bytes.graph.fwd:d=4", f"'bytes.graph' {NO_FILE} it is not UTF-8 text."),
    ("empty.graph.fwd:d=4", "'empty.graph' is expected to hold a forward graph: Expected 'graph @name(...) -> "),
    ("wrong.graph.fwd:d=4", "'wrong.graph' is expected to hold a forward graph: Line 2: '%z' is used before"),
    (
        "ordered.graph.fwd:d=4",
        "'ordered.graph' is expected to hold a forward graph: graph @rmsnorm_fwd: the sum '%ms_sum' is expected "
        "without an order, got chunk, segment; lngen show SPEC --stage graph --after build prints a graph before",
    ),
    (
        "my.graph.fwd:d=4,dtype=f32",
        "graph 'layernorm' is given with its dtypes and constants (dtype=bf16, weight=bf16, out=bf16); leave the "
        "keys dtype, weight, out and eps away, or change the graph.",
    ),
    ("my.graph.fwd:d=4,eps=0.1", "leave the keys dtype, weight, out and eps away, or change the graph."),
    ("my.graph.up:d=4", "there is no direction 'up', expected one of fwd, bwd"),
    ("my.graph:d=4", "there is no direction '', expected one of fwd, bwd"),
    ("my.graph.fwd", "'d', the number of features per row, is missing"),
    ("absent:f.fwd:d=4", "'absent:f' cannot be imported: ModuleNotFoundError: No module named 'absent'"),
    ("its_norms:f.fwd:d=4", "'its_norms:f' cannot be imported: 'its_norms' has no 'f'."),
    ("its_norms:D.fwd:d=4",
     "'its_norms:D' is expected to be a function that describes a graph, or a Definition, got Axis."),
])  # fmt: skip
def test_what_is_no_graph_is_a_sentence(folder: Path, spec: str, message: str) -> None:
    (folder / "folder.graph").mkdir()
    (folder / "large.graph").write_bytes(b" " * (LARGEST + 1))
    (folder / "bytes.graph").write_bytes(b"\xff\xfe")
    (folder / "empty.graph").write_text("\n")
    (folder / "wrong.graph").write_text(
        "graph @a(%x: f32[M, D]) -> (f32[M, D]) {\n%y : f32[M, D] = neg %z\nreturn %y\n}"
    )
    (folder / "ordered.graph").write_text(str(parse_spec("rmsnorm.fwd:d=64").graph()))
    with pytest.raises(SpecError, match=re.escape(message)):
        parse_spec(spec)


@pytest.mark.parametrize(("spec", "message"), [
    (
        "its_norms:leave.fwd:d=8",
        "graph @leave_fwd: its function raised SystemExit: 0 ('{folder}/its_norms.py', line {last}: "
        "raise SystemExit(0)).",
    ),
    ("json:dumps.fwd:d=8",
     "graph @dumps_fwd: its function raised TypeError: Object of type GraphBuilder is not JSON serializable."),
    ("broken:f.fwd:d=8",
     "'broken:f' cannot be imported: ZeroDivisionError: division by zero ('{folder}/broken.py', line 2: 1 / 0)"),
    ("refused:f.fwd:d=8", "graph @f_fwd: 'x' expects a dtype of f16, bf16, f32, f64, got 'f99'.\n"
     "    '{folder}/refused.py', line 3: b.input('x', dtype='f99')"),
])  # fmt: skip
def test_code_that_raises_is_a_wrong_request(folder: Path, spec: str, message: str) -> None:
    (folder / "broken.py").write_text("\n1 / 0\n")
    (folder / "refused.py").write_text("\ndef f(b):\n    b.input('x', dtype='f99')\n")
    done = call("check", spec)
    last = len(MODULE.splitlines())
    assert (done.exit_code, done.stderr) == (2, f"error: {message.format(folder=folder, last=last)}\n")
