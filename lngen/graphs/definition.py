"""The definition of a named graph: a function that describes the forward computation to a ``GraphBuilder``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType

from lngen.errors import LngenError, SpecError, VerifyError
from lngen.graphs.builder import GraphBuilder
from lngen.graphs.given import check_forward, declared, statistics_of
from lngen.graphs.hints import hint
from lngen.graphs.options import Options
from lngen.imports import failure, line_of
from lngen.ir import DType, Graph
from lngen.ir.names import is_graph_name
from lngen.ir.operators import recording

# Names of files and kernels, whose length is bounded, contain the name.
LONGEST_NAME = 48


@dataclass(frozen=True)
class Given:
    """Describes ``graph`` as it stands; backward may take its results called ``statistics`` from forward."""

    graph: Graph
    statistics: tuple[str, ...]

    def __call__(self, b: GraphBuilder) -> None:
        """Repeat the inputs, equations and results, with their names."""
        known = {p: b.param(p.name, p.type.dtype, *p.type.axes) for p in self.graph.params}
        for eqn in self.graph.eqns:
            name = b.exactly(eqn.out.name, "a value")
            known[eqn.out] = b.emit(eqn.op, name, tuple(known[a] for a in eqn.args), **dict(eqn.attrs))
        for result in self.graph.results:
            (b.statistics if result.name in self.statistics else b.results).append(known[result])


@dataclass(frozen=True)
class Definition:
    """A named forward graph.

    ``declared``: the dtypes of a spec (dtype, weight, out), if the description allows no others. ``summary`` and
    ``group`` are what ``lngen list`` prints.
    """

    name: str
    describe: Callable[[GraphBuilder], None]
    summary: str = field(default="", compare=False)
    group: str = field(default="", compare=False)
    declared: tuple[DType, DType, DType] | None = None

    @classmethod
    def from_graph(cls, graph: Graph, name: str | None = None) -> Definition:
        """The definition of a forward graph as it stands, ``parse(text)`` for example, for any D.

        Its dtypes and constants are fixed. Results that lack D, and that another result is computed from, are
        statistics, which backward may take from forward; the others are outputs. SpecError if the order of a sum is
        fixed: such a graph is for one D.
        """
        check_forward(graph)
        describe = Given(graph, statistics_of(graph))
        return cls(name or graph.name.removesuffix("_fwd"), describe, declared=declared(graph))

    def __post_init__(self) -> None:
        if not is_graph_name(self.name) or len(self.name) > LONGEST_NAME:
            raise SpecError(
                "a graph is expected to be called by lower-case words of letters and digits, one underscore between "
                f"two, {LONGEST_NAME} characters at most, got {self.name!r}; name it: lngen.Definition(name, describe)."
            )
        if not callable(self.describe):
            raise SpecError(f"graph '{self.name}' is expected to be described by a function, got {self.describe!r}.")

    def builder(self, options: Options) -> GraphBuilder:
        """The builder after the description has run; VerifyError, with the line, for what it raises.

        An error of the builder's gets a note with the line of the description.
        """
        b = GraphBuilder(self.name, options)
        try:
            with recording(b):
                self.describe(b)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(self.describe, FunctionType) and self.describe.__module__.startswith("lngen."):
                raise  # a refusal, or an error in lngen itself
            if isinstance(error, LngenError):
                if line := line_of(error):
                    error.add_note(f"    {line}")
                raise
            raise VerifyError(f"graph @{b.name}: its function raised {failure(error)}{hint(error)}") from error
        b.finish()
        for name, _ in options.chosen:
            if name not in b.declared:
                known = ", ".join(b.declared) or "none"
                raise SpecError(f"graph '{self.name}' has no option {name!r}; its options are {known}.")
        if not b.results:
            raise SpecError(f"graph '{self.name}' has no result; call b.output(name, value) in its description.")
        return b

    def forward(self, options: Options) -> Graph:
        """The forward graph: outputs, then the statistics that are saved."""
        b = self.builder(options)
        saved = _saved(b)
        return b.build(*b.results, *(v for v in b.statistics if v.name in saved))

    def outputs(self, options: Options) -> tuple[str, ...]:
        """Names of the results that are differentiated."""
        return tuple(v.name for v in self.builder(options).results)

    def statistics(self, options: Options) -> tuple[str, ...]:
        """Names of the values that forward may save besides its outputs."""
        return tuple(v.name for v in self.builder(options).statistics)

    def saved(self, options: Options) -> tuple[str, ...]:
        """Names of the values that backward takes from forward if it needs them, outputs first."""
        return _saved(self.builder(options))

    def demanded(self, options: Options) -> set[str]:
        """Names of the outputs that ``save`` names and that are not saved anyway: they have to stand for inputs."""
        b = self.builder(options)
        return {v.name for v in b.results} & {*options.save.split("+")} - b.standing

    def differentiable(self, options: Options) -> tuple[str, ...]:
        """Names of the inputs that have a gradient, in their order."""
        b = self.builder(options)
        return tuple(p.name for p in b.params if p.name not in b.constants)

    def positive(self, options: Options) -> set[str]:
        """Names of the inputs that are declared positive."""
        return self.builder(options).positive

    def gradients(self, options: Options) -> dict[str, DType]:
        """The dtype of the gradient of each input that declares one."""
        return self.builder(options).gradients


def _saved(b: GraphBuilder) -> tuple[str, ...]:
    """The names that ``save`` stands for. Outputs that are named alone take the statistics with them."""
    outputs, statistics = [v.name for v in b.results], tuple(v.name for v in b.statistics)
    match b.options.save:
        case "none":
            return ()
        case "stats":
            return (*(n for n in outputs if n in b.standing), *statistics)
    named = b.options.save.split("+")
    kept = tuple(n for n in statistics if n in named)
    return (*(n for n in outputs if n in named), *(kept or statistics))
