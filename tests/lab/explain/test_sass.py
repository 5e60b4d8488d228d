"""If these fail, machine code is read wrongly, or golden kernels have more of it than `generated/sass-budget.json`."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from commands import call, fails, prints
from explained import golden
from lngen.config import data_dir
from lngen.errors import LngenError, MissingError
from lngen.lab.inspect import sass, sass_lint
from lngen.lab.inspect.machine_code import kind, machine_code, mix
from lngen.lab.inspect.sass import disassemble
from lngen.packs import catalog
from lngen.proof.check.inputs import random_inputs
from lngen.proof.ptx import run_plan

pytest.importorskip("cupy")

BACK, FORTH = "layernorm.bwd:d=4096,dtype=bf16", "layernorm.fwd:d=4096,dtype=bf16"
COPIED = "layernorm.bwd:d=1000,dtype=f32"
SPILLING = "rmsnorm.fwd:d=64,dtype=f16,weight=f32"  # for an older arch
EVERY_FORM = (
    BACK, FORTH, COPIED, SPILLING, "rmsnorm.fwd:d=1001,dtype=bf16,beta=yes", "layernorm.fwd:d=32768,dtype=f32",
    "rmsnorm.bwd:d=65536,dtype=f32",
)  # fmt: skip
ONE_BY_ONE = "form=registers,threads=128,rows_per_block=1,vec=1,blocks_per_sm=6"


# ---- the disassembler ----


def test_line_numbers_change_no_instruction_and_name_a_statement_for_each() -> None:
    kernels = golden(BACK).kernels
    plain = disassemble(kernels.cubin("sm_90").image)
    lined = disassemble(kernels.cubin("sm_90", lines=True).image, lines=True)
    assert plain.keys() == {k.name for k in kernels.plan.kernels}
    assert {n: tuple(replace(i, where=()) for i in code) for n, code in lined.items()} == plain
    source = kernels.text.splitlines()
    for name, code in lined.items():
        assert [i.address for i in code] == [16 * n for n in range(len(code))]
        places = {w for i in code for w in i.where}
        own = f"{kernels.plan.name}.cu"
        assert {w.file for w in places if not w.file.startswith("lngen/")} == {own}
        assert {w.function for w in places if w.file == own} == {name}
        assert all(w.line <= len(source) for w in places if w.file == own)
    rows = lined[kernels.plan.kernels[0].name]
    assert {"fmaf(" in source[i.where[0].line - 1] for i in rows if i.opcode == "FFMA"} == {True}
    functions = {f"{w.file} {w.function}" for i in rows for w in i.where}
    assert {"lngen/row_reduce.cuh Add::of", "lngen/tma.cuh tma_load", "lngen/launch.cuh pdl_wait"} < functions


def test_what_is_missing_or_no_cubin_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LngenError, match=r"^a cubin is expected, and nvdisasm refuses this one \(.*\); name one that"):
        disassemble(b"no cubin")
    cubin = golden(BACK).kernels.cubin("sm_90").image
    sass._text.cache_clear()
    broken = tmp_path / "bin" / "nvdisasm"
    broken.parent.mkdir()
    broken.write_text("not a program")
    monkeypatch.setattr(sass, "files", lambda _: (_ for _ in ()).throw(PackageNotFoundError))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for mode, what in ((0o600, "which is not installed"), (0o700, r"which cannot be run \(.*\)")):
        broken.chmod(mode)
        with pytest.raises(MissingError, match=rf"nvdisasm, {what}; install it with: .*\[cuda13\]"):
            disassemble(cubin)
    broken.unlink()
    assert "nvidia-cuda-nvdisasm" in fails(3, "show", BACK, "--stage", "sass")
    assert "nvidia-cuda-nvdisasm" in prints("doctor")


# ---- the mix ----


CASES = [
    (FORTH, None, 1, 0),
    ("layernorm.fwd:d=768,dtype=f32", None, 1, 0),
    ("rmsnorm.bwd:d=1024,dtype=bf16,wrt=x", None, 1, 1),
    ("layernorm.bwd:d=1024,dtype=bf16,blocks=2", "", 16, 0),
]


@pytest.mark.parametrize(("spec", "schedule", "rows", "twice"), CASES)
def test_fp32_per_element_is_what_the_executor_counts(spec: str, schedule: str | None, rows: int, twice: int) -> None:
    """Additions, multiplications and multiply-adds of PTX, but those that the assembler finds twice, and up to 5 more
    for each root, reciprocal or division. A persistent kernel is compared by what ``rows`` more rows cost."""
    kernels = golden(spec, schedule).kernels
    plan, code = kernels.plan, machine_code(kernels, "sm_90")[0]

    def counted(number: int) -> Counter[str]:
        ptx = kernels.ptx("sm_90", lines=True)
        ran = run_plan(plan, random_inputs(plan.spec, number), source=kernels.text, ptx=ptx).traffic
        return Counter(ran.instructions[code.name])

    found = counted(2 * rows) - counted(rows) if code.loops else counted(rows)
    plain, hard = (
        32 * sum(found[f"{operation}.rn.f32"] for operation in operations.split()) / (rows * plan.spec.d)
        for operations in ("add sub mul fma", "sqrt rcp div")
    )
    assert 3 < plain - twice <= code.per_element["FP32"] <= plain - twice + 5 * hard


def test_kinds_and_loops_on_every_arch() -> None:
    """A row is copied, loaded and stored 16 bytes at a time, as often as the plan says; the padding is no kind."""
    for spec, arch, copies in ((BACK, "sm_90", "bulk load"), *((COPIED, a, "LDGSTS 16") for a in ("sm_90", "sm_120"))):
        plan, (rows, finish) = golden(spec).plan, machine_code(golden(spec).kernels, arch)
        least, found = sass_lint.promised(plan.kernels[0], plan), mix(rows.row[1])
        assert least[copies] == found[copies]
        assert found["LDS 16"] == least["LDS 16"] * (1 if plan.schedule.row_in_registers else 2)
        assert found["STG 16"] == 4
        assert (finish.per_element, len(finish.loops)) == ({}, 1)
        assert {one.opcode for one in (*rows.code, *finish.code) if kind(one) == "other"} == {"NOP"}
    forward, plan = machine_code(golden(FORTH).kernels, "sm_90")[0], golden(FORTH).plan
    assert forward.loops == {}
    assert mix(forward.row[1])["LDG 16"] == sass_lint.promised(plan.kernels[0], plan)["LDG 16"] == 12


# ---- the lint ----


@pytest.mark.parametrize(("arch", "specs"), [
    pytest.param("sm_90", EVERY_FORM, id="sm_90, every form"),
    *(pytest.param(arch, [*catalog.CATALOG], id=arch, marks=pytest.mark.full) for arch in ("sm_90", "sm_80")),
])  # fmt: skip
def test_the_golden_set_has_wide_loads_no_spills_and_no_more_instructions(
    arch: str, specs: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sass_lint, "kernel_sets", lambda: [golden(spec).kernels for spec in specs])
    faults, numbers = sass_lint.golden([arch])
    assert faults == []
    assert len(numbers) >= 0.6 * len(specs)
    most = sass_lint.recorded(data_dir("generated") / "sass-budget.json").get(sass_lint.build())
    if most is None:
        pytest.skip(f"NVRTC {sass_lint.build()} is not recorded")
    assert sass_lint.above(numbers, most) == [], "read the difference, then run: lngen generated --sass"


def test_narrow_loads_and_local_memory_are_faults() -> None:
    narrow = golden(FORTH, ONE_BY_ONE).kernels
    (fault,) = sass_lint.lint(narrow.plan, machine_code(narrow, "sm_90"))
    assert fault.endswith(f"rows of {FORTH} allow at least 12 of 'LDG 16', got 0.")
    spilling = golden(SPILLING).kernels
    (code,) = machine_code(spilling, "sm_80")
    (fault,) = sass_lint.lint(spilling.plan, [code])
    assert "instructions access local memory" in fault
    assert "It spills: " in code.text()


def test_a_sample_has_every_form() -> None:
    assert {golden(spec).plan.schedule.form for spec in EVERY_FORM} == {
        golden(s).plan.schedule.form for s in catalog.CATALOG
    }


def test_another_build_of_the_compiler_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers = {"k sm_90": {"instructions": 9, "row": 5, "fp32": 2}}
    monkeypatch.setattr(sass_lint, "golden", lambda: ([], numbers))
    monkeypatch.setattr("lngen.cli.generation.data_dir", lambda _: tmp_path)
    done = call("generated", "--sass", "--check")
    assert (done.exit_code, "is not recorded" in done.stderr) == (0, True)
    assert prints("generated", "--sass") == prints("generated", "--sass", "--check") == "1 kernels, 0 faults\n"
    numbers["k sm_90"]["row"] = 6
    done = call("generated", "--sass", "--check")
    assert (done.exit_code, "'row' is 6 instructions, and 5 are recorded" in done.stdout) == (1, True)


# ---- the command ----


def test_machine_code_and_plan_have_one_number_of_dynamic_shared_memory() -> None:
    """A launch that requests more says why."""
    for spec, more in ((BACK, True), (FORTH, False)):
        plan, (code, *_) = golden(spec).plan, machine_code(golden(spec).kernels, "sm_90")
        dynamic = plan.kernels[0].dynamic
        (line,) = (line for line in code.text().splitlines() if "bytes of shared memory: " in line)
        assert f" static, {dynamic} dynamic" in line
        assert (f"at least {dynamic} bytes of dynamic shared memory" in str(plan)) is (dynamic > 0)
        assert (f"a launch requests {code.used['launch_shared']}, so that" in line) is more


def test_show_sass_its_data_and_its_diffs(tmp_path: Path) -> None:
    golden = ("show", FORTH, "--stage", "sass", "--schedule", catalog.CATALOG[FORTH])
    text, data = prints(*golden), json.loads(prints(*golden, "--json"))
    (found,) = data["kernels"]
    assert text.startswith(f"kernel rows, sm_90: {found['instructions']} instructions, ")
    assert found["instructions"] == len(found["code"]) == sum(found["mix"].values())
    assert text.count("\n    FADD") == sum(one["text"].startswith("FADD") for one in found["code"])
    assert prints(*golden, "--diff", "vec=8") == ""
    assert "\n+    LDG.E.U16" in prints(*golden, "--diff", "vec=1")
    assert "\n+kernel rows, sm_80: " in prints(*golden, "--diff-arch", "sm_80")
    prints("build", FORTH, "--out", tmp_path, "--schedule", catalog.CATALOG[FORTH], "--emit", "cu,cubin")
    assert prints(*golden, "--against", tmp_path) == ""
    other = call("show", FORTH, "--stage", "sass", "--schedule", ONE_BY_ONE, "--against", tmp_path)
    assert "the pack has another schedule" in other.stderr
    assert "\n-    LDG.E.U16" in other.stdout
    for args, message in (
        (("ptx", "--against", tmp_path), f"a ptx file of '{FORTH}' for sm_90, and has none; build it: lngen"),
        (("sass", "--against", tmp_path / ".."), "and is no pack; build it: lngen build"),
    ):
        assert message in fails(2, "show", FORTH, "--schedule", catalog.CATALOG[FORTH], "--stage", *args)
