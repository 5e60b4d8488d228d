"""What forward returns beside its results, for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lngen.errors import ArrayError
from lngen.spec import Spec


@dataclass(slots=True, repr=False)
class Saved:
    """The inputs and results of a forward run that backward needs, by name, and the spec of that forward.

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
        """ArrayError unless ``spec``, of a forward, is that of these arrays: its text says all that they mean."""
        if str(spec) != str(self.spec):
            raise ArrayError(
                f"saved is expected to be what the forward of '{spec}' returned beside y, got that of '{self.spec}'; "
                "pass it to the backward of its own norm."
            )

    def __repr__(self) -> str:
        """The spec, and of each array its name, dtype and shape."""
        listed = ", ".join(f"{n} {_described(a)}" for n, a in zip(self.names, self.arrays, strict=True))
        lost = f"; overwritten: {', '.join(self.overwritten)}" if self.overwritten else ""
        return f"<Saved by {self.spec}: {listed}{lost}>"


def _described(array: Any) -> str:
    try:
        return f"{array.dtype}{list(array.shape)}"
    except AttributeError:  # an array that has DLPack alone
        return f"{type(array).__module__}.{type(array).__qualname__}"
