"""RoPE: the planes of each head turned by angles of its position (Su et al., RoFormer, 2021). Forward only.

A table has the cosines and the sines of a position in a row, one for each plane: [M, J] by row, or [P, J] with the
positions of rows, [M]. J repeats along a row: ``D % (width / 2)`` of halves, ``D % width / 2`` of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lngen.compiler.graphs.graph_builder import GraphBuilder
from lngen.compiler.graphs.quantised import returned
from lngen.compiler.ir import D, DType, M, Value
from lngen.compiler.ir.type_rules import PLANES

LARGEST_HEAD = 2**16


def rope(b: GraphBuilder) -> None:
    """y = x * cos + rotate(x) * sin of the first ``rotary`` features of each head; others pass.

    ``rotate=halves`` has plane j of the features j and j + rotary / 2 (NeoX, Llama), ``pairs`` of 2j and 2j + 1
    (GPT-J).
    ``positions=i32|i64``: an input of the position of each row, a row of cos and sin; else these have a row for each.
    ``rotate_in=x`` rounds x, cos, sin, both products and the sum to x's dtype, as PyTorch does one operator at a time
    (Qwen3, Gemma 3 in transformers); ``f32`` rounds once (vLLM, SGLang). ``norm`` rounds the norm
    before the rotation, and y (FlashInfer). cos and sin have no gradient.
    """
    head = int(b.option("head", 128, about="features of a head", whole=True))
    if head % 2 or not 2 <= head <= LARGEST_HEAD:
        b.refuse(f"head is expected to be an even number from 2 to {LARGEST_HEAD}, got {head}.")
    x32 = b.input("x", M, D)
    rotation = Rotation.by_keys(b, head)
    assert rotation is not None
    returned(b, rotation.apply(b, x32))


@dataclass(frozen=True)
class Rotation:
    """A rotation of heads: ``by`` as of ``rotate``, and the numbers of each plane.

    ``entry``: the dtype that x is rounded to before the rotation; ``rounding``: that of each step of the rotation.
    None: no rounding there.
    ``place``: the number of a feature in its head, where not all of a head are turned.
    """

    head: int
    width: int
    by: str
    cos: Value
    sin: Value
    place: Value | None
    entry: DType | None
    rounding: DType | None

    @classmethod
    def by_keys(cls, b: GraphBuilder, head: int, *, needed: bool = True) -> Rotation | None:
        """What the keys say, with the inputs cos, sin and positions; None if it may be left away and is.

        SpecError for keys that exclude each other, or a width whose columns do not repeat along a row.
        """
        ways = PLANES if needed else ("no", *PLANES)
        by = str(b.option("rotate", ways[0], ways, "planes: feature j and the one half of the width on, or neighbours"))
        given = int(b.option("rotary", 0, about="features of a head that are rotated; 0: all", whole=True))
        at = str(b.option("positions", "no", ("no", "i32", "i64"), "dtype of the input that says each row's position"))
        stored = DType(str(b.option("table_dtype", "f32", ("f32", "bf16", "f16"), "dtype of the inputs cos and sin")))
        orders = ("f32", "x") if needed else ("f32", "norm", "x")
        rotate_in = str(b.option("rotate_in", "f32", orders, "what is rounded: y alone, the norm too, or each step"))
        if by == "no":
            if given or at != "no" or stored is not DType.F32 or rotate_in != "f32":
                b.refuse("rotary, positions, table_dtype and rotate_in need rotate=halves|pairs; add it.")
            return None
        width = _width(b, given or head, head, by)
        entry = None if rotate_in == "f32" else b.options.dtype
        rounding = entry if rotate_in == "x" else None
        cos, sin = (_exact(b, v, rounding) for v in _tables(b, width, by, at, stored))
        place = None
        if width < head:
            place = b.cast("place", b.iota("feature", b.axis("F", D % head)), to=b.compute)
        return cls(head, width, by, cos, sin, place, entry, rounding)

    def apply(self, b: GraphBuilder, x: Value) -> Value:
        """The features of each head, rotated."""
        x, cos = _rounded(b, x, self.entry), self.cos
        if self.place is not None:  # others are multiplied by 1, and rotate gives 0 for them
            cos = b.where_gt("factor", float(self.width), self.place, cos, 1.0)
        turned = b.rotate("turned", x, head=self.head, width=self.width, by=self.by)
        y = _rounded(b, x * cos, self.rounding) + _rounded(b, turned * self.sin, self.rounding)
        said = dict(b.options.chosen).get("quant", "no")
        return y if b.options.out is self.rounding and said == "no" else _rounded(b, y, self.rounding)


def _rounded(b: GraphBuilder, x: Value, to: DType | None) -> Value:
    """x rounded to a dtype; x itself if there is none, or if it has it."""
    if to in (None, x.type.dtype):
        return x
    assert to is not None
    return b.record("cast", b.record("cast", x, to=to), to=b.compute)


def _width(b: GraphBuilder, width: int, head: int, by: str) -> int:
    """The width; SpecError for an odd one, one above the head, or one whose columns do not repeat along a row."""
    if width % 2 or not 2 <= width <= head:
        b.refuse(f"rotary is expected to be an even number from 2 to head={head}, got {width}.")
    columns = width if by == "pairs" else width // 2
    if head % columns:
        b.refuse(
            f"rotary={width} of rotate={by} has {columns} columns that repeat along a row, which do not divide "
            f"head={head}; take a width whose {'whole' if by == 'pairs' else 'half'} does."
        )
    return width


def _tables(b: GraphBuilder, width: int, by: str, at: str, stored: DType) -> list[Value]:
    """cos and sin of each plane, for each row; the inputs of these names have them by row or by position."""
    columns = b.axis("J", D % width / 2 if by == "pairs" else D % (width // 2))
    rows = M if at == "no" else b.axis("P", M @ "p")
    tables = [b.param(name, stored, rows, columns) for name in ("cos", "sin")]
    b.constants.update(t.name for t in tables)
    if at == "no":
        return tables
    positions = b.index("positions", M, dtype=at)
    return [b.gather(f"{t.name}_row", t, positions) for t in tables]


def _exact(b: GraphBuilder, stored: Value, rounding: DType | None) -> Value:
    """A number of a table in the compute dtype, first rounded to a dtype that it does not have."""
    name = stored.name.removesuffix("_row")
    exact = b.cast(f"{name}32", stored, to=b.compute)
    if rounding in (None, stored.type.dtype, b.compute):
        return exact
    assert rounding is not None
    return b.cast(f"{name}_rounded32", b.cast(f"{name}_rounded", exact, to=rounding), to=b.compute)
