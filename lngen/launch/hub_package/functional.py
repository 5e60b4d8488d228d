"""LayerNorm and RMSNorm on tensors of a GPU, differentiable; and the norm of the package that suits a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from torch.autograd.function import once_differentiable

from ._lngen import FLOATS, LngenError, Pack, PackNorm, Saved, load, short

# The order of roundings of an RMSNorm, the preferred one first; with f32 inputs they are the same.
ONCE = ("once", "llama")  # y is rounded once, as in torch.nn.RMSNorm
LLAMA = ("llama", "once")  # before and after the weight, as in transformers' LlamaRMSNorm

ALIGNMENT = 16  # bytes; the address of a tensor that every kernel takes

Shape = Union[int, Sequence[int]]


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Shape,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """LayerNorm of the last dimensions of ``x``, as torch.nn.functional.layer_norm.

    LngenError if the package has no kernel for these dtypes, this length and this eps; it names the command that
    builds it.
    """
    return _normalised("layernorm", x, normalized_shape, {"gamma": weight, "beta": bias}, eps, ("once",))


def rms_norm(
    x: torch.Tensor,
    normalized_shape: Shape,
    weight: Optional[torch.Tensor] = None,
    eps: Optional[float] = None,
    casts: Sequence[str] = ONCE,
) -> torch.Tensor:
    """RMSNorm of the last dimensions of ``x``, as torch.nn.functional.rms_norm; without eps it is that of torch.

    ``casts``: orders of roundings, of which the first is taken that the package has. LngenError as in ``layer_norm``.
    """
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return _normalised("rmsnorm", x, normalized_shape, {"gamma": weight}, eps, tuple(casts))


def norm(graph: str, **keys: Any) -> PackNorm:
    """A norm of the package: ``y, saved = norm("rmsnorm", d=4096, dtype=x.dtype).forward(x, weight)``.

    ``graph`` is the name of a graph, with keys of its spec, or a whole forward spec. Its backward is
    ``dx, dgamma = norm(...).backward(dy, saved)``.
    """
    return pack().norm(graph, **keys)


def _normalised(
    graph: str,
    x: torch.Tensor,
    shape: Shape,
    weights: Mapping[str, Optional[torch.Tensor]],
    eps: float,
    casts: tuple[str, ...],
) -> torch.Tensor:
    """The norm of the last dimensions of x, of which ``shape`` has the lengths."""
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    given = {name: a for name, a in weights.items() if a is not None}
    for name, a in {"x": x, **given}.items():
        there = tuple(a.shape[-len(dims) :] if name == "x" else a.shape)
        if not dims or there != dims:
            raise LngenError(f"'{name}' is expected to have the last dimensions {dims}, got shape {tuple(a.shape)}.")
    if len(dims) > 1:
        given = {name: a.reshape(-1) for name, a in given.items()}
        y = _normalised(graph, x.flatten(-len(dims)), math.prod(dims), given, eps, casts)
        return y.reshape(x.shape)
    dtypes = tuple([a.dtype for a in given.values()])
    needed: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        needed = tuple([name for name, a in (("x", x), *given.items()) if a.requires_grad])
    found = chosen(Wanted(graph, dims[0], x.dtype, tuple(given), dtypes, float(eps), casts, needed))
    if needed:
        result: torch.Tensor = _Normalised.apply(found, x, *given.values())
        return result
    return found.norm.forward(*map(_suited, (x, *given.values())), eps=found.eps)[0]


class _Normalised(torch.autograd.Function):  # type: ignore[misc]
    """A norm whose backward is that of the package."""

    @staticmethod
    def forward(ctx: Any, found: Chosen, *inputs: torch.Tensor) -> torch.Tensor:
        y, saved = found.norm.forward(*map(_suited, inputs), eps=found.eps)
        ctx.found = found
        ctx.save_for_backward(*[saved[name] for name in found.reads])
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        found: Chosen = ctx.found
        saved = Saved(found.norm.spec, found.reads, ctx.saved_tensors, found.eps)
        gradients = dict(zip(found.wrt, found.norm.backward(_suited(dy), saved)))
        wanted = zip(found.inputs, ctx.needs_input_grad[1:])
        return (None, *[gradients[name] if needed else None for name, needed in wanted])


def _suited(a: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if not every kernel takes it as it lies."""
    if a.is_contiguous() and a.data_ptr() % ALIGNMENT == 0:
        return a
    return a.clone(memory_format=torch.contiguous_format)


# ---- which norm: by dtypes, length and eps, and by the gradients that are needed ----

DTYPES = {getattr(torch, t.library): t.value for t in FLOATS}

WEIGHTS = {"layernorm": ("gamma", "beta"), "rmsnorm": ("gamma",)}  # the inputs of a graph by default, besides x
DEFAULT_EPS = 1e-5
RUN = "run"  # eps of a spec that takes it in every call

MOST_NAMED = 8  # specs in a message


class Wanted(NamedTuple):
    """What a call needs.

    dtype    of x; ``weights``: the names of the other inputs, ``dtypes``: theirs
    casts    orders of roundings, the preferred one first
    wrt      the inputs whose gradients are needed
    """

    graph: str
    d: int
    dtype: Any
    weights: tuple[str, ...]
    dtypes: tuple[Any, ...]
    eps: float
    casts: tuple[str, ...]
    wrt: tuple[str, ...]


