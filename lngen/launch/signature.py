"""The description of a call, as data: what a caller passes and gets, and the numbers that follow from its eps.

A kernel set has it in the manifest (``lngen help manifest``). The compiler makes the same for a spec, before there is a
schedule.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, Optional, Union

from ..errors import ArrayError
from ..files import shown
from ..rules import RULES, SETS, TABLE, padded

# ---- lengths ----

WIDE = ("M", "D")
LENGTH = re.compile(
    r"(?P<number>\d{1,9})|(?P<sets>M / inner)|(?P<table>rows of a table)|(?P<axis>[MD])(?: / (?P<by>[1-9]\d{0,8}))?"
    r"|(?:ceil\((?P<ceil>[MD]) / |roundup\((?P<roundup>[MD]), )(?P<to>[1-9]\d{0,8})\)"
)


class Length(NamedTuple):
    """How many elements an axis has: (M + ``add``) // ``per`` * ``number``, or ``number`` where ``per`` is 0.

    A ``per`` of -1 is the number of inner rows, those of a set. A table has the rows of its array, here 0.
    """

    number: int
    per: int = 0
    add: int = 0

    @classmethod
    def of(cls, text: str, d: int) -> Length:
        """From an expression of M and D: ``D``, ``D / 128``, ``ceil(M / 4)``, ``roundup(M, 4)``, ``8``."""
        found = LENGTH.fullmatch(text)
        if found is None:
            raise ValueError(f"'{text}' is no length")
        if found["number"]:
            return cls(int(found["number"]))
        if found["sets"]:
            return cls(1, -1)
        if found["table"]:
            return cls(0)
        per = int(found["by"] or found["to"] or 1)
        own = cls(per if found["roundup"] else 1, per, per - 1 if found["to"] else 0)
        return cls(own(d)) if "D" in text else own  # D is known, so that is a number

    def __call__(self, rows: int, inner: int = 1) -> int:
        """The length for so many rows, ``inner`` of them in a set."""
        per = inner if self.per < 0 else self.per
        return (rows + self.add) // per * self.number if per else self.number


def length(text: str, rows: int, d: int) -> int:
    """The value of an expression of M and D."""
    return Length.of(text, d)(rows)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous array, in elements."""
    return tuple([math.prod(shape[n + 1 :]) for n in range(len(shape))])


class Tensor(NamedTuple):
    """An input or result of a call.

    dtype    one of lngen.dtypes; ``size``: bytes of an element
    axes     ("M", "D"), ("M",) with a number per row, ("D",), or () for one number; ("M", "B") with one per block,
             ("B", "M") if these are stored by columns; ("M", "J") with some that repeat along a row, ("P", "J") of a
             table with such rows
    lengths  of the axes, as expressions of M and D; those of M and D themselves if empty
    """

    name: str
    dtype: str
    size: int
    axes: tuple[str, ...]
    lengths: tuple[str, ...] = ()

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Tensor:
        """From its description."""
        axes, lengths = tuple(described["axes"]), tuple(described["shape"])
        return cls(described["name"], described["dtype"], described["element_bytes"], axes, lengths)

    @property
    def wide(self) -> bool:
        """True for [M, D]."""
        return self.axes == WIDE

    @property
    def by_columns(self) -> bool:
        """True for [B, M]."""
        return self.axes[1:] == ("M",)

    @property
    def of_sets(self) -> bool:
        """True for [N, D], with a row for each set of rows."""
        return self.lengths[:1] == (SETS,)

    @property
    def of_table(self) -> bool:
        """True for rows of elements that repeat along a row: of each row, or of a table."""
        return len(self.lengths) == 2 and self.lengths[1].isdecimal() and not self.by_columns

    @property
    def by_position(self) -> bool:
        """True for a table, whose rows are those of positions."""
        return self.lengths[:1] == (TABLE,)

    @property
    def features(self) -> bool:
        """True for rows that lie in vectors: [M, D], [D], and those that repeat along a row."""
        return "D" in self.axes or (self.lengths[-1:] != () and self.lengths[-1].isdecimal())

    def strides(
        self, rows: Union[int, tuple[int, ...]], d: int, sets: Union[int, tuple[int, ...]] = 0
    ) -> tuple[int, ...]:
        """The strides of a new array of that ``shape``, in elements; columns have a distance of their own."""
        steps = contiguous(self.shape(rows, d, sets))
        return (padded(steps[0]), *steps[1:]) if self.by_columns else steps

    def shape(
        self, rows: Union[int, tuple[int, ...]], d: int, sets: Union[int, tuple[int, ...]] = 0
    ) -> tuple[int, ...]:
        """The shape of an array with ``rows`` rows and ``sets``, numbers or leading dimensions, and D = ``d``."""
        lead = rows if isinstance(rows, tuple) else (rows,)
        if self.of_sets:
            return (*(sets if isinstance(sets, tuple) else (sets,)), d)
        each = (lead if text == "M" else (length(text, math.prod(lead), d),) for text in self.lengths or self.axes)
        return tuple([n for part in each for n in part])


