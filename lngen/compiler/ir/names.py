"""Names of values. One rule names those that nobody named, in a description and in a derivation.

A value that is rounded to the result y is ``y32``, and the cotangent of v is ``dv``. Any other is called by what its
equation computes from values with names: ``x_plus_z``, ``mean_x_squared``. If that is too long, a function is called by
its own name, and anything else by what it is a part of: ``y_product``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Sequence

from lngen.compiler.ir.axes import Axis
from lngen.compiler.ir.types import Value

# C++ reserves names with two underscores in a row; names that kernels invent end in one (``lower.cuda.fragments``).
_VALUE = re.compile(r"[A-Za-z][A-Za-z0-9]*+(?:_[A-Za-z0-9]++)*+")
_GRAPH = re.compile(r"[a-z][a-z0-9]*+(?:_[a-z0-9]++)*+")


def is_name(name: object) -> bool:
    """True for words of letters and digits with one underscore between two words, the names of values."""
    return isinstance(name, str) and _VALUE.fullmatch(name) is not None


def is_graph_name(name: object) -> bool:
    """True for lower-case words of that kind, the names of graphs, of which files and kernels get their names."""
    return isinstance(name, str) and _GRAPH.fullmatch(name) is not None


def fresh(name: str, taken: Container[str]) -> str:
    """``name``, or ``name_1``, ``name_2``, ... if it is taken."""
    found, n = name, 0
    while found in taken:
        n += 1
        found = f"{name}_{n}"
    return found


def widened(name: str) -> str:
    """The name of what ``name`` is in the compute dtype: ``x32``, ``a1_32``."""
    return f"{name}_32" if name[-1].isdigit() else f"{name}32"


def plain(name: str) -> str:
    """The name that ``widened`` widened; another name as it is."""
    base = name.removesuffix("32").removesuffix("_")
    return base if base and widened(base) == name else name


_NUMBERS = {0.0: "zero", 0.5: "half", 1.0: "one", 2.0: "two", math.inf: "infinity"}
_DIGITS = 8  # a constant of more is a number


def of_number(value: float) -> str:
    """The name of a constant: ``half``, ``minus_one``, ``c1p5`` for 1.5, ``number`` for one of many digits."""
    sign, size = math.copysign(1.0, value) < 0, abs(float(value))
    if size in _NUMBERS:
        return f"{'minus_' if sign else ''}{_NUMBERS[size]}"
    digits = repr(size).removesuffix(".0").replace(".", "p").replace("-", "m").replace("+", "")
    return f"c{'m' if sign else ''}{digits}" if len(digits) <= _DIGITS else "number"


def of_size(axis: Axis, per: Axis | None = None) -> str:
    """The name of the length of an axis: ``d_size``; or of the elements of it that one of ``per`` has: ``d_per_b``."""
    return f"{axis.name.lower()}_{'size' if per is None else f'per_{per.name.lower()}'}"


LONGEST = 25  # characters of a name that is made of the operands' names
LONGEST_OF_COTANGENTS = 32  # which have the names of forward values in theirs

_FORMS = {
    "add": ("{}_plus_{}", "terms"),
    "sub": ("{}_minus_{}", "difference"),
    "mul": ("{}_{}", "product"),
    "div": ("{}_over_{}", "quotient"),
    "maximum": ("max_{}_{}", "larger"),
    "minimum": ("min_{}_{}", "smaller"),
    "reduce_sum": ("sum_{}", "total"),
    "reduce_mean": ("mean_{}", "average"),
    "reduce_max": ("max_{}", "largest"),
    "detach": ("{}_constant", "constant"),
    "stop_gradient": ("stopped_{}", "stopped"),
}
_POWERS = {2: "{}_squared", 3: "{}_cubed"}
_POWER = re.compile(r"([^_]+)_(squared|cubed|to_(\d+))")  # a_x_squared may be a * x^2


def describing(op: str, operands: Sequence[Value], part_of: str = "", longest: int = LONGEST) -> str:
    """A name for the result of ``op``: by its operands, else as a part of ``part_of``; a Builder makes it unique."""
    if op == "cast":
        return widened(operands[0].name)
    words = [plain(v.name) for v in operands]
    form, kind = _FORMS.get(op, (f"{op}_{{}}", ""))
    name = form.format(*words) if len(words) == form.count("{}") else ""
    if op == "mul":
        (base, n), (other, m) = map(_power, words)
        name = _POWERS.get(n + m, "{}_to_" + str(n + m)).format(base) if base == other else name
    if 0 < len(name) <= longest:
        return name
    return "_".join(filter(None, (part_of, kind))) if kind else op


def _power(word: str) -> tuple[str, int]:
    """x and 2 for ``x_squared``; a name and 1 for any other."""
    found = _POWER.fullmatch(word)
    if found is None:
        return word, 1
    return found[1], {"squared": 2, "cubed": 3}.get(found[2]) or int(found[3])
