"""Emitted CUDA and its headers: if these fail, the text differs from run to run, is untidy, or does not compile."""

import getpass
import hashlib
import importlib
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader, UndefinedError

import lngen
import sampling
from bit_graphs import DEFINITIONS
from lngen.compiler.compile import KernelSet
from lngen.compiler.devices import capability, device_for
from lngen.compiler.emit import WIDTH, emit, environment, laid_out
from lngen.compiler.graphs import Definition
from lngen.compiler.graphs.norms import layernorm
from lngen.compiler.headers import HEADER_OF, HEADERS, SEARCH, bundled, declared, included, includes, text_of
from lngen.compiler.ir import parse, print_graph
from lngen.compiler.lower import Plan, lower
from lngen.compiler.problem import problem
from lngen.compiler.problem.schedule import MINIMUM_ARCH
from lngen.compiler.schedule import MOST_TRIED, ranked
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import make_spec, parse_spec
from lngen.compiler.toolchain import ARCHES, compile_ptx, nvrtc
from lngen.config import data_dir
from lngen.errors import CompileError, EmitError
from paths import ROOT
from plans import PLANS, notes, plan_of, plans_of_every_template
from whole_numbers import WHOLE, everywhere


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PLANS[request.param])


# ---- the text ----


COMMAND = re.compile(r"//   (regenerate|compile) +: ")  # a line to paste is one line


def test_the_text_is_tidy(plan: Plan) -> None:
    text = emit(plan)
    assert text.endswith("}\n")
    assert text.isascii()
    assert not re.search(r"\t|[ \r]$|\n\n\n", text, re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > WIDTH and not COMMAND.match(line)] == []
    code = re.sub(r'"(\\.|[^"\\])*"|//.*', "", text)
    assert [code.count(c) for c in "([{"] == [code.count(c) for c in ")]}"]


def test_a_number_in_the_code_says_what_it_is(plan: Plan) -> None:
    """Of template arguments, offsets, distances and indices; equations say it in their notes."""
    text = emit(plan)
    lines = [line.partition("//")[0] for line in text[text.index("namespace lngen {") :].splitlines()]
    bare = re.compile(r"(?<!\bif)(?<!__align__)(?:<|\(|, |\+ |\* |\+= )\d+\b(?![.\w])")
    assert [line for line in lines if bare.search(line) and "__launch_bounds__" not in line] == []


def test_the_text_has_no_trace_of_machine_or_day(plan: Plan) -> None:
    text = emit(plan)
    assert not re.search(r"\b(19|20)\d\d-\d\d|\d\d:\d\d", text)
    for word in (getpass.getuser(), platform.node(), lngen.__name__ + "/", str(ROOT), os.environ.get("HOME", ROOT)):
        assert not re.search(rf"(?<![\w]){re.escape(str(word))}(?!\w)", text), word
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version
    assert not re.search(rf"(?<![\d.]){re.escape(version[1])}(?![\d.])", text)


def unwrapped(text: str) -> str:
    """The text with every comment in one line."""
    return re.sub(r"\n *//     (?=\S)", " ", re.sub(r"\n *//       (?=\S)", "", text))


@pytest.mark.parametrize(("text", "want"), [
    ("f(a, {\nb;\n});\nc;", "f(a, {\n    b;\n});\nc;\n"),
    ("if (a) {\n\nb;\n\n\nc;\n\n}", "if (a) {\n    b;\n\n    c;\n}\n"),
    ("a = 1;  // one\nlonger = 2;  // two", "a = 1;       // one\nlonger = 2;  // two\n"),
    (f"a;  // %{'n' * 114}\nb;  // m", f"// %{'n' * 114}\na;\nb;  // m\n"),
    (f"f({'a, ' * 50}b);  // why", f"f({'a, ' * 38}".rstrip() + f"\n    {'a, ' * 12}b);  // why\n"),
    (f"f(\n{'a, ' * 50}b)\n{{\n}}", f"f(\n    {'a, ' * 38}".rstrip() + f"\n    {'a, ' * 12}b)\n{{\n}}\n"),
    (f"f({'a' * 130});", f"f({'a' * 130});\n"),  # nowhere to break
    (f"f({'a, ' * 50}b);", f"f({'a, ' * 38}".rstrip() + f"\n    {'a, ' * 12}b);\n"),
    ("// {\na;", "// {\na;\n"),
    ('s = "{";\na;', 's = "{";\na;\n'),
])  # fmt: skip
def test_the_layout(text: str, want: str) -> None:
    assert laid_out(text) == want


