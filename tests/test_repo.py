"""If these fail, a rule that a machine can keep is broken: imports, templates, sizes, types, style, or the wheel."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import jinja2
import pytest
from jinja2 import nodes

import lngen
from lngen.config import data_dir
from lngen.errors import MissingError
from paths import ROOT

PACKAGE = ROOT / "lngen"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Lowest first; a module may import its own layer and those below it. The rooms, and the layers of the compiler.
LAYERS = (
    {"config", "dtypes", "errors", "files", "rules", "user_input", "version"},
    {"compiler.devices", "compiler.headers", "compiler.ir"},
    {"compiler.graphs", "compiler.passes"},
    {"compiler.interpret", "compiler.problem", "compiler.spec"},
    {"compiler.lower", "compiler.schedule"},
    {"compiler.contract", "compiler.emit"},
    {"compiler.toolchain"},
    {"compiler.compile"},
    {"launch"},
    {"proof"},
    {"packs", "torch"},
    {"lab"},
    {"__main__", "cli", "examples"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

TOP_LEVEL_FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")

OPTIONAL = {"cupy", "cupyx", "cupy_backends", "torch", "vllm", "flashinfer"}
MAY_IMPORT_OPTIONAL = (
    "compiler/toolchain/nvrtc.py",
    "launch/arrays.py",
    "files.py",
    "launch/runtime/",
    "lab/bench/",
    "proof/check/",
    "lab/tune/measure.py",
    "cli/installation.py",
    "launch/hub_package/",
    "launch/direct.py",
    "proof/torch_graph.py",
    "torch/",
    "examples/",
)
# For PyTorch programs: they import it at once, and no module but an example imports them.
FOR_PYTORCH = ("launch/direct.py", "launch/hub_package/", "torch/", "examples/gpt_step.py", "examples/dit_step.py")


@dataclass(frozen=True)
class Import:
    """One import: what, where, and whether it runs when its module is imported."""

    target: str
    path: Path
    line: int
    at_module_level: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.target}"

    @property
    def root(self) -> str:
        return self.target.partition(".")[0]


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def targets(node: ast.AST, path: Path) -> Iterator[str]:
    """The dotted names that one syntax node imports; a literal ``import_module("name")`` counts."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            package = path.relative_to(ROOT).parent.parts
            base = [*package[: len(package) - level + 1]] if level else []
            prefix = ".".join([*base, *([module] if module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in names)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(target)), *_]):
            if name in {"import_module", "__import__"}:
                yield target


def imports(path: Path) -> list[Import]:
    """Every import of a file, those inside functions included."""
    return _imports(path, path.read_text(encoding="utf-8"))


@cache
def _imports(path: Path, text: str) -> list[Import]:
    def visit(node: ast.AST, at_module_level: bool) -> Iterator[Import]:
        for target in targets(node, path):
            yield Import(target, path, getattr(node, "lineno", 0), at_module_level)
        inner = at_module_level and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    return [*visit(ast.parse(text), True)]


def component(path: Path) -> str:
    """``lngen/compiler/ir/types.py -> compiler.ir``, ``lngen/packs/hub.py -> packs``, ``lngen/files.py -> files``."""
    return layer_of(module(path))


def layer_of(name: str) -> str:
    """What stands in ``LAYERS`` for a dotted name; a room for what is in none of its layers."""
    parts = name.split(".")[1:3]
    return next((n for n in (".".join(parts), parts[0]) if n in RANK), ".".join(parts)) if parts else "__init__"


def layer_faults(path: Path) -> Iterator[str]:
    """The imports of a file that point up, or that name the package itself, which stands on top."""
    if path in (PACKAGE / "__init__.py", PACKAGE / "compiler" / "__init__.py"):
        return
    for found in imports(path):
        if found.root == "lngen" and RANK.get(layer_of(found.target), RANK["cli"]) > RANK[component(path)]:
            yield str(found)


