"""Definitions of forward graphs: by a function, a graph as it stands, a file, or a function of a module."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

from lngen.compiler.graphs.graph_builder import Chosen, GraphBuilder, Options
from lngen.compiler.ir import OPS, RUN, SUMS, WIDE, ByValue, D, DType, Graph, Value, is_graph_name, parse, recording
from lngen.compiler.ir.places import downstream
from lngen.compiler.ir.type_rules import ORDER
from lngen.dtypes import FLOATS
from lngen.errors import LngenError, ParseError, SpecError, VerifyError
from lngen.files import read
from lngen.user_input import failure, imported, is_function, line_of, module_name

# Names of files and kernels, whose length is bounded, contain the name.
LONGEST_NAME = 48


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
    _described: dict[Options, GraphBuilder] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_graph(cls, graph: Graph, name: str | None = None) -> Definition:
        """The definition of a forward graph as it stands, ``parse(text)`` for example, for any D.

        Its dtypes and constants are fixed. A result without D from which another result is computed is a
        statistic: backward may take it from forward. All other results are outputs. SpecError if the order of a sum is
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

    @property
    def source(self) -> str:
        """Where the command line finds it, ``module:name`` or a file; empty if it does not."""
        if isinstance(self.describe, Given | Recorded | FromModule):
            return self.describe.source
        module = sys.modules.get(getattr(self.describe, "__module__", ""))
        if module is None or not (home := module_name(module)):
            return ""
        names = [name for name, value in vars(module).items() if self._is_found_as(name, value)]
        return f"{home}:{min(names, key=lambda n: (n != self.name, n))}" if names else ""

    def _is_found_as(self, name: str, value: object) -> bool:
        """True if a definition that is read from there is this one."""
        return (value is self.describe and name == self.name) or (isinstance(value, Definition) and value == self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without what it has described so far."""
        return Definition, (self.name, self.describe, self.summary, self.group, self.declared)

    def builder(self, options: Options) -> GraphBuilder:
        """The builder after the description has run, once for these options; nothing changes it afterwards.

        ``save`` is not among what a description may ask. A copy, ``replace(definition)``, describes the graph anew.
        """
        options = replace(options, save="stats")
        if options not in self._described:
            self._described[options] = self._describe(options)
        return self._described[options]

    def fits(self, options: Options) -> bool:
        """Whether the description takes these options together."""
        try:
            self.builder(options)
        except SpecError:
            return False
        return True

    def _describe(self, options: Options) -> GraphBuilder:
        """Run the description; VerifyError, with the line, for what it raises.

        An error of the builder's gets a note with the line of the description.
        """
        b = GraphBuilder(self.name, options)
        try:
            with recording(b):
                self.describe(b)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(self.describe, FunctionType) and (self.describe.__module__ or "").startswith("lngen."):
                raise  # a refusal, or an error in lngen itself
            if isinstance(error, LngenError):
                if line := line_of(error):
                    error.add_note(f"    {line}")
                raise
            why = _NO_NUMBER if options.eps == RUN and isinstance(error, TypeError) else hint(error)
            raise VerifyError(f"graph @{b.name}: its function raised {failure(error)}{why}") from error
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
        b, saved = self.builder(options), self.saved(options)
        return b.build(*b.results, *(v for v in b.statistics if v.name in saved))

    def recorded(self, options: Options) -> Definition:
        """What the description says for these options alone: that can be pickled, whatever describes this one."""
        return replace(self, describe=self._recorded(options))

    def described(self, options: Options) -> str:
        """All that the description says for these options, as text."""
        found = self._recorded(options)
        notes = {name: sorted(note) if isinstance(note, set) else note for name, note in found.notes.items()}
        return f"{found.text}{found.statistics}\n{notes}"

    def _recorded(self, options: Options) -> Recorded:
        b = self.builder(options)
        notes = {name: getattr(b, name) for name in NOTES}
        text, statistics = str(b.build(*b.results)), tuple(v.name for v in b.statistics)
        return Recorded(text, b.options, statistics, notes, self.source)

    def outputs(self, options: Options) -> tuple[str, ...]:
        """Names of the results that are differentiated."""
        return tuple(v.name for v in self.builder(options).results)

    def statistics(self, options: Options) -> tuple[str, ...]:
        """Names of the values that forward may save besides its outputs."""
        return tuple(v.name for v in self.builder(options).statistics)

    def of_backward(self, options: Options) -> tuple[tuple[str, Chosen], ...]:
        """The chosen options that may change a backward."""
        declared = self.builder(options).declared
        return tuple((name, value) for name, value in options.chosen if not declared[name].of_forward)

    def saved(self, options: Options) -> tuple[str, ...]:
        """Names of the values that backward takes from forward if it needs them, outputs first.

        Outputs that ``save`` names alone take the statistics with them.
        """
        b, outputs, statistics = self.builder(options), self.outputs(options), self.statistics(options)
        match options.save:
            case "none":
                return ()
            case "stats":
                return (*(n for n in outputs if n in b.standing), *statistics)
        named = options.save.split("+")
        kept = tuple(n for n in statistics if n in named)
        return (*(n for n in outputs if n in named), *(kept or statistics))

    def demanded(self, options: Options) -> set[str]:
        """Names of the outputs that ``save`` names and that are not saved anyway: they have to stand for inputs."""
        b = self.builder(options)
        return {v.name for v in b.results} & {*options.save.split("+")} - b.standing

    def differentiable(self, options: Options) -> tuple[str, ...]:
        """Names of the inputs that have a gradient, in their order."""
        b = self.builder(options)
        found = (p for p in b.params if p.type.dtype in FLOATS and not isinstance(p, ByValue))
        return tuple(p.name for p in found if p.name not in b.constants)

    def by_value(self, options: Options) -> tuple[str, ...]:
        """Names of the parameters that a launch passes by value; none unless ``eps=run``, or the text declares some."""
        return tuple(p.name for p in self.builder(options).params if isinstance(p, ByValue))

    def positive(self, options: Options) -> set[str]:
        """Names of the inputs that are declared positive."""
        return {*self.builder(options).positive}

    def classes(self, options: Options) -> dict[str, int]:
        """The inputs that are declared to be classes, each with the number of those that are ignored."""
        return {**self.builder(options).classes}

    def check_row(self, options: Options, d: int) -> None:
        """SpecError for rows of ``d`` features that have not what the options say."""
        b = self.builder(options)
        for (bound, what), beyond, word in ((b.least_row, -1, "least"), (b.most_row, 1, "most")):
            if what and (d - bound) * beyond > 0:
                raise SpecError(f"graph '{self.name}': a row with {what} has {bound} features at {word}, got d={d}.")

    def gradients(self, options: Options) -> dict[str, DType]:
        """The dtype of the gradient of each input that declares one."""
        return {**self.builder(options).gradients}


# ---- a graph as it stands ----


@dataclass(frozen=True)
class Given:
    """Describes ``graph`` as it stands; backward may take its results called ``statistics`` from forward."""

    graph: Graph
    statistics: tuple[str, ...]
    source: str = field(default="", compare=False)  # the file that it was read from

    def __call__(self, b: GraphBuilder) -> None:
        """Repeat the inputs, equations and results, with their names."""
        known = {p: _declare(b, p) for p in self.graph.params}
        for eqn in self.graph.eqns:
            name = b.exactly(eqn.out.name, "a value")
            known[eqn.out] = b.emit(eqn.op, name, tuple(known[a] for a in eqn.args), **dict(eqn.attrs))
        for result in self.graph.results:
            (b.statistics if result.name in self.statistics else b.results).append(known[result])


def _declare(b: GraphBuilder, param: Value) -> Value:
    if isinstance(param, ByValue):
        return b.by_value(b.exactly(param.name, "a value"), param.type.dtype, param.rule)
    return b.param(param.name, param.type.dtype, *param.type.axes)


# Of a builder, beside its graph.
NOTES = ("declared", "standing", "takes_eps", "constants", "positive", "classes", "gradients", "least_row", "most_row")


@dataclass(frozen=True)
class Recorded:
    """Describes the graph in ``text`` for the ``options`` it was recorded for, and for no others."""

    text: str
    options: Options
    statistics: tuple[str, ...]
    notes: Mapping[str, Any] = field(hash=False)
    source: str = field(default="", compare=False)

    def __call__(self, b: GraphBuilder) -> None:
        """Repeat what the builder had; SpecError for other options."""
        if b.options != self.options:
            b.refuse("it was pickled with its dtypes, eps and options; for others compile its function.")
        graph = parse(self.text)
        known = {v.name: v for v in (*graph.params, *(e.out for e in graph.eqns))}
        b.params, b.eqns, b.results = [*graph.params], [*graph.eqns], [*graph.results]
        b.statistics = [known[name] for name in self.statistics]
        vars(b).update(self.notes)


def declared(graph: Graph) -> tuple[DType, DType, DType]:
    """The dtypes that a spec of the graph has: of inputs with rows and features, of other inputs, of outputs."""
    given = [p for p in graph.tensors if p.type.dtype in FLOATS]
    wide = next((p.type.dtype for p in given if p.type.axes == WIDE), DType.F32)
    weight = next((p.type.dtype for p in given if p.type.axes != WIDE), wide)
    return wide, weight, next((r.type.dtype for r in graph.results if r.type.along(D)), wide)


def statistics_of(graph: Graph) -> tuple[str, ...]:
    """The results that lack D and that another result is computed from: what backward may take from forward."""
    return tuple(r.name for r in graph.results if not r.type.along(D) and _is_used(graph, r))


def _is_used(graph: Graph, value: Value) -> bool:
    return not downstream(graph.eqns, [value]).isdisjoint(r for r in graph.results if r != value)


def check_forward(graph: Graph) -> None:
    """SpecError if the order of a sum is fixed already: lngen fixes it, for one D."""
    for eqn in graph.eqns:
        found = [key for key, _ in eqn.attrs if key in ORDER]
        if eqn.op in SUMS and found:
            raise SpecError(
                f"graph @{graph.name}: the sum '{eqn.out}' is expected without an order, got {', '.join(found)}; lngen "
                "show SPEC --stage graph --after build prints a graph before its sums are ordered."
            )


# ---- a file, or a function of a module ----

GRAPH_ENDING = ".graph"
LARGEST = 1 << 20  # bytes of a file

# In a spec: the source, the direction, the keys. A file's name may have dots, and a function's has a colon.
_FILE = re.compile(rf"(.+?{re.escape(GRAPH_ENDING)})(?:\.(\w*))?(?::(.*))?")
_FUNCTION = re.compile(r"([^:,=]+:[^:,=]+?)\.(fwd|bwd)(?::(.*))?")


def is_source(name: str) -> bool:
    """True for the name of a file that ends in ``.graph``, and for ``module:function``."""
    return name.endswith(GRAPH_ENDING) or is_function(name)


def split_source(spec: str) -> tuple[str, str, str] | None:
    """Source, direction and keys of a spec whose graph is in a file or a module; None for any other spec."""
    found = _FILE.fullmatch(spec) or _FUNCTION.fullmatch(spec)
    return (found[1], found[2] or "", found[3] or "") if found else None


def definition_from(name: str) -> Definition:
    """The definition in a file, or by a function, also of a module in the current folder.

    The name of a function is that of its graph; a Definition in a module has its own. SpecError for a file that cannot
    be read or holds no graph, or a module or function that is not there.
    """
    return _from_file(Path(name)) if name.endswith(GRAPH_ENDING) else _from_module(name)


def _from_file(path: Path) -> Definition:
    try:
        text = read(path, LARGEST).decode()
    except OSError as error:
        raise SpecError(f"'{path}' is expected to be a file with a graph, but {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"'{path}' is expected to be a file with a graph, but it is not UTF-8 text.") from error
    try:
        found = Definition.from_graph(parse(text))
    except (ParseError, SpecError, VerifyError) as error:
        raise SpecError(f"'{path}' is expected to hold a forward graph: {error}") from error
    assert isinstance(found.describe, Given)
    return replace(found, describe=replace(found.describe, source=path.name))


@dataclass(frozen=True)
class FromModule:
    """Describes a graph as the ``source`` module:function does, in any process; ``folder`` is searched last."""

    source: str
    folder: str

    def __call__(self, b: GraphBuilder) -> None:
        """Call the function."""
        found = imported(self.source, Path(self.folder))
        (found.describe if isinstance(found, Definition) else found)(b)


def _from_module(name: str) -> Definition:
    found, describe = imported(name, Path.cwd()), FromModule(name, str(Path.cwd()))
    if isinstance(found, Definition):
        return replace(found, describe=describe)
    if not callable(found):
        kind = type(found).__name__
        raise SpecError(f"'{name}' is expected to be a function that describes a graph, or a Definition, got {kind}.")
    return Definition(getattr(found, "__name__", name.rpartition(":")[2]), describe)


# ---- what to write instead of what values and builders lack ----

MOST = 3  # names in a hint
_SHAPES = ("reshape", "view", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "T", "broadcast_to", "repeat")
_OPERATORS = (
    "; values have the operators + - * / and ** 3, other ops are methods ('lngen help graph'), and in place of a "
    "comparison there are x.relu(), x.maximum(z), x.clamp(low, high) and b.where_gt(name, a, b, c, d)."
)


_NO_NUMBER = "; with eps=run options.eps is no number: write b.eps(), or b.from_eps(name, rule) ('lngen help graph')."


def hint(error: BaseException) -> str:
    """The end of a message about ``error``: the nearest methods, or the operators of values."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Value | GraphBuilder):
        if error.name in _SHAPES:
            return f"; axes combine by name, so that no graph has a {error.name} ('lngen help graph')."
        near = _nearest(str(error.name), isinstance(error.obj, Value))
        return f"; did you mean {' or '.join(near)}?" if near else "; 'lngen help graph' lists the methods."
    return _OPERATORS if isinstance(error, TypeError) and "Value" in str(error) else "."


def _nearest(word: str, of_value: bool) -> list[str]:
    """The methods of values, x, and of builders, b, whose names contain ``word``, or else resemble it.

    Of a builder's methods only those that take values are meant where a value was asked.
    """
    kinds = {"b": GraphBuilder, "x": Value} if of_value else {"x": Value, "b": GraphBuilder}
    known = {name: f"{x}.{name}" for x, kind in kinds.items() for name in dir(kind) if not name.startswith("_")}
    if of_value:
        known = {n: x for n, x in known.items() if hasattr(Value, n) or n in OPS or n in ("sum", "mean")}
    near = sorted((n for n in known if word in n), key=len) or difflib.get_close_matches(word, known, n=MOST)
    return [known[n] for n in near[:MOST]]
