"""If these fail, a case of ``lngen conform`` misses the mistake it is for, or fails a right function."""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sampling
from commands import call
from lngen.compiler.ir import DType
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.spec import parse_spec
from lngen.dtypes import FLOATS
from lngen.errors import MissingError, SpecError
from lngen.proof.check.conform import CASES, Outcome, conform, select
from lngen.proof.check.conform.implementations import (
    LngenTarget,
    NumpyTarget,
    TorchTarget,
    clone,
    find_target,
    laid,
)
from lngen.proof.check.conform.memory_cases import strided, transposed, unaligned
from lngen.proof.check.conform.number_cases import in_ulps
from lngen.proof.check.conform.suites import Contract

BF16 = NUMPY_DTYPE[DType.BF16]
F32 = np.dtype(np.float32)


# A right implementation, and what a mutation changes of it


def mean(x: Array) -> Array:
    return np.asarray(x.mean(axis=1, keepdims=True))


def wide(*arrays: Array) -> list[Array]:
    return [a.astype(np.float64 if a.dtype == np.float64 else np.float32) for a in arrays]


def statistics(x: Array, eps: float) -> tuple[Array, Array]:
    xc = x - mean(x)
    return xc, 1 / np.sqrt(mean(xc * xc) + eps)


def forward(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    x32, g, b = wide(x, gamma, beta)
    xc, r = statistics(x32, eps)
    return (xc * r * g + b).astype(x.dtype)


def backward(dy: Array, x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, ...]:
    dy32, x32, gamma32 = wide(dy, x, gamma)
    xc, r = statistics(x32, eps)
    xhat, g = xc * r, dy32 * gamma32
    dx = r * (g - mean(g) - xhat * mean(g * xhat))
    return dx.astype(x.dtype), (dy32 * xhat).sum(axis=0).astype(x.dtype), dy32.sum(axis=0).astype(x.dtype)


def outcomes(
    fwd: Callable[..., Any] = forward,
    bwd: Callable[..., Any] | None = backward,
    cases: str = "",
    dtype: DType = DType.F32,
    d: int = 768,
) -> dict[str, Outcome]:
    found = conform(NumpyTarget("mine", fwd, bwd), Contract.of("layernorm", dtype), select(cases.split()), d=d)
    return {o.name: o for o in found}


def failed(found: dict[str, Outcome]) -> set[str]:
    return {name for name, o in found.items() if o.status == "fail"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_right_function_passes(dtype: DType) -> None:
    found = outcomes(dtype=dtype)
    assert failed(found) == set(), found
    names = [case.name for case in CASES]
    assert [*found] == names
    assert len(names) == len({*names}) == 36
    assert all(0 < len(case.why) <= 64 and "\n" not in case.why for case in CASES)


def test_without_a_backward_its_cases_are_skipped() -> None:
    found = outcomes(bwd=None, cases="ordinary differences dx-sums-to-zero repeat-columns")
    skipped = {name: o.detail for name, o in found.items() if o.status == "skipped"}
    assert [*skipped] == ["differences", "dx-sums-to-zero", "repeat-columns"]
    assert skipped["dx-sums-to-zero"] == "no dx: a backward is not given"
    assert found["ordinary"].measured.keys() == {"y"}


# Wrong functions

Wrong = Callable[..., Any]


def writes_to_x(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    x -= mean(x)
    return forward(x, gamma, beta, eps)


def order_depends_on_m(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    squares = statistics(x if len(x) < 38 else x[:, ::-1], eps)[0] ** 2
    r = 1 / np.sqrt(squares.cumsum(axis=1)[:, -1:] / x.dtype.type(x.shape[1]) + eps)
    return (statistics(x, eps)[0] * r * gamma + beta).astype(x.dtype)


def depends_on_other_rows(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    largest = np.abs(x).max(initial=1e-30)
    return forward(x / largest, gamma, beta, eps / float(largest) ** 2).astype(x.dtype)


def refuses_no_rows(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    if len(x) == 0:
        raise ValueError("no rows\nat all")
    return forward(x, gamma, beta, eps)


def ignores(x: Array, gamma: Array, beta: Array, eps: float, alignment: bool) -> Array:
    """Takes the first elements in memory, of all arrays or of those that are not aligned."""
    window = laid(x)
    flat = window.memory[0 if alignment else window.offset :][: x.size].reshape(x.shape)
    return forward(clone(x) if alignment and window.offset % 4 == 0 else flat, gamma, beta, eps)


def kept(y: Array, where: Any) -> Array:
    return np.where(where, y, 0).astype(y.dtype)


# A wrong forward, and the cases that it fails of those that it is given: all of them.
FORWARDS: dict[str, tuple[Wrong, str]] = {
    "one-pass variance": (
        lambda x, g, b, eps: (x - mean(x)) / np.sqrt(mean(x * x) - mean(x) * mean(x) + eps) * g + b,
        "large-mean-1e2 large-mean-1e3 large-mean-1e4",
    ),
    "eps outside the root": (
        lambda x, g, b, eps: (x - mean(x)) / (np.sqrt(mean((x - mean(x)) ** 2)) + eps) * g + b,
        "tiny-variance",
    ),
    "unbiased variance": (
        lambda x, g, b, eps: forward(x, g * np.sqrt(1 - 1 / np.float32(max(2, x.shape[1]))), b, eps),
        "ordinary d-2 ulps",
    ),
    "mean in f16": (
        lambda x, g, b, eps: (x - mean(x).astype(np.float16).astype(x.dtype)) * statistics(x, eps)[1] * g + b,
        "large-mean-1e3 shift-invariance constant-rows",
    ),
    # By less than rows of large numbers may be, but in all rows.
    "slightly off": (lambda x, g, b, eps: forward(x, g, b, eps) + g * np.float32(1e-3), "constant-rows"),
    "writes to x": (writes_to_x, "inputs-unmodified"),
    "another order for more rows": (order_depends_on_m, "rows-in-bigger-batch"),
    "rows that depend on others": (depends_on_other_rows, "rows-alone nan-row"),
    "f64 results": (lambda *given: forward(*given).astype(np.float64), "shape-and-dtype"),
    "no empty batch": (refuses_no_rows, "m-0"),
    "NaN is skipped": (
        lambda x, g, b, eps: forward(np.nan_to_num(x, posinf=np.inf, neginf=-np.inf), g, b, eps),
        "nan-row",
    ),
    "infinity is clipped": (lambda x, g, b, eps: forward(np.where(np.isinf(x), 0, x), g, b, eps), "inf-row"),
    "subnormal y is flushed": (
        lambda *given: kept(y := forward(*given), ~(np.abs(y) < np.finfo(y.dtype).tiny)), "subnormal-y",
    ),
    "strides are ignored": (partial(ignores, alignment=False), "strided-rows transposed"),
    "alignment is ignored": (partial(ignores, alignment=True), "unaligned-base"),
    "large x is clamped": (lambda x, g, b, eps: forward(np.clip(x, -1e16, 1e16), g, b, eps), "huge overflow"),
    "negative gamma": (lambda x, g, b, eps: forward(x, np.abs(g) if (g < 0).all() else g, b, eps), "gamma-negative"),
    "the last lane is lost": (
        lambda *given: kept(y := forward(*given), np.arange(y.shape[1]) < y.shape[1] // 2 * 2), "d-31 d-4093 d-1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", FORWARDS)
def test_a_wrong_forward_fails_its_cases(wrong: str) -> None:
    function, cases = FORWARDS[wrong]
    assert failed(outcomes(function, None, cases)) == {*cases.split()}


def forgets_gamma(dy: Array, x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, ...]:
    return (backward(dy, x, np.ones_like(gamma), beta, eps)[0], *backward(dy, x, gamma, beta, eps)[1:])


def batch_sums(dy: Array, x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, ...]:
    """The formula of a widely read page: column sums where row sums belong."""
    _, dgamma, dbeta = backward(dy, x, gamma, beta, eps)
    xc, r = statistics(x, eps)
    return r * (dy * gamma - dbeta / x.shape[1] - xc * r * dgamma / x.shape[1]), dgamma, dbeta


def no_mean_term(dy: Array, x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, ...]:
    xc, r = statistics(x, eps)
    g, xhat = dy * gamma, xc * r
    return r * (g - xhat * mean(g * xhat)), *backward(dy, x, gamma, beta, eps)[1:]


def with_dgamma(of: Callable[..., Array]) -> Wrong:
    """The backward with another dgamma."""

    def wrong(*given: Any) -> tuple[Array, ...]:
        dx, _, dbeta = backward(*given)
        return dx, of(*given), dbeta

    return wrong


def from_y(dy: Array, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    return (dy * ((forward(x, gamma, beta, eps) - beta) / np.where(gamma == 0, 1, gamma))).sum(axis=0)  # type: ignore[no-any-return]


def random_order(dy: Array, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    order = np.random.default_rng().permutation(len(x))
    return (dy * forward(x, np.ones_like(gamma), np.zeros_like(beta), eps))[order].sum(axis=0)  # type: ignore[no-any-return]


def uninitialised(*given: Any) -> Array:
    dgamma = backward(*given)[1]
    return dgamma if len(given[0]) else np.full_like(dgamma, 3)


def writes_to_dy(*given: Any) -> tuple[Array, ...]:
    results = backward(*given)
    given[0][...] = results[0]
    return results


@pytest.mark.parametrize(("wrong", "cases"), [
    (forgets_gamma, "ordinary differences"),
    (batch_sums, "ordinary differences dx-sums-to-zero rows-alone m-1"),
    (no_mean_term, "ordinary differences dx-sums-to-zero d-2"),
    (lambda *given: [backward(*given)[n] for n in (0, 2, 1)], "ordinary differences"),
    (with_dgamma(from_y), "gamma-zero"),
    (with_dgamma(random_order), "repeat-columns"),
    (writes_to_dy, "inputs-unmodified"),
    (with_dgamma(uninitialised), "m-0"),
    (lambda *given: backward(*given)[:2], "ordinary shape-and-dtype differences"),
], ids=range(9))  # fmt: skip
def test_a_wrong_backward_fails_its_cases(wrong: Wrong, cases: str) -> None:
    assert failed(outcomes(bwd=wrong, cases=cases)) == {*cases.split()}


@pytest.mark.parametrize(("case", "times"), [("repeat", 3), ("repeat-columns", 5)])
def test_every_repetition_counts(case: str, times: int) -> None:
    """The last call of so many has other bits."""
    calls: list[int] = []

    def tires(dy: Array, x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, ...]:
        calls.append(len(x))
        return tuple(np.nextafter(a, 9) if len(calls) == times else a for a in backward(dy, x, gamma, beta, eps))

    found = outcomes(bwd=tires, cases=case)
    assert len(calls) == times
    assert failed(found) == {case}
    assert f"of call {times}" in found[case].detail


def test_gamma_forgotten_in_f32_alone_is_seen_by_the_differences_of_the_closed_form() -> None:
    def refuses_f64(*args: Any) -> Array:
        if args[0].dtype == np.float64:
            raise TypeError("float32 only")
        return forward(*args)

    right = outcomes(refuses_f64, backward, "differences")["differences"]
    assert (right.status, "of the closed form; f32 only" in right.detail) == ("pass", True)
    assert failed(outcomes(refuses_f64, forgets_gamma, "differences")) == {"differences"}


def bf16_column_sums(dy: Array, x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, ...]:
    dx, dgamma, _ = backward(dy, x, gamma, beta, eps)
    total = np.zeros(x.shape[1], x.dtype)
    for row in dy:
        total = total + row
    return dx, dgamma, total


def f16_row_sums(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    mean = np.add.accumulate(x, axis=1, dtype=x.dtype)[:, -1:] / x.dtype.type(x.shape[1])
    return forward(x - 0 * mean, gamma, beta, eps)


def test_sums_in_sixteen_bits_are_seen() -> None:
    assert failed(outcomes(bwd=bf16_column_sums, cases="m-1 m-4096", dtype=DType.BF16)) == {"m-4096"}
    assert failed(outcomes(f16_row_sums, None, "ordinary huge", DType.F16)) == {"huge"}
    assert outcomes(cases="overflow", dtype=DType.F16)["overflow"].status == "skipped"


def test_an_exception_fails_a_case_with_its_first_line_and_refusing_a_layout_passes() -> None:
    def contiguous_only(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        if not x.flags.c_contiguous:
            raise ValueError("x is not contiguous")
        return refuses_no_rows(x, gamma, beta, eps)

    found = outcomes(contiguous_only, None, "m-0 strided-rows transposed unaligned-base")
    assert {n: (o.status, o.detail) for n, o in found.items()} == {
        "m-0": ("fail", "raised ValueError: no rows"),
        "strided-rows": ("pass", "refused: ValueError: x is not contiguous"),
        "transposed": ("pass", "refused: ValueError: x is not contiguous"),
        "unaligned-base": ("pass", "as if contiguous"),
    }


# lngen and PyTorch


@sampling.rotating("text", [
    "layernorm.bwd:d=768,dtype=f32",
    "layernorm.bwd:d=768,dtype=bf16,weight=f32",
    "layernorm.bwd:d=100,dtype=f64",
    "layernorm.fwd:d=64,dtype=f16,out=f32,beta=no",
    "layernorm.bwd:d=64,dtype=bf16,gamma=no,save=none",
    "layernorm.bwd:d=1,dtype=f16,wrt=gamma",
    "rmsnorm.bwd:d=768,dtype=f16",
    "rmsnorm.bwd:d=64,dtype=f32,beta=yes,eps=0.001",
])  # fmt: skip
def test_lngens_definition_passes(text: str) -> None:
    spec = parse_spec(text)
    found = {o.name: o for o in conform(LngenTarget(spec, gpu=False), Contract.of_spec(spec), d=spec.d)}
    assert failed(found) == set(), [o for o in found.values() if o.status == "fail"]
    assert sum(o.status == "pass" for o in found.values()) >= 30


@pytest.mark.parametrize(("text", "y"), [
    ("layernorm.bwd:d=768,dtype=f32", "beta"), ("rmsnorm.fwd:d=64,dtype=f32", "0"),
    ("layernorm.fwd:d=64,dtype=f32,beta=no", "0"),
])  # fmt: skip
def test_what_y_is_where_squares_overflow(text: str, y: str) -> None:
    spec = parse_spec(text)
    (found,) = conform(LngenTarget(spec, gpu=False), Contract.of_spec(spec), select(("overflow",)), d=spec.d)
    assert (found.status, found.detail) == ("pass", f"the squares overflow: y is {y}")


@pytest.mark.gpu
@pytest.mark.parametrize("text", [
    "layernorm.bwd:d=768,dtype=f32", "layernorm.bwd:d=768,dtype=bf16,weight=f32", "rmsnorm.bwd:d=768,dtype=f16",
])  # fmt: skip
def test_lngens_kernels_pass(text: str) -> None:
    spec = parse_spec(text)
    found = {o.name: o for o in conform(LngenTarget(spec, gpu=True), Contract.of_spec(spec), d=spec.d)}
    assert failed(found) == set(), [o for o in found.values() if o.status == "fail"]


def torch_outcomes(name: str, dtype: DType) -> dict[str, Outcome]:
    pytest.importorskip("torch")
    target, norm = find_target(name)
    return {o.name: o for o in conform(target, Contract.of(norm, dtype))}


TORCH = ("torch-layernorm", "torch.nn.functional:layer_norm", "torch:layer_norm")


@sampling.grid(("name", "dtype"), product(TORCH, (DType.F32, DType.F64)), strength=1)
def test_torch_layernorm_passes(name: str, dtype: DType) -> None:
    found = torch_outcomes(name, dtype)
    assert {o.status for o in found.values()} == {"pass"}, found
    assert "of its own forward in f64" in found["differences"].detail


@pytest.mark.parametrize(
    ("dtype", "wrong"), [(DType.F32, {"huge"}), (DType.BF16, {"huge"}), (DType.F16, set()), (DType.F64, {"huge"})]
)
def test_torch_rmsnorm_underflows_backward_of_huge_rows(dtype: DType, wrong: set[str]) -> None:
    """Its dx has the cube of rstd in it, which underflows at x = 1e17: half of dx is lost."""
    found = torch_outcomes("torch-rmsnorm", dtype)
    assert failed(found) == wrong
    assert found["huge"].measured["y"] <= 1
    assert all("dx" not in o.measured or o.measured["dx"] > 1 for o in found.values() if o.status == "fail")


def test_a_torch_function_without_a_gradient_has_no_backward() -> None:
    torch = pytest.importorskip("torch")

    def detached(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        return torch.nn.functional.layer_norm(x.detach(), x.shape[-1:], gamma.detach(), beta.detach(), eps)

    cases = select(["ordinary", "dx-sums-to-zero"])
    found = [*conform(TorchTarget("mine", detached), Contract.of("layernorm", DType.F32), cases)]
    assert [o.status for o in found] == ["pass", "skipped"]


def test_a_torch_function_that_writes_to_its_input_is_seen() -> None:
    torch = pytest.importorskip("torch")

    class InPlace(torch.autograd.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Any, gamma: Any, beta: Any, eps: float) -> Any:
            ctx.save_for_backward(gamma)
            return torch.nn.functional.layer_norm(x, x.shape[-1:], gamma, beta, eps)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            dy.mul_(2)
            return dy, ctx.saved_tensors[0], ctx.saved_tensors[0], None

    cases = select(["inputs-unmodified"])
    (found,) = conform(TorchTarget("mine", InPlace.apply), Contract.of("layernorm", DType.BF16), cases)
    assert found.status == "fail"
    assert found.detail.startswith("written to: dy: ")


# Its parts


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("lay", [strided, unaligned, transposed, np.array])
def test_a_clone_keeps_the_layout(lay: Callable[[Array], Array], dtype: np.dtype[Any]) -> None:
    a = lay(np.arange(12).reshape(3, 4).astype(dtype))
    b = clone(a)
    assert (a.strides, laid(a).offset, a.dtype) == (b.strides, laid(b).offset, b.dtype)
    np.testing.assert_array_equal(a, b)
    b[...] = 0
    assert a[0, 1] == 1


def test_ulps_are_those_of_the_stored_dtype() -> None:
    contract = Contract.of("layernorm", DType.BF16)
    x = np.array([[-1.0, 1.0]]).astype(BF16)
    want = contract.expected({"x": x, "gamma": np.ones(2, BF16), "beta": np.zeros(2, BF16)})["y"]
    y = np.array([[-1.0, 1.0078125]]).astype(BF16)
    off = in_ulps(want, y, DType.BF16)
    assert (off.largest, off.mean) == (1.0, 0.5)
    assert 1 < want.excess(y) < 2
    assert want.excess(np.array([[np.nan, 1.0]]).astype(BF16)) == np.inf


# The command line


MODULE = """
import numpy as np

def forward(x, gamma, beta, eps):
    xc = x - x.mean(axis=1, keepdims=True)
    return (xc / np.sqrt((xc * xc).mean(axis=1, keepdims=True) + eps) * gamma + beta).astype(x.dtype)

def backward(dy, x, gamma, beta, eps):
    return dy, gamma, beta

def rms(x, gamma, beta, eps):
    assert beta is None
    return (x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * gamma).astype(x.dtype)

def by_torch(x, gamma, beta, eps):
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, correction=0) + eps).rsqrt() * gamma + beta
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_norms.py").write_text(MODULE)


@pytest.mark.usefixtures("module")
def test_the_command_prints_a_table_and_writes_json() -> None:
    options = "--callable my_norms:forward --backward my_norms:backward --out out/report.json"
    done = call("conform", *options.split())
    assert done.exit_code == 1, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["|", "|", "case", "|", "why", "|", "found", "|"]
    assert lines[2].split()[:4] == ["|", "FAIL", "|", "ordinary"]
    report = json.loads(Path("out/report.json").read_text())
    assert lines[-1] == f"{report['passed']} passed, {report['failed']} failed, {report['skipped']} skipped"
    assert (report["target"], report["norm"], report["dtype"]) == ("my_norms:forward", "layernorm", "f32")
    assert [c["name"] for c in report["cases"]] == [case.name for case in CASES]
    first = report["cases"][0]
    assert [*first] == ["name", "status", "why", "detail", "measured"]
    assert first["measured"]["y"] < 1 < first["measured"]["dx"]
    for name in "ab":
        done = call("conform", "--callable", "my_norms:forward", "--cases", "ulps,ordinary", "--out", name)
        assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "2 passed, 0 failed, 0 skipped")
    assert Path("a").read_bytes() == Path("b").read_bytes()


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("args", [
    "--callable my_norms:rms --norm rmsnorm --eps 1e-3 --dtype f64",
    "--callable torch-layernorm --device cpu",
    "--callable my_norms:by_torch --torch",
    "rmsnorm.bwd:d=64 --device cpu",
])  # fmt: skip
def test_functions_and_specs_pass_from_the_command_line(args: str) -> None:
    if "torch" in args:
        pytest.importorskip("torch")
    done = call("conform", *args.split(), "--cases", "ordinary,d-31,strided-rows")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "3 passed, 0 failed, 0 skipped"), done.output


def test_what_the_machine_lacks_is_exit_code_three() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(SpecError, match="--backward is for NumPy functions"):
        find_target("torch-layernorm", backward="a:b")
    if not torch.cuda.is_available():
        for args in ("--callable torch-layernorm --device cuda", "layernorm.fwd:d=8 --device cuda"):
            done = call("conform", *args.split())
            assert (done.exit_code, done.stdout) == (3, "")
            assert "--device cuda expects a GPU" in done.stderr


@pytest.mark.parametrize(("name", "package"), [
    ("liger-layernorm", "liger_kernel"), ("liger-rmsnorm", "liger_kernel"), ("quack-rmsnorm", "quack"),
])  # fmt: skip
def test_a_peer_that_is_not_installed_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.proof.check.conform.implementations.find_spec", lambda name: None)
    with pytest.raises(MissingError, match=f"'{name}' needs the package {package}, which is not installed"):
        find_target(name)