class Chosen(NamedTuple):
    """A norm for a call.

    eps      to be passed in every call, None if it is built in
    inputs   of forward; ``reads``: what backward needs of forward; ``wrt``: the gradients that it returns, in order
    """

    norm: PackNorm
    eps: Optional[float]
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    wrt: tuple[str, ...]


@functools.lru_cache(maxsize=None)
def pack() -> Pack:
    """The kernels of the package."""
    return load(Path(__file__).parent / "pack")


@functools.lru_cache(maxsize=4096)
def chosen(wanted: Wanted) -> Chosen:
    """The norm for a call; LngenError, with the command that builds it, if the package has none."""
    _check(wanted)
    specs = {text: pack().described(text)["spec"] for text in pack().specs}
    forwards = [text for text, spec in specs.items() if _fits(spec, wanted)]
    if not forwards:
        raise LngenError(_missing(wanted, specs, "fwd"))
    text = min(forwards, key=lambda t: _rank(specs[t], wanted))
    eps = wanted.eps if specs[text]["eps"] == RUN else None
    inputs = tuple(specs[text]["inputs"])
    if not wanted.wrt:
        return Chosen(PackNorm(pack(), text, None), eps, inputs, (), ())
    backwards = [t for t, spec in specs.items() if _differentiates(spec, text, wanted)]
    if not backwards:
        raise LngenError(_missing(wanted, specs, "bwd"))
    backward = min(backwards, key=lambda t: (len(specs[t]["wrt"]), len(t), t))
    cotangents = [f"d{name}" for name in specs[backward]["of"]]
    named = [t["name"] for t in pack().described(backward)["tensors"] if t["role"] == "input"]
    reads = tuple([name for name in named if name not in cotangents])
    return Chosen(PackNorm(pack(), text, backward), eps, inputs, reads, tuple(specs[backward]["wrt"]))


def _check(wanted: Wanted) -> None:
    """LngenError for dtypes that no spec has."""
    for name, dtype in zip(("x", *wanted.weights), (wanted.dtype, *wanted.dtypes)):
        if dtype not in DTYPES:
            raise LngenError(f"'{name}' is expected to be one of {', '.join(map(str, DTYPES))}, got {dtype}.")
    if len({*wanted.dtypes}) > 1:
        raise LngenError(f"weight and bias are expected to have one dtype, got {wanted.dtypes[0]}, {wanted.dtypes[1]}.")


def _fits(spec: Mapping[str, Any], wanted: Wanted) -> bool:
    """True for a forward that computes what is wanted."""
    dtype, options = DTYPES[wanted.dtype], spec["options"]
    return (
        spec["direction"] == "fwd"
        and spec["graph"] == wanted.graph
        and spec["d"] == wanted.d
        and spec["dtype"] == spec["out"] == dtype
        and (not wanted.dtypes or spec["weight"] == DTYPES[wanted.dtypes[0]])
        and tuple(spec["inputs"]) == ("x", *wanted.weights)
        and not options.get("zero_centred", False)
        and options.get("casts", "once") in wanted.casts
        and spec["eps"] in (wanted.eps, RUN)
    )


def _rank(spec: Mapping[str, Any], wanted: Wanted) -> tuple[Any, ...]:
    """The order among forwards that fit: roundings, then an eps that is built in."""
    casts = wanted.casts.index(spec["options"].get("casts", "once"))
    return casts, spec["eps"] == RUN, spec["strides"], len(spec["text"]), spec["text"]


def _differentiates(spec: Mapping[str, Any], forward: str, wanted: Wanted) -> bool:
    """True for a backward of a forward that has all the gradients that are wanted."""
    return (
        spec["direction"] == "bwd"
        and spec["forward"] == forward
        and {*wanted.wrt} <= {*spec["wrt"]}
        and spec["of"] == spec["outputs"]
        and not spec["accumulate"]
    )


def _missing(wanted: Wanted, specs: Mapping[str, Any], direction: str) -> str:
    """What is missing, what there is, and the command that builds it."""
    there = [text for text, s in specs.items() if (s["graph"], s["direction"]) == (wanted.graph, direction)]
    listed = ", ".join(there[:MOST_NAMED]) or "none"
    more = f" and {len(there) - MOST_NAMED} more" if len(there) > MOST_NAMED else ""
    arches = sorted({i["arch"] for text in pack().specs for i in pack().dispatch(text)["images"]})
    names = [_text(wanted, d) for d in (("fwd", "bwd") if wanted.wrt else ("fwd",))]
    return (
        f"the package has no kernel of {_text(wanted, direction)}, but {short(listed)}{more}; build it: lngen build "
        f"{' '.join(names)} --arch {','.join(arches)} --layout hf-kernel --out DIR."
    )


def _text(wanted: Wanted, direction: str) -> str:
    """The spec of what is wanted."""
    dtype = DTYPES[wanted.dtype]
    keys = [f"d={wanted.d}", f"dtype={dtype}"]
    keys += [f"weight={DTYPES[t]}" for t in wanted.dtypes[:1] if t != wanted.dtype]
    defaults = WEIGHTS[wanted.graph]
    keys += [f"{name}=no" for name in defaults if name not in wanted.weights]
    keys += [f"{name}=yes" for name in wanted.weights if name not in defaults]
    keys += [f"casts={wanted.casts[0]}"] if wanted.casts[0] != "once" else []
    keys += [f"eps={wanted.eps}"] if wanted.eps != DEFAULT_EPS else []
    return f"{wanted.graph}.{direction}:{','.join(keys)}"
