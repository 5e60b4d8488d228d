"""The arguments of kernels: pointers, rows and the distances between them, numbers by value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from lngen.compiler.ir import WIDE, ByValue, DType, Value, ctype, is_of_set, is_of_table
from lngen.compiler.lower.cuda.fragments import c_name
from lngen.compiler.passes import accumulated


@dataclass(frozen=True)
class Argument:
    """A kernel argument. ``kind``: rows, input, output, workspace (pointers), stride (of ``tensor``, in elements).

    Rows at two distances have two more kinds: ``inner`` is the number of rows that are ``stride`` apart, and
    ``outer_stride`` the distance of a row from the one ``inner`` rows before it. An [N, D] tensor, whose sets have
    ``inner`` rows, has the latter alone. So has a tensor that is stored by columns: ``column_stride``, and ``padded``,
    the number of rows with the zeros behind them. ``table_stride`` is the distance of the rows of an [M, E] input, or
    of a table. Or value: the number ``tensor`` of the graph itself, which follows
    from eps.

    ``alone``: no other pointer of the kernel reaches the same memory, if one of them writes to it.
    """

    name: str
    ctype: str
    kind: str
    tensor: str = ""
    const: bool = False
    alone: bool = True


ROWS = Argument("rows_", "long long", "rows")
INNER = Argument("inner_", "long long", "inner")


def tensors(
    values: Iterable[Value],
    kind: Literal["input", "output"],
    handed: tuple[Value, ...] = (),
    results: tuple[Value, ...] = (),
) -> list[Argument]:
    """A pointer for each value, and its distances: of rows, columns or sets; the value itself if it is passed so.

    Values in ``handed`` go from one kernel to the next and are in the workspace. Inputs in ``results`` are those of an
    earlier kernel.
    """
    arguments = []
    for v in values:
        if isinstance(v, ByValue):
            arguments.append(Argument(c_name(v), ctype(v.type.dtype), "value", v.name))
            continue
        where = "workspace" if v in handed else "output" if v in results else kind
        arguments.append(Argument(f"{v.name}_ptr_", ctype(v.type.dtype), where, v.name, const=kind == "input"))
        if v.type.axes == WIDE:
            arguments.append(Argument(f"{v.name}_stride_", "long long", "stride", v.name))
        if is_of_table(v):
            arguments.append(Argument(f"{v.name}_stride_", "long long", "table_stride", v.name))
        if v.type.by_columns:
            arguments.append(Argument(f"{v.name}_stride_", "long long", "column_stride", v.name))
            arguments.append(Argument(f"{v.name}_padded_", "long long", "padded", v.name))
        if is_of_set(v) and where != "workspace":
            arguments.append(Argument(f"{v.name}_outer_", "long long", "outer_stride", v.name))
    return arguments


def workspace(name: str, dtype: DType, const: bool = False) -> Argument:
    """A pointer to the buffer ``name``, which ends in an underscore."""
    return Argument(name, ctype(dtype), "workspace", name, const)


def sharing(arguments: Iterable[Argument]) -> tuple[Argument, ...]:
    """The arguments, of which those that may be one array are not ``alone``.

    An [M, D] result may overwrite an [M, D] input, and a result that is added to an input may overwrite that.
    """
    arguments = tuple(arguments)
    read, written = ({a.tensor for a in arguments if a.kind == kind} for kind in ("input", "output"))
    wide = {a.tensor for a in arguments if a.kind == "stride"}
    pairs = {(i, o) for o in written for i in read if {i, o} <= wide or i == accumulated(o)}
    shared = {name for pair in pairs for name in pair}
    return tuple(replace(a, alone=False) if a.tensor in shared and a.kind != "stride" else a for a in arguments)


def at_two_distances(arguments: Iterable[Argument]) -> tuple[Argument, ...]:
    """The arguments of a kernel whose rows lie at two distances: an outer stride before each stride, and ``inner``."""
    listed = tuple(
        one
        for a in arguments
        for one in (replace(a, name=f"{a.tensor}_outer_", kind="outer_stride"), a)
        if a.kind == "stride" or one is a
    )
    return INNER, *listed
