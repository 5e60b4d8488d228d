"""Quantised results of a norm: the keys from ``quant`` on, which say how y becomes q and its scale.

``GraphBuilder.quantise`` writes the equations. The keys change nothing in a backward: its cotangent is that of the
value before it is quantised, and is called dy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lngen.compiler.graphs.graph_builder import APPLY, Chosen, GraphBuilder
from lngen.compiler.ir import D, DType, M, Value
from lngen.compiler.ir.scales import SCALE_MIN
from lngen.dtypes import QUANTISED

FORMATS = tuple(map(str, QUANTISED))

# Each with its default, the words that it takes, and what ``lngen list`` says.
KEYS: Mapping[str, tuple[Chosen, tuple[str, ...], str]] = {
    "quant": ("no", ("no", *FORMATS), "dtype of the results q and q_scale in place of y"),
    "scales": ("row", ("row", "block", "tensor"), "what has a scale of its own; tensor: q_scale is an input"),
    "block_size": ("128", ("16", "32", "64", "128", "256"), "features with one scale, for scales=block"),
    "tensor_scale": ("divide", ("divide", "multiply"), "what the input q_scale does"),
    "apply": ("div", APPLY, "v / s, v * (1 / s) or v * (Q / amax)"),
    "amax_min": (0.0, (), "least amax"),
    "amax_max": (False, (), "whether amax_max, the largest amax, is an input"),
    "scale_min": (SCALE_MIN, (), "least scale"),
    "scale_pow2": ("no", ("no", "up"), "whether a scale is raised to a power of two"),
    "scale_layout": ("rows", ("rows", "columns"), "whether scales of blocks are stored by rows or by columns"),
    "quantised": ("f32", ("f32", "y"), "what is quantised: the value, or y as it is stored"),
    "y": (False, (), "whether y is an output beside q"),
    "amax": (False, (), "whether amax, the larger one of the input amax_in and of |v| over all rows, is an output"),
}
_COMPUTED = ("scales", ("row", "block"))
NEEDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **{key: ("quant", FORMATS) for key in KEYS if key != "quant"},
    **{
        "block_size": ("scales", ("block",)),
        "scale_layout": ("scales", ("block",)),
        "tensor_scale": ("scales", ("tensor",)),
    },
    **{"amax_min": _COMPUTED, "amax_max": _COMPUTED, "scale_min": _COMPUTED, "scale_pow2": _COMPUTED},
}


def returned(b: GraphBuilder, y32: Value) -> None:
    """The output y, or what the keys from ``quant`` on say: q, its scale, and perhaps y."""
    Returned.by_keys(b).write(b, y32)


@dataclass(frozen=True)
class Returned:
    """How a norm returns its value: as y, or quantised, as the keys ``said``."""

    said: Mapping[str, Chosen]

    @classmethod
    def by_keys(cls, b: GraphBuilder) -> Returned:
        """What the keys say; SpecError for those that do not fit together."""
        said = {key: b.option(key, *described, of_forward=True) for key, described in KEYS.items()}
        _check(b, said)
        return cls(said)

    def write(self, b: GraphBuilder, y32: Value, suffix: str = "") -> None:
        """The outputs, whose names end in ``suffix``."""
        if self.said["quant"] == "no":
            b.output(f"y{suffix}", y32)
            return
        rounds, keeps = self.said["quantised"] == "y", self.said["y"]
        y = b.cast(f"y{suffix}", y32, to=b.options.out) if rounds or keeps else y32
        v = b.record("cast", y, to=b.compute) if rounds else y32
        self._quantise(b, v, suffix)
        if keeps:
            b.output(f"y{suffix}", y)
        if self.said["amax"]:
            largest = b.stop_gradient(b.max(b.max(abs(v)), axis=M))
            b.output(f"amax{suffix}", largest.maximum(_number(b, f"amax{suffix}_in")), DType.F32)

    def _quantise(self, b: GraphBuilder, v: Value, suffix: str) -> None:
        said, name, dtype = self.said, f"q{suffix}", DType(str(self.said["quant"]))
        scale = _number(b, f"{name}_scale") if said["scales"] == "tensor" else None
        if scale is not None and said["tensor_scale"] == "multiply":
            b.output(name, v * scale, dtype)
            return
        b.quantise(
            name,
            v,
            dtype,
            scale=scale,
            to=b.axis("B", D / int(said["block_size"])) if said["scales"] == "block" else None,
            apply=str(said["apply"]),
            amax_min=float(said["amax_min"]),
            amax_max=_number(b, f"amax{suffix}_max") if said["amax_max"] else None,
            scale_min=float(said["scale_min"]),
            power_of_two=said["scale_pow2"] == "up",
            by_columns=said["scale_layout"] == "columns",
        )


def _number(b: GraphBuilder, name: str) -> Value:
    """An input of one positive number."""
    return b.input(name, dtype=DType.F32, differentiable=False, positive=True)


def _check(b: GraphBuilder, said: Mapping[str, Chosen]) -> None:
    """SpecError for keys that exclude each other, or a number that no scale has."""
    for key, (other, values) in NEEDS.items():
        if said[key] != KEYS[key][0] and said[other] not in values:
            b.refuse(f"{key} needs {other}={'|'.join(values)}, got {other}={said[other]}; add it, or leave {key} away.")
    if said["apply"] != "div" and said["tensor_scale"] == "multiply":
        b.refuse("tensor_scale=multiply multiplies by q_scale as it is; leave apply away.")
    if said["apply"] == "ratio" and (said["scales"] == "tensor" or said["scale_pow2"] == "up"):
        b.refuse("apply=ratio multiplies by Q / amax, which a given scale or one of two powers is not; use apply=mul.")
    if said["block_size"] == "256" and b.options.dtype.size > 2:
        b.refuse(f"block_size=256 needs a 16-bit dtype, got dtype={b.options.dtype}; use a block_size of 128 at most.")
    if not SCALE_MIN <= float(said["scale_min"]) <= 1:
        b.refuse(f"scale_min is expected to be from 2^-126 to 1, got {said['scale_min']}.")
    if float(said["amax_min"]) < 0:
        b.refuse(f"amax_min is expected to be 0 or more, got {said['amax_min']}.")
