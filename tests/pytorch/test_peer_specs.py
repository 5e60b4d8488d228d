"""If these fail, lngen's function in the place of a peer's operator has other bytes, or a page says what is not so."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import peer_models  # noqa: E402
from lngen.torch import bridge, for_flashinfer, for_vllm, peer_specs  # noqa: E402
from lngen.torch.peer_specs import SPECS  # noqa: E402
from paths import ROOT  # noqa: E402

EPS = 1e-5
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, INT8: np.int8}
GROUP, LARGEST = 128, 2.25
CASES = [(name, False) for name in SPECS] + [(name, True) for name in SPECS if "dynamic" in name or "block" in name]


def drawn(rows: int, d: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(rows, d), torch.randn(rows, d), torch.randn(d)
    return {name: t.bfloat16() for name, t in (("input", x), ("residual", residual), ("weight", weight))}


def as_numpy(t: Any) -> Any:
    """The same memory."""
    if t.dtype in NUMPY:
        return t.view(torch.int8).numpy().view(NUMPY[t.dtype])
    return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()


class Called:
    """A call of an operator by its parameters there, on 8 rows of 512 or as many as are given."""

    def __init__(self, name: str, added: bool, rows: int = 8, d: int = 512, dtype: Any = E4M3, **others: Any) -> None:
        self.operator, _, word = name.partition(", ")
        self.vllm, self.added = self.operator.startswith(("rms_norm", "fused_add_rms_norm")), added or "add" in name
        given = drawn(rows, d)
        residual = given.pop("residual")
        result = torch.zeros(rows, d, dtype=INT8 if word else dtype)
        self.keys: dict[str, Any] = {"result" if self.vllm else "out": result, **given}
        self.keys |= {"residual": residual} if self.added else {"residual": None} if self.dynamic else {}
        self.keys |= {"epsilon" if self.vllm else "eps": EPS, "scale": torch.tensor([0.0123])}
        if self.dynamic:
            blocks = {"group_size": GROUP, "is_scale_transposed": False} if "block" in name else {}
            scale = torch.zeros(rows, d // GROUP if blocks else 1)
            self.keys |= {"scale": scale, "scale_ub": None, **blocks}
        self.keys |= others

    @property
    def dynamic(self) -> bool:
        """True if it computes scales."""
        return "dynamic" in self.operator or "block" in self.operator

    def ours(self, function: Any = None) -> list[Any]:
        """What lngen writes: q, the scales, the sum."""
        keys = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in self.keys.items()}
        function = function or getattr(for_vllm if self.vllm else for_flashinfer, self.operator)
        assert function(**keys) is None
        return self.written({name: as_numpy(v) for name, v in keys.items() if isinstance(v, torch.Tensor)})

    def theirs(self, **root: Any) -> list[Any]:
        """What the model writes."""
        copies = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in self.keys.items()}
        keys = {name: as_numpy(v) if isinstance(v, torch.Tensor) else v for name, v in copies.items()}
        getattr(peer_models, self.operator)(**keys, **root)
        return self.written(keys)

    def written(self, keys: dict[str, Any]) -> list[Any]:
        return [keys[n] for n in ("result", "out", "scale", "residual") if keys.get(n) is not None]

    def root(self, x: Any, eps: float) -> Any:
        """lngen's 1 / rms of these rows: the statistic of the norm in 16 bits."""
        x, weight = self.keys["input"], self.keys["weight"]
        if not self.added:
            rstd = torch.ops.lngen.rmsnorm_fwd(x, weight, None, eps=eps)[-1]
        else:
            keys = "" if "static" in self.operator else "round_sum=no"
            absent = [None] * 3
            sums = torch.ops.lngen.add_rmsnorm_fwd(x, self.keys["residual"], *absent, weight, None, eps=eps, keys=keys)
            rstd = sums[-1]
        return rstd.numpy()[:, None]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


def telling(name: str, added: bool) -> Called:
    """A call with a row of zeros, and one whose rms is 1, so that its value is the weight: there are ties.

    Those of a scale of 7 are broken by a product with 1 / 7, and half of the largest number is one of int8.
    """
    call = Called(name, added)
    x, weight = call.keys["input"], call.keys["weight"]
    call.keys["epsilon" if call.vllm else "eps"] = 1e-9
    x[0], x[1] = 0, x[1].sign()
    if call.added:
        call.keys["residual"][:2] = 0
    weight.clamp_(-1.5, 1.5)
    weight[::GROUP], weight[1::GROUP] = LARGEST, LARGEST / 2
    if not call.dynamic:
        call.keys["scale"] = torch.tensor([7 / 512])
    return call


