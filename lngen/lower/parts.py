"""The parts of a kernel's text: arguments, statements, loops over vectors, reductions, phases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """A kernel argument. ``kind``: rows, input, output, workspace (pointers), stride (of ``tensor``, in elements).

    ``alone``: no other pointer of the kernel reaches the same memory, if one of them writes to it.
    """

    name: str
    ctype: str
    kind: str
    tensor: str = ""
    const: bool = False
    alone: bool = True

    @property
    def declaration(self) -> str:
        """The declaration in the kernel's signature."""
        if self.kind in ("rows", "stride"):
            return f"const long long {self.name}"
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


def address(name: str, row: str) -> str:
    """C++: the address of a row of an [M, D] tensor."""
    return f"{name}_ptr_ + {row} * {name}_stride_"


@dataclass(frozen=True)
class Tensor:
    """An input or output of a kernel: its IR name, its C type, and its C name."""

    name: str
    ctype: str
    cname: str

    def row(self, row: str) -> str:
        """C++: the address of a row."""
        return address(self.name, row)


@dataclass(frozen=True)
class Sum:
    """A reduction: its IR name, its C name, its index among its kind, its IR equation, Add or Max, and the C type."""

    name: str
    cname: str
    index: int
    note: str
    op: str = "Add"
    real: str = "float"

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
        return f"stage_ + {self.offset}" if self.offset else "stage_"

    def row(self, row: str) -> str:
        """C++: the address of a row in global memory."""
        return address(self.name, row)
