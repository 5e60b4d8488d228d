"""What PTX instructions compute, once more and in another way: on Python's integers and exact fractions.

``model`` takes an opcode as the PTX manual spells it; it knows those that the executor is meant to know, no others.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

NAN = "nan"
FLOATS = {"f16": (11, 15), "bf16": (8, 127), "f32": (24, 127), "f64": (53, 1023)}  # digits, largest exponent
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "pred": 1}
WIDTH |= {f"{kind}{width}": width for kind in "bus" for width in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Model:
    """Types of the results and operands; the results' bits (or NAN) from the operands' bits."""

    outs: tuple[str, ...]
    ins: tuple[str, ...]
    fn: Callable[..., Any]


def number(bits: int, kind: str) -> Any:
    """The integer or float (as float64, which has them all) that bits stand for."""
    width = WIDTH[kind]
    if kind in FLOATS:
        if kind == "bf16":
            bits, kind = bits << 16, "f32"
        code, size = {"f16": ("e", 2), "f32": ("f", 4), "f64": ("d", 8)}[kind]
        return struct.unpack(f"<{code}", bits.to_bytes(size, "little"))[0]
    return bits - (1 << width) if kind[0] == "s" and bits >> width - 1 else bits


def rounded(q: Fraction, kind: str, mode: str = "rn", negative_zero: bool = False) -> int:
    """The bits of the float next to a fraction."""
    digits, emax = FLOATS[kind]
    sign, size, emin = q < 0 or (q == 0 and negative_zero), abs(q), 1 - emax
    top = int(sign) << WIDTH[kind] - 1
    if not size:
        return top
    e = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, emin)
    while Fraction(2) ** (e + 1) <= size:
        e += 1
    n, rest = divmod(size / Fraction(2) ** (e - digits + 1), 1)
    up = {"rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n % 2 == 1), "rz": False,
          "rm": rest > 0 and sign, "rp": rest > 0 and not sign}[mode]  # fmt: skip
    bits = ((e - emin + 1) << digits - 1) + int(n) + int(up) - (1 << digits - 1)
    infinite = 2 * emax + 1 << digits - 1
    away = mode == "rn" or (mode == "rm" and sign) or (mode == "rp" and not sign)
    return top | (bits if bits < infinite else infinite if away else infinite - 1)


def encoded(x: float, kind: str, mode: str = "rn") -> Any:
    """The bits of a float, rounded."""
    digits, emax = FLOATS[kind]
    if math.isnan(x):
        return NAN
    if math.isinf(x):
        return int(x < 0) << WIDTH[kind] - 1 | 2 * emax + 1 << digits - 1
    return rounded(Fraction(x), kind, mode, math.copysign(1, x) < 0)


def exact(kind: str, special: Callable[..., float], fraction: Callable[..., Fraction]) -> Callable[..., Any]:
    """Rounded once from the fraction; what is infinite, no number or zero comes out of float64 as well."""

    def fn(*values: float) -> Any:
        if all(map(math.isfinite, values)):
            try:
                q = fraction(*map(Fraction, values))
            except ZeroDivisionError:
                q = Fraction(0)
            if q:
                return rounded(q, kind)
        return encoded(special(*values), kind)

    return fn


def divided(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if not a or math.isnan(a) else math.copysign(math.inf, math.copysign(1, a) * math.copysign(1, b))


def root(q: Fraction) -> Fraction:
    """Near enough to the square root to be rounded as it."""
    if q <= 0:
        return Fraction(0)
    shift = max(0, 200 - q.numerator.bit_length() + q.denominator.bit_length()) // 2 + 1
    scaled, rest = divmod(q * 4**shift, 1)
    found = math.isqrt(int(scaled))
    return Fraction(2 * found + (found**2 != scaled or rest > 0), 2 << shift)


def square_root(a: float) -> float:
    return math.nan if a < 0 or math.isnan(a) else math.sqrt(a)


ARITHMETIC: dict[str, tuple[Callable[..., float], Callable[..., Fraction]]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "div": (divided, lambda a, b: a / b),
    "rcp": (lambda a: divided(1.0, a), lambda a: 1 / a),
    "sqrt": (square_root, root),
    "fma": (lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
}
INTEGERS = [f"{kind}{width}" for kind in "us" for width in (16, 32, 64)]
BITS = ["b16", "b32", "b64"]


def masked(n: int, kind: str) -> int:
    return n & (1 << WIDTH[kind]) - 1


def on_numbers(kind: str, count: int, fn: Callable[..., int], out: str = "") -> Model:
    def bits(*given: int) -> int:
        return masked(fn(*(number(g, kind) for g in given)), out or kind)

    return Model((out or kind,), (kind,) * count, bits)


def toward_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def model(opcode: str) -> Model | None:
    """What an opcode computes."""
    name, *mods = opcode.split(".")
    families: dict[str, Callable[[str, list[str]], Model | None]] = {
        "cvt": conversion, "setp": comparison, "cvta": window, "shf": funnel, "min": extreme, "max": extreme,
        "selp": choice, "mov": same, "and": logic, "or": logic, "xor": logic, "not": logic, "bfe": field,
        "bfi": field, "shl": shift, "shr": shift, "popc": count, "clz": count, "brev": count,
        "neg": signed, "abs": signed, "copysign": signed_as,
    }  # fmt: skip
    if name in families:
        return families[name](name, mods)
    if opcode == "prmt.b32":
        return Model(("b32",), ("b32",) * 3, permuted)
    if opcode == "lop3.b32":
        return Model(("b32",), ("b32",) * 4, looked_up)
    return arithmetic(name, mods)


def arithmetic(name: str, mods: list[str]) -> Model | None:
    kind = mods[-1]
    if name in ARITHMETIC and mods[0] == "rn":
        special, fraction = ARITHMETIC[name]
        operands = special.__code__.co_argcount
        types = ["f32", *(["f64"] if name != "fma" else [])]
        if mods[1:] in [[t] for t in types]:
            fn = exact(kind, special, fraction)
            return Model((kind,), (kind,) * operands, lambda *b: fn(*(number(x, kind) for x in b)))
        if name in ("add", "sub", "fma") and mods[1:] in (["f32", "f16"], ["f32", "bf16"]):
            ins = (*(kind,) * (operands - 1), "f32")
            fn = exact("f32", special, fraction)
            return Model(("f32",), ins, lambda *b: fn(*(number(x, t) for x, t in zip(b, ins, strict=True))))
        return None
    if kind not in INTEGERS:
        return None
    width, twice = WIDTH[kind], f"{kind[0]}{2 * WIDTH[kind]}"
    match [name, *mods[:-1]]:
        case ["add"]:
            return on_numbers(kind, 2, lambda a, b: a + b)
        case ["sub"]:
            return on_numbers(kind, 2, lambda a, b: a - b)
        case ["mul", "lo"]:
            return on_numbers(kind, 2, lambda a, b: a * b)
        case ["mul", "hi"]:
            return on_numbers(kind, 2, lambda a, b: a * b >> width)
        case ["mul", "wide"] if width < 64:
            return on_numbers(kind, 2, lambda a, b: a * b, twice)
        case ["mad", "lo"]:
            return on_numbers(kind, 3, lambda a, b, c: a * b + c)
        case ["mad", "wide"] if width < 64:
            ins = (kind, kind, twice)
            return Model((twice,), ins, lambda a, b, c: masked(number(a, kind) * number(b, kind) + c, twice))
        case ["div"]:
            return on_numbers(kind, 2, lambda a, b: toward_zero(a, b) if b else 0)
        case ["rem"]:
            return on_numbers(kind, 2, lambda a, b: a - toward_zero(a, b) * b if b else a)
    return None


def conversion(name: str, mods: list[str]) -> Model | None:
    if mods in (["rn", "f16x2", "f32"], ["rn", "bf16x2", "f32"]):
        half = mods[1].removesuffix("x2")

        def packed(a: int, b: int) -> Any:
            high, low = (encoded(number(x, "f32"), half) for x in (a, b))
            return NAN if NAN in (high, low) else high << 16 | low

        return Model(("b32",), ("f32", "f32"), packed)
    if mods in (["rn", "satfinite", "e4m3x2", "f32"], ["rn", "satfinite", "e5m2x2", "f32"]):
        codes = bytes_of(mods[2].removesuffix("x2"))
        return Model(("b16",), ("f32", "f32"), lambda a, b: narrowed(a, codes) << 8 | narrowed(b, codes))
    if mods in (["rn", "f16x2", "e4m3x2"], ["rn", "f16x2", "e5m2x2"]):
        halves = [encoded(x, "f16") for x in bytes_of(mods[2].removesuffix("x2"))]

        def widened(two: int) -> Any:
            high, low = halves[two >> 8], halves[two & 255]
            return NAN if NAN in (high, low) else high << 16 | low

        return Model(("b32",), ("b16",), widened)
    if mods == ["rni", "sat", "s8", "f32"]:
        return conversion(name, ["rni", "s8", "f32"])
    *rounding, to, source = mods
    known = {*FLOATS, *(f"{k}{w}" for k in "us" for w in (8, 16, 32, 64))}
    if len(rounding) > 1 or to not in known or source not in known:
        return None
    mode = rounding[0] if rounding else ""
    directed, integral = mode in ("rn", "rz", "rm", "rp"), mode in ("rni", "rzi", "rmi", "rpi")
    if source not in FLOATS and to not in FLOATS:
        return None if mode else Model((to,), (source,), lambda a: masked(number(a, source), to))
    if source not in FLOATS:
        wide = WIDTH[source] == 64
        if not directed or (wide and (mode != "rn" or WIDTH[to] == 16)):
            return None
        return Model((to,), (source,), lambda a: rounded(Fraction(number(a, source)), to, mode))
    if to not in FLOATS:
        return Model((to,), (source,), lambda a: clamped(number(a, source), to, source, mode)) if integral else None
    if to == source and integral:
        return Model((to,), (source,), lambda a: whole_float(number(a, source), to, mode))
    loses = FLOATS[to][0] < FLOATS[source][0] or FLOATS[to][1] < FLOATS[source][1]
    if loses != directed or (mode and not loses):
        return None
    return Model((to,), (source,), lambda a: encoded(number(a, source), to, mode or "rn"))


def bytes_of(kind: str) -> list[float]:
    """The number of each byte of a float of 8 bits."""
    if kind == "e5m2":  # the upper half of an f16
        return [number(byte << 8, "f16") for byte in range(256)]
    size = [(n % 8 + 8 * (n > 7)) * 2.0 ** (max(n // 8, 1) - 10) for n in range(127)] + [math.nan]
    return [*size, *(-x for x in size)]


def narrowed(bits: int, numbers: list[float]) -> int:
    """The byte whose number is next, of two the even one; the largest finite one beyond it, and 0x7f for a NaN."""
    x = number(bits, "f32")
    if math.isnan(x):
        return 0x7F
    finite = [n for n in range(128) if math.isfinite(numbers[n])]
    size = Fraction(min(abs(x), numbers[finite[-1]]))
    return min(finite, key=lambda n: (abs(Fraction(numbers[n]) - size), n % 2)) | bits >> 24 & 0x80


WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def clamped(x: float, to: str, source: str, mode: str) -> int:
    width = WIDTH[to]
    if math.isnan(x):
        return 1 << width - 1 if source == "f64" or width == 64 else 0
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if to[0] == "s" else (0, (1 << width) - 1)
    n = (low if x < 0 else high) if math.isinf(x) else WHOLE[mode](Fraction(x))
    return masked(min(max(n, low), high), to)


def whole_float(x: float, kind: str, mode: str) -> Any:
    if not math.isfinite(x):
        return encoded(x, kind)
    return rounded(Fraction(WHOLE[mode](Fraction(x))), kind, "rn", math.copysign(1, x) < 0)


def compared(op: str, a: Any, b: Any) -> bool:
    """By the manual's table: ordered ones are false of a NaN, unordered ones true."""
    unordered = a != a or b != b
    if op in ("num", "nan"):
        return unordered == (op == "nan")
    if op in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        return unordered or compared(op[:2], a, b)
    op = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(op, op)
    order = (a > b) - (a < b)
    wanted = {"eq": (0,), "ne": (-1, 1), "lt": (-1,), "le": (-1, 0), "gt": (1,), "ge": (0, 1)}[op]
    return not unordered and order in wanted