def module(path: Path) -> str:
    """``lngen/files.py -> lngen.files``, ``lngen/compiler/ir/__init__.py -> lngen.compiler.ir``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def module_graph() -> dict[str, set[str]]:
    """The modules that each module imports, wherever in its file, with the packages that this imports as well."""
    modules = {module(path): path for path in sources()}

    def imported(name: str, path: Path) -> Iterator[str]:
        for found in imports(path):
            target = found.target
            while target and target not in modules:
                target = target.rpartition(".")[0]
            while target.count(".") and not f"{name}.".startswith(f"{target}."):
                yield target
                target = target.rpartition(".")[0]

    return {name: {*imported(name, path)} - {name} for name, path in modules.items()}


def circle() -> list[str]:
    """Modules that import each other, the first also last; none if there are no such modules."""
    try:
        TopologicalSorter(module_graph()).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_modules_import_each_other() -> None:
    """Imports in functions and for type checkers count: a circle that they hide is one all the same."""
    assert circle() == []


def test_imports_that_break_a_rule_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A circle that hides in a function or behind TYPE_CHECKING; each way of importing what stands above."""
    for name, value in (("ROOT", tmp_path), ("PACKAGE", tmp_path / "lngen")):
        monkeypatch.setattr(sys.modules[__name__], name, value)
    monkeypatch.setattr(sources, "__defaults__", (tmp_path / "lngen",))
    folder = tmp_path / "lngen" / "compiler" / "ir"
    folder.mkdir(parents=True)
    files = {
        "../../__init__": "",
        "../__init__": "",
        "__init__": "from lngen.compiler.ir.b import x",
        "b": "from lngen.compiler.ir.c import y",
    }
    for hidden in (
        "def f():\n    from lngen.compiler.ir import b",
        "if TYPE_CHECKING:\n    from lngen.compiler.ir.b import x",
    ):
        for name, text in {**files, "a": hidden, "c": ""}.items():
            (folder / f"{name}.py").write_text(text)
        assert circle() == []
        (folder / "c.py").write_text("import lngen.compiler.ir.a")
        assert {*circle()} == {"lngen.compiler.ir.a", "lngen.compiler.ir.b", "lngen.compiler.ir.c"}
    path = folder / "x.py"
    path.write_text(
        "import lngen\nimport lngen.cli\nfrom lngen import compile\nfrom lngen.compiler.emit import a\n"
        "from ..lower import b\nfrom ... import launch\ndef f():\n    from lngen.compiler.passes.vjp import c\n"
        "    importlib.import_module('lngen.proof.check')\n    import cupy\n"
        "from . import types\nfrom .types import M\nfrom lngen.errors import E\nfrom lngen.compiler import ir\n"
    )
    assert [int(fault.split(":")[1].split()[0]) for fault in layer_faults(path)] == [1, 2, 3, 4, 5, 6, 8, 9]
    assert [i.line for i in imports(path) if not i.at_module_level] == [8, 9, 10]


def test_imports_point_one_way() -> None:
    assert {component(path) for path in sources()} - {"__init__", "compiler"} <= RANK.keys()
    assert [fault for path in sources() for fault in layer_faults(path)] == []


# The stages of the compiler, and who may call them besides lngen/compiler/compile.py and their own package.
STAGES = {
    "lngen.compiler.problem.problem": {"compiler/lower/__init__.py", "lab/tune/recorded.py"},
    "lngen.compiler.schedule.attempts": set(),
    "lngen.compiler.lower.lower": set(),
    "lngen.compiler.emit.emit": {"proof/ptx/call.py", "packs/catalog.py"},
    "lngen.compiler.toolchain.compile_cubin": {
        "packs/build.py",
        "packs/catalog.py",
        "packs/verify.py",
        "lab/bench/providers.py",
        "lab/bench/startup.py",
    },
    "lngen.compiler.toolchain.compile_ptx": {"packs/build.py", "packs/verify.py", "proof/ptx/call.py"},
}


def test_the_stages_of_the_compiler_are_called_in_one_place() -> None:
    """Where a kernel is executed without one, timed, or compiled in another process, its text is taken directly."""
    callers: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for path in sources():
        for found in imports(path):
            if found.target in STAGES and component(path) != layer_of(found.target):
                callers[found.target].add(str(path.relative_to(PACKAGE)))
    assert callers == {stage: {"compiler/compile.py", *others} for stage, others in STAGES.items()}


