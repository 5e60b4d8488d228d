"""The parts of a kernel's text: the C names of values, arguments, statements, loops, reductions and phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lngen.compiler.headers import HEADER_OF
from lngen.compiler.ir import OPS, WIDE, ByValue, DType, Eqn, Value, ctype, print_eqn
from lngen.compiler.passes import accumulated

# ---- names ----


# Keywords and alternative tokens of C++20; macros of the compilers and of the headers they always include; names that
# CUDA declares and statements use; the names of a kernel's own types.
_CPP = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
assert errno linux stderr stdin stdout typeof unix va_arg va_copy va_end va_start
threadIdx blockIdx blockDim gridDim warpSize fmaf sqrtf sqrt fabsf fabs rintf rint
Row Reduce Exchange Stream Finish lngen
"""


# The names that values may not have in a kernel.
TAKEN = frozenset(_CPP.split()) | HEADER_OF.keys()


def c_name(value: Value) -> str:
    """The C identifier of ``value``."""
    return f"{value.name}_value_" if value.name in TAKEN else value.name


# ---- what a kernel is made of ----


NUMBERS = ("rows", "inner", "stride", "outer_stride")  # kinds of arguments that are no pointers


@dataclass(frozen=True)
class Argument:
    """A kernel argument. ``kind``: rows, input, output, workspace (pointers), stride (of ``tensor``, in elements).

    Rows at two distances have two more kinds: ``inner`` is the number of rows that are ``stride`` apart, and
    ``outer_stride`` the distance of a row from the one ``inner`` rows before it. Or value: the number ``tensor`` of the
    graph itself, which follows from eps by ``rule``.

    ``alone``: no other pointer of the kernel reaches the same memory, if one of them writes to it.
    """

    name: str
    ctype: str
    kind: str
    tensor: str = ""
    const: bool = False
    alone: bool = True
    rule: str = ""

    @property
    def declaration(self) -> str:
        """The declaration in the kernel's signature."""
        if self.kind in NUMBERS:
            return f"const long long {self.name}"
        if self.kind == "value":
            return f"const {self.ctype} {self.name}"
        return f"{'const ' if self.const else ''}{self.ctype}* {'__restrict__ ' if self.alone else ''}{self.name}"


@dataclass(frozen=True)
class Statement:
    """A line of C and its IR equation."""

    text: str
    note: str = ""

    @property
    def line(self) -> str:
        """The text with its note."""
        return f"{self.text}  // {self.note}" if self.note else self.text


def address(name: str, row: str, strides: int) -> str:
    """C++: the address of a row of an [M, D] tensor; of rows at two distances, of the row at ``place_``."""
    if strides == 1:
        return f"{name}_ptr_ + {row} * {name}_stride_"
    return f"row_of({name}_ptr_, place_, {name}_outer_, {name}_stride_)"


@dataclass(frozen=True)
class Tensor:
    """An input or output of a kernel: its IR name, its C type, and its C name."""

    name: str
    ctype: str
    cname: str


@dataclass(frozen=True)
class Sum:
    """A reduction: its IR name, its C name, its index among its kind, its IR equation, Add or Max, and the C type.

    ``why``: what a reader of its accumulator would ask; empty for most.
    """

    name: str
    cname: str
    index: int
    note: str
    op: str = "Add"
    real: str = "float"
    why: str = ""

    @property
    def functor(self) -> str:
        """The operation in C."""
        return f"{self.op}<{self.real}>"

    @property
    def partials(self) -> str:
        """The partial sums in the workspace."""
        return f"{self.name}_partials_"

    @property
    def accumulator(self) -> str:
        """What the terms of a reduction are added to."""
        return f"{self.name}_acc_"


def parameters(sums: Iterable[Sum]) -> str:
    """The accumulators of reductions, as parameters."""
    return ", ".join(f"{s.real}& {s.accumulator}" for s in sums)


def declared(sums: Sequence[Sum]) -> tuple[str, str]:
    """The declaration of the results of reductions of one type, and their names."""
    names = ", ".join(s.cname for s in sums)
    return f"{sums[0].real} {names};", names


