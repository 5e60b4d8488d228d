"""The direct way: a call that is like an earlier one in all but addresses launches at once, past PyTorch's dispatcher.

The dispatcher's way through Python takes tens of microseconds. This one is for plain tensors and parameters of a GPU. A
guard that PyTorch has for torch.compile compares types, dtypes, shapes, strides, devices and dispatch keys with those
of the earlier call; so it also notices modes, autocast and torch.func. Every call that it does not recognise goes the
dispatcher's way, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from lngen.ir import bits_of, values_of
from lngen.launch.arrays import library_of
from lngen.torch.bridge import PLAIN, TO_TORCH, Side, side
from lngen.torch.graph_ops import GraphOps, backward_text

MOST = 4096  # earlier calls that a thread remembers for a graph

# Without it every call goes the dispatcher's way.
Guard: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
grad_mode, function_mode = torch.is_grad_enabled, torch._C._is_torch_function_mode_enabled
empty_like, empty = torch.empty_like, torch.empty_strided


on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda")


def plain(tensor: Tensor) -> bool:
    """True for a tensor of a GPU that is no subclass."""
    return type(tensor) in PLAIN and on_gpu(tensor)


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check that other tensors are like these in all but content and address."""
    sizes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    check: Callable[..., bool] = Guard(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


class Kernels:
    """The kernels of a side for tensors of one layout, in one thread.

    ``shared``: so many last results have a number per row; they stand in one tensor, one after the other.
    """

    def __init__(self, one: Side, given: Sequence[Tensor], eps: float, shared: int = 0, out: Tensor | None = None):
        self.call, self.library = one.call, library_of(given[0], one.names[0])
        layouts = self.library.describe(given)[1]
        count = len(one.results) - shared
        outs = [None] * len(one.results) if out is None else self.library.describe([out])[1]
        self.recipe = self.call.recipe(self.library, layouts, outs)
        self.values = {name: bits_of(number) for name, number in values_of(self.call.graph, eps).items()}
        self.makers = [
            (next((n for n, g in enumerate(given) if self._alike(g, v)), -1), make)
            for v, make in zip(one.results[:count], self.recipe.makers, strict=False)
        ]
        self.shared: tuple[Any, ...] = ()
        self.offsets: list[int] = []
        if shared:
            numbers = one.results[count:]
            self.shared = (shared * self.recipe.rows,), (1,), TO_TORCH[numbers[0].dtype], given[0].device
            self.offsets = [n * self.recipe.rows * numbers[0].size for n in range(shared)]

    def _alike(self, tensor: Tensor, value: Any) -> bool:
        """True if a new tensor like this one is what the maker of a result would make."""
        lead = tuple(tensor.shape[: tensor.dim() - len(value.axes) + value.wide])
        shape = value.shape(lead, self.call.d) if value.wide else value.shape((), self.call.d)
        dtype, there = TO_TORCH[value.dtype], tuple(tensor.shape)
        return bool(tensor.is_contiguous()) and tensor.dtype == dtype and there == shape

    def __call__(
        self, given: Sequence[Tensor], numbers: Sequence[int] = (), out: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor | None]:
        """The results and the shared tensor; ``numbers``: addresses of the inputs after ``given``."""
        results = [empty_like(given[n]) if n >= 0 else make() for n, make in self.makers] if out is None else [out]
        pointers = [t.data_ptr() for t in given]
        pointers += numbers
        pointers += [t.data_ptr() for t in results]
        shared = None
        if self.shared:
            shape, strides, dtype, device = self.shared
            shared = empty(shape, strides, dtype=dtype, device=device)
            first = shared.data_ptr()
            pointers += [first + offset for offset in self.offsets]
        self.call.launch(self.library, self.recipe, pointers, self.values)
        return results, shared


class Prepared:
    """A call that later ones may be like, in one thread.

    given      its tensors, called ``names``; ``wrt``: those that have a gradient
    keys, eps  as of the operator
    kept       what backward reads of the tensors, and of the results after them, by number
    """

    def __init__(
        self, ops: GraphOps, names: Sequence[str], given: Sequence[Tensor], keys: str, eps: float, out: Tensor | None
    ) -> None:
        known = dict(zip(names, given, strict=True))
        self.ops, self.names, self.eps = ops, names, eps
        self.check = guard(given if out is None else [*given, out])
        self.forward = ops.side([known.get(name) for name in ops.inputs], keys)
        self.outputs = self.forward.spec.differentiated
        self.numbers = [r.name for r in self.forward.results[len(self.outputs) :]]
        alone = side(f"{self.forward.spec},save=none") if self.numbers else self.forward
        self.inference = Kernels(alone, given, eps, out=out)
        self.wrt = [name for name in names if known[name].requires_grad]
        if self.wrt and out is None:
            self.training = Kernels(self.forward, given, eps, len(self.numbers))
            self.backward = side(backward_text(self.forward.spec, self.wrt, self.outputs))
            named = [*names, *self.outputs]
            self.saved = [name for name in self.backward.names[len(self.outputs) :] if name in named]
            self.kept = tuple(named.index(name) for name in self.saved)
            gradients = dict(zip(self.wrt, self.backward.returns, strict=True))
            self.places = tuple(gradients.get(name, -1) for name in names)
            self.offsets = self.training.offsets
            self.backwards: dict[int, tuple[Callable[..., bool], Kernels]] = {}

    def __call__(self, given: Sequence[Tensor], out: Tensor | None = None) -> Sequence[Tensor]:
        """The outputs."""
        if self.wrt and grad_mode():
            results = through(self, *given)
            return (results,) if len(self.outputs) == 1 else results
        return self.inference(given, (), out)[0]

    def of_thread(self, given: Sequence[Tensor], numbers: Tensor | None) -> tuple[Callable[..., bool], Kernels]:
        """The check and the kernels of a backward, for this thread: ``given`` are cotangents and what is kept."""
        found = self.backwards.get(get_ident())
        if found is None:
            tensors = [*given, *self.apart(numbers, given[0].shape[:-1]).values()]
            found = self.backwards[get_ident()] = guard(given), Kernels(self.backward, tensors, self.eps)
        return found

    def apart(self, numbers: Tensor | None, lead: Sequence[int]) -> dict[str, Tensor]:
        """The tensors in the one that they share."""
        if numbers is None:
            return {}
        return dict(zip(self.numbers, numbers.view(len(self.numbers), *lead).unbind(), strict=True))

    def general(
        self, cotangents: Sequence[Tensor | None], kept: Sequence[Tensor], numbers: Tensor | None
    ) -> Sequence[Any]:
        """The gradients of ``given`` by the dispatcher's way."""
        lead = next(ct for ct in cotangents if ct is not None).shape[:-1]
        saved = {**dict(zip(self.saved, kept, strict=True)), **self.apart(numbers, lead)}
        found = self.ops.gradients(self.forward, self.wrt, self.eps, cotangents, saved)
        by_name = dict(zip(self.ops.inputs, found, strict=True))
        return [by_name[name] for name in self.names]


class Node(Function):  # type: ignore[misc]
    """A direct call in PyTorch's graph of gradients."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, *given: Tensor) -> Any:
        results, numbers = prepared.training(given)
        both = (*given, *results)
        ctx.prepared = prepared
        ctx.save_for_backward(*[both[n] for n in prepared.kept], numbers)
        if len(results) == 1:
            return results[0]
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        prepared: Prepared = ctx.prepared
        *kept, numbers = ctx.saved_tensors
        given = [*cotangents, *kept]
        if grad_mode() or any(t is None for t in cotangents):
            return (None, *prepared.general(cotangents, kept, numbers))
        check, kernels = prepared.of_thread(given, numbers)
        if not check(*given):
            return (None, *prepared.general(cotangents, kept, numbers))
        first = 0 if numbers is None else numbers.data_ptr()
        results, _ = kernels(given, [first + offset for offset in prepared.offsets])
        return (None, *[results[n] if n >= 0 else None for n in prepared.places])


# Function.apply without what it does for torch.func, which the guard has ruled out.
through: Callable[..., Any] = super(Function, Node).apply


class Direct:
    """The direct way of a graph: the calls of each thread that later ones may be like."""

    def __init__(self, ops: GraphOps) -> None:
        self.ops = ops
        self._threads: dict[int, dict[Any, list[Prepared]]] = {}

    def __call__(self, key: Any, given: Sequence[Tensor], out: Tensor | None = None) -> Sequence[Tensor] | None:
        """The outputs; None if no earlier call with this key was like this one."""
        known = self._threads.get(get_ident())
        if known is None or function_mode() or forward_ad._current_level >= 0:
            return None
        for prepared in known.get(key, ()):
            if prepared.check(*given) if out is None else prepared.check(*given, out):
                return prepared(given, out)
        return None

    def prepare(
        self, key: Any, tensors: Mapping[str, Tensor], keys: str, eps: float, out: Tensor | None = None
    ) -> Sequence[Tensor] | None:
        """The same for a call that is the first of its kind; None if it has to go the dispatcher's way."""
        given = [*tensors.values()]
        everything = given if out is None else [*given, out]
        if not all(plain(t) and _lies(t, given[0]) for t in everything) or not _bare():
            return None
        prepared = Prepared(self.ops, [*tensors], given, keys, eps, out)
        known = self._threads.setdefault(get_ident(), {})
        if len(known) >= MOST:
            known.clear()
        known.setdefault(key, []).insert(0, prepared)
        return prepared(given, out)


def _lies(tensor: Tensor, x: Tensor) -> bool:
    """True for a tensor that kernels take as it lies: rows at one distance, or contiguous."""
    if tensor.shape != x.shape or tensor.is_contiguous():
        return bool(tensor.is_contiguous() and tensor.numel())
    try:
        return bool(tensor.view(-1, tensor.shape[-1]).stride(-1) == 1)
    except RuntimeError:
        return False


def _bare() -> bool:
    """True outside all modes that see operators: those of functions and of the dispatcher, autocast, torch.func."""
    return (
        Guard is not None
        and not function_mode()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._functorch.peek_interpreter_stack()
        and not torch.is_autocast_enabled("cuda")
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )
