"""What a description of a graph is written with: a Builder that knows the options of the spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from lngen.compiler.ir import (
    DEFAULT_EPS,
    RULES,
    RUN,
    Attr,
    Axis,
    Builder,
    ByValue,
    D,
    DType,
    Eqn,
    Graph,
    M,
    Run,
    Value,
    compute_dtype,
    is_graph_name,
    is_name,
)
from lngen.compiler.ir.builder import Unnamed
from lngen.compiler.ir.names import describing, fresh, of_number, widened
from lngen.compiler.ir.scales import SCALE_MIN
from lngen.compiler.passes.edit import cse
from lngen.dtypes import QUANTISED
from lngen.errors import SpecError, VerifyError, short
from lngen.files import shown
from lngen.user_input import decimal

Chosen = bool | float | str

LARGEST_NUMBER = 1e30  # of an option
APPLY = ("div", "mul", "ratio")


@dataclass(frozen=True)
class Option:
    """An option with its default: True or False, a number, or one of the words ``choices``; ``about`` explains it.

    ``of_forward``: it changes nothing in a backward. ``whole``: the number is a whole one.
    """

    default: Chosen
    choices: tuple[str, ...] = ()
    about: str = ""
    of_forward: bool = False
    whole: bool = False

    @property
    def values(self) -> str:
        """The values that it takes, in words."""
        if isinstance(self.default, bool):
            return "yes or no"
        return f"one of {', '.join(self.choices)}" if self.choices else f"a {'whole ' * self.whole}number"

    def check(self, graph: str, name: str) -> None:
        """VerifyError for a name that no key can have, or a default that is no value of the option."""
        if not is_name(name):
            raise VerifyError(
                f"graph @{graph}: an option is expected to be called by words of letters and digits, one underscore "
                f"between two, got {name!r}."
            )
        for word in self.choices:
            if not is_graph_name(word) and not word.isdecimal():
                raise VerifyError(
                    f"graph @{graph}: the values of '{name}' are expected to be lower-case words of letters and "
                    f"digits, one underscore between two, got {word!r}."
                )
        if self.read(self.default) is None:
            raise VerifyError(
                f"graph @{graph}: the default of '{name}' is expected to be {self.values}, got {self.default!r}."
            )

    def read(self, value: object) -> Chosen | None:
        """A value, from text or a Python object; None if the option does not take it."""
        if isinstance(self.default, bool):
            return value if isinstance(value, bool) else {"yes": True, "no": False}.get(short(value))
        if self.choices:
            return short(value) if short(value) in self.choices else None
        if isinstance(value, str) and value.startswith("-"):
            number = decimal(value[1:], 0, LARGEST_NUMBER)
            return None if number is None else -number
        number = decimal(value, -LARGEST_NUMBER, LARGEST_NUMBER)
        if not self.whole or number is None:
            return number
        return int(number) if number.is_integer() else None


@dataclass(frozen=True)
class Options:
    """What a spec says to the description of a graph: dtypes, eps, options that differ from their defaults, ``save``.

    ``eps``: a number, or ``run`` for one that every call gives. ``save``: ``stats``, ``none``, or the names of the
    results that forward saves for backward, joined by ``+``.
    """

    dtype: DType
    weight: DType
    out: DType
    eps: float | Run = DEFAULT_EPS
    chosen: tuple[tuple[str, Chosen], ...] = ()
    save: str = "stats"


def chosen_value(graph: str, name: str, option: Option, value: object) -> Chosen:
    """The value of an option; SpecError if the option does not take it."""
    found = option.read(value)
    if found is None:
        graph = graph.removesuffix("_fwd")
        raise SpecError(f"graph '{graph}': '{name}' is expected to be {option.values}, got {shown(value)}.")
    return found


class GraphBuilder(Builder):
    """A Builder with the options, which give inputs their dtypes and results their rounding.

    Operators on its values add equations, ``h * rstd`` that of ``b.mul("h_rstd", h, rstd)``; their results get names
    when the description has run (``lngen.compiler.ir.names``). A number is taken where a value is.
    """

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(f"{name}_fwd")
        self.options = options
        self.declared: dict[str, Option] = {}
        self.statistics: list[Value] = []
        self.standing: set[str] = set()  # outputs that are saved like statistics
        self.takes_eps = False
        self.constants: set[str] = set()  # inputs without a gradient
        self.positive: set[str] = set()  # inputs that the graph is defined for if they are positive
        self.classes: dict[str, int] = {}  # inputs of classes, each with the number of those that are ignored
        self.gradients: dict[str, DType] = {}  # of inputs whose gradient has a dtype of its own
        self.least_row = 1, ""  # the least features of a row, and what has so many
        self.most_row = 2**31 - 1, ""  # and the most
        self._named: dict[Value, str] = {}  # which were given after their equations
        self.compute = compute_dtype(options.dtype, options.weight, options.out)

    def input(
        self,
        name: str,
        *axes: Axis,
        dtype: object = None,
        grad: object = None,
        differentiable: bool = True,
        positive: bool = False,
    ) -> Value:
        """An input over the given axes, in the compute dtype; stored as ``dtype``, its gradient as ``grad``.

        dtype=None: [M, D] has the spec's dtype, others weight's; grad=None: the input's own, or that of the spec's key
        ``grad``. An input that is not ``differentiable`` has no gradient, and neither has one of whole numbers (int8,
        i32, i64), of 8-bit floats (e4m3, e5m2) or of truth values (bool, which are 0 and 1). For one that is
        ``positive``, checks, conform and tune draw positive numbers; it changes no kernel. VerifyError for a dtype
        wider than the compute dtype.
        """
        stored = self.options.dtype if M in axes and D in axes else self.options.weight
        if dtype is not None:
            stored = self._declared(name, dtype)
        if grad is not None:
            self.gradients[name] = self._declared(name, grad)
        if positive:
            self.positive.add(name)
        x32 = self.record("cast", self.param(name, stored, *axes), to=self.compute)
        if differentiable or not stored.digits:
            return x32
        self.constants.add(name)
        return self.record("detach", x32)

    def index(self, name: str, *axes: Axis, dtype: object = "i32", ignored: int | None = None) -> Value:
        """An input of whole numbers, i32 or i64, that ``select_eq`` compares with places: a class, a position.

        With ``ignored`` they are classes: from 0, below D, or that number. NumPy arrays are checked for it.
        """
        stored = self._declared(name, dtype)
        if stored not in (DType.I32, DType.I64):
            raise VerifyError(f"graph @{self.name}: index '{name}' expects a dtype of i32, i64, got {stored}.")
        if ignored is not None:
            self.classes[name] = ignored
        return self.param(name, stored, *axes)

    def take(self, name: str, x: Value, index: Value) -> Value:
        """The element at ``index`` of each row of x, an input over D, [M]; 0 where that is outside the row."""
        made, path, stored = {e.out: e for e in self.eqns}, list[Eqn](), x
        while stored in made and made[stored].op in ("cast", "detach", "stop_gradient"):
            path.append(made[stored])
            stored = path[-1].args[0]
        found = super().take(f"{name}_stored", stored, index)
        for eqn in reversed(path):
            found = self.emit(eqn.op, name, (found,), **dict(eqn.attrs))
        return found

    def optional_input(
        self, name: str, *axes: Axis, default: bool = True, dtype: object = None, about: str = ""
    ) -> Value | None:
        """An input that a spec may omit (``gamma=no``) or, if ``default`` is False, add; None if it is absent."""
        if self.flag(name, default, about or f"whether {name} is an input"):
            return self.input(name, *axes, dtype=dtype)
        # The name is reserved, so that graphs with and without the input differ only in its uses.
        self.reserve(name, "an input")
        return None

    def option(
        self,
        name: str,
        default: Chosen,
        choices: tuple[str, ...] = (),
        about: str = "",
        of_forward: bool = False,
        whole: bool = False,
    ) -> Chosen:
        """The value of the spec's key ``name``: a number, ``whole`` or not, or one of the words ``choices``.

        ``about`` is what ``lngen list`` prints. A backward drops the key if it is ``of_forward``. VerifyError for a
        name that is declared twice or a wrong default, SpecError for a value that the option does not take.
        """
        return self._choose(name, Option(default, choices, about, of_forward, whole))

    def flag(self, name: str, default: bool, about: str = "") -> bool:
        """The value of the spec's key ``name``, which is yes or no."""
        return bool(self._choose(name, Option(default, (), about)))

    def _choose(self, name: str, option: Option) -> Chosen:
        if name in self.declared:
            raise VerifyError(f"graph @{self.name}: the option '{name}' is declared twice; give one another name.")
        option.check(self.name, name)
        self.declared[name] = option
        return chosen_value(self.name, name, option, dict(self.options.chosen).get(name, option.default))

    def needs_row(self, features: int, what: str) -> None:
        """A row has that many features at least, because it has ``what``."""
        self.least_row = max(self.least_row, (features, what))

    def bounds_row(self, features: int, what: str) -> None:
        """A row has that many features at most, because it has ``what``."""
        self.most_row = min(self.most_row, (features, what))

    def refuse(self, why: str) -> NoReturn:
        """SpecError: options, or an option and a dtype, that exclude each other."""
        raise SpecError(f"graph '{self.name.removesuffix('_fwd')}': {why}")

    def emit(self, op: str, name: str, args: tuple[Value | float, ...], **attrs: Attr) -> Value:
        """A new equation; ``name`` gets a suffix if it is taken. VerifyError for what is no value and no number."""
        return super().emit(op, name, self._operands(op, args), **attrs)

    def record(self, op: str, *operands: Value | float, **attrs: Attr) -> Value:
        """A new equation whose result has no name yet; VerifyError for what is no value and no number."""
        args = self._operands(op, operands)
        return self.propose(op, describing(op, args), args, **attrs)

    def _operands(self, op: str, operands: Sequence[object]) -> tuple[Value, ...]:
        """The operands; a number is a constant in the dtype of the first that is a value."""
        dtype = next((o.type.dtype for o in operands if isinstance(o, Value)), self.compute)
        return tuple(self._operand(op, o, dtype) for o in operands)

    def _operand(self, op: str, operand: object, dtype: DType) -> Value:
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, int | float) and not isinstance(operand, bool):
            return self.propose("const", of_number(operand), (), value=float(operand), dtype=dtype)
        raise VerifyError(
            f"graph @{self.name}: '{op}' is expected to have values or numbers as operands, got "
            f"{type(operand).__name__}; make it an input, or a number with float()."
        )

    def where_gt(self, name: str, a: Value | float, b: Value | float, c: Value | float, d: Value | float) -> Value:
        """c where a is greater than b, else d, also where a or b is a NaN."""
        return self.emit("where_gt", name, (a, b, c, d))

    def sum(self, x: Value, axis: Axis = D, to: Axis | None = None) -> Value:
        """The sum over an axis, or of its elements that belong to one of ``to``."""
        return self._reduced("reduce_sum", x, axis, to)

    def mean(self, x: Value, axis: Axis = D, to: Axis | None = None) -> Value:
        """The sum over an axis divided by its length; ``to`` as in a sum."""
        return self._reduced("reduce_mean", x, axis, to)

    def max(self, x: Value, axis: Axis = D, to: Axis | None = None) -> Value:
        """The largest element along an axis; equal maxima share its cotangent equally; ``to`` as in a sum."""
        return self._reduced("reduce_max", x, axis, to)

    def _reduced(self, op: str, x: Value, axis: Axis, to: Axis | None) -> Value:
        return self.record(op, x, axis=axis, **({} if to is None else {"to": to}))

    def stop_gradient(self, x: Value) -> Value:
        """``x``, whose gradient is 0 by definition: the scale of a quantiser, a straight-through estimator."""
        return self.record("stop_gradient", x)

    def named(self, name: str, x: Value) -> Value:
        """``x``, which gets exactly that name when the description has run.

        VerifyError if the name is taken, or if ``x`` is no result of an equation.
        """
        self._value(x, f"'{name}'")
        if self._is_called(x, name):
            return x
        if all(e.out != x for e in self.eqns) and not isinstance(x, ByValue):
            raise VerifyError(f"graph @{self.name}: '{name}' is expected to be the result of an equation, got '{x}'.")
        self.reserve(name, "a value")
        self._named[x] = name
        return x

    def _is_called(self, x: Value, name: str) -> bool:
        """True if ``x`` was given that name."""
        return self._named[x] == name if x in self._named else x.name == name and not isinstance(x, Unnamed)

    def finish(self) -> None:
        """Merge equal equations, and give all values their names: a name that was given goes before any other.

        The equations of a text, which all have names, stay as they are.
        """
        given = {e.out: e.out.name for e in self.eqns if not isinstance(e.out, Unnamed)} | self._named
        results = (*self.results, *self.statistics)
        graph = Graph(self.name, tuple(self.params), tuple(self.eqns), results)
        graph = graph if all(e.out in given for e in self.eqns) else cse(graph, given)
        rounded = {e.args[0]: given[e.out] for e in reversed(graph.eqns) if e.op == "cast" and e.out in self.results}
        part_of: dict[Value, str] = {}  # the first value with a name that it is used for
        for eqn in reversed(graph.eqns):
            part_of |= dict.fromkeys(eqn.args, given.get(eqn.out) or part_of.get(eqn.out, ""))
        new: dict[Value, Value] = {p: replace(p, name=self._named.get(p, p.name)) for p in self.params}
        self.eqns = []
        for eqn in graph.eqns:
            args = tuple(new[a] for a in eqn.args)
            name = given.get(eqn.out) or self._name(eqn, args, part_of.get(eqn.out, ""), rounded.get(eqn.out))
            new[eqn.out] = Value(name, eqn.out.type)
            self.eqns.append(replace(eqn, out=new[eqn.out], args=args))
        self.params, results = [new[p] for p in self.params], tuple(new[r] for r in graph.results)
        self.results, self.statistics = [*results[: len(self.results)]], [*results[len(self.results) :]]

    def _name(self, eqn: Eqn, args: tuple[Value, ...], part_of: str, rounded: str | None) -> str:
        """The name of a result that has none: by the result that it is ``rounded`` to, or by what computes it."""
        of_input = eqn.op == "cast" and args[0] in self.params
        name = eqn.out.name if eqn.op == "const" else describing(eqn.op, args, part_of)
        if rounded is not None and not of_input and self.is_free(widened(rounded)):
            name = widened(rounded)
        name = fresh(name, self._names)
        self._names.add(name)
        return name

    def number(self, name: str, value: float) -> Value:
        """A constant in the compute dtype."""
        return self.const(name, value, self.compute)

    def eps(self) -> Value:
        """The spec's eps."""
        if self.options.eps == RUN:
            return self.from_eps("eps", "eps")
        self.takes_eps = True
        return self.propose("const", "eps", (), value=self.options.eps, dtype=self.compute)

    def from_eps(self, name: str, rule: str) -> Value:
        """A number that follows from eps by ``rule``, one of ``lngen.compiler.ir.RULES``, in the compute dtype.

        It is a constant; under ``eps=run`` it is a parameter that a launch passes by value. VerifyError for another
        rule.
        """
        if rule not in RULES:
            raise VerifyError(
                f"graph @{self.name}: '{name}' is expected to follow from eps by one of the rules {', '.join(RULES)}, "
                f"got {rule!r}."
            )
        self.takes_eps = True
        if self.options.eps == RUN:
            return self.by_value(name, self.compute, rule)
        return self.number(name, RULES[rule].of(self.options.eps))

    def output(self, name: str, x: Value, dtype: object = None, save: bool = False) -> Value:
        """A result, rounded to ``dtype`` (None: the spec's out dtype); VerifyError if it cannot have exactly that name.

        A value that has this name and dtype already is the result itself. A backward takes a cotangent for it, called
        ``d`` and the name, of the same dtype. With ``save`` it also takes the result itself from forward, as it takes
        statistics, and computes with it in place of ``x`` (see ``passes.save``).
        """
        self._value(x, f"the output '{name}'")
        stored = self.options.out if dtype is None else self._declared(name, dtype)
        if not self._is_called(x, name) or x.type.dtype is not stored or x in self.results:
            x = self.cast(self.exactly(name, "an output"), x, to=stored)
        self.results.append(x)
        if save:
            self.standing.add(name)
        return self.results[-1]

    def optional_output(
        self, name: str, x: Value, dtype: object = None, save: bool = False, default: bool = True
    ) -> Value | None:
        """A result that a spec may omit (``h=no``) or, if ``default`` is False, add; None if it is absent."""
        if self.flag(name, default, f"whether {name} is an output"):
            return self.output(name, x, dtype, save)
        return None

    def quantise(
        self,
        name: str,
        x: Value,
        dtype: object = DType.E4M3,
        *,
        scale: Value | None = None,
        to: Axis | None = None,
        apply: str = "div",
        amax_min: float = 0.0,
        amax_max: Value | None = None,
        scale_min: float = SCALE_MIN,
        power_of_two: bool = False,
        by_columns: bool = False,
    ) -> Value:
        """The result x / scale, in e4m3, e5m2 or int8, and the result that is called ``name`` and ``_scale``, in f32.

        The scale is amax, the largest |x| of the row, or of its block ``to``, divided by Q, the largest number of
        ``dtype``, and ``scale_min`` at least. If an element is a NaN, so is the scale, and with it all that is divided
        by it. A ``scale`` that is given, a positive f32[], is no result. The derivative takes the scale for a constant
        and passes the rounding, as a straight-through estimator does.

        apply         ``div``: x / scale, a division; ``mul``: x * (1 / scale); ``ratio``: x * (Q / amax)
        amax_min      the least amax
        amax_max      the largest one; larger numbers are saturated
        power_of_two  whether the scale is raised to the next power of two
        by_columns    whether scales of blocks are stored by columns, [B, M]

        VerifyError for another dtype, a ``scale_min`` that is not above 0, or a given scale and ``to``.
        """
        stored = self._declared(name, dtype)
        self._check_quantised(name, stored, scale, to, scale_min, apply)
        if scale is not None:
            s = self.stop_gradient(scale)
            q32 = x * (1.0 / s) if apply == "mul" else self.record("div_scale", x, s, least=0.0, bounded=0)
            return self.output(name, q32, stored)
        largest = self.stop_gradient(self.max(abs(x), to=to))
        largest = largest if amax_max is None else largest.minimum(amax_max)
        amax = self.named(f"{name}_amax", largest.maximum(amax_min) if amax_min else largest)
        own = self._in(self.least_scale(name, amax, stored.largest, scale_min), DType.F32)
        own = self.record("ceil_power", own) if power_of_two else own
        if by_columns:
            own = self.named(f"{name}_scale_rows", own)
        kept = self.named(f"{name}_scale", self.record("by_columns", own) if by_columns else own)
        s = self._in(own, self.compute)
        if apply == "ratio":
            q32 = x * (stored.largest / amax).minimum(1 / scale_min)
        elif apply == "mul":
            q32 = x * (1.0 / s)
        else:
            q32 = self.record("div_scale", x, s, least=scale_min, bounded=int(amax_max is None))
        q = self.output(name, q32, stored)
        self.output(f"{name}_scale", kept, DType.F32)
        return q

    def _check_quantised(
        self, name: str, dtype: DType, scale: Value | None, to: Axis | None, scale_min: float, apply: str
    ) -> None:
        """VerifyError for what ``quantise`` does not take."""
        what = f"graph @{self.name}: the quantised output '{name}' is expected"
        if dtype not in QUANTISED:
            raise VerifyError(f"{what} in one of {', '.join(map(str, QUANTISED))}, got {dtype}.")
        if scale is not None and to is not None:
            raise VerifyError(f"{what} with a given scale or with one for each block, got scale= and to=.")
        if not DType.F32.least <= scale_min <= DType.F32.largest:
            raise VerifyError(f"{what} with a scale_min of f32 above 0, got {scale_min!r}.")
        ways = APPLY if scale is None else APPLY[:2]
        if apply not in ways:
            raise VerifyError(f"{what} with apply={'|'.join(ways)}, got {apply!r}.")

    def _in(self, x: Value, dtype: DType) -> Value:
        """x in a dtype."""
        return x if x.type.dtype is dtype else self.record("cast", x, to=dtype)

    def _declared(self, name: str, dtype: object) -> DType:
        """The dtype that an input or output declares, by any name that ``DType.of`` takes."""
        try:
            found = DType.of(dtype)
        except ValueError:
            known = ", ".join(map(str, DType))
            raise VerifyError(f"graph @{self.name}: '{name}' expects a dtype of {known}, got {dtype!r}.") from None
        if compute_dtype(self.compute, found) is not self.compute:
            raise VerifyError(
                f"graph @{self.name}: '{name}' is declared as {found}, but the graph computes in {self.compute}; give "
                f"the spec dtype={found}, or declare it as {self.compute}."
            )
        return found

    def statistic(self, x: Value, name: str | None = None) -> Value:
        """A value that backward may take from forward: a result, called ``name``, unless the spec has ``save=none``."""
        self._value(x, "a statistic")
        self.statistics.append(x if name is None else self.named(name, x))
        return x
