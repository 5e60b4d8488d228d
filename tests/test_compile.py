"""One column: each stage of the compiler runs once, whoever asks; and ``lngen.compile`` is always the function."""

import hashlib
import inspect
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lngen
from commands import prints
from lngen.compiler import passes
from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.emit import emit
from lngen.compiler.lower import lower
from lngen.compiler.problem import parse_schedule, problem
from lngen.compiler.schedule import attempts
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import compile_cubin, compile_ptx
from lngen.lab.tune.candidates import build_all, candidates
from lngen.launch.runtime import direction as calls

FWD, BWD = "rmsnorm.fwd:d=64,dtype=f16", "layernorm.bwd:d=64,dtype=f16"
SCHEDULE = "form=registers,threads=8,rows_per_block=16,vec=8"
FRONT = {"finish", "problem"}
BACK = FRONT | {"attempts", "lower", "emit", "compile_cubin"}

# Each stage, and what of its arguments a second call must not have again.
STAGES: dict[Callable[..., Any], Callable[..., object]] = {
    passes.finish: lambda graph, d, *_, **__: (str(graph), d),
    problem: lambda graph, d, strides: (str(graph), d, strides),
    attempts: lambda facts, *asked: (str(facts), str(asked)),
    lower: lambda spec, schedule, *_: (str(spec), schedule),
    emit: lambda plan: plan.name,
    compile_cubin: lambda source, arch, **_: (hashlib.sha256(source.encode()).hexdigest(), arch),
    compile_ptx: lambda source, arch, **options: (
        hashlib.sha256(source.encode()).hexdigest(),
        arch,
        options.get("lines", False),
    ),
}

Counts = Counter[tuple[str, object]]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """How often each stage was called with the same arguments, by whichever module of lngen."""
    pytest.importorskip("cupy")
    for command in ("inspection", "generation", "verification", "run_files"):
        import_module(f"lngen.cli.{command}")
    found: Counts = Counter()

    def counted(stage: Callable[..., Any], key: Callable[..., object]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            found[stage.__name__, key(*args, **options)] += 1
            return stage(*args, **options)

        return run

    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "lngen"]
    for stage, key in STAGES.items():
        for module in modules:
            for name in [name for name, value in vars(module).items() if value is stage]:
                monkeypatch.setattr(module, name, counted(stage, key))
    return found


def once(counts: Counts, *expected: str) -> None:
    """No stage ran twice on the same, and exactly the expected ones ran."""
    assert {key: n for key, n in counts.items() if n > 1} == {}
    assert {stage for stage, _ in counts} == set(expected)


