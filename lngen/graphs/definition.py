"""What a named graph is: a function that describes the forward computation to a ``GraphBuilder``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lngen.errors import SpecError
from lngen.ir import Axis, Builder, D, DType, Graph, M, Value
from lngen.ir.names import is_name
from lngen.ir.ops import compute_dtype

# The name is in those of files and kernels, whose length is bounded.
LONGEST_NAME = 48


@dataclass(frozen=True)
class Options:
    """What a graph is specialised on besides D: dtypes, eps, which optional inputs it has, what it saves."""

    dtype: DType
    weight: DType
    out: DType
    eps: float = 1e-5
    inputs: tuple[tuple[str, bool], ...] = ()
    save: str = "stats"


class GraphBuilder(Builder):
    """A Builder that knows the options: inputs get their dtypes, results their rounding, from them."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(f"{name}_fwd")
        self.options = options
        self.optional: dict[str, bool] = {}
        self.statistics: list[Value] = []
        self.compute = compute_dtype(options.dtype, options.weight, options.out)

    def input(self, name: str, *axes: Axis) -> Value:
        """An input over the given axes, in the compute dtype; [M, D] has the spec's dtype, others weight's."""
        dtype = self.options.dtype if M in axes and D in axes else self.options.weight
        return self.cast(f"{name}32", self.param(name, dtype, *axes), to=self.compute)

    def optional_input(self, name: str, *axes: Axis, default: bool = True) -> Value | None:
        """An input a spec may leave out (``gamma=no``) or, if ``default`` is False, put in; None if it is left out."""
        present = dict(self.options.inputs).get(name, default)
        value = self.input(name, *axes) if present else None
        if not present:
            # Nothing else is called so: a graph that has the input differs in nothing but what it does with it.
            self._names.add(self.exactly(name, "an input"))
        self.optional[name] = default
        return value

    def number(self, name: str, value: float) -> Value:
        """A constant in the compute dtype."""
        return self.const(name, value, self.compute)

    def eps(self) -> Value:
        """The spec's eps."""
        return self.number("eps", self.options.eps)

    def output(self, name: str, x: Value) -> Value:
        """A result, rounded to the spec's out dtype; VerifyError if it cannot have exactly that name.

        A backward takes a cotangent for it, called ``d`` and the name.
        """
        self.results.append(self.cast(self.exactly(name, "an output"), x, to=self.options.out))
        return self.results[-1]

    def statistic(self, x: Value) -> Value:
        """A value backward may take from forward: a result, unless the spec says ``save=none``."""
        self.statistics.append(x)
        return x


@dataclass(frozen=True)
class Definition:
    """A named forward graph."""

    name: str
    describe: Callable[[GraphBuilder], None]
    summary: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not is_name(self.name) or len(self.name) > LONGEST_NAME:
            raise SpecError(
                "a graph is expected to be called by lower-case words of letters and digits, one underscore between "
                f"two, {LONGEST_NAME} characters at most, got {self.name!r}; name it: lngen.Definition(name, describe)."
            )
        if not callable(self.describe):
            raise SpecError(f"graph '{self.name}' is expected to be described by a function, got {self.describe!r}.")

    def builder(self, options: Options) -> GraphBuilder:
        """The builder after the description ran."""
        b = GraphBuilder(self.name, options)
        self.describe(b)
        for name, _ in options.inputs:
            if name not in b.optional:
                known = ", ".join(b.optional) or "none"
                raise SpecError(f"graph '{self.name}' has no optional input {name!r}; its optional inputs are {known}.")
        if not b.results:
            raise SpecError(f"graph '{self.name}' has no result; call b.output(name, value) in its description.")
        return b

    def forward(self, options: Options) -> Graph:
        """The forward graph: outputs, then statistics if they are saved."""
        b = self.builder(options)
        return b.build(*b.results, *(b.statistics if options.save == "stats" else ()))

    def outputs(self, options: Options) -> tuple[str, ...]:
        """Names of the results that are differentiated."""
        return tuple(v.name for v in self.builder(options).results)

    def saved(self, options: Options) -> tuple[str, ...]:
        """Names of the values forward keeps for backward."""
        return tuple(v.name for v in self.builder(options).statistics) if options.save == "stats" else ()