def comparison(name: str, mods: list[str]) -> Model | None:
    op, *combine, kind = mods
    known = {
        "f": ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"],
        "s": ["eq", "ne", "lt", "le", "gt", "ge"],
        "u": ["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"],
        "b": ["eq", "ne"],
    }
    if kind not in [*INTEGERS, *BITS, *FLOATS] or op not in known["f" if kind in FLOATS else kind[0]]:
        return None
    if combine and combine not in (["and"], ["or"], ["xor"]):
        return None

    def fn(a: int, b: int, *c: int) -> tuple[int, int]:
        found = compared(op, number(a, kind), number(b, kind))
        if not c:
            return int(found), int(not found)
        join = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}[combine[0]]
        return join(int(found), c[0]), join(int(not found), c[0])

    return Model(("pred", "pred"), (kind, kind, *("pred" for _ in combine)), fn)


def window(name: str, mods: list[str]) -> Model | None:
    sign = -1 if mods[:1] == ["to"] else 1
    rest = mods[sign < 0 :]
    places = {"global": 0, "const": 0, "shared": 1 << 40, "shared::cta": 1 << 40, "local": 1 << 41}
    if len(rest) != 2 or rest[0] not in places or rest[1] != "u64":
        return None
    return Model(("u64",), ("u64",), lambda a: masked(a + sign * places[rest[0]], "u64"))


