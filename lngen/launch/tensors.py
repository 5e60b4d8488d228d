"""The tensors of a kernel set, as its description has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

WIDE = ("M", "D")


class Tensor(NamedTuple):
    """An input or result of a call.

    dtype    f16, bf16, f32 or f64; ``size``: bytes of an element
    axes     ("M", "D"), ("M",) with a number per row, ("D",), or () for one number
    """

    name: str
    dtype: str
    size: int
    axes: tuple[str, ...]

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Tensor:
        """From its description."""
        return cls(described["name"], described["dtype"], described["element_bytes"], tuple(described["axes"]))

    @property
    def wide(self) -> bool:
        """True for [M, D]."""
        return self.axes == WIDE

    def shape(self, rows: int | tuple[int, ...], d: int) -> tuple[int, ...]:
        """The shape of an array with ``rows`` rows, a number or leading dimensions, and D = ``d``."""
        lengths = {"M": rows if isinstance(rows, tuple) else (rows,), "D": (d,)}
        return tuple(n for axis in self.axes for n in lengths[axis])
