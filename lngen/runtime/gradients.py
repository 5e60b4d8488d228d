"""The gradients that a backward returns, and the results that its kernels store: equal ones are stored once."""

from __future__ import annotations

from typing import Any

from lngen.errors import ArrayError
from lngen.ir import Graph
from lngen.passes import accumulated
from lngen.spec import Spec


class Gradients:
    """Gradients by name, in the order of the inputs."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.names = tuple(f"d{name}" for name in spec.differentiates)
        self.added = tuple(f"d{name}" for name in spec.accumulate)

    def plain(self, graph: Graph) -> bool:
        """True if each of them is a result of ``graph``, and none is added to an array."""
        return not self.added and not graph.shared

    def stored(self, graph: Graph, out: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
        """The arrays for the results of ``graph``, from those for the gradients; and the inputs that are added to.

        ArrayError for arrays of which one would stay unwritten, or without an array to add to.
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