def funnel(name: str, mods: list[str]) -> Model | None:
    if len(mods) != 3 or mods[0] not in "lr" or mods[1] not in ("clamp", "wrap") or mods[2] != "b32":
        return None

    def fn(a: int, b: int, c: int) -> int:
        n = min(c, 32) if mods[1] == "clamp" else c % 32
        return masked((b << 32 | a) << n >> 32 if mods[0] == "l" else (b << 32 | a) >> n, "b32")

    return Model(("b32",), ("b32",) * 3, fn)


def extreme(name: str, mods: list[str]) -> Model | None:
    pick = min if name == "min" else max
    if name == "min" and mods == ["NaN", "xorsign", "abs", "f32"]:
        return Model(("f32",), ("f32", "f32"), least_magnitude)
    if len(mods) == 1 and mods[0] in INTEGERS:
        return on_numbers(mods[0], 2, pick)
    if name == "max" and mods in (["NaN", "f16x2"], ["NaN", "bf16x2"]):
        one = extreme(name, ["NaN", mods[1].removesuffix("x2")])
        assert one is not None

        def packed(a: int, b: int) -> Any:
            high, low = one.fn(a >> 16, b >> 16), one.fn(a & 0xFFFF, b & 0xFFFF)
            return NAN if NAN in (high, low) else high << 16 | low

        return Model(("b32",), ("b32", "b32"), packed)
    kind, strict = mods[-1], mods[:-1] == ["NaN"]
    if kind not in FLOATS or (mods[:-1] and not strict) or (strict and kind == "f64"):
        return None

    def fn(a: int, b: int) -> Any:
        x, y = number(a, kind), number(b, kind)
        if x != x or y != y:
            return NAN if strict or (x != x and y != y) else encoded(y if x != x else x, kind)
        if x == y == 0:
            return a | b if name == "min" else a & b
        return encoded(pick(x, y), kind)

    return Model((kind,), (kind, kind), fn)


