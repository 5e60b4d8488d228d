"""The arguments of a kernel: tensors with their row strides, and buffers of the workspace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from lngen.ir import WIDE, DType, Value
from lngen.ir.op import ctype
from lngen.lower.parts import Argument

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
