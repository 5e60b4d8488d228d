"""If these fail, a launcher in another language is tested with wrong numbers, or on some machine with others."""

import hashlib
import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from lngen.compiler.compile import Compilation
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.interpret import interpret
from lngen.compiler.ir import D, DType, M
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.packs import known_answers
from lngen.packs.known_answers import SPECIAL, row_counts, vectors
from lngen.proof.check.inputs import mismatches
from lngen.proof.ptx import run_plan
from own_graphs import OWN, own

SPECS = (
    "layernorm.fwd:d=64,dtype=bf16",
    "layernorm.bwd:d=64,dtype=bf16",
    "layernorm.bwd:d=33,dtype=f64,save=none,wrt=x",
    "rmsnorm.fwd:d=4096,dtype=f16,weight=f32,eps=1e-06,save=none",
    "rmsnorm.bwd:d=64,accumulate=gamma,save=y",
    "add_rmsnorm.fwd:d=100,dtype=bf16,round_sum=no,casts=gemma",
    "add_layernorm.bwd:d=64,dtype=f16,residual_dtype=f32,rowscale=yes",
    "gated_rmsnorm.bwd:d=48,dtype=bf16",
    "dyt.bwd:d=64",
    "cross_entropy.bwd:d=17",
    "cross_entropy.fwd:d=17,target=index,reduction=mean,class_weight=yes,x_grad=yes",
    "cross_entropy.bwd:d=16,dtype=bf16,target=index,target_dtype=i32",
    "softmax.fwd:d=1,dtype=bf16",
)
READ = {"f16": "<f2", "bf16": "<u2", "f32": "<f4", "f64": "<f8", "i32": "<i4", "i64": "<i8"}  # without ml_dtypes


def table(files: Mapping[str, bytes]) -> tuple[str, dict[str, Any]]:
    """The folder and its table."""
    (name,) = (name for name in files if name.endswith("/vectors.json"))
    document = json.loads(files[name])
    return name.removesuffix("vectors.json"), document


def tensors(files: Mapping[str, bytes], case: str, role: str) -> dict[str, Array]:
    """The tensors of a case, from the .bin files with only the table."""
    folder, document = table(files)
    (found,) = (c for c in document["cases"] if c["name"] == case)
    return {
        t["name"]: np.frombuffer(files[folder + t["bin"]["file"]], NUMPY_DTYPE[DType(t["dtype"])]).reshape(t["shape"])
        for t in found["tensors"]
        if t["role"] == role
    }


def cases(files: Mapping[str, bytes]) -> dict[str, int]:
    """The rows of each case."""
    return {case["name"]: case["rows"] for case in table(files)[1]["cases"]}


EVERY = {**{text: parse_spec(text) for text in SPECS},
         **{f"{name} {way}": own(name, way) for name in OWN for way in ("fwd", "bwd")}}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_the_table_and_the_files_are_all_that_is_needed(name: str) -> None:
    """Each file is listed with its hash, and NumPy reads it; what a case has are inputs and their results."""
    spec = EVERY[name]
    files, graph = vectors(spec), spec.graph()
    folder, document = table(files)
    assert folder == f"vectors/{spec.file_slug}/"
    assert document["graph_sha256"] == hashlib.sha256(str(graph).encode()).hexdigest()
    assert (document["spec"], document["eps"]) == (str(spec), spec.eps)
    assert document["same_tensor"] == graph.shared
    for case in cases(files):
        inputs, outputs = (tensors(files, case, role) for role in ("input", "output"))
        results = interpret(graph, inputs)
        assert list(inputs) == [p.name for p in graph.params]
        assert list(outputs) == list(results)
        assert mismatches(outputs, results) == []
    listed = {"vectors.json"}
    for tensor in (t for case in document["cases"] for t in case["tensors"]):
        raw, npy = (files[folder + tensor[kind]["file"]] for kind in ("bin", "npy"))
        listed |= {tensor[kind]["file"] for kind in ("bin", "npy")}
        for kind, data in (("bin", raw), ("npy", npy)):
            found = (tensor[kind]["bytes"], tensor[kind]["sha256"])
            assert found == (len(data), hashlib.sha256(data).hexdigest())
        array = np.load(io.BytesIO(npy), allow_pickle=False)
        assert (array.dtype.str, list(array.shape)) == (READ[tensor["dtype"]], tensor["shape"])
        assert array.tobytes() == raw
        assert len(raw) == tensor["element_bytes"] * math.prod(tensor["shape"])
    assert {folder + name for name in listed} == files.keys()


