"""PTX text is read wrongly, or an instruction that only computes gives other bits than its model, if these fail."""

import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from lngen.compiler.emit import emit
from lngen.compiler.toolchain import compile_ptx
from lngen.errors import PtxError
from lngen.proof.ptx import parse
from lngen.proof.ptx.computing import ROWS, pure
from lngen.proof.ptx.opcodes import PATTERNS
from lngen.proof.ptx.parser import integer
from lngen.proof.ptx.program import DTYPES, UNSIGNED, immediate
from plans import plan_of
from ptx_arithmetic import FLOATS, NAN, WIDTH, Model, model, number
from ptx_source import bound, clean, run_ptx
from schedules import registers

ROUND, FTZ, SAT = ["", "rn", "rz", "rm", "rp"], ["", "ftz"], ["", "sat"]
INT = [f"{k}{w}" for k in "us" for w in (16, 32, 64)]
PAIRS = ["u16x2", "s16x2", "f16x2", "bf16x2", "f32x2"]
BITS = ["b16", "b32", "b64"]
FLOAT = list(FLOATS)
ALL = [*INT, *PAIRS, *BITS, *FLOAT, "b128", "pred"]
SIZED = [f"{k}{w}" for k in "us" for w in (8, 16, 32, 64)]
NARROW = ["e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "e4m3x4", "e5m2x4", "s2f6x2", "tf32"]
COMPARE = ["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"]
COMPARE += ["equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
CVT = ["", "rn", "rna", "rz", "rm", "rp", "rs", "rni", "rzi", "rmi", "rpi"]

# By instruction the places for modifiers, each with what the manual has for it. Not all combinations are PTX.
MANUAL: dict[str, list[list[list[str]]]] = {
    "add": [[[*ROUND, "cc"], FTZ, SAT, [*ALL, "f32.f16", "f32.bf16"]]],
    "sub": [[[*ROUND, "cc"], FTZ, SAT, [*ALL, "f32.f16", "f32.bf16"]]],
    "mul": [[[*ROUND, "hi", "lo", "wide"], FTZ, SAT, ALL]],
    "mad": [[[*ROUND, "hi", "lo", "wide"], FTZ, SAT, ALL]],
    "fma": [[ROUND, FTZ, SAT, ["", "relu", "oob"], [*ALL, "f32.f16", "f32.bf16"]]],
    "div": [[[*ROUND, "approx", "full"], FTZ, ALL]],
    "rem": [[ALL]],
    "rcp": [[[*ROUND, "approx"], FTZ, ALL]],
    "sqrt": [[[*ROUND, "approx"], FTZ, ALL]],
    "neg": [[FTZ, ALL]],
    "abs": [[FTZ, ALL]],
    "copysign": [[FTZ, ALL]],
    "min": [[FTZ, ["", "NaN"], ["", "xorsign.abs"], ["", "relu"], ALL]],
    "max": [[FTZ, ["", "NaN"], ["", "xorsign.abs"], ["", "relu"], ALL]],
    "popc": [[ALL]], "clz": [[ALL]], "brev": [[ALL]],
    "and": [[ALL]], "or": [[ALL]], "xor": [[ALL]], "not": [[ALL]],
    "shl": [[ALL]], "shr": [[ALL]],
    "shf": [[["l", "r"], ["", "wrap", "clamp"], ALL]],
    "lop3": [[["", "and", "or"], ["b32"]]],
    "prmt": [[["b32"], ["", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"]]],
    "bfe": [[ALL]], "bfi": [[ALL]],
    "setp": [[COMPARE, ["", "and", "or", "xor"], FTZ, ALL]],
    "selp": [[ALL]],
    "mov": [[ALL]],
    "cvta": [[["", "to"], ["const", "global", "local", "shared", "shared::cta", "shared::cluster", "param"],
              ["u32", "u64"]]],
    "cvt": [[CVT, [*SIZED, *FLOAT], [*SIZED, *FLOAT]],
            [CVT, ["ftz", "sat", "ftz.sat", "relu", "satfinite", "relu.satfinite"], ["s32", "f16", "bf16", "f32"],
             ["s32", "f16", "bf16", "f32", "f64"]],
            [CVT, ["", "relu", "satfinite", "satfinite.relu"], ["f16x2", "bf16x2", *NARROW],
             ["f32", "f16x2", "bf16x2", *NARROW]]],
}  # fmt: skip


def spellings(name: str) -> list[str]:
    """Every choice of one modifier for each place."""
    return sorted({".".join(p for p in (name, *chosen) if p) for slots in MANUAL[name] for chosen in product(*slots)})


CORNERS: dict[str, list[int]] = {
    "f32": [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800001, 0x3F000000, 0xBFC00000,
            0x40200000, 0x40A00001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x477FE000, 0x477FF000, 0xCF000001,
            0x4F000000, 0x42FC0000, 0x5F000000, 0xDF000001, 0x33800001, 0x3F808000, 0x3EAAAAAB],
    "f64": [0, 1 << 63, 1, 0x3FF0000000000000, 0xBFF8000000000001, 0x3FE0000000000000, 0x4004000000000000,
            0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x40EFFE0000000001,
            0x3690000000000001, 0x47EFFFFFF0000000, 0x41E0000000000000, 0x41DFFFFFFF800000, 0xC1E0000000200000,
            0x43E0000000000000,
            0xC3E0000000000001, 0x3FF0000010000000, 0x3FF0080000000001],
    "f16": [0, 0x8000, 1, 0x83FF, 0x0400, 0x3C00, 0xBE00, 0x3800, 0x4100, 0x7BFF, 0xFC00, 0x7E00, 0x3555],
    "bf16": [0, 0x8000, 1, 0x807F, 0x0080, 0x3F80, 0xBFC0, 0x3F00, 0x4020, 0x7F7F, 0xFF80, 0x7FC0, 0x3EAB],
    "pred": [0, 1],
}  # fmt: skip


def corners(kind: str) -> list[int]:
    """Bits of a type: small and large, and what lies at edges."""
    if kind in CORNERS:
        return CORNERS[kind]
    width = WIDTH[kind]
    top = 1 << width - 1
    more = {0, 1, 3, 31, top, top - 1, 2 * top - 1, 2 * top - 3, 0x5A, 0x0123456789ABCDEF % (2 * top), top | 0x35}
    if width == 32:
        more |= {32, 33, 63, 64, 255, 256, 65536 + 1, 0x1000001, 0x7531, 0xCA28, 0x96}
    return sorted(more)


def run(opcode: str, meant: Model) -> tuple[list[tuple[int, ...]], list[list[int]], list[list[bool]]]:
    """Operands' bits, the results', and which of these are NaN."""
    row = pure(opcode)
    given = list(product(*map(corners, meant.ins)))
    if len(given) > 6000:
        given = given[:: len(given) // 3000]
    if opcode.startswith(("div", "rem")) and meant.ins[0] in INT:
        given = [g for g in given if g[1]]  # nothing is said of a quotient by 0
    columns = [bits_as(column, t) for column, t in zip(zip(*given, strict=True), row.ins, strict=True)]
    with np.errstate(all="ignore"):
        found = row.fn(*columns)
        found = found if len(row.outs) > 1 else (found,)
        one = row.fn(*(c[-1] for c in columns))
    one = one if len(row.outs) > 1 else (one,)
    for whole, single, t in zip(found, one, row.outs, strict=True):
        assert np.asarray(whole).dtype == np.asarray(single).dtype == t, opcode
        assert np.asarray(whole)[-1:].tobytes() == np.asarray(single).tobytes() or whole[-1] != whole[-1], opcode
    nan = [(np.asarray(f) != np.asarray(f)).tolist() for f in found]
    return given, [np.asarray(f).view(UNSIGNED[f.dtype.itemsize]).tolist() for f in found], nan


def bits_as(column: tuple[int, ...], dtype: Any) -> Any:
    return np.array(column, UNSIGNED[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize("name", MANUAL)
def test_each_modifier_is_executed_or_refused(name: str) -> None:
    """The table knows exactly what the model does, and computes the same bits; all NaNs are one value."""
    executed = 0
    for opcode in spellings(name):
        meant = model(opcode)
        assert (pure(opcode) is None) == (meant is None), opcode
        if meant is None:
            continue
        executed += 1
        given, found, nan = run(opcode, meant)
        for n, operands in enumerate(given):
            want = meant.fn(*operands)
            want = want if isinstance(want, tuple) else (want,)
            for w, f, is_nan in zip(want, found, nan, strict=True):
                got = NAN if is_nan[n] and w == NAN else f[n]
                assert w == got or (w == NAN and meant.outs == ("b32",)), (opcode, operands, w, got)
    assert executed
    assert executed < len(spellings(name)) or name == "cvt"


def varies(pattern: str) -> bool:
    """True if alternatives or options stand outside of named groups."""
    unnamed = pattern
    while (begin := unnamed.find("(?P<")) >= 0:
        end, depth = begin + 1, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(unnamed[end], 0)
            end += 1
        unnamed = unnamed[:begin] + "N" + unnamed[end:]
    while (shorter := re.sub(r"\(\?:[^()|?*+[\]]*N[^()|?*+[\]]*\)\?|N\?", "N", unnamed)) != unnamed:
        unnamed = shorter
    return bool(re.search(r"[|?*+()[\]]", unnamed))


def test_what_varies_in_an_opcode_has_a_name() -> None:
    """So that a maker has to ask for it."""
    assert varies(r"add(?:\.rn)?\.(?P<t>f32|f64)")
    assert varies(r"(?P<op>ld|st)(?:\.ca|\.cg)\.u32")
    assert not varies(r"ld(?:\.(?P<space>shared)(?P<window>::cta)?)?\.(?P<t>u(?:16|32))")
    assert [pattern for pattern, _ in ROWS if varies(pattern)] == []
    assert [found.pattern for found in PATTERNS if varies(found.pattern)] == []


def test_the_model_knows_numbers() -> None:
    """Its own anchors, by hand."""
    assert number(0x3FC0, "bf16") == 1.5
    assert number(0xFFFE, "s16") == -2
    half = model("cvt.rn.f16.f32")
    assert half.fn(0x477FF000) == 0x7C00  # 65520: a tie, to infinity
    nan = model("cvt.rzi.u64.f32")
    assert nan.fn(0x7FC00000) == 1 << 63
    assert {DTYPES[k].itemsize * 8 for k in ("f16", "bf16")} == {16}


@pytest.mark.parametrize("opcode", ["add.f32", "sub.f32", "mul.f32", "add.f64", "sub.f64", "mul.f64"])
def test_what_the_assembler_may_fuse_is_refused(opcode: str) -> None:
    """Without a rounding a product may become part of a fused multiply-add: its bits are the assembler's choice."""
    register = "%fd1" if opcode.endswith("f64") else "%f1"
    operands = f"{register}, {register}, {register}"
    with pytest.raises(PtxError, match=f"line 14: instruction '{opcode}' names no rounding, .*-fmad=false"):
        bound(f"{opcode} {operands}")
    bound(f"{opcode.replace('.', '.rn.')} {operands}")


PAIR = """mov.u32 %r0, %tid.x;
setp.gt.u32 %p0|%p1, %r0, 20;
selp.u32 %r1, 1, 2, %p0;
@%p1 add.s32 %r1, %r1, 10;
mul.wide.u32 %rd1, %r0, 4;
add.s64 %rd1, %rd0, %rd1;
st.global.u32 [%rd1], %r1;
"""


def test_an_instruction_with_two_results() -> None:
    found = clean(run_ptx(PAIR, np.zeros(32, np.uint32), block=32))["0"]
    assert (found == np.where(np.arange(32) > 20, 1, 12)).all()


@pytest.mark.parametrize(("text", "number"), [
    ("0", 0), ("-0", 0), ("17", 17), ("-1", -1), ("017", 15), ("-010", -8), ("0x1F", 31), ("0b101", 5), ("7U", 7),
])  # fmt: skip
def test_integer_constants(text: str, number: int) -> None:
    assert integer(text) == number
    assert int(immediate(text, DTYPES["s32"])) == number
    assert bound(f"mov.u32 %r0, {text}")
    assert bound(f"ld.global.u32 %r0, [%rd0+{text}]").instructions[0].operands[1].offset == number


def test_float_constants() -> None:
    for text, value in (("1.5", 1.5), ("-2.0e3", -2000.0), ("1e2", 100.0), ("0f3FC00000", 1.5), ("2", 2.0)):
        assert immediate(text, DTYPES["f32"]) == value
        assert bound(f"mov.f32 %f0, {text}")
    assert immediate("0d3FF8000000000000", DTYPES["f64"]) == 1.5


def test_a_refused_text_is_no_wrong_request() -> None:
    assert PtxError.exit_code == 1


def test_a_line_names_the_kernel_s_line_through_all_calls_that_were_inlined() -> None:
    """Line 3 is called in line 7, which is called in line 20 of the kernel; then line 7 in line 30."""
    inlined = ".loc 1 {} 9, function_name $i, inlined_at 1 {} 9\nmov.u32 %r0, 0;\n"
    code = "".join(
        f".loc 1 {kernel} 5\nmov.u32 %r0, 0;\n{inlined.format(7, kernel)}{inlined.format(3, 7)}" for kernel in (20, 30)
    )
    head = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\n.reg .b32 %r<2>;\n"
    found = [(i.loc.line, i.loc.inlined_at) for i in parse(f"{head}{code}ret;\n}}\n").entries["k"].instructions[:6]]
    assert found == [(20, 0), (7, 20), (3, 20), (30, 0), (7, 30), (3, 30)]


def test_the_text_of_a_plan() -> None:
    """An entry for each kernel, with its parameters; instructions know their line, and the same without lines."""
    plan = plan_of("layernorm.bwd:d=64,dtype=f32", registers(16, 64, 4))
    text = compile_ptx(emit(plan), "sm_90", lines=True)
    module, lines = parse(text), text.splitlines()
    assert list(module.entries) == [k.name for k in plan.kernels]
    assert module.target == "sm_90"
    entry = module.entries[plan.kernels[0].name]
    assert len(entry.params) == len(plan.kernels[0].arguments)
    assert all(i.opcode in lines[i.line - 1] for i in entry.instructions)
    assert any(i.loc.inlined_at for i in entry.instructions)
    plain = parse(compile_ptx(emit(plan), "sm_90")).entries[entry.name]
    assert [i.text for i in plain.instructions] == [i.text for i in entry.instructions]
