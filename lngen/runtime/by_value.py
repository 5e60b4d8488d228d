"""Calls whose kernels take numbers by value: every call gives eps, and nothing is compiled or checked again for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from lngen.ir import ByValue, bits_of, values_of
from lngen.launch.given_eps import given_eps
from lngen.launch.kernels import NO_VALUES
from lngen.runtime.direction import Call
from lngen.runtime.lock_file import Lock
from lngen.runtime.numpy_arrays import run_on_host
from lngen.spec import Spec

LAST = 16  # values of eps whose numbers are kept


def call_of(spec: Spec, schedule: str, lock: Lock | None = None, overlap: bool = False) -> Call:
    """The call of a direction, which takes numbers by value if its graph does."""
    return (ValueCall if spec.graph().by_value else Call)(spec, schedule, lock, overlap)


class ValueCall(Call):
    """A call that takes, among its arrays, a NumPy array of shape () for each number that is passed by value."""

    def __init__(self, spec: Spec, schedule: str, lock: Lock | None = None, overlap: bool = False) -> None:
        super().__init__(spec, schedule, lock, overlap)
        self._local = threading.local()
        self.takes, self.plain = self.graph.params, -1
        self.names = (*(v.name for v in self.graph.params), *(t.name for t in self.outputs))
        self._places = {v.name: place for place, v in enumerate(self.graph.params) if isinstance(v, ByValue)}
        self._values_of = lru_cache(LAST)(partial(values_of, self.graph))

    def arrange(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """As of ``Call``, with the numbers that follow from the eps among ``named``; ArrayError for a wrong eps."""
        if len(inputs) != len(self.inputs) or len(named) > 1:
            inputs = super().arrange(inputs, {name: a for name, a in named.items() if name != "eps"})
        values, arrays = self._values_of(given_eps(self.text, named.get("eps"))), list(inputs)
        for name, place in self._places.items():
            arrays.insert(place, values[name])
        return arrays

    def __call__(
        self, arrays: Sequence[Any], out: Any, values: Mapping[str, int] = NO_VALUES
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """As of ``Call``; ``arrays`` has the numbers as well, in the order of the graph's parameters."""
        tensors, numbers = list(arrays), {}
        for name, place in reversed(self._places.items()):
            numbers[name] = tensors.pop(place)
        self._local.numbers = numbers
        return super().__call__(tensors, out, {name: bits_of(number) for name, number in numbers.items()})

    def on_host(
        self, arrays: Sequence[Any], given: tuple[Any, ...], values: Mapping[str, int]
    ) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The results of the interpreter."""
        return run_on_host(self.graph, self.d, self.leader, arrays, given, self._local.numbers)