# ---- numbers that follow from eps ----

OF_EPS = {rule.text: rule.of for rule in RULES.values()}


class Number(NamedTuple):
    """A number that is passed by value: the dtype to which it is rounded once, and the text of its rule."""

    name: str
    dtype: str
    rule: str


class Values(NamedTuple):
    """The eps of a call, None where it is built in, and the bits of the numbers that follow from it, by name."""

    eps: Optional[float]
    bits: Mapping[str, int]


NO_VALUES = Values(None, MappingProxyType({}))


@lru_cache(maxsize=256)
def values_of(numbers: tuple[Number, ...], eps: float) -> Values:
    """The numbers of an eps."""
    return Values(eps, {n.name: _bits(OF_EPS[n.rule](eps), n.dtype) for n in numbers})


def _bits(value: float, dtype: str) -> int:
    """The bits of a number, rounded once to a dtype; a number beyond it is infinite."""
    if dtype == "f64":
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    try:
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F800000 if value > 0 else -0x800000


def given_eps(spec: str, given: Any) -> float:
    """The eps of a call as a number; ArrayError if it is missing, or anything but one finite real number."""
    if given is None:
        raise ArrayError(f"'{spec}' expects eps in every call, which is missing; add for example eps=1e-6.")
    eps = finite(given)
    if eps is None:
        got = f"{type(given).__module__}.{type(given).__name__}" if hasattr(given, "shape") else shown(given)
        raise ArrayError(f"'{spec}' expects eps to be a finite number, got {got}; pass for example eps=1e-6.")
    return eps


def finite(value: object) -> Optional[float]:
    """The finite number in ``value``, without the sign of a zero; None for anything that is not one real number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value) + 0.0
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


# ---- a call ----


class Signature(NamedTuple):
    """What a caller passes and gets.

    text             of the spec; ``forward``: that of its forward
    strides          1, or 2 for rows at two distances
    inputs, outputs  in order; ``leader``: the index of the input that gives rows, library and device
    numbers          passed by value
    eps              built in; "run" if every call gives it; None for a graph without one
    returned         the names of what a caller gets: of results, or of gradients
    same             of those that are stored once, the result that has them
    held             the index of the result that has each of ``returned``
    cotangents       the inputs of a backward that are gradients of results
    added            the input that a result is added to, by the result's name
    """

    text: str
    forward: str
    d: int
    strides: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    leader: int
    numbers: tuple[Number, ...]
    eps: Union[float, str, None]
    returned: tuple[str, ...]
    same: Mapping[str, str]
    held: tuple[int, ...]
    cotangents: tuple[str, ...]
    added: Mapping[str, str]

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Signature:
        """From a kernel set, or from what the compiler says of a spec."""
        spec, tensors, call = described["spec"], described["tensors"], described["call"]
        inputs, outputs = (tuple([Tensor.of(t) for t in tensors if t["role"] == role]) for role in ("input", "output"))
        same, stored = described["same_tensor"], [t.name for t in outputs]
        return cls(
            text=spec["text"],
            forward=spec["forward"],
            d=spec["d"],
            strides=spec["strides"],
            inputs=inputs,
            outputs=outputs,
            leader=[t.name for t in inputs].index(call["leader"]),
            numbers=tuple([Number(n["name"], n["dtype"], n["rule"]) for n in call["numbers"]]),
            eps=call["eps"],
            returned=tuple(call["returned"]),
            same=same,
            held=tuple([stored.index(same.get(name, name)) for name in call["returned"]]),
            cotangents=tuple(call["cotangents"]),
            added={t["name"]: t["added_to"] for t in tensors if t["added_to"]},
        )

    def values(self, eps: object, about: str = "") -> Values:
        """The numbers of a call with this eps; ArrayError if it is missing, or not wanted.

        ``about``: how to get a norm that takes it, the end of a sentence.
        """
        if self.numbers:
            return values_of(self.numbers, given_eps(self.text, eps))
        if eps is None:
            return NO_VALUES
        raise ArrayError(f"'{self.text}' has eps={self.eps} built in, got eps= in a call{about}.")