def facts_of(text: str) -> dict[str, str]:
    """The facts in the header of an emitted text."""
    header = [line.removeprefix("// ") for line in unwrapped(text).split("\n\n")[0].splitlines()]
    start = next(n for n, line in enumerate(header) if line.startswith("graph @"))
    return dict(map(str.strip, line.split(" : ", 1)) for line in header[:start] if " : " in line)


def test_every_equation_stands_beside_its_statement(plan: Plan) -> None:
    text = unwrapped(emit(plan))
    for kernel in plan.kernels:
        for note in notes(kernel):
            assert re.search(rf"// {re.escape(note)}$", text, re.MULTILINE), note


def test_the_header_holds_the_graph_and_how_to_make_and_compile_the_file(plan: Plan) -> None:
    text = unwrapped(emit(plan))
    header = [line.removeprefix("// ") for line in text.split("\n\n")[0].splitlines()]
    start = next(n for n, line in enumerate(header) if line.startswith("graph @"))
    assert parse("\n".join(header[start:])) == plan.graph
    assert header[0] == plan.name
    facts = facts_of(text)
    assert facts["ir-sha256"] == hashlib.sha256(print_graph(plan.graph).encode()).hexdigest()[:12]
    assert facts["regenerate"] == f"lngen show {plan.spec} --schedule {plan.schedule} > {plan.name}.cu"
    own = {option for option in nvrtc._OPTIONS if "include" not in option}  # those that decide bits
    assert own == {"-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"}
    assert set(re.findall(r"(?<=\s)-+[a-z][\w-]*=\S+", facts["compile"])) == {*own, "-arch=sm_90"}
    assert (facts["spec"], facts["schedule"]) == (str(plan.spec), str(plan.schedule))
    for n, kernel in enumerate(plan.kernels, 1):
        assert facts[f"launch {n}"] == f"{kernel.role}, {kernel.launch_rule()}"
    assert [b.name for b in plan.workspace if b.name not in facts["workspace"]] == []


@pytest.mark.parametrize("keys", [{"d": 96}, {"d": 64, "dtype": "bf16", "eps": 1e-6, "gamma": "no", "wrt": "x"}])
def test_the_header_of_a_graph_of_ones_own_says_the_python_that_emits_it(keys: dict[str, Any]) -> None:
    own = Definition("own", layernorm)
    for direction in ("fwd", "bwd"):
        mine = {k: v for k, v in keys.items() if k != "wrt" or direction == "bwd"}
        spec = make_spec(own, direction, mine)
        text = emit(lower(spec, ranked(problem(spec.graph(), spec.d))[5]))
        assert eval(facts_of(text)["regenerate"], {"lngen": lngen, "g": own}) == text


# ---- templates and their context ----


def test_lambdas_name_the_types_of_their_parameters() -> None:
    """Some versions of NVRTC take a lambda with a parameter of type auto for a function of the host, and refuse it."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "templates").rglob("*.*")}
    assert [str(path) for path, text in texts.items() if re.search(r"\]\s*\([^)]*\bauto\b", text)] == []


def test_undefined_names_are_errors() -> None:
    with pytest.raises(UndefinedError, match="'missing' is undefined"):
        environment().from_string("{{ missing }}").render(given=1)


@pytest.mark.parametrize(("files", "where"), [
    ({"registers.cu.jinja": "a\n\n{{ nam }}\n"}, "registers.cu.jinja:3: 'nam' is undefined."),
    ({"registers.cu.jinja": "a\n{% for %}\n"}, "registers.cu.jinja:2: Expected "),
    ({"registers.cu.jinja": "{% include 'p.cu.jinja' %}", "p.cu.jinja": "b\n{{ kernel.nam }}"},
     "p.cu.jinja:2: 'lngen.compiler.lower.plan.Kernel object' has no attribute 'nam'."),
    ({"registers.cu.jinja": "\n{% include 'gone.jinja' %}"}, "registers.cu.jinja:2: 'gone.jinja' not found"),
])  # fmt: skip
def test_a_broken_template_is_named_with_its_line(
    files: dict[str, str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    emitter = importlib.import_module("lngen.compiler.emit")
    broken = environment().overlay(loader=FileSystemLoader(tmp_path))
    monkeypatch.setattr(emitter, "environment", lambda: broken)
    plan = plan_of(*PLANS["row"])
    with pytest.raises(EmitError) as error:
        emit(plan)
    assert str(error.value).startswith(f"'{plan.name}' could not be laid out: {where}")


# ---- compiled templates in the cache folder ----


@pytest.fixture
def kept_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[str, int]]]:
    """Emits one plan as a new process does: the text, and how many templates Jinja compiled for it."""
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "cache"))
    compiled: list[str] = []
    generate = Environment.compile

    def counted(self: Environment, source: Any, *args: Any, **options: Any) -> Any:
        compiled.append(source)
        return generate(self, source, *args, **options)

    monkeypatch.setattr(Environment, "compile", counted)

    def again() -> tuple[str, int]:
        environment.cache_clear()
        compiled.clear()
        return emit(plan_of(*PLANS["row"])), len(compiled)

    yield again
    environment.cache_clear()


def test_templates_are_compiled_once(kept_templates: Callable[[], tuple[str, int]], tmp_path: Path) -> None:
    """A file that was changed, or that others may write, is not run: the template is compiled, the file replaced."""
    text, made = kept_templates()
    files = sorted((tmp_path / "cache" / "templates").iterdir())
    assert len(files) == made > 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert kept_templates() == (text, 0)
    first, second, *_ = files
    good = first.read_bytes(), second.read_bytes()
    first.write_bytes(good[0][:-1])
    second.chmod(0o622)
    assert kept_templates() == (text, 2)
    assert (first.read_bytes(), second.read_bytes()) == good
    first.write_bytes(good[1])  # the bytecode of another template
    assert kept_templates() == (text, 1)


@pytest.mark.parametrize("folder", ["file/cache", "~nosuch-user-here"])
def test_a_folder_that_cannot_be_used_changes_no_text(
    kept_templates: Callable[[], tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    text, made = kept_templates()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LNGEN_CACHE_DIR", folder if folder.startswith("~") else str(tmp_path / folder))
    assert kept_templates() == (text, made)


def test_compiled_templates_depend_on_who_compiled_them(
    kept_templates: Callable[[], tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another Jinja, other options in this module, or another interpreter: other files."""
    emitter = importlib.import_module("lngen.compiler.emit")
    text, made = kept_templates()
    with monkeypatch.context() as patched:
        patched.setattr(emitter, "_made_by", lambda: "others")
        assert kept_templates() == (text, made)
    monkeypatch.setattr("sys.implementation.cache_tag", "another-311")
    assert kept_templates() == (text, made)


# ---- the compiler ----

# Spec and form; the schedule is the first of that form in the ranking that is clean, as a default would be.
STRUCTURES = {
    "row": ("layernorm.fwd:d=1024", "registers"),
    "row, columns": ("layernorm.bwd:d=1024", "registers"),
    "row, columns, narrow": ("rmsnorm.bwd:d=63", "registers"),
    "row, staged": ("layernorm.bwd:d=1024", "cp_async"),
    "row, staged, forward": ("rmsnorm.fwd:d=512", "tma"),
    "row, dynamic": ("rmsnorm.fwd:d=20480", "tma"),
    "row, staged, backward": ("layernorm.bwd:d=4096", "tma"),
    "row, multipass": ("rmsnorm.fwd:d=100003", "multipass"),
    "columns": ("layernorm.bwd:d=70000,save=none", "multipass"),
}
CASES = [(s, t) for s in STRUCTURES for t in ("f16", "bf16", "f32", "f64")]