def test_cases_have_few_rows() -> None:
    assert [row_counts(d) for d in (1, 768, 16384, 32768, 65536, 2**20)] == [
        (0, 1, 5), (0, 1, 5), (0, 1, 4), (0, 2), (0, 2), (0, 2),
    ]  # fmt: skip
    spec = parse_spec(SPECS[0])
    assert cases(vectors(spec)) == {"rows_0": 0, "rows_1": 1, "rows_5": 5, SPECIAL: 5}
    assert sum(map(len, vectors(parse_spec("layernorm.bwd:d=65536,dtype=f32")).values())) < 10_000_000


# ---- the numbers ----

DIGESTS = {
    "layernorm.bwd:d=64,dtype=bf16": "e311be35b930fb560f7f4e2b9bede9ec7a42c3cf8ea8681924c299c4fd832d19",
    "rmsnorm.fwd:d=100,dtype=f32": "b0d551e0bf2dd51c11e2cbb3fb227c85086c1d0a24f0feb2da04967cf3a22347",
    "softmax.bwd:d=17,dtype=f16": "0432182a2ab082f6c30031f1cf7216185a8721342622ce210806dac62a1765f6",
    "l2norm.fwd:d=5,dtype=f64": "b4c9144eb840246a2a62214059b3c94efca30200e8bfcfaa12146e8b5971ceb4",
}


def digest(files: Mapping[str, bytes]) -> str:
    """Of all tensors, not of the table."""
    names = sorted(name for name in files if not name.endswith(".json"))
    return hashlib.sha256(b"".join(name.encode() + files[name] for name in names)).hexdigest()


@pytest.mark.parametrize("text", DIGESTS)
def test_the_numbers_are_the_same_on_every_machine(text: str) -> None:
    """Changed on purpose only: the numbers of the inputs, or the order of the sums."""
    assert digest(vectors(parse_spec(text))) == DIGESTS[text]


@pytest.mark.parametrize("text", ["l2norm.fwd:d=64", *SPECS])
def test_ordinary_cases_have_numbers_that_hide_nothing(text: str) -> None:
    """Every number is finite; no input is zero, and few are alike."""
    files = vectors(parse_spec(text))
    for case in ("rows_1", "rows_5"):
        for role in ("input", "output"):
            assert all(np.isfinite(a.astype(np.float64)).all() for a in tensors(files, case, role).values())
        for array in tensors(files, case, "input").values():
            assert (array != 0).all()
            first = array.ravel()[:20].tolist()
            assert len({*first}) > 0.7 * len(first)


def root(b: GraphBuilder) -> None:
    """A graph whose input has to be positive."""
    b.output("y", b.input("x", M, D).sqrt() * b.input("z", M, D))


def test_inputs_stay_where_the_graph_is_defined() -> None:
    spec = make_spec(Definition("root", root), "fwd", {"d": 40})
    assert spec.positive_inputs() == ("x",)
    files = vectors(spec)
    for case in ("rows_5", SPECIAL):
        assert (tensors(files, case, "input")["x"] >= 0.25).all()
    assert np.isnan(tensors(files, SPECIAL, "input")["z"]).any()


def column_norm(b: GraphBuilder) -> None:
    """A saved result without rows: the maximum of each feature."""
    x = b.input("x", M, D)
    top = b.reduce_max("top", x, axis=M)
    b.output("y", x * x * top)
    b.statistic(top, "top")


