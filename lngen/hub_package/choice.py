"""The norm of the package that suits a call: by dtypes, length and eps, and by the gradients it needs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from ._lngen import LngenError, Pack, PackNorm, load, short

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}

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