def least_magnitude(a: int, b: int) -> Any:
    """Bits of magnitudes are in the order of their numbers."""
    size, sign = 0x7FFFFFFF, 0x80000000
    return NAN if max(a & size, b & size) > 0x7F800000 else min(a & size, b & size) | (a ^ b) & sign


def choice(name: str, mods: list[str]) -> Model | None:
    if len(mods) != 1 or mods[0] not in [*BITS, *INTEGERS, "f32", "f64"]:
        return None
    return Model((mods[0],), (mods[0], mods[0], "pred"), lambda a, b, p: a if p else b)


def same(name: str, mods: list[str]) -> Model | None:
    if len(mods) != 1 or mods[0] not in [*BITS, *INTEGERS, "f32", "f64", "pred"]:
        return None
    return Model((mods[0],), (mods[0],), lambda a: a)


def logic(name: str, mods: list[str]) -> Model | None:
    if len(mods) != 1 or mods[0] not in [*BITS, "pred"]:
        return None
    (kind,) = mods
    if name == "not":
        return Model((kind,), (kind,), lambda a: masked(~a, kind))
    fn = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}[name]
    return Model((kind,), (kind, kind), fn)


def field(name: str, mods: list[str]) -> Model | None:
    kinds = ["u32", "u64", "s32", "s64"] if name == "bfe" else ["b32", "b64"]
    if len(mods) != 1 or mods[0] not in kinds:
        return None
    (kind,) = mods
    top = WIDTH[kind] - 1

    def extracted(a: int, b: int, c: int) -> int:
        at, size = b & 255, c & 255
        sign = a >> min(at + size - 1, top) & 1 if kind[0] == "s" and size else 0
        return sum((a >> at + n & 1 if n < size and at + n <= top else sign) << n for n in range(top + 1))

    def inserted(a: int, b: int, c: int, d: int) -> int:
        at, size, found = c & 255, d & 255, b
        for n in range(min(size, top + 1 - at)):
            found = found & ~(1 << at + n) | (a >> n & 1) << at + n
        return found

    if name == "bfe":
        return Model((kind,), (kind, "u32", "u32"), extracted)
    return Model((kind,), (kind, kind, "u32", "u32"), inserted)


