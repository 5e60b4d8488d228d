"""The direct way: a call that is like an earlier one in all but addresses launches at once, past PyTorch's dispatcher.

The dispatcher's way through Python takes tens of microseconds. This one is for plain tensors and parameters of a GPU. A
guard that PyTorch has for torch.compile compares types, dtypes, shapes, strides, devices and dispatch keys with those
of the earlier call; so it also notices modes, autocast and torch.func. Every call that it does not recognise goes the
dispatcher's way, with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from threading import get_ident
from typing import Any, Optional, Protocol

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .array_call import WIDEST, ArrayCall
from .arrays import has_gaps, library_of, torch_dtypes

TO_TORCH = torch_dtypes()
PLAIN = (torch.Tensor, torch.nn.Parameter)  # no subclass, such as a FakeTensor or a DTensor
MOST = 4096  # earlier calls that a thread remembers for a graph

Run = Callable[..., tuple[tuple[Tensor, ...], Optional[Tensor]]]  # the results, and the numbers that they share
Made = tuple[Sequence[int], Sequence[int], torch.dtype]  # shape, strides and dtype of a new tensor

# Without this guard every call goes the dispatcher's way.
Guard: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
grad_mode, function_mode = torch.is_grad_enabled, torch._C._is_torch_function_mode_enabled


def maker(device: torch.device) -> Callable[..., Tensor]:
    """A function that makes a tensor on a GPU from its shape, strides and dtype.

    One of PyTorch's, for the code of torch.compile, takes half the time; its tensors are on the current device.
    """
    fast: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if fast is None or torch.cuda.device_count() > 1:
        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return fast


on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda")


def plain(tensor: Tensor) -> bool:
    """True for a tensor of a GPU that is no subclass, and whose numbers are as they lie: not negated, not conjugate."""
    return type(tensor) in PLAIN and on_gpu(tensor) and not (tensor.is_neg() or tensor.is_conj())


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check that other tensors are like these in all but content and address.

    PyTorch's own refuses a tensor that is there twice. Here it has to be there twice again.
    """
    first = [next(m for m, other in enumerate(tensors) if other is t) for t in tensors]
    own = [n for n, m in enumerate(first) if n == m]
    sizes, strides = [[*tensors[n].shape] for n in own], [[*tensors[n].stride()] for n in own]
    once = Guard(*[tensors[n] for n in own], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = once.check
    if len(own) == len(tensors):
        return check
    twice = [(n, m) for n, m in enumerate(first) if n != m]
    return lambda *given: all(given[n] is given[m] for n, m in twice) and check(*[given[n] for n in own])


class Way(Protocol):
    """The kernels of a function for tensors of some dtypes, and the dispatcher's way to its gradients.

    forward   results, and what backward reads of it; alone: results
    """

    forward: ArrayCall
    alone: ArrayCall

    def backward(self, wrt: tuple[str, ...]) -> ArrayCall:
        """Gradients of these inputs."""

    def gradients(
        self,
        wrt: tuple[str, ...],
        eps: float,
        cotangents: Sequence[Optional[Tensor]],
        saved: Mapping[str, Tensor],
    ) -> Mapping[str, Optional[Tensor]]:
        """The same by the dispatcher's way; a cotangent that is None is zero."""


class Kernels:
    """The kernels of a call for tensors of one layout, in one thread.

    ``results, shared = kernels.run(*given, *addresses)`` launches them.

    given    the tensors; ``more``: inputs after them, of which a call gets addresses
    shared   so many last results are statistics, which stand in one tensor, one after the other
    out      the tensor for the result; it is the last of ``given``
    """

    def __init__(
        self,
        call: ArrayCall,
        given: Sequence[Tensor],
        eps: float,
        shared: int = 0,
        *,
        more: Sequence[Tensor] = (),
        out: bool = False,
    ) -> None:
        self.call, self.out, self.given, self.more = call, out, given, more
        self.library = library_of(given[0], call.names[0])
        layouts = self.library.describe([*given, *more])[1]
        outs: list[Any] = [None] * len(call.outputs)
        if out:
            *layouts, outs[0] = layouts
        self.recipe = call.recipe(self.library, layouts, outs)
        self.values = call.values(eps if call.signature.numbers else None).bits
        self.bound = call.bind(self.recipe, self.recipe.vec)
        self.bound.give(self.values)
        self.recipe.bounds[self.recipe.vec] = self.bound  # for the general launch too
        self.count = len(call.outputs) - shared
        lies = call.made([t.shape for t in (*given[: len(given) - out], *more)])
        made: list[Made] = [(shape, steps, TO_TORCH[v.dtype]) for v, (shape, steps) in zip(call.outputs, lies)]
        self.made = made[: self.count]
        self.lengths = [math.prod(shape) for shape, _, _ in made[self.count :]]
        sizes = [number.size for number in call.outputs[self.count :]]
        self.offsets = [sum(self.lengths[:n]) * size for n, size in enumerate(sizes)]
        self.run: Run = self._written(given)

    def _written(self, given: Sequence[Tensor]) -> Any:
        """The call, as Python that is written for these tensors: loops would take longer than what they repeat.

        For a LayerNorm without gradients it is::

            def run(t0, t1, t2):
                r0 = new(*made0)
                p0 = t0.data_ptr()
                ...
                p3 = r0.data_ptr()
                if (p0 | p1 | p2 | p3) & 15: launch(library, recipe, [p0, p1, p2, p3], values)
                else:
                    s = stream(device)
                    pack(block, 0, p0, p1, p2, p3)
                    config0.stream = s
                    failed = driver(*given0)
                    if failed: launch(library, recipe, [p0, p1, p2, p3], values)
                return (r0,), None
        """
        tensors = [f"t{n}" for n in range(len(given))]
        addresses = [f"n{n}" for n in range(len(self.call.inputs) + self.out - len(given))]
        results = tensors[-1:] if self.out else [f"r{n}" for n in range(self.count)]
        pointed = [*tensors[: len(given) - self.out], *addresses, *results]
        pointers = [f"p{n}" for n in range(len(pointed))] + [f"p + {offset}" for offset in self.offsets]
        lines = [] if self.out else [f"r{n} = {self._new(n)}" for n in range(self.count)]
        lines += ["r = new(*made)", "p = r.data_ptr()"] if self.offsets else []
        lines += [f"p{n} = {name}" + ".data_ptr()" * (name[0] != "n") for n, name in enumerate(pointed)]
        aligned = [p for p, name in zip(pointers, pointed) if name not in addresses]
        unlike = [f"({' | '.join(aligned)}) & {WIDEST - 1}"]
        unlike += [f"{low} < p{i} - p{j} < {high}" for i, j, low, high in self.recipe.near]  # memory may be shared
        general = f"launch(library, recipe, [{', '.join(pointers)}], values)"
        lines += [f"if {' or '.join(unlike)}: {general}", "else:"]
        lines += [f"    {line}" for line in [*self._launches(pointers), f"if failed: {general}"]]
        lines.append(f"return ({', '.join(results)},), {'r' if self.offsets else None}")
        text = f"def run({', '.join(tensors + addresses)}):\n" + "".join(f"    {line}\n" for line in lines)
        known = self._known(given[0])
        exec(text, known)
        return known["run"]

    def _new(self, number: int) -> str:
        """What makes a result, as Python."""
        shape, strides, _ = self.made[number]
        return f"new(*whole{number}).as_strided_(*lies{number})" if has_gaps(shape, strides) else f"new(*made{number})"

    def _launches(self, pointers: Sequence[str]) -> list[str]:
        """The lines that launch on ``s``, with the status of the driver in ``failed``."""
        numbers = range(len(self.bound.launches))
        lines = [f"pack(block, 0, {', '.join(pointers)})", *(f"config{n}.stream = s" for n in numbers)]
        lines.append(f"failed = {' or '.join(f'driver(*given{n})' for n in numbers)}")
        if self.bound.workspace_bytes:
            place = "    place(w.fit(library, device, s, bound))"
            lines = ["w = workspaces(device, s, name)", "with w.lock:", place, *(f"    {line}" for line in lines)]
        return ["s = stream(device)", *lines]

    def _known(self, like: Tensor) -> dict[str, Any]:
        """What the names in that text mean."""
        call, recipe, bound = self.call, self.recipe, self.bound
        known = {"launch": call.launch, "library": self.library, "recipe": recipe, "values": self.values}
        known |= {"new": maker(like.device), "workspaces": call.workspaces.of}
        known |= {"stream": self.library.stream, "device": recipe.device, "bound": bound, "name": bound.name}
        known |= {"pack": bound.pack, "block": bound.block, "place": bound.place}
        for n, launch in enumerate(bound.launches):
            known |= {f"config{n}": launch.config, f"given{n}": launch.given, "driver": launch.call}
        for n, (shape, strides, dtype) in enumerate(self.made):
            known[f"made{n}"] = shape, strides, dtype
            if has_gaps(shape, strides):
                known |= {f"whole{n}": ((shape[0] * strides[0],), (1,), dtype), f"lies{n}": (shape, strides)}
        self.numbers: Made | None = None
        if self.offsets:
            known["made"] = self.numbers = (sum(self.lengths),), (1,), TO_TORCH[call.outputs[-1].dtype]
        return known


class Prepared:
    """A call that later ones may be like, in one thread.

    fixed      its arguments but tensors; absent: the tensors that are None, by number; given: the others, ``names``
    eps        0 for a graph without one
    retry      errors of a launch after which the dispatcher's way is taken
    wrt        the tensors that have a gradient
    kept       what backward reads of the tensors, and of the results after them, by number
    statistics  what forward stores for backward, their shapes by name
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, Tensor]], Way],
        fixed: Any,
        tensors: Mapping[str, Optional[Tensor]],
        eps: float,
        retry: tuple[type[Exception], ...] = (),
    ) -> None:
        known = {name: t for name, t in tensors.items() if t is not None}
        given = [*known.values()]
        out = known.pop("out", None) is not None
        self.names, self.eps, self.fixed, self.retry = tuple(known), eps, fixed, retry
        self.check = guard(given)
        self.absent = tuple([n for n, t in enumerate(tensors.values()) if t is None])
        self.present = tuple([n for n, t in enumerate(tensors.values()) if t is not None])
        self.way = way = make(known)
        self.outputs = way.forward.signature.returned
        made = way.forward.made([known[t.name].shape for t in way.forward.inputs])
        every = {t.name: shape for t, (shape, _) in zip(way.forward.outputs, made)}
        self.statistics = {name: shape for name, shape in every.items() if name not in self.outputs}
        self.out = out
        # Compiled when they are called: a step that trains has no use for results alone, nor others for what it saves.
        self.inference: Optional[Run] = None
        self.training: Optional[Run] = None
        self.wrt = () if out else tuple([name for name in self.names if known[name].requires_grad])
        if self.wrt:
            self.backward = way.backward(self.wrt)
            named, read = [*self.names, *self.outputs], self.backward.inputs[len(self.outputs) :]
            self.saved = [t.name for t in read if t.name in named]
            self.kept = tuple([named.index(name) for name in self.saved])
            held = dict(zip(self.backward.signature.returned, self.backward.signature.held))
            self.places = tuple([held[f"d{name}"] if name in self.wrt else -1 for name in self.names])
            self.backwards: dict[int, tuple[Callable[..., bool], Callable[..., Any]]] = {}
        self.native: Optional[Callable[..., Any]] = None
        if native is not None and not out:
            inference, saving = self.alone(given), self.saving(given) if self.wrt else None
            self.stream, self.device = inference.library.stream, inference.recipe.device
            self.native = native(self, inference, saving)

    def alone(self, given: Sequence[Tensor]) -> Kernels:
        """The kernels of a call without gradients, like this one, which keeps their ``run``."""
        call = self.way.alone
        kernels = Kernels(call, given, self.eps, len(call.outputs) - len(self.outputs), out=self.out)
        self.inference = kernels.run
        return kernels

    def saving(self, given: Sequence[Tensor]) -> Kernels:
        """The kernels of a call with gradients, like this one, which keeps their ``run``."""
        kernels = Kernels(self.way.forward, given, self.eps, len(self.statistics))
        self.training, self.offsets = kernels.run, kernels.offsets
        return kernels

    def like(self, tensors: Sequence[Tensor | None], fixed: Any) -> Sequence[Any] | None:
        """The tensors of a call that are there, if it is like this one, else None."""
        if self.fixed != fixed:
            return None
        if self.absent:
            for n in self.absent:
                if tensors[n] is not None:
                    return None
            tensors = [tensors[n] for n in self.present]
        return tensors if self.check(*tensors) else None

    def __call__(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs."""
        if self.native is not None:
            found: Sequence[Tensor] | None = self.native(self.stream(self.device), *given)
            if found is not None:
                return found
        if self.wrt and grad_mode():
            results = through(self, *given)
            return (results,) if len(self.outputs) == 1 else results
        run = self.inference or self.alone(given).run
        return run(*given)[0]

    def of_thread(self, given: Sequence[Tensor], numbers: Tensor | None) -> Any:
        """The check and the kernels of a backward, for this thread: ``given`` are cotangents and what is kept.

        None if kernels do not take these as they lie, if a mode has to see operators, or for a batch of gradients.
        """
        if torch._C._len_torch_dispatch_stack() or any(map(torch._C._functorch.is_legacy_batchedtensor, given)):
            return None
        if not all(plain(t) and _lies(t, given[0]) for t in given):
            return None
        self.backwards[get_ident()] = found = guard(given), self.kernels_of(given, numbers).run
        return found

    def kernels_of(self, given: Sequence[Tensor], numbers: Tensor | None) -> Kernels:
        """The kernels of a backward."""
        more = [*self.apart(numbers).values()]
        return Kernels(self.backward, given, self.eps, more=more)

    def apart(self, numbers: Tensor | None) -> dict[str, Tensor]:
        """The tensors in the one that they share."""
        if numbers is None:
            return {}
        parts = numbers.split([math.prod(shape) for shape in self.statistics.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.statistics.items(), parts)}

    def general(
        self, cotangents: Sequence[Tensor | None], kept: Sequence[Tensor], numbers: Tensor | None
    ) -> Sequence[Any]:
        """The gradients of ``given`` by the dispatcher's way."""
        saved = {**dict(zip(self.saved, kept)), **self.apart(numbers)}
        found = self.way.gradients(self.wrt, self.eps, cotangents, saved)
        return [found.get(name) for name in self.names]

    def gradients(
        self, cotangents: Sequence[Tensor | None], kept: Sequence[Tensor], numbers: Tensor | None
    ) -> Sequence[Any]:
        """The gradients of ``given``."""
        given: tuple[Any, ...] = (*cotangents, *kept)
        if grad_mode() or type(None) in map(type, cotangents):
            return self.general(cotangents, kept, numbers)
        try:
            known = self.backwards.get(get_ident()) or self.of_thread(given, numbers)
            if known is None or not known[0](*given):
                return self.general(cotangents, kept, numbers)
            if numbers is not None:
                first = numbers.data_ptr()
                given += tuple([first + offset for offset in self.offsets])
            results, _ = known[1](*given)
        except self.retry:
            return self.general(cotangents, kept, numbers)
        return [results[n] if n >= 0 else None for n in self.places]


class Node(Function):  # type: ignore[misc]
    """A direct call in PyTorch's graph of gradients."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, *given: Tensor) -> Any:
        run = prepared.training or prepared.saving(given).run
        results, numbers = run(*given)
        both = (*given, *results)
        ctx.prepared = prepared
        ctx.save_for_backward(*[both[n] for n in prepared.kept], numbers)
        if len(results) == 1:
            return results[0]
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        prepared: Prepared = ctx.prepared
        *kept, numbers = ctx.saved_tensors
        if tracing():  # compiled autograd, whose Dynamo is to see nothing of the launch
            return (None, *untraced(prepared, cotangents, kept, numbers))
        return (None, *prepared.gradients(cotangents, kept, numbers))


tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling
untraced: Callable[..., Sequence[Any]] = torch._disable_dynamo(Prepared.gradients)

# Function.apply without what it does for torch.func, which the guard has ruled out.
through: Callable[..., Any] = super(Function, Node).apply


class _Known:
    """The calls of a thread that later ones may be like: the last one, and all by shape and arguments."""

    def __init__(self) -> None:
        self.last: Prepared | None = None
        self.every: dict[Any, list[Prepared]] = {}


class Direct:
    """The direct way of a function: ``names`` of its tensors, with ``out`` at the end, and of its ``options``."""

    retry: tuple[type[Exception], ...] = ()  # as of ``Prepared``

    def __init__(self, graph: str, names: Sequence[str], options: Sequence[str] = ()) -> None:
        self.graph, self.names, self.options = graph, (*names, "out"), tuple(options)
        self._threads: dict[int, _Known] = {}
        DIRECT.append(self)

    def __call__(self, tensors: Sequence[Tensor | None], fixed: Any) -> Sequence[Tensor] | None:
        """The outputs; None if no earlier call was like this one."""
        known = self._threads.get(get_ident())
        if known is None or function_mode() or forward_ad._current_level >= 0:
            return None
        last = known.last
        if last is not None and (given := last.like(tensors, fixed)):
            return self._called(last, given)
        x: Any = tensors[0]
        if type(x) in PLAIN and not x.is_nested:
            for prepared in known.every.get((x.shape, fixed), ()):
                if given := prepared.like(tensors, fixed):
                    known.last = prepared
                    return self._called(prepared, given)
        return None

    def _called(self, prepared: Prepared, given: Sequence[Tensor]) -> Sequence[Tensor] | None:
        try:
            return prepared(given)
        except self.retry:
            return None

    def prepared(
        self,
        make: Callable[[Mapping[str, Tensor]], Way],
        tensors: Sequence[Tensor | None],
        fixed: Any,
        eps: float,
    ) -> Sequence[Tensor] | None:
        """The same for a call that is the first of its kind; None if it has to go the dispatcher's way.

        ``make``: the kernels for tensors by name.
        """
        given = [t for t in tensors if t is not None]
        if not all(plain(t) and _lies(t, given[0]) for t in given) or not _bare():
            return None
        known = self._threads.setdefault(get_ident(), _Known())
        if len(known.every) >= MOST:
            known.every.clear()
        try:
            known.last = Prepared(make, fixed, dict(zip(self.names, tensors)), eps, self.retry)
        except self.retry:
            return None
        known.every.setdefault((given[0].shape, fixed), []).append(known.last)
        return self._called(known.last, given)


DIRECT: list[Direct] = []  # of all functions


def forget() -> None:
    """Earlier calls are prepared again."""
    for way in DIRECT:
        way._threads.clear()


# What makes the C++ call of a prepared one, or None for a call that C++ cannot launch; set by ``use_extension``.
native: Optional[Callable[[Prepared, Kernels, Optional[Kernels]], Optional[Callable[..., Any]]]] = None


def _lies(tensor: Tensor, x: Tensor) -> bool:
    """True for a tensor that kernels take as it lies: where x is, with rows at one distance, or contiguous.

    A row of each set of x's rows may have another shape than x, such as a part of a projection.
    """
    if tensor.device != x.device or not tensor.numel():
        return False
    if tensor.is_contiguous():
        return True
    if tensor.dim() < 2 or tensor.shape[-1:] != x.shape[-1:]:
        return False
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
