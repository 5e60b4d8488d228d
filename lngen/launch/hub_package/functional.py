"""LayerNorm and RMSNorm on tensors of a GPU, differentiable; and the norm of the package that suits a call."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from ._lngen import (
    FLOATS,
    NO_VALUES,
    TO_TORCH,
    ArrayCall,
    ArrayError,
    Direct,
    LngenError,
    Pack,
    PackCall,
    PackNorm,
    Values,
    load,
    short,
)

# The order of roundings of an RMSNorm, the preferred one first; with f32 inputs they are the same.
ONCE = ("once", "llama")  # y is rounded once, as in torch.nn.RMSNorm
LLAMA = ("llama", "once")  # before and after the weight, as in transformers' LlamaRMSNorm

ALIGNMENT = 16  # bytes; the address of a tensor that every kernel takes

Shape = Union[int, Sequence[int]]
Weights = Sequence[Optional[torch.Tensor]]


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
    return _normalised(LAYER_NORM, x, normalized_shape, (weight, bias), eps, ("once",))


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
    return _normalised(RMS_NORM, x, normalized_shape, (weight,), eps, tuple(casts))


def norm(graph: str, **keys: Any) -> PackNorm:
    """A norm of the package: ``y, saved = norm("rmsnorm", d=4096, dtype=x.dtype).forward(x, weight)``.

    ``graph`` is the name of a graph, with keys of its spec, or a whole forward spec. Its backward is
    ``dx, dgamma = norm(...).backward(dy, saved)``.
    """
    return pack().norm(graph, **keys)


def _normalised(
    direct: Direct, x: torch.Tensor, shape: Shape, weights: Weights, eps: float, casts: tuple[str, ...]
) -> torch.Tensor:
    """The norm of the last dimensions of x, of which ``shape`` has the lengths."""
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    fixed = dims, eps, casts
    eager = not torch.compiler.is_compiling()
    if eager:
        results = direct((x, *weights, None), fixed)
        if results is not None:
            return results[0]
    given = {name: a for name, a in zip(direct.names, (x, *weights)) if a is not None}
    for name, a in given.items():
        there = tuple(a.shape[-len(dims) :] if name == "x" else a.shape)
        if not dims or there != dims:
            raise LngenError(f"'{name}' is expected to have the last dimensions {dims}, got shape {tuple(a.shape)}.")
    if len(dims) > 1:
        flat = [a if a is None else a.reshape(-1) for a in weights]
        y = _normalised(direct, x.flatten(-len(dims)), math.prod(dims), flat, eps, casts)
        return y.reshape(x.shape)
    needed = ",".join([n for n, a in given.items() if a.requires_grad]) if torch.is_grad_enabled() else ""
    asked = direct.graph, float(eps), ",".join(casts), needed
    if eager:
        results = direct.prepared(lambda known: OfPack(_wanted(known, *asked)), (x, *weights, None), fixed, float(eps))
        if results is not None:
            return results[0]
    result: torch.Tensor = FORWARD(x, weights[0], weights[1] if len(weights) > 1 else None, *asked)[0]
    return result


# ---- operators: for torch.compile, and for tensors that kernels do not take as they lie ----


def _forward(x: Any, weight: Any, bias: Any, graph: str, eps: float, casts: str, wrt: str) -> list[torch.Tensor]:
    """All results of the forward that suits; ``casts`` and ``wrt`` have commas."""
    given = _given(x, weight, bias)
    found = chosen(_wanted(given, graph, eps, casts, wrt))
    return list(found.forward([_suited(a) for a in given.values()], None, found.values)[0])


def _forward_like(x: Any, weight: Any, bias: Any, graph: str, eps: float, casts: str, wrt: str) -> list[torch.Tensor]:
    """The same without content."""
    found = chosen(_wanted(_given(x, weight, bias), graph, eps, casts, wrt))
    return _like(found.forward, x.new_empty, x.shape[:-1])


def _backward(dy: Any, saved: Sequence[Any], spec: str, eps: float) -> list[torch.Tensor]:
    """What the kernels of a backward store, for what they read."""
    call = call_of(spec)
    values = call.values(eps if call.signature.numbers else None)
    return list(call([_suited(a) for a in (dy, *saved)], None, values)[0])


def _backward_like(dy: Any, saved: Sequence[Any], spec: str, eps: float) -> list[torch.Tensor]:
    return _like(call_of(spec), dy.new_empty, dy.shape[:-1])


def _like(call: PackCall, new: Any, lead: Sequence[int]) -> list[torch.Tensor]:
    return [new(t.shape(tuple(lead), call.d), dtype=TO_TORCH[t.dtype]) for t in call.outputs]


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
    """Keep what the backward reads."""
    given = _given(*inputs[:3])
    found = chosen(_wanted(given, *inputs[3:]))
    known = {**given, **{t.name: a for t, a in zip(found.forward.outputs, output)}}
    ctx.found, ctx.eps = found, inputs[4]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*[known[name] for name in found.reads])


def _differentiate(ctx: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    found: dict[str, Any] = {}
    if cotangents[0] is not None and ctx.found.backward is not None:
        found = gradients_of(ctx.found.backward, ctx.eps, cotangents[0], ctx.saved_tensors)
    needed = [found.get(name) if wanted else None for name, wanted in zip(NAMES, ctx.needs_input_grad)]
    return (*needed, None, None, None, None)


def _twice(ctx: Any, *gradients: Any) -> None:
    raise LngenError("a norm of the package has no second derivative; leave out create_graph=True.")


def gradients_of(call: PackCall, eps: float, dy: Any, saved: Sequence[Any]) -> dict[str, Any]:
    """Gradients by the names of the inputs, by the operator."""
    stored = BACKWARD(dy, list(saved), call.text, eps)
    return {name[1:]: stored[n] for name, n in zip(call.signature.returned, call.signature.held)}


def _given(*tensors: Any) -> dict[str, Any]:
    """The tensors that are there, by name."""
    return {name: a for name, a in zip(NAMES, tensors) if a is not None}


def _defined(schema: str, kernel: Any, like: Any) -> Any:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):  # those of the CPU are refused, by lngen
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", like, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


NAMES = ("x", "gamma", "beta")
NAMESPACE = re.sub(r"\W", "_", __package__ or __name__)
LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # the operators live as long as this
FORWARD = _defined(
    "norm(Tensor x, Tensor? weight, Tensor? bias, str graph, float eps, str casts, str wrt) -> Tensor[]",
    _forward,
    _forward_like,
)
BACKWARD = _defined(
    "norm_backward(Tensor dy, Tensor[] saved, str spec, float eps) -> Tensor[]", _backward, _backward_like
)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(BACKWARD, _twice, lib=LIBRARY)


# ---- the direct way ----


class OfPack:
    """The kernels of the package for a call, as the direct way takes them."""

    def __init__(self, wanted: Wanted) -> None:
        self._found = chosen(wanted)
        self.forward: ArrayCall = self._found.forward
        self.alone: ArrayCall = self.forward

    def backward(self, wrt: tuple[str, ...]) -> ArrayCall:
        """Gradients of these inputs, and perhaps of others."""
        assert self._found.backward is not None
        return self._found.backward

    def gradients(
        self,
        wrt: tuple[str, ...],
        eps: float,
        cotangents: Sequence[Optional[torch.Tensor]],
        saved: Mapping[str, torch.Tensor],
    ) -> Mapping[str, Optional[torch.Tensor]]:
        """The same by the operator."""
        if cotangents[0] is None or self._found.backward is None:
            return {}
        found = gradients_of(self._found.backward, eps, cotangents[0], [saved[name] for name in self._found.reads])
        return {name: found[name] for name in wrt}


class _Direct(Direct):
    """Tensors that kernels do not take as they lie go to the operator, which copies them."""

    retry = (ArrayError,)


LAYER_NORM, RMS_NORM = _Direct("layernorm", NAMES), _Direct("rmsnorm", NAMES[:2])


def _suited(a: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if not every kernel takes it as it lies."""
    if a.is_contiguous() and a.data_ptr() % ALIGNMENT == 0:
        return a
    return a.clone(memory_format=torch.contiguous_format)


# ---- which norm: by dtypes, length and eps, and by the gradients that are needed ----

DTYPES = {TO_TORCH[t.value]: t.value for t in FLOATS}

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
    """The kernels for a call; backward is None if no gradient is needed.

    values   the numbers that forward is given; ``reads``: what backward reads besides the cotangent
    """

    forward: PackCall
    backward: Optional[PackCall]
    values: Values
    reads: tuple[str, ...]


def _wanted(given: Mapping[str, Any], graph: str, eps: float, casts: str, wrt: str) -> Wanted:
    """What a call of these tensors needs; ``casts`` and ``wrt`` have commas."""
    weights = {name: a.dtype for name, a in given.items() if name != "x"}
    orders, needed = (tuple([part for part in text.split(",") if part]) for text in (casts, wrt))
    x = given["x"]
    return Wanted(graph, x.shape[-1], x.dtype, tuple(weights), tuple(weights.values()), eps, orders, needed)


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
    forward = call_of(text)
    values = forward.values(wanted.eps) if forward.signature.numbers else NO_VALUES
    if not wanted.wrt:
        return Chosen(forward, None, values, ())
    backwards = [t for t, spec in specs.items() if _differentiates(spec, text, wanted)]
    if not backwards:
        raise LngenError(_missing(wanted, specs, "bwd"))
    backward = call_of(min(backwards, key=lambda t: (len(specs[t]["wrt"]), len(t), t)))
    cotangents = backward.signature.cotangents
    return Chosen(forward, backward, values, tuple([t.name for t in backward.inputs if t.name not in cotangents]))


@functools.lru_cache(maxsize=None)
def call_of(spec: str) -> PackCall:
    """The kernels of a spec of the package."""
    return PackCall(pack(), spec)


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
