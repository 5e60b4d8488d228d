"""Measure the host time of lngen.torch beside PyTorch's norms, on a GPU; without one, on a driver that does nothing.

    python tests/proof/torch_record.py [--out generated/bench/h100-torch-host.txt]

Calls are issued in batches too short to fill the launch queue, after each of which the GPU is awaited; interleaved,
medians of 21 batches, in microseconds a call. ``native`` is lngen with its extension, which is built if it can be, and
``python`` an autograd.Function that allocates the same and launches nothing. Without a GPU, PyTorch's column is that of
its CPU kernels and says little.
"""

import argparse
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import lngen.torch as L
from lngen.errors import MissingError
from lngen.lab.bench.host_time import host_times
from lngen.launch import direct

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

ROWS, DEPTH = 16, 24
Calls = dict[str, Callable[[], object]]
EPS = {"lngen": 1e-5, "native": 2e-5}  # so that their calls are unlike each other


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w, torch.empty_like(w))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(w), torch.empty_like(w) if ctx.needs_input_grad[2] else None


def nothing(x: torch.Tensor, shape: Any, w: torch.Tensor, b: Any = None) -> torch.Tensor:
    """A norm that launches nothing."""
    result: torch.Tensor = Nothing.apply(x, w, b)
    return result


def calls_of(d: int, device: str) -> dict[str, Calls]:
    """By what is timed: a call of lngen.torch, and PyTorch's for the same."""
    x, w, b = (torch.randn(*shape, d, dtype=torch.bfloat16, device=device) for shape in ((ROWS,), (), ()))
    xg, wg, bg = (t.clone().requires_grad_() for t in (x, w, b))
    dy, out = torch.randn_like(x), torch.empty_like(x)

    def inferred(norm: Callable[..., Any], *args: Any) -> Callable[[], object]:
        return lambda: norm(x, (d,), *args)

    def saved(norm: Callable[..., Any], *args: Any) -> Callable[[], object]:
        return lambda: norm(xg, (d,), *args)

    def trained(norm: Callable[..., Any], *args: Any) -> Callable[[], object]:
        given = [xg, *(t for t in args if isinstance(t, torch.Tensor))]
        return lambda: torch.autograd.grad(norm(xg, (d,), *args), given, dy)

    def chained(norm: Callable[..., Any], *args: Any) -> Callable[[], object]:
        def call() -> object:
            h = xg
            for _ in range(DEPTH):
                h = norm(h, (d,), *args)
            return torch.autograd.grad(h, xg, dy)

        return call

    found: dict[str, Calls] = {}
    for name, ours, theirs, plain, differentiable in (
        ("layer_norm", L.layer_norm, F.layer_norm, (w, b), (wg, bg)),
        ("rms_norm", L.rms_norm, F.rms_norm, (w,), (wg,)),
    ):
        own = {n: partial(ours, eps=eps) for n, eps in EPS.items()}
        both = {**own, "torch": partial(theirs, eps=1e-5)}
        every = {**both, "python": nothing}
        found[f"{name}, no gradients"] = {n: inferred(norm, *plain) for n, norm in both.items()}
        written = {"lngen": partial(own["lngen"], out=out), "torch": both["torch"]}
        found[f"{name}, out= (beside torch without)"] = {n: inferred(norm, *plain) for n, norm in written.items()}
        for what, way in (
            ("forward that saves", saved),
            ("forward and backward", trained),
            (f"{DEPTH} in a row, forward and backward", chained),
        ):
            found[f"{name}, {what}"] = {n: way(norm, *differentiable) for n, norm in every.items()}
    return found


def prepared(calls: Calls, native: Any) -> Calls:
    """The calls that can be timed, each called once: only that of the extension is prepared for it."""
    known = {name: call for name, call in calls.items() if native or name != "native"}
    for name, call in known.items():
        direct.native = native if name == "native" else None
        call()
    return known


def on_nothing(stack: ExitStack) -> None:
    """CPU tensors pass for those of a GPU, whose launches do nothing."""
    import pytest

    from direct_tensors import go_the_direct_way

    monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
    go_the_direct_way(monkeypatch, launches=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--d", type=int, default=1024)
    args = parser.parse_args()
    real = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if real else "a driver that does nothing"
    lines = [f"python tests/proof/torch_record.py: {where}, {platform.machine()}, torch {torch.__version__}"]
    lines += [f"bf16, {ROWS} x {args.d}, microseconds a call, p10 and p90 in brackets"]
    with ExitStack() as stack:
        if not real:
            on_nothing(stack)
        wait = torch.cuda.synchronize if real else lambda: None
        try:
            L.use_extension()
        except MissingError as error:
            print(error, file=sys.stderr)
        native = direct.native
        for what, calls in calls_of(args.d, "cuda" if real else "cpu").items():
            found = host_times(prepared(calls, native), wait, count=20 if "in a row" in what else 200)
            times = [
                f"{n} {s.median:.1f} ({s.p10:.1f}, {s.p90:.1f})" for n, s in found.items() if not isinstance(s, str)
            ]
            times += [f"{n}: {s}" for n, s in found.items() if isinstance(s, str)]
            a, b, c = (getattr(found.get(n), "median", float("nan")) for n in ("lngen", "native", "torch"))
            lines.append(f"{what:<48} {'; '.join(times)}; ratio {a / c:.2f}, native {b / c:.2f}")
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