@sampling.grid(("structure", "dtype"), CASES, strength=1)
def test_every_structure_has_a_schedule_without_spills(structure: str, dtype: str) -> None:
    """One arch beside sm_90 for each structure and dtype, another for each."""
    pytest.importorskip("cupy")
    text, form = STRUCTURES[structure]
    spec = parse_spec(f"{text},dtype={dtype}")
    at = CASES.index((structure, dtype))
    for arch in {ARCHES[at % 7], "sm_90"}:
        if capability(arch) < MINIMUM_ARCH[form]:
            continue
        schedules = ranked(problem(spec.graph(), spec.d), device_for(arch))
        fitting = [s for s in schedules if s.form == form and s.dynamic == (structure == "row, dynamic")]
        if not fitting and arch != "sm_90":
            continue  # its shared memory is too small
        tried = []
        for schedule in fitting[:MOST_TRIED]:
            plan = lower(spec, schedule)
            template = "columns" if structure == "columns" else form
            if structure.startswith("row, columns"):
                template = "persistent"
            assert f"{template}.cu.jinja" in {k.template for k in plan.kernels}
            used = KernelSet(plan).cubin(arch).resources
            assert list(used) == [k.name for k in plan.kernels]
            tried.append((str(schedule), [r for r in used.values() if r.spills]))
            if not tried[-1][1]:
                break
        assert not tried[-1][1], (arch, tried)


TEXTS = {header: text_of(header) for header in HEADERS}
COMMENT = re.compile(r"//.*")


@cache
def kernels() -> tuple[str, ...]:
    """Kernels that take every template between them, without their headers and comments."""
    return tuple(COMMENT.sub("", emit(plan)) for plan in plans_of_every_template())


