"""Between forward and backward: what forward saves, the row that backward rebuilds from it, and the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lngen.compiler.interpret import interpret
from lngen.compiler.ir import WIDE, D, Graph, M, Value, preformatted
from lngen.compiler.ir.numerics import NUMPY_DTYPE, Array
from lngen.compiler.ir.places import extract
from lngen.compiler.passes import accumulated, rebuilt
from lngen.compiler.spec import Spec
from lngen.errors import ArrayError

LARGEST_ERROR = 1 / 16  # of a rebuilt number; the numbers of a normalised row have a mean square of 1


@dataclass(slots=True, repr=False)
class Saved:
    """The inputs and results of a forward run that backward needs, by name, and the spec of that forward.

    Under ``eps=run`` it has the numbers that follow from eps, too, as NumPy arrays of shape ().

    ``overwritten``: inputs that are lost because a result of forward or backward was written over them.
    """

    spec: Spec
    names: tuple[str, ...]
    arrays: tuple[Any, ...]
    overwritten: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """The array of that name; ArrayError if there is none, or if it was overwritten."""
        if name not in self.names:
            raise ArrayError(f"forward saved {', '.join(self.names)}, and no '{name}'.")
        if name in self.overwritten:
            raise ArrayError(f"'{name}' is needed, but a result was written over it; pass another array to out=.")
        return self.arrays[self.names.index(name)]

    def check(self, spec: Spec) -> None:
        """ArrayError unless these arrays are of the forward ``spec``; equal texts mean equal arrays."""
        if str(spec) != str(self.spec):
            raise ArrayError(
                f"saved is expected to be what the forward of '{spec}' returned beside y, got that of '{self.spec}'; "
                "pass it to the backward of its own norm."
            )

    def __repr__(self) -> str:
        """The spec, of each array its name, dtype and shape, and all their bytes, with the device."""
        return f"<Saved by {self.spec}: {', '.join(self._listed())}{'; '.join(['', *self._about()])}>"

    def _repr_html_(self) -> str:
        return preformatted("\n  ".join([f"saved by {self.spec}", *self._listed(), *self._about()]))

    def _listed(self) -> list[str]:
        return [f"{n} {_described(a)}" for n, a in zip(self.names, self.arrays, strict=True)]

    def _about(self) -> list[str]:
        known = [a for a in self.arrays if hasattr(a, "nbytes") and hasattr(a, "device")]
        size = [f"{sum(a.nbytes for a in known)} bytes on {known[0].device}"] if known else []
        return size + [f"overwritten: {', '.join(self.overwritten)}"] * bool(self.overwritten)


def _described(array: Any) -> str:
    try:
        return f"{array.dtype}{list(array.shape)}"
    except AttributeError:  # an array that has DLPack alone
        return f"{type(array).__module__}.{type(array).__qualname__}"


@dataclass(frozen=True)
class Rebuilt:
    """How backward rebuilds the normalised row from a saved result: the graph that does it, and the result.

    The weights decide whether it can: they are checked when forward saves the result.
    """

    spec: Spec
    graph: Graph
    result: Value

    @classmethod
    def of(cls, backward: Spec) -> Rebuilt | None:
        """The rebuilding of a backward; None if it has none."""
        graph = rebuilt(backward.trace()["save"], backward.forward())
        if graph is None:
            return None
        return cls(backward, graph, next(p for p in graph.params if p.type.axes == WIDE))

    @property
    def weights(self) -> tuple[Value, ...]:
        """The inputs without rows that the rebuilding reads."""
        return tuple(p for p in self.graph.tensors if M not in p.type.axes)

    def errors(self, weights: Mapping[str, Array]) -> Array:
        """[D]: a bound of the error of each rebuilt number of at most 1, infinite where a weight is 0.

        The result is a * value + b, where a and b follow from the weights. It is rounded by at most u |a + b|, or half
        of the smallest subnormal number. So the rebuilt value is off by at most (u (|a| + |b|) + floor) / |a|.
        """
        rows = np.array([[0.0], [1.0]], NUMPY_DTYPE[self.result.type.dtype])
        inputs: dict[str, Array] = dict(weights)
        for p in self.graph.params:
            if p.type.axes == WIDE:
                inputs[p.name] = np.repeat(rows, self.spec.d, axis=1)
            elif M in p.type.axes:
                inputs[p.name] = np.ones(2, NUMPY_DTYPE[p.type.dtype])
        at_zero, at_one = interpret(self.graph, inputs)[self.graph.results[0].name].astype(np.float64)
        slope = np.abs(at_one - at_zero)  # 1 / |a|
        dtype = self.result.type.dtype
        errors = dtype.roundoff * (1 + np.abs(at_zero)) + dtype.floor * slope
        return np.asarray(np.where(self._lost(weights), np.inf, errors))

    def _lost(self, weights: Mapping[str, Array]) -> Array:
        """[D]: True where a factor is 0, so that nothing can be rebuilt from the result."""
        lost = np.zeros(self.spec.d, bool)
        for eqn in self.graph.eqns:
            if eqn.op == "select_eq" and eqn.out.type.axes == (D,):
                weight = extract(self.graph, self.graph.name, self.graph.params, (eqn.args[0],))
                lost |= interpret(weight, weights)[eqn.args[0].name] == 0
        return lost

    def check(self, weights: Mapping[str, Array], numbers: Mapping[str, Array]) -> None:
        """ArrayError if a weight is so small that rounding the saved result loses the value.

        ``numbers`` are those that a call passes by value.
        """
        errors = self.errors({**weights, **numbers})
        worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
        if errors[worst] <= LARGEST_ERROR:
            return
        at = ", ".join(f"{v.name}[{worst}] is {float(weights[v.name][worst]):g}" for v in self.weights if v.type.axes)
        raise ArrayError(
            f"'{self.spec}' rebuilds the normalised row from '{self.result.name}', but {at}: rounding "
            f"'{self.result.name}' to {self.result.type.dtype} moves it by up to {errors[worst]:.2g}, and "
            f"{LARGEST_ERROR:g} is allowed; compile with save=stats."
        )


class Gradients:
    """The gradients that a backward returns, and the results that its kernels store: equal ones are stored once."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.names = tuple(f"d{name}" for name in spec.differentiates)
        self.added = tuple(f"d{name}" for name in spec.accumulate)

    def plain(self, graph: Graph) -> bool:
        """True if each gradient is a result of ``graph``, and none is added to an array."""
        return not self.added and not graph.shared

    def stored(self, graph: Graph, out: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
        """From the arrays for the gradients: those for the results of ``graph``, and those that are added to, by name.

        ArrayError if an array would stay unwritten, or if there is no array to add to.
        """
        given = self._by_name(out)
        for name in self.added:
            if given[name] is None:
                raise ArrayError(
                    f"'{self.spec}' adds '{name}' to an array, which is missing; pass it in out=, with one entry each "
                    f"for {', '.join(self.names)}."
                )
        for name, same in graph.shared.items():
            if given[name] is not None and given[name] is not given[same]:
                raise ArrayError(
                    f"'{name}' is the same value as '{same}' and is stored once; pass None for '{name}' in out=, or "
                    f"the array of '{same}'."
                )
        targets = {accumulated(name): given[name] for name in self.added}
        return None if out is None else tuple(given[r.name] for r in graph.results), targets

    def returned(self, graph: Graph, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients in the order of the inputs."""
        found = {r.name: array for r, array in zip(graph.results, results, strict=True)}
        return tuple(found[graph.shared.get(name, name)] for name in self.names)

    def _by_name(self, out: Any) -> dict[str, Any]:
        if out is None:
            return dict.fromkeys(self.names)
        given = out if isinstance(out, tuple | list) else (out, *((None,) * (len(self.names) - 1)))
        if len(given) != len(self.names):
            raise ArrayError(
                f"out= is expected to be one array or {len(self.names)} ({', '.join(self.names)}), got {len(given)}."
            )
        return dict(zip(self.names, given, strict=True))