@dataclass(frozen=True)
class Loop:
    """A loop over the vectors of a thread: ``vector`` statements once per vector, ``element`` ones once per element.

    ``inputs``: the IR names of the [M, D] and [D] inputs that it reads.
    """

    vector: tuple[Statement, ...]
    element: tuple[Statement, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Join:
    """A sum over the segments of a row: the number ``result``, from the ``value`` of each segment ``s_``.

    ``statements`` compute the operands of the value; ``interleave`` partial sums; ``unroll`` rounds of them at a time.
    """

    result: Statement
    statements: tuple[Statement, ...]
    value: str
    interleave: int
    unroll: int


@dataclass(frozen=True)
class Reduce:
    """Reductions of one kind over the row, which end a phase.

    op           Add or Max
    call         the device function and its arguments before the terms
    declaration  of the results
    results      what the device function fills: numbers of the row, or an array of those of its segments
    sums         the reductions
    loop         adds the terms of a vector to the accumulators
    whole_row    the results are those of the row, not of its segments
    kept         values that the loop leaves in registers
    """

    op: str
    call: str
    declaration: str
    results: str
    sums: tuple[Sum, ...]
    loop: Loop
    whole_row: bool
    kept: tuple[Tensor, ...] = ()

    @property
    def accumulators(self) -> str:
        """The parameters of the function that adds the terms of a vector."""
        return parameters(self.sums)


@dataclass(frozen=True)
class Phase:
    """The part of a kernel between two row reductions.

    loop         adds to column sums and computes the results that the phase stores
    outputs      [M, D] results stored
    accumulators column sums added to
    reduces      the reductions that end the phase
    exchanged    the sums of segments that the blocks of a cluster then exchange, by name
    after        the statements and the sums over segments that depend on the reductions
    row_outputs  [M] results stored after the reductions
    releases     the reductions imply that every thread has read the row: its stage is refilled
    broadcast    the exchange of the blocks of a cluster also broadcasts the row for that stage
    kept         stored results that the loop leaves in registers
    """

    number: int
    loop: Loop | None
    outputs: tuple[Tensor, ...]
    accumulators: tuple[Sum, ...]
    reduces: tuple[Reduce, ...]
    after: tuple[Statement | Join, ...]
    row_outputs: tuple[Tensor, ...]
    exchanged: tuple[str, ...] = ()
    releases: bool = False
    broadcast: bool = False
    kept: tuple[Tensor, ...] = ()

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops over the vectors of a row, in order; the first stores results."""
        return (*self.storing, *(r.loop for r in self.reduces))

    @property
    def storing(self) -> tuple[Loop, ...]:
        """The loop that stores results and adds to column sums, if the phase has one."""
        return () if self.loop is None else (self.loop,)

    @property
    def whole_rows(self) -> bool:
        """True if a reduction gives results of whole rows, which the blocks of a cluster exchange."""
        return any(r.whole_row for r in self.reduces)

    @property
    def title(self) -> str:
        """The results of the phase in words."""
        sums = [s.name for r in self.reduces for s in r.sums]
        added = {op: [s.name for s in self.accumulators if s.op == op] for op in ("Add", "Max")}
        parts = {
            "column sums": added["Add"],
            "column maxima": added["Max"],
            "reduce": sums,
            "store": [t.name for t in self.outputs],
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names) or "per-row results"


@dataclass(frozen=True)
class Place:
    """The place of a tensor's part of a row in a stage: IR name, C type, and the byte at which it starts.

    A stage is the shared memory of one row of one row group. A result may have the place of an input: a thread reads
    its part of the input before it writes its part of the result.
    """

    name: str
    ctype: str
    offset: int

    def __str__(self) -> str:
        return f"{self.name} at byte {self.offset}"

    @property
    def element(self) -> str:
        """The bytes of an element, in C."""
        return f"sizeof({self.ctype})"

    @property
    def start(self) -> str:
        """Where the part begins in a stage, in C."""
        return f"stage_ + /* bytes */ {self.offset}" if self.offset else "stage_"


# ---- arguments ----


ROWS = Argument("rows_", "long long", "rows")
INNER = Argument("inner_", "long long", "inner")


def tensors(
    values: Iterable[Value],
    kind: Literal["input", "output"],
    handed: tuple[Value, ...] = (),
    results: tuple[Value, ...] = (),
) -> list[Argument]:
    """A pointer for each value, and a row stride for each that is [M, D]; the value itself if it is passed so.

    Values in ``handed`` go from one kernel to the next and are in the workspace. Inputs in ``results`` are those of an
    earlier kernel.
    """
    arguments = []
    for v in values:
        if isinstance(v, ByValue):
            arguments.append(Argument(c_name(v), ctype(v.type.dtype), "value", v.name, rule=v.rule))
            continue
        where = "workspace" if v in handed else "output" if v in results else kind
        arguments.append(Argument(f"{v.name}_ptr_", ctype(v.type.dtype), where, v.name, const=kind == "input"))
        if v.type.axes == WIDE:
            arguments.append(Argument(f"{v.name}_stride_", "long long", "stride", v.name))
    return arguments


def workspace(name: str, dtype: DType, const: bool = False) -> Argument:
    """A pointer to the buffer ``name``, which ends in an underscore."""
    return Argument(name, ctype(dtype), "workspace", name, const)


def sharing(arguments: Iterable[Argument]) -> tuple[Argument, ...]:
    """The arguments, of which those that may be one array are not ``alone``.

    An [M, D] result may overwrite an [M, D] input, and a result that is added to an input may overwrite that.
    """
    arguments = tuple(arguments)
    read, written = ({a.tensor for a in arguments if a.kind == kind} for kind in ("input", "output"))
    wide = {a.tensor for a in arguments if a.kind == "stride"}
    pairs = {(i, o) for o in written for i in read if {i, o} <= wide or i == accumulated(o)}
    shared = {name for pair in pairs for name in pair}
    return tuple(replace(a, alone=False) if a.tensor in shared and a.kind != "stride" else a for a in arguments)


def at_two_distances(arguments: Iterable[Argument]) -> tuple[Argument, ...]:
    """The arguments of a kernel whose rows lie at two distances: an outer stride before each stride, and ``inner``."""
    listed = tuple(
        one
        for a in arguments
        for one in (replace(a, name=f"{a.tensor}_outer_", kind="outer_stride"), a)
        if a.kind == "stride" or one is a
    )
    return INNER, *listed


# Elements from a row to the next. Of rows at two distances, first from one row to the one ``inner`` rows on.
Distance = int | tuple[int, int]


def number(argument: Argument, rows: int, inner: int, distances: Mapping[str, Distance]) -> int:
    """The value of an argument of one of the kinds ``NUMBERS``; rows at one distance lie at two as well."""
    if argument.kind in ("rows", "inner"):
        return rows if argument.kind == "rows" else inner
    given = distances[argument.tensor]
    outer, stride = given if isinstance(given, tuple) else (inner * given, given)
    return outer if argument.kind == "outer_stride" else stride


# ---- expressions ----


@dataclass(frozen=True)
class Inputs:
    """The C expressions for the [M, D] and [D] inputs.

    element   the element ``i_`` of each
    vector    the statement, once per loop, that loads the vector ``v_`` of inputs that are not in registers
    widened   f16 inputs that are stored as floats
    at_use    f16 is converted at every use
    """

    element: Mapping[Value, str]
    vector: Mapping[Value, str] = field(default_factory=dict)
    widened: frozenset[Value] = frozenset()
    at_use: bool = False

    def spell(self, value: Value) -> str:
        """``value`` in C."""
        return self.element.get(value) or c_name(value)

    def statement(self, eqn: Eqn) -> Statement:
        """The C line of one equation: its IR name, its op's CUDA meaning, its IR text as note."""
        meaning = OPS[eqn.op].cuda
        assert meaning is not None, f"'{eqn.op}' is lowered by the pass '{OPS[eqn.op].lowered_by}', which has not run"
        text = meaning(tuple(map(self.spell, eqn.args)), eqn)
        if eqn.op == "cast" and eqn.args[0] in self.widened:
            text = self.spell(eqn.args[0])
        elif eqn.op == "cast" and self.at_use and eqn.args[0].type.dtype is DType.F16:
            text = text.replace("f32_from_f16(", "f32_from_f16_at_use(")
        return Statement(f"const {ctype(eqn.out.type.dtype)} {c_name(eqn.out)} = {text};", note(eqn))


def note(eqn: Eqn) -> str:
    """The equation without its type, which the C declaration has."""
    return print_eqn(eqn).replace(f" : {eqn.out.type}", "", 1)