def shift(name: str, mods: list[str]) -> Model | None:
    if len(mods) != 1 or mods[0] not in (BITS if name == "shl" else [*BITS, *INTEGERS]):
        return None
    (kind,) = mods

    def fn(a: int, n: int) -> int:
        amount = min(n, WIDTH[kind])
        return masked(a << amount if name == "shl" else number(a, kind) >> amount, kind)

    return Model((kind,), (kind, "u32"), fn)


def count(name: str, mods: list[str]) -> Model | None:
    if mods not in (["b32"], ["b64"]):
        return None
    (kind,) = mods
    width = WIDTH[kind]
    if name == "brev":
        return Model((kind,), (kind,), lambda a: int(f"{a:0{width}b}"[::-1], 2))
    fn = (lambda a: width - a.bit_length()) if name == "clz" else int.bit_count
    return Model(("u32",), (kind,), fn)


def signed(name: str, mods: list[str]) -> Model | None:
    if len(mods) != 1 or mods[0] not in ["s16", "s32", "s64", *FLOATS]:
        return None
    (kind,) = mods
    top = 1 << WIDTH[kind] - 1
    if kind not in FLOATS:
        return on_numbers(kind, 1, abs if name == "abs" else lambda a: -a)

    def fn(a: int) -> Any:
        return NAN if math.isnan(number(a, kind)) else a & ~top if name == "abs" else a ^ top

    return Model((kind,), (kind,), fn)


def signed_as(name: str, mods: list[str]) -> Model | None:
    if mods not in (["f32"], ["f64"]):
        return None
    (kind,) = mods
    top = 1 << WIDTH[kind] - 1
    return Model((kind,), (kind,) * 2, lambda a, b: NAN if math.isnan(number(b, kind)) else b & ~top | a & top)


def permuted(a: int, b: int, selector: int) -> int:
    source, total = (b << 32 | a).to_bytes(8, "little"), 0
    for n in range(4):
        pick = selector >> 4 * n & 15
        byte = source[pick & 7]
        total |= (255 * (byte >> 7) if pick & 8 else byte) << 8 * n
    return total


def looked_up(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1) & 1) << n for n in range(32))
