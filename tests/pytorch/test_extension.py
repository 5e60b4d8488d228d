"""If these fail, the C++ extension of lngen.torch is no good citizen of PyTorch's autograd, leaks, or is built wrongly.

Its bits, and what is not like an earlier call, are tested with those of the direct way in Python (test_direct.py).
"""

import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_direct import CALLS, D, Passing, Seeing, inputs
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import cpp_extension
from torch.utils.checkpoint import checkpoint

import lngen.torch as L
from direct_tensors import forget, go_the_direct_way
from lngen.errors import MissingError
from lngen.launch import direct
from lngen.torch import extension
from native_launches import NativeLaunches, go_native
from torch_calls import same_bits

pytestmark = pytest.mark.full  # a plain run builds nothing


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeLaunches]:
    """The launches of the extension; Python launches nothing."""
    found = go_native(monkeypatch, go_the_direct_way(monkeypatch))
    yield found
    forget()
    assert not found.errors


def norm(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return L.layer_norm(x, (D,), *weights)


def expected_of(call: Callable[[], Any]) -> Any:
    """What the dispatcher's way gives."""
    with Passing():
        return call()


def gradients(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Those of a sum of cubes."""
    return torch.autograd.grad(norm(*given).pow(3).sum(), given)


@pytest.mark.parametrize("name", CALLS)
def test_all_launches_are_those_of_the_extension(native: NativeLaunches, name: str) -> None:
    given = inputs()
    for _ in range(2):
        CALLS[name](*given).pow(2).sum().backward()
        assert native.launched == len(native.gpu.launched) >= 2
    with torch.no_grad():
        CALLS[name](*given)
    assert native.launched == len(native.gpu.launched) >= 5


def test_columns_have_zeros_behind_the_rows(native: NativeLaunches) -> None:
    x, keys = torch.randn(2, 3, 64), {"scales": "block", "block_size": 16, "scale_layout": "columns"}
    wanted = expected_of(lambda: L.rms_norm_quant(x, (64,), **keys))
    for _ in range(2):
        _, scale = L.rms_norm_quant(x, (64,), **keys)
        assert torch.equal(scale, wanted[1])
        assert scale.stride() == (3, 1, 8)
        assert not scale.as_strided((4, 2), (8, 1), 6).count_nonzero()
    assert native.launched == 2


def test_what_autograds_threads_exclude_is_no_mode(native: NativeLaunches) -> None:
    """Those of a GPU leave out keys that no kernel of lngen would see."""
    y = norm(*inputs()[:3])
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)):
        y.backward(torch.ones_like(y))
    assert native.launched == len(native.gpu.launched) == 3


# ---- the graph of gradients ----


def test_hooks_see_and_change_gradients(native: NativeLaunches) -> None:
    x, w, b, _ = inputs()
    seen: list[str] = []

    def call() -> tuple[torch.Tensor, ...]:
        doubled = x * 2
        doubled.register_hook(lambda g: g * 3)
        y = norm(doubled, w, b)
        y.register_hook(lambda g: g + 1)
        y.retain_grad()
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda grads: seen.append("before"))
        y.grad_fn.register_hook(lambda ours, theirs: seen.append("after"))
        found = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        return *found, y

    expected = expected_of(call)
    seen.clear()
    assert same_bits(call(), expected)
    assert seen == ["before", "after"]
    assert norm(x, w, b).grad_fn.name() == "LngenBackward"  # type: ignore[union-attr]


def test_a_graph_is_kept_or_freed(native: NativeLaunches) -> None:
    given = inputs()[:3]
    y = norm(*given)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, given, dy, retain_graph=True)
    assert same_bits(torch.autograd.grad(y, given, dy), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, given, dy)


def test_gradients_accumulate(native: NativeLaunches) -> None:
    x, w, b, _ = inputs()
    for n in (1, 2):
        for y in L.add_layer_norm(x, x, (D,), w, b):  # whose gradients of both are one tensor
            y.sum().backward(retain_graph=True)
        if n == 1:
            first = [t.grad.clone() for t in (x, w)]  # type: ignore[union-attr]
    assert same_bits((x.grad, w.grad), [2 * t for t in first])


def test_a_change_in_place_of_what_is_kept_is_noticed(native: NativeLaunches) -> None:
    x, w, b, r = inputs()
    other = x * 1
    y = norm(other, w, b)
    other.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, h = L.add_rms_norm(x, r, (D,), w)
    h.add_(1)  # an output that backward reads
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_result_can_be_changed_in_place(native: NativeLaunches) -> None:
    given = inputs()[:3]

    def call() -> Any:
        return torch.autograd.grad(norm(*given).mul_(3).pow(2).sum(), given)

    expected = expected_of(call)
    assert same_bits(call(), expected)


def test_hooks_of_saved_tensors_are_called(native: NativeLaunches) -> None:
    given = inputs()[:3]
    expected = expected_of(lambda: gradients(*given))
    packed: list[torch.Size] = []
    with saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):  # type: ignore[func-returns-value]
        y = norm(*given)
    assert packed == [(2, 3, D), (D,), (12,)]
    assert same_bits(torch.autograd.grad(y.pow(3).sum(), given), expected)
    with save_on_cpu():
        y = norm(*given)
    assert same_bits(torch.autograd.grad(y.pow(3).sum(), given), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(native: NativeLaunches, reentrant: bool) -> None:
    given = inputs()[:3]
    expected = expected_of(lambda: gradients(*given))
    y = checkpoint(norm, *given, use_reentrant=reentrant)
    y.pow(3).sum().backward()
    assert same_bits([t.grad for t in given], expected)


def test_modes_and_batches_in_backward_go_another_way(native: NativeLaunches) -> None:
    given = inputs()[:3]
    y = norm(*given)
    before = native.launched
    with Seeing() as mode:  # before the backward is prepared, and after
        torch.autograd.grad(y, given, torch.ones_like(y), retain_graph=True)
    assert "lngen.layernorm_bwd.default" in mode.seen
    assert native.launched == before
    torch.autograd.grad(y, given, torch.ones_like(y), retain_graph=True)
    with Seeing() as mode:
        torch.autograd.grad(y, given, torch.ones_like(y), retain_graph=True)
    assert "lngen.layernorm_bwd.default" in mode.seen
    batch = torch.randn(2, *y.shape)
    found = torch.autograd.grad(y, given, batch, is_grads_batched=True, retain_graph=True)
    assert native.launched == before + 2  # of the one without a mode
    for one, wanted in zip(found, torch.autograd.grad(y, given, batch[1]), strict=True):
        torch.testing.assert_close(one[1], wanted)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomalies_are_detected(native: NativeLaunches) -> None:
    x, w, b, _ = inputs()
    with torch.autograd.detect_anomaly():
        y = norm(x, w, b)
        with (
            pytest.raises(RuntimeError, match="'LngenBackward' returned nan"),
            pytest.warns(UserWarning, match="Error detected"),
        ):
            y.backward(torch.full_like(y, float("nan")))


def test_many_threads_have_gradients(native: NativeLaunches) -> None:
    given = [tuple((t.detach() + n).requires_grad_() for t in inputs()[:3]) for n in range(3)]
    expected = [expected_of(lambda one=one: gradients(*one)) for one in given]
    with ThreadPoolExecutor(3) as pool:
        for found, wanted in zip(pool.map(lambda one: gradients(*one), given * 2), expected * 2, strict=True):
            assert same_bits(found, wanted)
    y = norm(*given[0]).pow(3).sum()
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda n: torch.autograd.grad(y, given[0], retain_graph=True), range(6)):
            assert same_bits(found, expected[0])


def test_an_error_in_python_reaches_the_caller(native: NativeLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise KeyError("of a test")

    monkeypatch.setattr(direct.Prepared, "kernels_of", fails)
    with pytest.raises(KeyError, match="of a test"):
        gradients(*inputs()[:3])


def test_a_workspace_that_has_to_be_prepared_is_pythons(
    native: NativeLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs()[:3]
    expected = expected_of(lambda: gradients(*given))
    planned = extension.plan_of
    monkeypatch.setattr(extension, "plan_of", lambda kernels: None if kernels.more else planned(kernels))
    for n in (1, 2):
        assert same_bits(gradients(*given), expected)
        assert native.launched == n < len(native.gpu.launched)
    monkeypatch.setattr(extension, "plan_of", lambda kernels: None)
    forget()
    assert same_bits(gradients(*given), expected)
    assert native.launched == 2


def test_inference_mode(native: NativeLaunches) -> None:
    x, w, b, _ = inputs()
    expected = norm(x, w, b)
    for _ in range(2):
        with torch.inference_mode():
            y = norm(x, w, b)
        assert torch.equal(y, expected)
        assert y.is_inference()
        assert not y.requires_grad


# ---- memory ----


def test_what_is_saved_is_freed(native: NativeLaunches) -> None:
    x, w, b, _ = inputs()

    def saved() -> tuple[torch.Tensor, Any]:
        h = x * 2
        return norm(h, w, b), weakref.ref(h)

    gradients(x, w, b)  # what prepares a launch on the fake driver is kept
    for backward in (True, False):
        y, h = saved()
        assert h() is not None
        if backward:
            y.pow(2).sum().backward()
        else:
            del y
        assert h() is None


def test_an_earlier_call_is_freed(native: NativeLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    prepare = direct.native

    def noted(prepared: Any, *kernels: Any) -> Any:
        made.append(weakref.ref(prepared))
        return prepare(prepared, *kernels)  # type: ignore[misc]

    monkeypatch.setattr(direct, "native", noted)
    x, w, b, _ = inputs()
    gradients(x, w, b)
    y = norm(x, w, b)
    direct.forget()
    assert made[0]() is None
    y.pow(2).sum().backward()  # by the call, which its graph keeps


# ---- the build ----


def test_it_is_used_when_asked_for(native: NativeLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "native", None)
    given = [t.detach() for t in inputs()[:3]]
    norm(*given)
    assert not native.launched
    L.use_extension()
    norm(*given)
    assert native.launched


def test_the_build_is_kept(native: NativeLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_build", lambda folder: pytest.fail("a build"))
    assert extension.module.__wrapped__().make


def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """cpp_extension cannot be imported, as without setuptools."""
    monkeypatch.delattr(torch.utils, "cpp_extension")
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)


MISSING: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "compiler": (lambda m: m.setattr(shutil, "which", lambda name: None), r"a C\+\+ compiler \('.*' is not found"),
    "ninja": (lambda m: m.setattr(cpp_extension, "is_ninja_available", lambda: False), r"ninja; .*torch-ext"),
    "headers": (
        lambda m: m.setattr(cpp_extension, "include_paths", lambda: ["/none"]),
        r"headers .* \(/none is missing",
    ),
    "setuptools": (lacking, r"setuptools \("),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_build_says_what_it_lacks(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    remove, words = MISSING[what]
    remove(monkeypatch)
    with pytest.raises(MissingError, match=rf"use_extension\(\) builds a C\+\+ file, for which it needs .*{words}"):
        extension.module.__wrapped__()


def test_a_build_that_fails_shows_the_compilers_words(
    native: NativeLaunches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(extension, "SOURCE", tmp_path / "wrong.cpp")
    extension.SOURCE.write_text("#error of a test\n")
    with pytest.raises(MissingError, match=r"cannot build the extension of lngen.torch(.|\n)*#error of a test"):
        extension.module.__wrapped__()
