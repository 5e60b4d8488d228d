"""PTX text is read wrongly, constants, blocks or lines of the CUDA source, if these fail."""

import pytest

from lngen.emit import emit
from lngen.errors import PtxError
from lngen.ptx import parse
from lngen.ptx.parser import integer
from lngen.ptx.program import DTYPES, immediate
from lngen.toolchain import compile_ptx
from plans import plan_of
from ptx_source import bound
from schedules import registers


@pytest.mark.parametrize(("text", "number"), [
    ("0", 0), ("-0", 0), ("17", 17), ("-1", -1), ("017", 15), ("-010", -8), ("0x1F", 31), ("0b101", 5), ("7U", 7),
])  # fmt: skip
def test_integer_constants(text: str, number: int) -> None:
    assert integer(text) == number
    assert int(immediate(text, DTYPES["s32"])) == number
    assert bound(f"mov.u32 %r0, {text}")
    assert bound(f"ld.global.u32 %r0, [%rd0+{text}]").instructions[0].operands[1].offset == number


def test_float_constants() -> None:
    for text, number in (("1.5", 1.5), ("-2.0e3", -2000.0), ("1e2", 100.0), ("0f3FC00000", 1.5), ("2", 2.0)):
        assert immediate(text, DTYPES["f32"]) == number
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