def test_cupy_and_torch_are_imported_lazily_and_only_where_listed() -> None:
    """CuPy where its cache is prepared; JAX nowhere."""
    every = [i for path in sources() for i in imports(path)]
    found = [i for i in every if i.root in OPTIONAL]
    allowed = tuple(str(PACKAGE / place) for place in MAY_IMPORT_OPTIONAL)
    at_once = tuple(str(PACKAGE / place) for place in FOR_PYTORCH)
    early = [i for i in found if i.at_module_level and not str(i.path).startswith(at_once)]
    assert [str(i) for i in found if i in early or not str(i.path).startswith(allowed)] == []
    places = {(str(i.path.relative_to(PACKAGE)), i.target) for i in every if i.root.startswith("cupy")}
    assert places == {("files.py", "cupy"), ("compiler/toolchain/nvrtc.py", "cupy.cuda.nvrtc")}
    for name in ("launch.hub_package", "torch"):
        names = [i for i in every if f"{i.target}.".startswith(f"lngen.{name}.")]
        own = str(PACKAGE.joinpath(*name.split(".")))
        assert names
        assert [str(i) for i in names if not str(i.path).startswith((own, str(PACKAGE / "examples")))] == []
    assert [str(i) for i in every if i.root in {"jax", "jaxlib"}] == []


def python(*args: str, cwd: Path = ROOT, **env: str) -> str:
    """The standard output of a Python subprocess that must succeed."""
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(args)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("tool", [
    pytest.param("mypy --strict lngen/", marks=pytest.mark.full),
    "ruff check lngen tests",
    "ruff format --check lngen tests",
])  # fmt: skip
def test_tool_has_nothing_to_say(tool: str) -> None:
    python("-m", *tool.split())


def template_faults(source: str) -> Iterator[str]:
    """What a template must leave to Python: arithmetic. Conditions show what a schedule picks."""
    tree = jinja2.Environment().parse(source)
    arithmetic = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.Neg)
    yield from (f"line {node.lineno}: {type(node).__name__}" for node in tree.find_all(arithmetic))


def test_templates_hold_no_arithmetic() -> None:
    """Layout is none."""
    files = [path for path in sorted((ROOT / "templates").rglob("*")) if path.is_file()]
    assert files, "no templates"
    faults = [(str(p.relative_to(ROOT)), f) for p in files for f in template_faults(p.read_text(encoding="utf-8"))]
    assert faults == []
    for text in ("{{ a + 1 }}", "{{ -a }}", "{{ 1 / D }}", "{{ f(a * b) }}", "{% set n = a // 2 %}"):
        assert [*template_faults(text)], text
    layout = "{% for s in p.body %}{{ s.text }}{% if s.note %} // a + b{% endif %}{{ s.a | join(' + ') }}{% endfor %}"
    assert [*template_faults(layout)] == []


CPP = re.compile(r"::|_cast<|__shared__|<Row|_\[|^(const|using) |\);$")  # what text in C++ has, and sentences do not


def strings(path: Path) -> Iterator[str]:
    """The string constants of a module, without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    docs = [n.body[0].value for n in ast.walk(tree) if isinstance(n, kinds) and isinstance(n.body[0], ast.Expr)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield node.value


def test_lowering_writes_cpp_in_one_package() -> None:
    """Everything else in it decides."""
    lower = PACKAGE / "compiler" / "lower"
    found = {str(p.relative_to(lower)): [s for s in strings(p) if CPP.search(s)] for p in sorted(lower.rglob("*.py"))}
    outside = {name: texts for name, texts in found.items() if not name.startswith("cuda/")}
    assert outside.pop("plan.py") == ["const ", "using "]  # which a plan's text leaves out
    assert not any(outside.values()), outside
    assert len([name for name, texts in found.items() if texts and name.startswith("cuda/")]) > 4


def test_files_and_functions_are_short() -> None:
    """At most 500 lines to a file, 60 to a function."""
    faults = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > 500:
            faults.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                faults += [f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"] if lines > 60 else []
    assert faults == []


NAMED_TWICE = {"builder", "inputs", "parser"}  # modules of two packages, each of which means its own


def test_a_name_of_a_module_has_one_meaning() -> None:
    """No two modules have one name, but for those listed."""
    names = Counter(path.stem for path in sources() if not path.stem.startswith("__"))
    assert {name for name, count in names.items() if count > 1} <= NAMED_TWICE


def tracked_files() -> list[Path]:
    """What git tracks, or would; without a git checkout the test is skipped."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files are tracked is unknown")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
    assert len(files) > 10
    return files


def test_the_top_level_is_short() -> None:
    visible = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    visible = {name for name in visible if not name.startswith(".")}
    assert visible == {*TOP_LEVEL_FILES, "lngen", "templates", "generated", "tests"}


