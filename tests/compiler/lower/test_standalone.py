"""An emitted file stands alone: if these fail, it needs other options, a file of its own or a name of its own."""

import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

import lngen
import sampling
from commands import prints
from lngen.compiler.compile import Compilation
from lngen.compiler.emit import emit
from lngen.compiler.graphs import Definition
from lngen.compiler.lower import Plan, lower
from lngen.compiler.problem import Schedule, problem
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import Spec, make_spec, parse_spec
from lngen.compiler.toolchain import compile_cubin, compile_ptx
from lngen.config import data_dir
from lngen.errors import CompileError
from lngen.examples.own_graph import gated_rmsnorm
from lngen.packs import catalog
from lngen.proof.ptx import parse
from paths import SEARCH
from plans import PLANS, run_checked

pytest.importorskip("cupy")

ARCH = "sm_90"
FORMS = {"registers": 8, "tma": 64, "tma_unaligned": 99, "cp_async": 64, "multipass": 9}  # and a D that has the form


@cache
def text_of(spec: str, schedule: str) -> str:
    """What is emitted for a spec under a schedule."""
    return Compilation(parse_spec(spec)).changed(schedule).text


GOLDEN = [*catalog.CATALOG.items()]
STRUCTURES = [
    (spec, str(schedule)) for spec, schedule in PLANS.values()
]  # every structure, dtype and kind of input that lowering has


def factors(spec: str, schedule: str) -> tuple[object, ...]:
    """A plain run takes cases with every value of these."""
    keys = dict(key.split("=") for key in schedule.split(","))
    direction = spec.partition(":")[0].partition(".")[2]
    return (direction, keys["form"]), (direction, "cluster" in keys), "dynamic" in keys, "single_launch" in keys


every_text = sampling.grid(("spec", "schedule"), [*dict.fromkeys([*GOLDEN, *STRUCTURES])], factors, ids=str, strength=1)


def ptx(text: str, arch: str = ARCH) -> str:
    return compile_ptx(text, arch, name="standalone.cu")


def opcodes(text: str) -> dict[str, list[str]]:
    """What each entry of a PTX text executes, but for the names of registers and symbols."""
    return {name: [i.opcode for i in entry.instructions] for name, entry in parse(text).entries.items()}


def of_form(spec: Spec, form: str) -> Plan:
    """The plan of a spec under the first schedule of a form, or a multipass plan where the space has none."""
    schedules = (s for s in space(problem(spec.graph(), spec.d)) if s.form == form)
    return lower(spec, next(schedules, Schedule("multipass", threads=256, rows_per_block=1, vec=1)))


# ---- the header ----


def command(text: str, name: str) -> str:
    """A command in the comment that a text begins with."""
    header = text.split("\n\n")[0]
    assert all(line.startswith("//") for line in header.splitlines())
    (found,) = re.findall(rf"^//   {name} +: (.*)", header, re.MULTILINE)
    return str(found)


def stated_options(text: str) -> set[str]:
    """The compiler options in that comment that decide bits."""
    return set(re.findall(r"(?<=\s)-(?!arch)[a-z][\w-]*=\S+", command(text, "compile")))


SMALL = "form=registers,threads=8,rows_per_block=4,vec=4"


def packed(folder: Path) -> str:
    """The file of a pack, for two archs, of a graph in a module of the current folder."""
    Path("its_norms.py").write_text("from lngen.examples.own_graph import gated_rmsnorm\n")
    options = ("--arch", "sm_80,sm_90", "--emit", "cu", "--schedule", SMALL, "--out", folder)
    prints("build", "its_norms:gated_rmsnorm.fwd:d=32", *options)
    (file,) = folder.glob("*.cu")
    return file.read_text()


SPEC = make_spec(Definition("gated_rmsnorm", gated_rmsnorm), "fwd", {"d": 32})
WRITTEN: dict[str, Callable[[Path], str]] = {
    "a named graph": lambda _: prints("show", "rmsnorm.fwd:d=32", "--schedule", SMALL),
    "a bundle": lambda _: prints("show", "rmsnorm.fwd:d=32", "--schedule", SMALL, "--bundle"),
    "another arch": lambda _: prints("show", "rmsnorm.fwd:d=32", "--schedule", SMALL, "--arch", "sm_80"),
    "a graph of one's own": lambda _: lngen.compile(gated_rmsnorm, d=32, schedule={"fwd": SMALL}).source(),
    "and its bundle": lambda _: lngen.compile(gated_rmsnorm, d=32, schedule={"fwd": SMALL}).source(bundle=True),
    "one that was pickled": lambda _: Compilation(pickle.loads(pickle.dumps(SPEC))).changed(SMALL).file(ARCH),
    "the file of a pack": packed,
}


