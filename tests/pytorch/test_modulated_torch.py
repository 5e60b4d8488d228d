"""If these fail, ``ada_layer_norm`` or ``ada_rms_norm`` is not what PyTorch's own operators say; so its gradients."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
import lngen.torch as L  # noqa: E402

B, T, D = 2, 5, 16
SHAPES = {"sample": (B, D), "kept": (B, 1, D), "row": (B, T, D)}
FUNCTIONS = {"layer": L.ada_layer_norm, "rms": L.ada_rms_norm}


def eager(kind: str, x: Any, shift: Any, scale: Any, gate: Any = None, residual: Any = None, *affine: Any) -> Any:
    """The same in PyTorch's operators."""

    def of_rows(t: Any) -> Any:
        return t if t.dim() == x.dim() else t[:, None]

    h = x if gate is None else x * of_rows(gate)
    h = h if residual is None else h + residual
    functional = torch.nn.functional
    if kind == "rms":
        y = functional.rms_norm(h, x.shape[-1:], *affine, eps=1e-6)
    else:
        y = functional.layer_norm(h, x.shape[-1:], *affine, eps=1e-6)
    y = y * (1 + of_rows(scale)) + of_rows(shift)
    return y if gate is None and residual is None else (y, h)


def arguments(form: str, gated: bool, affine: int, dtype: Any = torch.float64) -> list[Any]:
    torch.manual_seed(49)
    shapes = [(B, T, D), SHAPES[form], SHAPES[form]]
    shapes += [SHAPES[form], (B, T, D)] if gated else []
    made = [torch.randn(*s, dtype=dtype, requires_grad=True) for s in shapes]
    made += [] if gated or not affine else [None, None]
    return [*made, *(torch.randn(D, dtype=dtype, requires_grad=True) for _ in range(affine))]


@pytest.mark.parametrize("affine", [0, 1])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_values_and_gradients(kind: str, form: str, gated: bool, affine: int) -> None:
    function, given = FUNCTIONS[kind], arguments(form, gated, affine and (1 if kind == "rms" else 2))
    found, wanted = function(*given), eager(kind, *given)
    found, wanted = (r if isinstance(r, tuple) else (r,) for r in (found, wanted))
    seeds, leaves = [torch.randn_like(r) for r in wanted], [t for t in given if t is not None]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    pairs = zip(*(torch.autograd.grad(r, leaves, seeds) for r in (found, wanted)), strict=True)
    for a, b in pairs:
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtypes", ["bf16 and bf16", "bf16 and f32", "f16 and f16", "f16 and bf16"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_eager_rounds_where_the_operators_do(kind: str, dtypes: str) -> None:
    """A step of the last place is left, where a sum or a root of the norm differs; ``once`` differs more often."""
    known = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    own, stored = (known[name] for name in dtypes.split(" and "))
    given = [t.detach().to(own if n in (0, 4) else stored) for n, t in enumerate(arguments("kept", True, 0))]
    given = [t.repeat(64, *[1] * (t.dim() - 1)) + torch.randn(64 * B, *[1] * (t.dim() - 1)).to(t.dtype) for t in given]
    wanted = eager(kind, *given)[0].to(own) if stored is own else None
    y, h = FUNCTIONS[kind](*given, casts="eager")
    total = (given[4] + given[3] * given[0]).to(own)
    assert torch.equal(h, total)
    norm = torch.nn.functional.rms_norm if kind == "rms" else torch.nn.functional.layer_norm
    normed = norm(total, total.shape[-1:], eps=1e-6)
    again = (normed * (1 + given[2]) + given[1]).to(own)
    assert wanted is None or torch.equal(again, wanted)
    same = (y == again).double().mean()
    assert same > 0.995
    assert (FUNCTIONS[kind](*given)[0] == again).double().mean() < same - 0.02 * (stored is own)


@pytest.mark.parametrize("form", SHAPES)
def test_second_derivatives(form: str) -> None:
    assert torch.autograd.gradgradcheck(L.ada_layer_norm, arguments(form, True, 0))


@pytest.mark.parametrize("needed", [(1,), (2,), (1, 2), (0,), (3, 4)])
def test_some_gradients(needed: tuple[int, ...]) -> None:
    """Those of shift and scale alone, and of what one output does not reach."""
    given = [t.detach().requires_grad_(n in needed) for n, t in enumerate(arguments("sample", True, 0))]
    leaves = [given[n] for n in needed]
    for output in (0, 1) if 0 in needed or 3 in needed else (0,):
        found, wanted = (
            torch.autograd.grad(r[output].sum(), leaves, allow_unused=True)
            for r in (L.ada_layer_norm(*given), eager("layer", *given))
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_shapes_of_samples_may_differ() -> None:
    """Gradients have the shapes of their inputs, [B, D] and [B, 1, D]."""
    x, shift, scale = (torch.randn(*s, requires_grad=True) for s in ((B, T, D), (B, D), (B, 1, D)))
    found = torch.autograd.grad(L.ada_layer_norm(x, shift, scale).sin().sum(), (x, shift, scale))
    alike = torch.autograd.grad(L.ada_layer_norm(x, shift[:, None], scale).sin().sum(), (x, shift, scale))
    assert all(map(torch.equal, found, alike))


def test_chunks_of_a_projection_beside_bf16() -> None:
    """Six chunks in f32 of [B, 6, D], as Wan has them: nothing is copied, y has the dtype of x."""
    x, table = torch.randn(B, T, D, dtype=torch.bfloat16), torch.randn(B, 6, D)
    y = L.ada_layer_norm(x, table[:, 0], table[:, 1])
    want = eager("layer", x.float(), table[:, 0], table[:, 1]).bfloat16()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, want, rtol=8e-3, atol=8e-3)


def test_tensors_without_content() -> None:
    """Shapes and dtypes of the operator are those of a call."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        given = [torch.empty(s) for s in ((B, T, D), (B, 1, D), (B, 1, D), (B, 1, D), (B, T, D))]
        y, h = L.ada_layer_norm(*given)
    assert y.shape == h.shape == (B, T, D)


def test_no_shift() -> None:
    x, scale = torch.randn(B, T, D), torch.randn(B, D)
    want = torch.nn.functional.rms_norm(x, (D,), eps=1e-6) * (1 + scale[:, None])
    torch.testing.assert_close(L.ada_rms_norm(x, None, scale), want)


def test_modules() -> None:
    """They have the state of torch.nn's, and an affine norm where these have one."""
    torch.manual_seed(1)
    x, shift, scale = torch.randn(B, T, D), torch.randn(B, D), torch.randn(B, D)
    for module, plain, kind in ((L.AdaLayerNorm, torch.nn.LayerNorm, "layer"), (L.AdaRMSNorm, torch.nn.RMSNorm, "rms")):
        own, theirs = module(D, eps=1e-6), plain(D, eps=1e-6)
        with torch.no_grad():
            for p in theirs.parameters():
                p.normal_()
        own.load_state_dict(theirs.state_dict())
        want = eager(kind, x, shift, scale, None, None, *theirs.parameters())
        torch.testing.assert_close(own(x, shift, scale), want)


REFUSED = {
    "row for each sample": ((B, T, D), (B + 1, D)),
    "not NoneType": ((B, T, D), None),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit(words: str) -> None:
    of_x, of_scale = REFUSED[words]
    scale = None if of_scale is None else torch.zeros(of_scale)
    with pytest.raises((RuntimeError, TypeError), match=words):
        L.ada_layer_norm(torch.zeros(of_x), torch.zeros(B, D), scale)
