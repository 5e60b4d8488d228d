"""The kernels of a spec on tensors: those of a GPU are launched on, those of the CPU run the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import ml_dtypes
import numpy as np
import torch

from lngen.compiler.spec import Spec, parse_spec
from lngen.errors import ArrayError, LngenError
from lngen.launch.array_rules import Sets, check_table
from lngen.launch.direct import TO_TORCH
from lngen.launch.runtime.direction import Call
from lngen.launch.signature import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

FROM_TORCH = {own: dtype for dtype, own in TO_TORCH.items()}


class TorchError(LngenError, RuntimeError):
    """What PyTorch reports as a RuntimeError, with lngen's sentence."""


class TorchValueError(TorchError, ValueError):
    """What PyTorch reports as a ValueError."""


class TorchTypeError(TorchError, TypeError):
    """What PyTorch reports as a TypeError."""


class TorchMissing(TorchError, NotImplementedError):
    """What PyTorch reports as a NotImplementedError, such as a dtype without a kernel."""


def shown(dtype: torch.dtype) -> str:
    """PyTorch's word for a dtype in its errors: Float, Long."""
    word: str = torch.empty(0, dtype=dtype, device="cpu").type()
    return word.removeprefix("torch.").removesuffix("Tensor")


def constant(function: Function) -> Function:
    """A function of plain data, called once for the same; where Dynamo traces, its result is a constant."""
    known = cache(function)

    found: Any = lambda *given: known(*given)  # noqa: E731
    # What torch.compiler.assume_constant_result does after it has imported Dynamo, which takes a second.
    found._dynamo_marked_constant = True
    return cast(Function, found)


class Side(NamedTuple):
    """One direction of a norm.

    names      of the tensors that it takes, in order
    takes_eps  whether a number that every call gives is among them
    returns    the result that holds each gradient of a backward, by the number of the result
    """

    spec: Spec
    call: Call
    names: tuple[str, ...]
    takes_eps: bool
    returns: tuple[int, ...]

    @property
    def results(self) -> tuple[Tensor, ...]:
        """What the kernels write."""
        return self.call.outputs


SPECS: dict[str, Spec] = {}  # by text, which does not say what a program's own graph is


def text_of(spec: Spec) -> str:
    """The text of a spec, which ``side`` knows from now on."""
    SPECS.setdefault(str(spec), spec)
    return str(spec)


@cache
def side(text: str) -> Side:
    """The kernels of a spec; LngenError if it is none."""
    spec = SPECS.get(text) or parse_spec(text)
    call = Call(spec, "")
    return Side(spec, call, tuple(t.name for t in call.inputs), bool(call.signature.numbers), call.signature.held)


def leading_of(one: Side, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], Sets | None]:
    """The leading dimensions of a call, and its sets of rows; TorchError for a tensor whose shape does not fit."""
    call, d = one.call, one.spec.d
    try:
        lead = call.lead([t.shape for t in tensors])
        sets = Sets.among([(v, t.shape) for v, t in zip(call.inputs, tensors, strict=True)], lead, d)
        for value, tensor in zip(call.inputs, tensors, strict=True):
            if value.by_position:
                check_table(value, tensor.shape)
    except ArrayError as error:
        raise TorchError(str(error)) from error
    for value, tensor in zip(call.inputs, tensors, strict=True):
        if not (value.of_sets or value.by_position) and tensor.shape != (expected := value.shape(lead, d)):
            raise TorchError(
                f"'{value.name}' is expected to have shape {list(expected)}, got {list(tensor.shape)}; leading "
                f"dimensions are those of '{call.inputs[call.leader].name}'."
            )
    return lead, sets


def _shape(value: Tensor, lead: tuple[int, ...], sets: Sets | None, d: int) -> tuple[int, ...]:
    return value.shape(lead, d, sets.lead if sets else 0)


def _flat(tensor: torch.Tensor, value: Tensor, rows: int, d: int) -> torch.Tensor:
    """A tensor with its rows in one dimension, whose elements are neighbours."""
    tensor = tensor.detach() if value.by_position else tensor.detach().reshape(value.shape(rows, d))
    return tensor if not value.axes or tensor.stride(-1) == 1 else tensor.contiguous()


def _in_sets(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a call that has sets of rows, whose dimensions say what a set is: its rows lie at two distances."""
    tensor = tensor.detach()
    return tensor if tensor.dim() <= 3 and tensor.stride(-1) == 1 else tensor.contiguous()


def run(
    one: Side, tensors: Sequence[torch.Tensor], eps: float, out: Sequence[torch.Tensor | None] = ()
) -> list[torch.Tensor]:
    """The results, new (None) or in ``out``, which are [M, D] tensors and may be the inputs.

    Rows may lie anywhere. TorchError for shapes that do not fit, ArrayError for what kernels cannot write to.
    """
    d, (lead, sets) = one.spec.d, leading_of(one, tensors)
    flat: list[Any] = [
        _in_sets(tensor) if sets and value.axes else _flat(tensor, value, math.prod(lead), d)
        for tensor, value in zip(tensors, one.call.inputs, strict=True)
    ]
    written: list[Any] = [t if t is None else t.detach() for t in out]
    if flat[0].device.type == "cpu":
        one.call.compilation.warn()
        flat, written = [_to_numpy(t) for t in flat], [t if t is None else _to_numpy(t) for t in written]
    values = one.call.values(eps if one.takes_eps else None)
    results, _ = one.call(one.call.arrange(flat, {}), tuple(written) or None, values)
    return [_to_torch(r, _shape(v, lead, sets, d)) for r, v in zip(results, one.results, strict=True)]


def like(one: Side, tensors: Sequence[torch.Tensor], eps: float) -> list[torch.Tensor]:
    """Results without content, for tensors that have none."""
    leading_of(one, tensors)  # refuses shapes
    made = zip(one.results, one.call.made([t.shape for t in tensors]), strict=True)
    return [tensors[0].new_empty_strided(shape, steps, dtype=TO_TORCH[v.dtype]) for v, (shape, steps) in made]


# PyTorch's dtypes that NumPy lacks, as those of ml_dtypes and as PyTorch's whole numbers of the same bits.
LACKED = {
    torch.bfloat16: (ml_dtypes.bfloat16, torch.int16),
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, torch.int8),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, torch.int8),
}


def _to_numpy(tensor: torch.Tensor) -> Any:
    """A view by DLPack: Tensor.numpy() would forbid to resize the storage, which FSDP does."""
    if tensor.dtype in LACKED:
        own, whole = LACKED[tensor.dtype]
        return np.from_dlpack(tensor.view(whole)).view(own)
    return np.from_dlpack(tensor)


def _to_torch(array: Any, shape: Sequence[int]) -> Any:
    """A tensor that autograd takes for no view, so that it can be modified in place."""
    if isinstance(array, np.ndarray):
        to = next((t for t, (own, _) in LACKED.items() if array.dtype == own), None)
        array = torch.from_numpy(array if to is None else array.view(f"i{array.itemsize}"))
        array = array if to is None else array.view(to).clone()
    if not array.numel():
        return array.new_empty(shape)  # an array without elements has any strides
    return torch.ops.aten._unsafe_view(array, shape)