def test_no_path_of_a_machine_and_no_index_is_written_down() -> None:
    machine = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/")
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in tracked_files()}
    assert [path.name for path, text in texts.items() if machine.search(text)] == []
    installing = "".join(texts[ROOT / name] for name in ("pyproject.toml", ".ci/run"))
    assert [word for word in ("://", "index-url", "find-links", "jax") if word in installing] == []


def test_ci_runs_what_the_readme_says_and_then_all_else() -> None:
    script = [line.strip() for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]
    (command,) = [line for line in script if line.startswith("pip install ")]
    assert command in [line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    assert script[-1] == "pytest -n 2 -m full --half"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


STUB = """#!/bin/sh
command="$(basename "$0") $*"
case "$command" in
"python -m venv"*)
    mkdir "$3/bin" && cp "$0" "$3/bin/pip" && cp "$0" "$3/bin/pytest" && echo "PATH=$3/bin:$PATH" > "$3/bin/activate"
    exit
esac
echo "$command" >> "$LOG"
[ "$command" != "$FAILS" ]
"""


def test_ci_ends_where_a_command_fails(tmp_path: Path) -> None:
    """Installing, the plain run or the full run: nothing runs behind it, and the exit code says so."""
    stub, log = tmp_path / "python", tmp_path / "log"
    stub.write_text(STUB)
    stub.chmod(0o700)
    commands = ["pip install -e .[cuda13,test]", "pytest -n 2", "pytest -n 2 -m full --half"]
    for at, fails in enumerate([*commands, "none"]):
        log.unlink(missing_ok=True)
        env = {**os.environ, "PYTHON": str(stub), "LOG": str(log), "FAILS": fails}
        done = subprocess.run([ROOT / ".ci" / "run"], env=env, check=False)
        assert log.read_text().splitlines() == commands[: at + 1]
        assert (done.returncode == 0) is (fails == "none")


def test_pytest_benchmark_is_not_loaded() -> None:
    """It warns where pytest-xdist runs, before a test does, and a warning is an error here."""
    assert "-p no:benchmark" in PROJECT["tool"]["pytest"]["ini_options"]["addopts"]


def test_data_folders_are_found_beside_the_package_or_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [data_dir("templates"), data_dir("generated")] == [ROOT / "templates", ROOT / "generated"]
    monkeypatch.setattr("lngen.config.PACKAGE", tmp_path / "lngen")
    with pytest.raises(MissingError, match=r"'templates' is missing: expected it at .*_data"):
        data_dir("templates")
    (tmp_path / "lngen" / "_data" / "templates").mkdir(parents=True)
    assert data_dir("templates") == tmp_path / "lngen" / "_data" / "templates"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist built from this checkout: what a user of an index gets."""
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_carries_the_data_and_works_alone(wheel: Path, tmp_path: Path) -> None:
    """Its files are the checkout's; installed by itself and run from an empty folder, it shows a kernel."""
    carried = set(zipfile.ZipFile(wheel).namelist())
    data = {"lngen/_data/LICENSE"}
    for name in ("templates", "generated/kernels"):
        files = [path for path in (ROOT / name).rglob("*") if path.is_file()]
        assert files
        data |= {f"lngen/_data/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert {name for name in carried if name.startswith("lngen/_data/")} == data
    assert wheel.name.startswith("lngen_cuda-")  # lngen is a stranger's package on the public index
    assert wheel.stat().st_size < 1_250_000
    own = [
        p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix in (".py", ".md", ".toml", ".typed", ".cpp", ".hpp")
    ]
    assert {path.suffix for path in own} >= {".py", ".md", ".typed", ".cpp"}
    assert {path.relative_to(ROOT).as_posix() for path in own} <= carried
    assert not [name for name in carried if name.startswith(("tests/", "templates/", "generated/"))]
    others = [n for n in carried if n.endswith((".png", ".json", ".jsonl", ".txt")) and ".dist-info/" not in n]
    assert others == ["lngen/packs/schema.json"]

    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    python("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    found = python(
        "-c", "from lngen.config import data_dir; print(data_dir('templates'))", cwd=empty, PYTHONPATH=str(site)
    )
    assert Path(found.strip()) == site / "lngen" / "_data" / "templates"
    show = ("-m", "lngen", "show", "layernorm.fwd:d=768,dtype=bf16", "--stage", "cuda")
    assert "__global__" in python(*show, cwd=empty, PYTHONPATH=str(site))


def test_the_version_is_written_once_or_agrees() -> None:
    assert lngen.__version__ == PROJECT["project"]["version"]