LISTED = {  # command lines, the stages that run, how often some do
    "graph": (f"show {BWD} --stage graph", {"finish"}, {}),
    "plan": (f"show {BWD} --stage plan", BACK, {}),
    "cuda": (f"show {BWD} --stage cuda", BACK, {}),
    "ptx": (f"show {BWD} --stage ptx", BACK | {"compile_ptx"}, {}),
    "resources": (f"show {BWD} --stage resources", BACK, {}),
    "traffic": (f"show {BWD} --stage traffic", BACK | {"compile_ptx"}, {}),
    "a diff": (f"show {FWD} --diff blocks_per_sm=1", BACK, {"problem": 1}),
    "a complete schedule": (f"show {FWD} --schedule {SCHEDULE}", BACK - {"attempts", "compile_cubin"}, {}),
    "a check": (f"check {BWD} --on ptx --rows 0,1,5 --schedules 2", BACK | {"compile_ptx"}, {}),
    # One more cubin for the GPUs of sm_80 with less shared memory; those that the search made are those written.
    "a build": (f"build {FWD} {BWD} --arch sm_80,sm_90 --out .", BACK | {"compile_ptx"}, {"cubin": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_a_command_runs_each_stage_once(
    counts: Counts, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, stages, often = LISTED[name]
    prints(*words.split())
    once(counts, *stages)
    found = Counter(stage for stage, _ in counts) | Counter(cubin=len([*tmp_path.glob("*.cubin")]))
    assert {stage: found[stage] for stage in often} == often


def test_one_norm_runs_each_stage_once(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, sources, and kernels loaded for any number of rows."""
    loaded: list[str] = []

    def load(plan: Any, image: bytes, device: int, overlap: bool) -> Any:
        loaded.append(plan.name)
        return SimpleNamespace(described={}, shared=())

    monkeypatch.setattr(calls, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(calls, "live_gpu", lambda device: None)
    monkeypatch.setattr(calls, "Launcher", load)
    monkeypatch.setattr(calls, "row_counts", lambda facts, gpu: (1, 64, 4096))
    norm = lngen.compile("layernorm", d=64, dtype="f16")
    for direction in ("fwd", "bwd"):
        assert norm.plan(direction).name in norm.source(direction)
    norm.warmup()
    assert len(loaded) == len({*loaded}) >= 2
    once(counts, *BACK)


def test_one_tuning_job_runs_each_stage_once(counts: Counts) -> None:
    """The default is built for being the default, and is the first candidate, too."""
    compilation = Compilation(parse_spec(FWD))
    ranked = [*enumerate(candidates(compilation, 4096, "sm_90")[:3])]
    assert [c.status for c in build_all(compilation, ranked, "sm_90")] == ["correct"] * 3
    once(counts, *BACK)


def test_a_stage_that_runs_twice_is_seen(counts: Counts) -> None:
    spec, schedule = parse_spec(FWD), parse_schedule(SCHEDULE, lngen.Schedule("registers", 8, 16, 8))
    compiling: Any = import_module("lngen.compiler.compile")
    for _ in range(2):
        KernelSet(compiling.lower(spec, schedule)).text  # noqa: B018
    assert {stage: n for (stage, _), n in counts.items()} == {"finish": 1, "problem": 2, "lower": 2, "emit": 2}


@pytest.mark.parametrize("first", [False, True])
def test_ptx_with_lines_is_not_that_without(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is asked for first, and each is compiled once for an arch."""
    asked: list[str] = []

    def compiled(text: str, arch: str, *, name: str, lines: bool) -> str:
        asked.append(f"{arch}, {lines}")
        return asked[-1]

    monkeypatch.setattr(import_module("lngen.compiler.compile"), "compile_ptx", compiled)
    kernels = Compilation(parse_spec(FWD)).changed(SCHEDULE)
    for _ in range(2):
        for lines in (first, not first):
            for arch in ("sm_80", "sm_90"):
                assert kernels.ptx(arch, lines=lines) == f"{arch}, {lines}"
    assert len(asked) == 4


ORDERS = {
    "lngen": "import lngen; f = lngen.compile; import lngen.compiler.compile; assert lngen.compile is f",
    "a name of the module": "from lngen.compiler.compile import Compilation; import lngen; f = lngen.compile",
    "the norm": "import lngen.launch.runtime.norm, lngen; f = lngen.compile",
}


@pytest.mark.parametrize("first", ORDERS)
def test_compile_is_the_function_whatever_was_imported_first(first: str) -> None:
    tail = "; from lngen.launch.runtime.norm import compile; assert f is compile, f"
    subprocess.run([sys.executable, "-c", ORDERS[first] + tail], check=True, cwd=Path(lngen.__path__[0]).parent)


def test_the_function_has_its_signature_and_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "graph" in inspect.signature(lngen.compile).parameters
    monkeypatch.setattr(lngen, "compile", len)
    assert lngen.compile is len


OLD_NAMES = {
    "spec.spec": "compiler.spec.spec",
    "ir": "compiler.ir",
    "headers": "compiler.headers",
    "aot.build": "packs.build",
    "runtime.norm": "launch.runtime.norm",
    "ptx": "proof.ptx",
    "torch_graph": "proof.torch_graph",
    "bench.records": "lab.bench.records",
    "schedule.table": "compiler.schedule.table",
    "schedule.recorded": "lab.tune.recorded",
}


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_module_has_its_old_name_too(first: str) -> None:
    """It is one module, whichever name comes first: classes in pickles are those of the program."""
    code = "from importlib import import_module as load\n"
    for old, new in OLD_NAMES.items():
        order = (old, new) if first == "old" else (new, old)
        code += "assert " + " is ".join(f"load('lngen.{name}')" for name in order) + "\n"
        code += f"assert load('lngen.{old}').__spec__.name == 'lngen.{new}'\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(lngen.__path__[0]).parent)


def test_pickles_and_commands_have_old_names() -> None:
    spec = parse_spec(FWD)
    text = pickle.dumps(spec, protocol=0)
    assert pickle.loads(text.replace(b"lngen.compiler.", b"lngen.")) == spec
    found = subprocess.run([sys.executable, "-m", "lngen.headers"], capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).name == "include"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'lngen\.nothing'"):
        import_module("lngen.nothing")