def words(code: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", COMMENT.sub("", code)))


DECLARED = """
struct Before {};
namespace lngen {
struct Plain {
    int member;
    __device__ static int method(int a) { return a; }
};
struct alignas(16) Aligned {};
union Either { int a; float b; };
template <typename T, int N> struct Of {};
template <int N>
struct Below {};
// struct Commented {};
__device__ __forceinline__ int function(int a) { struct Local {}; return other(a); }
template <typename T> __device__ __forceinline__ T generic(T a) {
    return function(a);
}
template <typename T, typename... Ts>
__device__ void spread(T a,
    Ts... more) {}
}
"""


def test_what_a_header_declares_is_read_from_it() -> None:
    """Types and functions of its namespace, not members, locals or what it calls; no two headers have a name."""
    found = {"Plain", "Aligned", "Either", "Of", "Below", "function", "generic", "spread"}
    assert declared(DECLARED) == found
    folder = data_dir("templates") / "include" / "lngen"
    assert sorted(HEADERS) == sorted(path.stem for path in folder.iterdir())
    names = [name for text in TEXTS.values() for name in declared(text)]
    assert len(names) == len(HEADER_OF) > 100
    assert HEADER_OF["BlockReduce"] == "row_reduce"


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_can_be_read_alone(header: str) -> None:
    """It says what it is for, how it is used, and includes the headers of the names it uses, but no others."""
    text = TEXTS[header]
    assert text.startswith(f"// {header}.cuh: ")
    about = text[: text.index("#ifndef")]
    assert re.search(r"^//     \S", about, re.MULTILINE), "a usage line"
    assert set(re.findall(r"[A-Za-z_]\w*", about)) & declared(text), "a name of its own in it"
    assert f"#ifndef LNGEN_{header.upper()}_CUH\n#define LNGEN_{header.upper()}_CUH\n" in text
    needed = {HEADER_OF[name] for name in words(text) if name in HEADER_OF} - {header}
    listed = re.findall(r'#include "lngen/(\w+)\.cuh"', text)
    assert listed == sorted(listed)
    reached = {name.removeprefix("lngen/").removesuffix(".cuh") for name in included(text)}
    assert {*listed} <= needed <= reached


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone(header: str) -> None:
    pytest.importorskip("cupy")
    source = f'#include "lngen/{header}.cuh"\n' * 2 + 'extern "C" __global__ void k() {}\n'
    assert ".entry k" in compile_ptx(source, "sm_90", name=f"{header}.cu")


def kernels_of_own_graphs() -> Iterator[str]:
    """Kernels whose rows come by TMA: of whole numbers, an element taken, numbers for each block, also across segments.

    And one with a maximum of pairs, one with a maximum over all rows, and rotations.
    """
    specs = [
        make_spec(Definition("everywhere", everywhere(stored)), "fwd", {"d": 64, "dtype": dtype})
        for dtype, stored in product(("f32", "f64"), (*WHOLE, "e4m3", "e5m2"))
    ]
    blocks = [make_spec(DEFINITIONS["block_scaled"], "fwd", {"d": 64})]
    blocks += [make_spec(DEFINITIONS["quantised"], "fwd", {"d": 64, "dtype": dtype}) for dtype in ("f32", "f64")]
    blocks += [parse_spec("rmsnorm.fwd:d=8320,dtype=bf16,quant=e4m3,scales=block,scale_layout=columns")]
    blocks += [parse_spec("softmax.fwd:d=64,dtype=bf16")]
    blocks += [parse_spec("rmsnorm.fwd:d=64,quant=e4m3,amax=yes"), make_spec(DEFINITIONS["taken"], "fwd", {"d": 64})]
    blocks += [parse_spec(f"rope.fwd:d=64,head=32,rotate={way},positions=i64") for way in ("halves", "pairs")]
    blocks += [parse_spec("rope.fwd:d=96,head=48")]
    for spec in (*specs, *blocks):
        facts = problem(spec.graph(), spec.d)
        found = {s.form: s for s in space(facts)}
        yield COMMENT.sub("", emit(lower(spec, found["tma"], None, facts)))


def test_every_name_of_the_headers_is_used() -> None:
    """By a kernel, by the text of an op, by another header or in its own."""
    ops = (path.read_text(encoding="utf-8") for path in (Path(lngen.__file__).parent / "compiler" / "ir").glob("*.py"))
    used = set[str]().union(*map(words, (*kernels(), *kernels_of_own_graphs(), *ops)))
    for header, text in TEXTS.items():
        for name in declared(text):
            elsewhere = set[str]().union(*(words(t) for other, t in TEXTS.items() if other != header))
            assert name in used | elsewhere or len(re.findall(rf"\b{name}\b", COMMENT.sub("", text))) > 1, name


def test_a_kernel_includes_the_headers_whose_names_it_uses() -> None:
    for text in kernels():
        body = text[text.index("namespace lngen {") :]
        assert includes(body) in text
        assert {HEADER_OF[name] for name in words(body) if name in HEADER_OF} == {
            *re.findall(r'#include "lngen/(\w+)\.cuh"', text)
        }
    assert includes("pdl_wait();  // tma_load\n") == '#include "lngen/launch.cuh"'
    assert includes("int a;") == ""


def test_a_bundle_stands_alone_and_compiles_to_the_same() -> None:
    pytest.importorskip("cupy")
    text = emit(plan_of(*PLANS["row"]))
    bundle = bundled(text)
    assert "#include" in text
    assert "#include" not in bundle
    assert bundled(bundle) == bundle
    assert SEARCH in text.split("\n\n")[0]  # and a bundle needs no -I
    assert SEARCH not in bundle
    assert bundle.endswith(text[text.index("namespace lngen {") :])
    one, other = (compile_ptx(t, "sm_90", name="k.cu") for t in (text, bundle))
    assert one == other
    assert compile_ptx(bundle + bundled(emit(plan_of(*PLANS["columns"]))), "sm_90", name="two.cu").count(".entry") > 1


def test_an_error_in_a_header_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    broken = TEXTS["launch"].replace("inline", "inlin", 1)
    monkeypatch.setattr(
        "lngen.compiler.headers.text_of", lambda header: broken if header == "launch" else TEXTS[header]
    )
    line = broken[: broken.index("__forceinlin__")].count("\n") + 1
    with pytest.raises(CompileError) as error:
        compile_ptx(emit(plan_of(*PLANS["row"])), "sm_90", name="row.cu")
    assert f"lngen/launch.cuh({line}): error" in str(error.value)
    assert "lngen/launch.cuh:\n" in str(error.value)
    assert f"> {line} | __device__ __forceinlin__ void pdl_wait() {{" in str(error.value)