@pytest.mark.parametrize("what", WRITTEN)
def test_the_commands_of_a_file_can_be_pasted(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first writes the same kernels to the file that the second compiles."""
    monkeypatch.chdir(tmp_path)
    text = WRITTEN[what](tmp_path)
    written, _, file = command(text, "regenerate").partition(" > ")
    program, *arguments = shlex.split(written)
    again = prints(*arguments)
    assert program == "lngen"
    assert again[again.index("\n\n") :] == text[text.index("\n\n") :]
    assert (again == text) is (what != "the file of a pack")  # which names the folder of its headers
    arch = "sm_80" if what in ("another arch", "the file of a pack") else "sm_90"
    assert f"-arch={arch} " in command(text, "compile")
    Path(file).write_text(text)
    if nvcc() is None or what not in ("a named graph", "a bundle", "the file of a pack"):
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), str(Path(str(nvcc())).parent), os.environ["PATH"]])
    paste = subprocess.run(
        ["/bin/sh", "-c", command(text, "compile")],
        env={**os.environ, "PATH": path, "PYTHONPATH": SEARCH}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (paste.returncode, paste.stderr) == (0, "")
    assert Path(file).with_suffix(".cubin").stat().st_size > 0


PROGRAM = """
from lngen import Definition
from lngen.examples.own_graph import gated_rmsnorm

def gated(b):
    gated_rmsnorm(b)

own = Definition("own", gated)
others = [Definition("other", gated), Definition("f", lambda b: 0)]
print(*(g.source for g in (Definition("gated", gated), Definition("own", gated), *others)), sep="\\n")
"""


def test_the_program_that_runs_is_the_module_of_its_graphs(tmp_path: Path) -> None:
    """A graph that no name of the module leads to has no source: its command is Python."""
    (tmp_path / "its_norms.py").write_text(PROGRAM)
    run = [sys.executable, str(tmp_path / "its_norms.py")]
    assert subprocess.check_output(run, text=True, env={**os.environ, "PYTHONPATH": SEARCH}).split("\n") == [
        "its_norms:gated", "its_norms:own", "", "", "",
    ]  # fmt: skip


# ---- one translation unit ----


def assert_same_kernels(together: str, texts: Iterable[str]) -> None:
    """The entries of a unit are those of its texts, and execute the same instructions."""
    found = opcodes(together)
    alone = {name: code for text in texts for name, code in opcodes(ptx(text)).items()}
    assert found.keys() == alone.keys()
    assert not [name for name in alone if found[name] != alone[name]]


@pytest.mark.full
def test_every_structure_shares_a_translation_unit() -> None:
    texts = [text_of(*case) for case in STRUCTURES]
    assert_same_kernels(ptx("".join(texts)), texts)


def test_schedules_of_one_spec_share_a_translation_unit() -> None:
    """One of each form, in one direction and one dtype."""
    texts = [emit(of_form(parse_spec(f"layernorm.fwd:d={d},dtype=f32"), form)) for form, d in FORMS.items()]
    assert_same_kernels(ptx("".join(texts)), texts)


def test_what_is_defined_twice_would_be_seen() -> None:
    text = text_of(*GOLDEN[0])
    with pytest.raises(CompileError, match="has already been defined"):
        ptx(text + text)


# ---- nvcc ----


@cache
def nvcc() -> str | None:
    """The compiler on PATH, or that of the wheels nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-crt."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    wheels = sorted(p for p in packages.glob("*/bin/nvcc") if (p.parents[2] / "nvvm" / "bin" / "cicc").exists())
    return shutil.which("nvcc") or next(map(str, wheels), None)


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="needs nvcc, on PATH or as a wheel (nvidia-cuda-nvcc)")


def by_nvcc(folder: Path, texts: Iterable[str], options: set[str]) -> str:
    """The PTX that nvcc makes of one file that includes the texts."""
    texts = [*texts]
    for n, text in enumerate(texts):
        (folder / f"{n}.cu").write_text(text)
        with (folder / "all.cu").open("a") as file:
            file.write(f'#include "{n}.cu"\n')
    command = [
        str(nvcc()), f"-I{data_dir('templates') / 'include'}", "-ptx", f"-arch={ARCH}", *sorted(options),
        "-Werror=all-warnings", "all.cu", "-o", "all.ptx",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (folder / "all.ptx").read_text()


@needs_nvcc
@pytest.mark.full
def test_nvcc_compiles_the_golden_set_as_one_translation_unit(tmp_path: Path) -> None:
    texts = [text_of(*case) for case in GOLDEN]
    found = by_nvcc(tmp_path, texts, stated_options(texts[0]))
    assert opcodes(found).keys() == opcodes(ptx("".join(texts))).keys()


@needs_nvcc
@pytest.mark.parametrize("spec", ["rmsnorm.fwd:d=64,dtype=f16,weight=f32", "layernorm.bwd:d=1000,dtype=f32"])
def test_nvcc_gives_the_same_bits_with_the_options_of_the_header(tmp_path: Path, spec: str) -> None:
    plan = next(plan for plan in catalog.plans() if str(plan.spec) == spec)
    text = emit(plan)
    run_checked(plan, 5, arch=ARCH, ptx=by_nvcc(tmp_path, [text], stated_options(text)))


# ---- names ----


@every_text
def test_a_kernel_may_be_renamed(spec: str, schedule: str) -> None:
    """Its name is in the text for itself alone: with another one it compiles, to the same instructions."""
    text = text_of(spec, schedule)
    kernels = set(re.findall(r"^(\w+)\(", text, re.MULTILINE))
    renamed = text
    for n, name in enumerate(sorted(kernels)):
        renamed = re.sub(rf"\b{name}\b", f"renamed_{n}", renamed)
    assert len(kernels) > 0
    compile_cubin(renamed, ARCH)  # what assembly names is looked up there
    before, after = opcodes(ptx(text)), opcodes(ptx(renamed))
    assert after == {f"renamed_{n}": before[name] for n, name in enumerate(sorted(kernels))}