def test_a_saved_result_without_rows_is_of_its_case() -> None:
    spec = make_spec(Definition("column_norm", column_norm), "bwd", {"d": 24})
    assert "top" in [p.name for p in spec.graph().params]
    files = vectors(spec)
    assert {"rows_1/top.bin", "rows_5/top.bin"} <= {n.removeprefix(table(files)[0]) for n in files}


def test_a_backward_has_what_its_forward_saved() -> None:
    spec: Spec = parse_spec("add_layernorm.bwd:d=64,dtype=bf16")
    backward, forward = vectors(spec), vectors(spec.with_direction("fwd"))
    for case in cases(backward):
        given = tensors(backward, case, "input")
        made = {**tensors(forward, case, "input"), **tensors(forward, case, "output")}
        shared = given.keys() & made.keys()
        assert {"h", "mean", "rstd", "gamma"} <= shared
        for name in shared:
            assert given[name].tobytes() == made[name].tobytes()


# ---- special numbers ----


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_special_rows_are_as_the_table_says(dtype: str) -> None:
    files = vectors(parse_spec(f"add_rmsnorm.fwd:d=64,dtype={dtype}"))
    inputs, outputs = (tensors(files, SPECIAL, role) for role in ("input", "output"))
    for name in ("x", "residual"):
        x = inputs[name].astype(np.float64)
        assert np.isnan(x[0]).tolist() == [True] + [False] * 63
        assert np.isinf(x[1]).tolist() == [True] + [False] * 63
        assert (x[2] == 0).all()
        largest, smallest = x[3][0], x[4][0]
        assert (x[3] == largest).all()
        assert (x[4] == smallest).all()
        bits = inputs[name].view(f"u{inputs[name].itemsize}")
        assert (bits[4] == 1).all()
        infinity = bits[1, 0]
        assert (bits[3] == infinity - 1).all()
    assert np.isfinite(inputs["gamma"].astype(np.float64)).all()
    y = outputs["y"].astype(np.float64)
    assert np.isnan(y[0]).all()
    assert (y[2] == 0).all()
    assert "row 0 starts with a NaN, row 1 with infinity" in table(files)[1]["special_rule"]


def test_each_nan_has_the_same_bits() -> None:
    """Processors differ in the sign of a NaN that they make, files may not."""
    quiet = {"f16": 0x7E00, "bf16": 0x7FC0, "f32": 0x7FC00000, "f64": 0x7FF8000000000000}
    for dtype, want in quiet.items():
        files = vectors(parse_spec(f"layernorm.bwd:d=64,dtype={dtype}"))
        for role in ("input", "output"):
            for array in tensors(files, SPECIAL, role).values():
                bits = array.view(f"u{array.itemsize}")[np.isnan(array)]
                assert {*bits.tolist()} <= {quiet["f32"] if array.dtype == np.float32 else want}
        made = np.array([-np.nan, 1.0, -0.0], NUMPY_DTYPE[DType(dtype)])
        portable = known_answers._portable(made).view(f"u{made.itemsize}")
        assert portable.tolist() == [want, *made.view(f"u{made.itemsize}")[1:].tolist()]


def test_tensors_that_differ_never_share_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(range(100))
    made = known_answers._drawn
    monkeypatch.setattr(known_answers, "_drawn", lambda *a, **k: made(*a, **k) + np.float32(next(drawn)))
    with pytest.raises(AssertionError, match=r"gamma\.npy differs from case to case"):
        vectors(parse_spec("rmsnorm.fwd:d=8"))


@pytest.mark.parametrize("text", [SPECS[0], SPECS[1], SPECS[5], SPECS[10], "cross_entropy.fwd:d=17"])
def test_the_kernels_give_these_results(text: str) -> None:
    """Also for no rows and for special numbers, as a launcher in another language gets them."""
    pytest.importorskip("cupy")
    files = vectors(parse_spec(text))
    plan = Compilation(parse_spec(text)).changed("", "sm_90").plan
    for case in cases(files):
        outcome = run_plan(plan, tensors(files, case, "input"))
        assert outcome.findings == ()
        assert mismatches(outcome.results, tensors(files, case, "output")) == []
