"""The arguments of a kernel: tensors with their row strides, and buffers of the workspace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from lngen.ir import WIDE, DType, Value, ctype
from lngen.lower.parts import Argument
from lngen.passes import accumulated

ROWS = Argument("rows_", "long long", "rows")


def tensors(
    values: Iterable[Value],
    kind: Literal["input", "output"],
    handed: tuple[Value, ...] = (),
    results: tuple[Value, ...] = (),
) -> list[Argument]:
    """A pointer for each value, and a row stride for each that is [M, D].

    Values in ``handed`` go from one kernel to the next and are in the workspace. Inputs in ``results`` are those of an
    earlier kernel.
    """
    arguments = []
    for v in values:
        where = "workspace" if v in handed else "output" if v in results else kind
        arguments.append(Argument(f"{v.name}_ptr_", ctype(v.type.dtype), where, v.name, const=kind == "input"))
        if v.type.axes == WIDE:
            arguments.append(Argument(f"{v.name}_stride_", "long long", "stride", v.name))
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
