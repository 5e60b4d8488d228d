"""A norm on arrays: forward, what it saves, and backward, wherever the kernels come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Generic, NamedTuple, Optional, TypeVar

from ..errors import ArrayError, LngenError
from .array_call import ArrayCall
from .signature import NO_VALUES, Values


class Saved:
    """The inputs and results of a forward run that backward needs, by name, and the spec and eps of that forward.

    ``overwritten``: inputs that are lost because a result of forward or backward was written over them.
    """

    __slots__ = ("arrays", "eps", "names", "overwritten", "spec")

    def __init__(
        self,
        spec: str,
        names: Sequence[str],
        arrays: Sequence[Any],
        eps: Optional[float] = None,
        overwritten: tuple[str, ...] = (),
    ) -> None:
        self.spec, self.names, self.arrays, self.eps, self.overwritten = spec, names, arrays, eps, overwritten

    def __getitem__(self, name: str) -> Any:
        """The array of that name; ArrayError if there is none, or if it was overwritten."""
        if name not in self.names:
            raise ArrayError(f"forward saved {', '.join(self.names)}, and no '{name}'.")
        if name in self.overwritten:
            raise ArrayError(f"'{name}' is needed, but a result was written over it; pass another array to out=.")
        return self.arrays[self.names.index(name)]

    def check(self, spec: str) -> None:
        """ArrayError unless these arrays are of the forward ``spec``; equal texts mean equal arrays."""
        if self.spec != spec:
            raise ArrayError(
                f"saved is expected to be what the forward of '{spec}' returned beside y, got that of '{self.spec}'; "
                "pass it to the backward of its own norm."
            )

    def __repr__(self) -> str:
        """The spec, of each array its name, dtype and shape, and all their bytes, with the device."""
        return f"<Saved by {self.spec}: {', '.join(self._listed())}{'; '.join(['', *self._about()])}>"

    def _repr_html_(self) -> str:
        text = "\n  ".join([f"saved by {self.spec}", *self._listed(), *self._about()])
        return f"<pre>{escape(text)}</pre>"

    def _listed(self) -> list[str]:
        return [f"{n} {_described(a)}" for n, a in zip(self.names, self.arrays)]

    def _about(self) -> list[str]:
        known = [a for a in self.arrays if hasattr(a, "nbytes") and hasattr(a, "device")]
        size = [f"{sum(a.nbytes for a in known)} bytes on {known[0].device}"] if known else []
        given = [] if self.eps is None else [f"eps={self.eps}"]
        return [*given, *size] + [f"overwritten: {', '.join(self.overwritten)}"] * bool(self.overwritten)


def _described(array: Any) -> str:
    try:
        return f"{array.dtype}{list(array.shape)}"
    except AttributeError:  # an array that has DLPack alone
        return f"{type(array).__module__}.{type(array).__qualname__}"


class Gradients(NamedTuple):
    """The gradients that a backward returns by their names, and those of them that are added to an array."""

    text: str
    names: tuple[str, ...]
    added: tuple[str, ...]

    def stored(self, call: ArrayCall, out: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
        """From the arrays for the gradients: those for the results of a call, and those that are added to, by name.

        ArrayError if an array would stay unwritten, or if there is no array to add to.
        """
        given = self._by_name(out)
        for name in self.added:
            if given[name] is None:
                raise ArrayError(
                    f"'{self.text}' adds '{name}' to an array, which is missing; pass it in out=, with one entry each "
                    f"for {', '.join(self.names)}."
                )
        for name, first in call.signature.same.items():
            if given[name] is not None and given[name] is not given[first]:
                raise ArrayError(
                    f"'{name}' is the same value as '{first}' and is stored once; pass None for '{name}' in out=, or "
                    f"the array of '{first}'."
                )
        targets = {target: given[name] for name, target in call.added.items()}
        return None if out is None else tuple([given[t.name] for t in call.outputs]), targets

    def _by_name(self, out: Any) -> dict[str, Any]:
        if out is None:
            return dict.fromkeys(self.names)
        given = out if isinstance(out, (tuple, list)) else (out, *((None,) * (len(self.names) - 1)))
        if len(given) != len(self.names):
            raise ArrayError(
                f"out= is expected to be one array or {len(self.names)} ({', '.join(self.names)}), got {len(given)}."
            )
        return dict(zip(self.names, given))


C = TypeVar("C", bound=ArrayCall)


class ArrayNorm(ABC, Generic[C]):
    """A forward, and a backward for each set of cotangents, made when it is first asked for."""

    _forward: C
    _gradients: Gradients
    _cotangents: tuple[str, ...]  # of a backward for all outputs that are differentiated
    _no_backward = ""  # why there is none
    _before: Optional[Callable[[Sequence[Any], Values], None]] = None  # a check before each forward

    def _set_up(self, forward: C) -> None:
        self._forward, self._count = forward, len(forward.inputs)
        self._primary = len(forward.signature.returned)
        self._backwards: dict[tuple[str, ...], C] = {}  # by their cotangents

    @abstractmethod
    def _backward_of(self, cotangents: tuple[str, ...]) -> C:
        """The backward for these cotangents alone."""

    def forward(self, *inputs: Any, out: Any = None, eps: Any = None, **named: Any) -> tuple[Any, Saved]:
        """Results and what backward needs: ``y, saved = norm.forward(x, gamma, beta)``.

        x        [..., D] of the spec's dtype: CuPy, torch, anything with __cuda_array_interface__ or DLPack on
                 one GPU, or NumPy arrays, which run the interpreter (a pack has none); rows are contiguous,
                 with one stride on a GPU, or with strides=2 with an outer and an inner one:
                 ``qkv.view(T, 3, H, D)[:, 0]``
        gamma    [D] of the weight dtype; beta alike
        eps      of a norm that was compiled with ``eps="run"``, there alone, and by this name: any finite number
        out      y, or the tuple of all results (y, mean, rstd), to be written; None for a new array. An array in
                 ``out`` shares no memory with another array of the call, with one exception: y may be exactly x, with
                 the same address, strides and element size. Then ``saved`` lacks x, and a backward that needs x
                 refuses. Some kernels of form=multipass refuse it as well, because they read x again after they have
                 stored a result: those with several [M, D] results.

        Launches on the library's current stream and does not wait. ArrayError for a wrong array, and for an eps that is
        missing or not wanted. Another eps compiles nothing. With ``save=y`` it
        refuses weights so small that x cannot be rebuilt from y. It checks NumPy arrays in every call. On a GPU it
        checks once for each set of addresses of the weights: that call waits for the GPU. While a CUDA graph is
        captured it does not check.
        """
        call = self._forward
        if eps is not None and call.signature.eps is None:  # an input of that name, or nothing that there is
            named, eps = {**named, "eps": eps}, None
        arrays = inputs if len(inputs) == self._count and not named else call.arrange(inputs, named)
        values = NO_VALUES if eps is None and not call.signature.numbers else call.values(eps)
        if self._before is not None:
            self._before(arrays, values)
        results, taken = call(arrays, out, values)
        saved = Saved(call.text, call.names, (*arrays, *results), values.eps, taken)
        if self._primary == 1:
            return results[0], saved
        return results[: self._primary], saved

    def backward(self, dy: Any, saved: Saved, *, out: Any = None, dx_scale: Any = None) -> tuple[Any, ...]:
        """Gradients of the inputs in the graph's order: ``dx, dgamma, dbeta = norm.backward(dy, saved)``.

        dy     of the shape and dtype of y. A graph of several outputs takes a tuple, with a cotangent for each output
               that is differentiated (the spec's ``of``) in the graph's order: ``norm.backward((dy, dh), saved)``.
               None means zeros; the kernels without it are compiled at the first such call.
        out    a tuple of arrays to write instead of new ones, as in forward. dx may be exactly dy or x, unless the
               kernels read them again: those of form=multipass with column sums or several [M, D] results.
               Gradients of the same value (those of x and of a residual of its dtype) are one array, returned twice;
               ``out`` has None for the second. Gradients in the spec's ``accumulate`` are added to their arrays in
               ``out``, which have to be there.

        dx_scale  the f32[] by which ``dx_quant`` divides dx; with ``dx_scales=block`` it is the last result

        ArrayError for a wrong array, for more or fewer cotangents, or for what a norm of another spec saved. The first
        call derives the backward: DerivativeError for a graph that has none, LowerError if no kernels compute it.
        """
        if self._no_backward:
            raise LngenError(self._no_backward)
        if not isinstance(saved, Saved):
            raise ArrayError(f"saved is expected to be what forward returned beside y, got {type(saved).__name__}.")
        if saved.spec is not self._forward.text:
            saved.check(self._forward.text)
        given = dy if isinstance(dy, (tuple, list)) else (dy,)
        if len(given) != len(self._cotangents):
            raise ArrayError(
                f"'{self._gradients.text}' takes {len(self._cotangents)} cotangents ({', '.join(self._cotangents)}), "
                f"None for one that is zero, got {len(given)}."
            )
        known: dict[str, Any] = {name: ct for name, ct in zip(self._cotangents, given) if ct is not None}
        call = self._backwards.get(tuple(known)) or self._made(tuple(known))
        plain = not call.added and not call.signature.same
        stored, targets = (out, {}) if plain else self._gradients.stored(call, out)
        known.update(targets)
        if (dx_scale is not None) is not ("dx_scale" in call.names[: len(call.inputs)]):
            wanted = "takes no dx_scale; leave it out" if dx_scale is not None else "expects dx_scale=, an f32[]"
            raise ArrayError(f"'{self._gradients.text}' {wanted}.")
        known["dx_scale"] = dx_scale
        arrays = [known[name] if name in known else saved[name] for name in call.names[: len(call.inputs)]]
        values = call.values(saved.eps) if call.signature.numbers else NO_VALUES
        results, taken = call(arrays, stored, values)
        saved.overwritten += tuple([n for n in taken if n in saved.names])
        return results if plain else tuple([results[n] for n in call.signature.held])

    def _made(self, cotangents: tuple[str, ...]) -> C:
        """The backward for these cotangents, kept for the next call."""
        if not cotangents:
            raise ArrayError(
                f"'{self._gradients.text}' takes at least one of {', '.join(self._cotangents)}, got None alone; all "
                "gradients would be zero."
            )
        self._backwards[cotangents] = call = self._backward_of(cotangents)
        return call