@pytest.mark.parametrize(("name", "added"), CASES)
def test_all_bytes_are_those_of_the_model_with_the_same_root(
    name: str, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no key can be left out."""
    call = telling(name, added)
    wanted = call.theirs(root=call.root)
    assert same(call.ours(), wanted)
    graph, _, keys = SPECS[name].partition(":")
    for left_out in keys.split(","):
        if not left_out.startswith("scales"):
            fewer = ",".join(key for key in keys.split(",") if key != left_out)
            monkeypatch.setitem(SPECS, name, f"{graph}:{fewer}")  # type: ignore[arg-type]
            assert not same(call.ours(), wanted), left_out


@pytest.mark.parametrize("name", ["rmsnorm_quant", "fused_add_rmsnorm_quant"])
def test_flashinfer_has_e5m2_and_numbers_as_scales(name: str) -> None:
    call = Called(name, False, dtype=E5M2)
    wanted = call.theirs(root=call.root)
    assert same(call.ours(), wanted)
    call.keys |= {"scale": float(call.keys["scale"]), "enable_pdl": True}
    assert same(call.ours()[:1], wanted[:1])


@pytest.mark.parametrize("name", [name for name in SPECS if Called(name, False).dynamic])
def test_vllm_bounds_amax_and_takes_scales_of_any_strides(name: str) -> None:
    call = Called(name, True, scale_ub=torch.tensor([1.25]))
    wanted = call.theirs(root=call.root)
    assert same(call.ours(), wanted)
    call.keys["scale"] = call.keys["scale"].T.contiguous().T
    assert same(call.ours(), wanted)


@pytest.mark.parametrize(("apart", "layout"), [(8, "columns"), (12, "columns"), (7, "rows")])
def test_transposed_scales_are_written_where_they_lie(apart: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 rows: a distance that is no multiple of 4 is that of no kernel."""
    call = Called("rms_norm_per_block_quant", False, rows=6)
    wanted, memory, specs = call.theirs(root=call.root), torch.full((4, apart), 7.0), []
    monkeypatch.setattr(peer_specs, "run", lambda one, *given: specs.append(one.spec) or bridge.run(one, *given))
    call.keys["scale"] = memory[:, :6].T
    for_vllm.rms_norm_per_block_quant(**call.keys)
    assert same(call.written({name: as_numpy(call.keys[name]) for name in ("result", "scale")}), wanted)
    assert (memory[:, 6:] == 7).all()
    assert [dict(spec.chosen).get("scale_layout", "rows") for spec in specs] == [layout]


@pytest.mark.parametrize(("name", "added"), CASES)
def test_rows_of_three_dimensions_and_a_compiled_call(name: str, added: bool) -> None:
    call = Called(name, added)
    wanted = call.ours()
    torch._dynamo.reset()
    function = getattr(for_vllm if call.vllm else for_flashinfer, call.operator)
    if name in ("fused_add_rmsnorm_quant", "rms_norm_per_block_quant"):
        assert same(call.ours(torch.compile(function, backend="aot_eager", fullgraph=True)), wanted)
    for key in ("result", "out", "input", "residual"):
        if call.keys.get(key) is not None:
            call.keys[key] = call.keys[key].reshape(2, 4, -1)
    assert same(call.ours(), wanted)


def test_a_dtype_that_the_operator_has_not() -> None:
    for name, dtype in (("rms_norm_static_fp8_quant", INT8), ("rms_norm_dynamic_per_token_quant", torch.bfloat16)):
        with pytest.raises(NotImplementedError, match=f'"{name}" not implemented for .*; pass a result of'):
            Called(name, False, dtype=dtype).ours()


# ---- the page ----

PAGE = (ROOT / "lngen" / "docs" / "quantised.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\w+) \| `(\w+)`(, int8)? \| `(.*?)` \| (.*? %) \| (.*? %) \| (.*? %) \|", PAGE, re.MULTILINE)


def test_the_page_has_the_table() -> None:
    assert {operator + word: keys for _, operator, word, keys, *_ in ROWS} == SPECS
    for peer, operator, *_ in ROWS:
        assert hasattr({"vLLM": for_vllm, "FlashInfer": for_flashinfer}[peer], operator)


def off(units: int) -> Any:
    """A reciprocal root that is so many units in the last place off, as CUDA's may be."""
    return lambda x, eps: (peer_models.exact(x, eps).view(np.int32) + units).view(np.float32)


@pytest.mark.parametrize(
    "row", [ROWS[3], *(pytest.param(r, marks=pytest.mark.full(sample=False)) for r in ROWS if r != ROWS[3])]
)
def test_the_page_has_the_shares_of_bytes_that_differ(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of q, for 256 rows of 4096: the larger one, where an operator takes a residual or not."""
    _, operator, word, keys, *said = row
    name = operator + word
    calls = [Called(name, added, 256, 4096) for added in (False, True) if (name, added) in CASES]
    models = [[call.theirs()[0], call.theirs(root=off(2))[0], call.theirs(root=off(-2))[0]] for call in calls]
    ours = [call.ours()[0] for call in calls]
    graph, _, rest = keys.partition(":")
    scales = [key for key in rest.split(",") if key.startswith("scales=")]
    monkeypatch.setitem(SPECS, name, f"{graph}:{','.join(scales)}")  # type: ignore[arg-type]
    default = [call.ours()[0] for call in calls]
    shares = [
        max(differing(q, exact) for q, (exact, *_) in zip(ours, models, strict=True)),
        max(differing(q, other) for q, (_, *others) in zip(ours, models, strict=True) for other in others),
        max(differing(q, exact) for q, (exact, *_) in zip(default, models, strict=True)),
    ]
    assert said == [f"{100 * share:.2g} %" for share in shares]


def differing(found: Any, wanted: Any) -> float:
    return float((found.view(np.uint8) != wanted.view(np.uint8)).mean())
