"""If these fail, a hub package is not laid out as kernels wants it, loses what it had, or computes other bits."""

import ast
import gc
import importlib.util
import inspect
import json
import re
import shutil
import sys
import tomllib
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import lngen
from child import output, start
from commands import prints
from direct_tensors import map_direct_tensors
from fake_driver import FakeDriver
from host_tensors import HostTensors, pass_for_gpu_tensors
from killing import Killed, killed_at, points
from lngen.errors import LngenError
from lngen.launch import arrays, direct, hub_package
from lngen.packs import hub
from lngen.packs.build import Built, build
from paths import ROOT

VARIANT = Path("build") / "torch-cuda"
D = 64
LAYER = f"d={D},dtype=f32"
QUICK = "form=registers,threads=8,rows_per_block=16,vec=4"
KEYS = (("layernorm", LAYER), ("rmsnorm", f"d={D},dtype=bf16,casts=llama"), ("rmsnorm", f"d={D},dtype=bf16"),
        ("rmsnorm", f"{LAYER},eps=run"))  # fmt: skip
SPECS = [f"{graph}.{direction}:{keys}" for graph, keys in KEYS for direction in ("fwd", "bwd")]


def made(folder: Path, *specs: str, emit: str | None = "cubin,ptx", arch: str = "sm_90", schedule: str = "") -> Built:
    """A package, by default of all specs, with PTX for the fake GPU."""
    return build(specs or SPECS, folder, arch=arch, emit=emit, layout="hf-kernel", schedule=schedule)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that no test changes."""
    made(folder := tmp_path_factory.mktemp("hub") / "package")
    return folder


def metadata(folder: Path) -> Any:
    return json.loads((folder / VARIANT / "metadata.json").read_text(encoding="utf-8"))


# ---- the layout ----


def test_metadata_and_texts_say_what_the_variant_is(whole: Path) -> None:
    found = metadata(whole)
    files = found["digest"]["files"]
    assert (found["name"], found["version"], found["license"]) == ("lngen-norms", 1, "MIT")
    assert found["backend"] == {"type": "cuda", "archs": ["9.0"]}
    assert (found["python-depends"], found["kernel-depends"], found["digest"]["algorithm"]) == ([], [], "sha256")
    assert found["id"].isidentifier()
    assert found["id"].startswith("_lngen_norms_cuda_")
    there = {p.relative_to(whole / VARIANT).as_posix(): p for p in (whole / VARIANT).rglob("*") if p.is_file()}
    assert {*there} == {*files, "metadata.json"}
    assert all(files[name] == hub.digest_of(path.read_bytes()) for name, path in there.items() if name in files)
    assert hub.digest_of(b"hello world") == "uU0nuZNNPgilLlLX2n2r+sSE7+N6U4DukIj3rOLvzek="
    read = tomllib.loads((whole / "build.toml").read_text(encoding="utf-8"))
    general = read["general"]
    assert (general["name"], general["version"], general["edition"]) == ("lngen-norms", 1, 5)
    assert general["backends"] == ["cuda"]
    assert read["torch-noarch"] == {"pyext": ["cubin", "json", "ptx", "py"], "cuda_capabilities": ["9.0"]}
    card = (whole / "build" / "CARD.md").read_text(encoding="utf-8")
    assert card == (whole / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n")
    assert "library_name: kernels\nlicense: mit\n" in card
    assert f"| `layernorm.fwd:dtype=f32` | {D} |" in card


def test_by_default_a_package_has_machine_code_alone(tmp_path: Path) -> None:
    built = made(tmp_path, f"layernorm.fwd:{LAYER}", emit=None, arch="sm_80,sm_90+ptx")
    kinds = sorted(Path(name).suffix for name in built.files if "/pack/" in name)
    assert kinds == [".cubin", ".cubin", ".json", ".ptx"]
    assert metadata(tmp_path)["backend"]["archs"] == ["8.0", "9.0+PTX"]
    assert built.files[-1] == "build/torch-cuda/metadata.json"
    assert {*built.files} == {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}


def test_sources_are_those_of_lngen(whole: Path) -> None:
    """All but the two files that say where the others are."""
    root, place = Path(str(lngen.__file__)).parent, whole / VARIANT
    own = {path.name for path in (root / "launch" / "hub_package").glob("*.py")} - {"_lngen.py"}
    assert {path.name for path in place.glob("*.py")} == own
    assert all((place / name).read_bytes() == (root / "launch" / "hub_package" / name).read_bytes() for name in own)
    copied = [p.relative_to(place / "_lngen") for p in (place / "_lngen").rglob("*.py") if p.parent != place / "_lngen"]
    assert {path.name for path in copied} == {path.name for path in (root / "launch").glob("*.py")}
    assert all((place / "_lngen" / name).read_bytes() == (root / name).read_bytes() for name in copied)
    assert (place / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


# ---- a second build, and a build that is killed ----


def test_a_second_build_adds(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "package")
    before = metadata(folder)
    changed = json.dumps({**before, "version": 3, "source": "https://example.org/norms.git"})
    (folder / VARIANT / "metadata.json").write_text(changed)
    with (folder / "build.toml").open("a") as file:
        file.write("# mine\n")
    built = made(folder, f"layernorm.fwd:{LAYER}", f"rmsnorm.fwd:d={D},dtype=f16", arch="sm_80,sm_90")
    after = metadata(folder)
    assert (after["version"], after["source"]) == (3, "https://example.org/norms.git")
    assert after["backend"]["archs"] == ["8.0", "9.0"]
    assert {*before["digest"]["files"]} < {*after["digest"]["files"]}
    assert after["id"] != before["id"]
    assert lngen.verify(folder).faults == ()
    assert built.replaced == (f"'{folder / 'build.toml'}' was changed and is left as it is.",)
    assert (folder / "build.toml").read_text().endswith("# mine\n")
    assert f"| `rmsnorm.fwd:dtype=f16` | {D} |" in (folder / "README.md").read_text()
    assert made(folder, f"layernorm.bwd:{LAYER}").files, "a forward is there"


def test_what_metadata_lists_is_there_whenever_a_build_is_killed(tmp_path: Path) -> None:
    """In a new folder and in an old one; building again completes the rest."""
    first = tmp_path / "first"
    made(first, f"layernorm.fwd:{LAYER}", schedule=QUICK)
    (first / VARIANT / "layers.py").write_text("# of an older lngen\n")
    for name in ("new", "old"):
        target = tmp_path / name

        def work(target: Path = target) -> Built:
            return made(target, f"rmsnorm.fwd:{LAYER}", schedule=QUICK)

        def prepare(target: Path = target) -> None:
            shutil.rmtree(target, ignore_errors=True)
            if target.name == "old":
                shutil.copytree(first, target)

        prepare()
        count = points(work)
        done = {p for p in target.rglob("*") if p.is_file()}
        for point in range(0, count, 9):
            prepare()
            with suppress(Killed), killed_at(point):
                work()
            if (target / VARIANT / "metadata.json").exists():
                listed = metadata(target)["digest"]["files"]
                wrong = [n for n in listed if hub.digest_of((target / VARIANT / n).read_bytes()) != listed[n]]
                assert wrong in ([], ["layers.py"])
            work()
            assert {p for p in target.rglob("*") if p.is_file()} == done
        assert lngen.verify(target).faults == lngen.verify(target).unlisted == ()


def test_verify_and_list_take_the_folder_and_its_variant(whole: Path) -> None:
    for place in (whole, whole / VARIANT):
        found = lngen.verify(place)
        assert (found.faults, found.unlisted) == ((), ())
        assert found.files == len(metadata(whole)["digest"]["files"])
        assert "layernorm.bwd:d=64" in prints("pack", "list", place)
    assert "no fault" in prints("verify", whole)


@pytest.mark.parametrize("what", ["a file", "another package", "a broken package"])
def test_something_else_in_the_place_of_the_package_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("lngen.packs.build.compile_cubin", lambda *_, **__: pytest.fail("compiled"))
    place = tmp_path / VARIANT
    if what == "a file":
        place.parent.mkdir()
        place.write_text("mine")
    else:
        place.mkdir(parents=True)
        foreign = {"id": "_relu", "digest": {"algorithm": "sha256", "files": {"__init__.py": "a"}}}
        (place / "metadata.json").write_text(json.dumps(foreign) if what == "another package" else "{")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    words = f"'{place}' is expected to be a hub package that lngen has built, but has something else"
    with pytest.raises(LngenError, match=re.escape(words)):
        made(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


# ---- the Python it needs, and what it may import ----


def newer(tree: ast.AST) -> list[str]:
    """What Python 3.9 lacks and runs outside annotations: unions by |, zip(strict=), dataclass(slots=) and the like."""
    notes = [getattr(node, key, None) for node in ast.walk(tree) for key in ("annotation", "returns")]
    skipped = {inner for note in notes if note is not None for inner in ast.walk(note)}
    found = []
    for node in ast.walk(tree):
        lacks = False
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords):
                given = {k.arg for k in keywords}
                lacks = (name == "zip" and "strict" in given) or bool(
                    name == "dataclass" and given & {"slots", "kw_only"}
                )
                lacks |= name in {"isinstance", "issubclass"} and isinstance(node.args[1], ast.BinOp)
            case ast.Attribute(attr="pairwise" | "batched" | "bit_count" | "add_note" | "walk_up"):
                lacks = True
            case ast.BinOp(op=ast.BitOr(), left=left, right=right) if node not in skipped:
                lacks = any(isinstance(s, ast.Subscript) or getattr(s, "value", s) is None for s in (left, right))
        found += [f"{node.lineno}: {ast.unparse(node)}"] if lacks else []
    return found


def test_every_file_is_of_python_3_9(whole: Path) -> None:
    files = [*(whole / VARIANT).rglob("*.py")]
    assert len(files) > 15
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert newer(ast.parse(text, feature_version=(3, 9))) == [], path.name
        assert "from __future__ import annotations" in text or "|" not in text
    for code in (
        "zip(a, b, strict=True)",
        "@dataclass(slots=True)\nclass A: pass",
        "A = int | None",
        "isinstance(a, A | B)",
    ):
        assert newer(ast.parse(code)), code
    assert newer(ast.parse("def f(a: int | None) -> str | None: b: int | None = a")) == []


def test_the_package_runs_without_lngen_numpy_and_cupy(whole: Path) -> None:
    """Under the name that old loaders take. It chooses a kernel; the CPU tensor is then refused, without a driver."""
    code = """
        import sys
        for name in ("lngen", "numpy", "cupy", "ml_dtypes", "filelock", "jinja2", "platformdirs"):
            sys.modules[name] = None
        import warnings
        warnings.simplefilter("ignore")  # of PyTorch, which misses NumPy
        import torch
        before = {*sys.modules}
        sys.path.insert(0, sys.argv[1])
        import lngen_norms
        print(lngen_norms.__all__, lngen_norms.layers.LayerNorm.__name__)
        print(lngen_norms.norm("layernorm", d=64, dtype=torch.float32))
        try:
            lngen_norms.layer_norm(torch.zeros(2, 64), (64,), torch.ones(64), torch.zeros(64))
        except Exception as error:
            print(error)
        tops = {name.partition(".")[0] for name in {*sys.modules} - before}
        print(sorted(name for name in tops - {"torch"} - sys.stdlib_module_names if "lngen_norms" not in name))
    """
    names, norm, refused, others = output(start(code, str(whole / VARIANT))).splitlines()
    assert names == "['layer_norm', 'layers', 'norm', 'rms_norm'] LayerNorm"
    assert "layernorm.fwd:d=64" in norm
    assert "'x' is expected on a GPU" in refused
    assert others == "[]"


# ---- results ----


def served(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[FakeDriver, Any]:
    """The package of this checkout, with the kernels of one that was built, on a fake GPU."""
    functional = sys.modules[f"{hub_package.__name__}.functional"]
    monkeypatch.setattr(functional, "__file__", str(folder / VARIANT / "functional.py"))
    for kept in (value for value in vars(functional).values() if hasattr(value, "cache_clear")):
        kept.cache_clear()
    gpu = FakeDriver(version=13050)
    gpu.knows_pack(folder / VARIANT / "pack")
    map_direct_tensors(monkeypatch, pass_for_gpu_tensors(monkeypatch, gpu))
    direct.forget()
    return gpu, hub_package


@pytest.fixture(params=["operators", "direct"])
def package(whole: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """By the dispatcher's way, or past it."""
    monkeypatch.setattr(direct, "on_gpu", lambda tensor: request.param == "direct")
    yield served(monkeypatch, whole)[1]
    direct.forget()


class LlamaRMSNorm(nn.Module):
    """As transformers has it."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the package's forward takes the place of this")


class Case(NamedTuple):
    """A layer of a model, the package's layer for it, and the keys of the norm that it computes."""

    layer: str
    model: Callable[[], nn.Module]
    graph: str
    keys: Mapping[str, Any]


LIKE_LLAMA = {"dtype": "bf16", "casts": "llama"}
CASES = {
    "LayerNorm": Case("LayerNorm", lambda: nn.LayerNorm(D), "layernorm", {"dtype": "f32"}),
    "RMSNorm": Case("RMSNorm", lambda: nn.RMSNorm(D, eps=1e-3), "rmsnorm", {"dtype": "f32", "eps": 1e-3}),
    "no eps": Case("RMSNorm", lambda: nn.RMSNorm(D), "rmsnorm", {"dtype": "f32", "eps": 2.0**-23}),
    "once": Case("RMSNorm", lambda: nn.RMSNorm(D, eps=1e-5).bfloat16(), "rmsnorm", {"dtype": "bf16"}),
    "Llama": Case("LlamaRMSNorm", lambda: LlamaRMSNorm(D, 1e-5).bfloat16(), "rmsnorm", LIKE_LLAMA),
    "transformers": Case("RMSNorm", lambda: LlamaRMSNorm(D, 1e-5).bfloat16(), "rmsnorm", LIKE_LLAMA),
}


def array(tensor: torch.Tensor) -> Any:
    plain = tensor.detach()
    return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if plain.dtype is torch.bfloat16 else plain.numpy()


def same(tensor: torch.Tensor | None, expected: Any) -> bool:
    return array(tensor).tobytes() == np.ascontiguousarray(expected).tobytes()


def compare(case: Case, model: nn.Module) -> None:
    """Results and gradients of a model's layer against the interpreter, bit for bit."""
    draw = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data = torch.randn(D, generator=draw).to(parameter.dtype)
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, 3, D, generator=draw).to(dtype).requires_grad_()
    dy = torch.randn(2, 3, D, generator=draw).to(dtype)
    y = model(x)
    y.backward(dy)
    norm = lngen.compile(case.graph, d=D, **case.keys)
    expected, saved = norm.forward(array(x), *map(array, model.parameters()))
    assert same(y, expected)
    gradients = norm.backward(array(dy), saved)
    assert [same(a.grad, b) for a, b in zip((x, *model.parameters()), gradients, strict=True)] == [True] * len(
        gradients
    )
    with torch.no_grad():
        assert same(model(x), expected)


def taken_by(layer: type[Any], model: torch.nn.Module) -> None:
    """Gives a model's layer the forward of a package's, if the rules of ``kernels`` for layers allow it."""
    assert issubclass(layer, torch.nn.Module)
    assert layer.__init__ is torch.nn.Module.__init__
    own = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(torch.nn.Module)}
    assert own <= {"can_torch_compile", "has_backward"}
    mine, theirs = (inspect.signature(c.forward).parameters for c in (layer, type(model)))
    assert [p.kind for p in mine.values()] == [p.kind for p in theirs.values()]
    model.forward = layer.forward.__get__(model)


@pytest.mark.parametrize("name", CASES)
def test_layers_give_the_interpreters_bits(package: Any, name: str) -> None:
    case = CASES[name]
    taken_by(getattr(package.layers, case.layer), model := case.model())
    compare(case, model)


def test_a_built_package_computes(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded as Hugging Face kernels loads it, with its own copies of lngen's modules."""
    name, variant = metadata(whole)["id"], whole / VARIANT
    spec: Any = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    monkeypatch.setitem(sys.modules, name, module := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    on_fake_gpu(monkeypatch, name, variant)
    taken_by(module.layers.LayerNorm, model := nn.LayerNorm(D))
    compare(CASES["LayerNorm"], model)


def on_fake_gpu(monkeypatch: pytest.MonkeyPatch, name: str, variant: Path) -> None:
    """CPU tensors are memory of a GPU for this package alone."""
    gpu = FakeDriver(version=13050)
    gpu.knows_pack(variant / "pack")
    monkeypatch.setattr(sys.modules[f"{name}._lngen.launch.driver"], "library", lambda: gpu)
    monkeypatch.setitem(sys.modules[f"{name}._lngen.launch.arrays"]._BY_TYPE, torch.Tensor, HostTensors(gpu))
    assert gpu.cuInit(0) == 0


@pytest.mark.parametrize("direct", [True, False])
def test_kernels_loads_the_package(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Hugging Face kernels: the folder, or its variant, and kernelize; its digest and its metadata are ours."""
    kernels = pytest.importorskip("kernels")
    from kernels import importer
    from kernels._rust import Digest, Metadata

    case, model = CASES["Llama"], nn.Sequential(CASES["Llama"].model())
    folder = shutil.copytree(whole, tmp_path / "package")
    variant = folder / VARIANT
    read = Metadata.read_from_file(variant / "metadata.json")
    assert (str(read.name), read.version, read.backend.archs) == ("lngen-norms", 1, ["9.0"])
    read.digest.validate(Digest.hash_variant(read.digest.algorithm, variant))
    if not direct:
        monkeypatch.setattr(torch.version, "cuda", "13.0")  # kernels takes variants of PyTorch's own backend
    repository = kernels.LocalLayerRepository(repo_path=variant if direct else folder, layer_name=case.layer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    kernels.replace_kernel_forward_from_hub(type(model[0]), "Norm")
    try:
        with kernels.use_kernel_mapping({"Norm": {"cuda": repository}}, inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cuda", use_fallback=False)
        on_fake_gpu(monkeypatch, importer._loaded_kernels[variant].module.__name__, variant)
        compare(case, model[0])
    finally:
        del type(model[0]).kernel_layer_name, type(model[0]).kernel_condition


def test_a_call_like_an_earlier_one_passes_the_dispatcher(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that kernels do not take as they lie go its way, and so do gradients that lie otherwise."""
    functional = sys.modules[f"{hub_package.__name__}.functional"]
    asked = list[str]()
    for name in ("FORWARD", "BACKWARD"):
        real = getattr(functional, name)
        monkeypatch.setattr(functional, name, lambda *args, n=name, f=real: (asked.append(n), f(*args))[1])
    monkeypatch.setattr(direct, "on_gpu", lambda tensor: True)
    _, package = served(monkeypatch, whole)
    x, weight, bias = (torch.randn(*shape).requires_grad_() for shape in ((3, D), (D,), (D,)))
    room = torch.randn(3 * D + 1)
    unaligned = room[1:].view(3, D).requires_grad_()
    dy = torch.randn(3, D)
    found = []
    for given, cotangent, ways in (
        (x, dy, []),
        (x, dy, []),
        (unaligned, dy, ["FORWARD", "BACKWARD"]),
        (x, room[1:].view(3, D), ["BACKWARD"]),
        (x, dy.t().contiguous().t(), ["BACKWARD"]),
    ):
        asked.clear()
        y = package.layer_norm(given, D, weight, bias)
        found.append(torch.autograd.grad(y, (given, weight), cotangent))
        assert asked == ways
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[4], strict=True))
    direct.forget()


@pytest.mark.parametrize("name", CASES)
def test_layers_work_under_torch_compile(whole: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As one operator, with its derivative."""
    case, package = CASES[name], served(monkeypatch, whole)[1]
    layer = getattr(package.layers, case.layer)
    assert layer.can_torch_compile
    taken_by(layer, model := case.model())
    torch.compiler.reset()
    compare(case, torch.compile(model, backend="aot_eager", fullgraph=True))


def test_a_second_derivative_is_refused(package: Any) -> None:
    x, weight = torch.randn(3, D).requires_grad_(), torch.randn(D).requires_grad_()
    (dx,) = torch.autograd.grad(package.rms_norm(x, D, weight, 1e-5).sum(), x, create_graph=True)
    with pytest.raises(LngenError, match="has no second derivative"):
        dx.sum().backward()


def test_functions_take_any_layout_and_any_leading_dimensions(package: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((3, 5, D), (D,), (D,)))
    expected = package.layer_norm(x, D, weight, bias)
    assert torch.equal(package.layer_norm(x.transpose(0, 1), D, weight, bias), expected.transpose(0, 1))
    shifted = torch.empty(3 * 5 * D + 1)[1:].view_as(x).copy_(x)
    assert torch.equal(package.layer_norm(shifted, (D,), weight, bias), expected)
    shape = (8, D // 8)
    whole = package.layer_norm(x.view(3, 5, *shape), shape, weight.view(shape), bias.view(shape))
    assert torch.equal(whole.view_as(x), expected)
    assert package.layer_norm(x[:0], D, weight, bias).shape == (0, 5, D)


def test_a_frozen_weight_has_no_gradient_and_results_hold_no_memory(package: Any) -> None:
    """An expanded dy is copied; a graph that is dropped frees its tensors without the garbage collector."""
    weight, bias = torch.ones(D), torch.zeros(D)
    x = torch.randn(4, D, requires_grad=True)
    package.layer_norm(x, D, weight, bias).sum().backward()
    assert (x.grad is None, weight.grad) == (False, None)
    gc.disable()
    try:
        y = package.layer_norm(x * 2, D, weight, bias)
        gone = weakref.ref(y)
        del y
        arrays._BY_TYPE[torch.Tensor].seen.clear()  # type: ignore[attr-defined]
        assert gone() is None
    finally:
        gc.enable()


# ---- the choice of a norm ----


def test_a_built_in_eps_comes_before_one_at_run_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = f"d={D},dtype=f32"
    made(tmp_path, f"rmsnorm.fwd:{keys},eps=1e-6", f"rmsnorm.fwd:{keys},eps=run", f"rmsnorm.fwd:{keys},casts=llama")
    gpu, package = served(monkeypatch, tmp_path)
    x, weight = torch.randn(3, D), torch.randn(D)
    for eps, casts in ((1e-6, ("once",)), (1e-5, ("once",)), (0.25, ("once",)), (1e-5, ("llama", "once"))):
        y = package.rms_norm(x, D, weight, eps, casts)
        expected, _ = lngen.compile("rmsnorm", d=D, dtype="f32", eps=eps, casts=casts[0]).forward(
            array(x), array(weight)
        )
        assert same(y, expected)
    names = [launch.kernel for launch in gpu.launched]
    assert ["epsrun" in name for name in names] == [False, True, True, False]
    assert "llama" in names[-1]


@pytest.mark.parametrize(("call", "words"), [
    (lambda p: p.layer_norm(torch.zeros(2, 96), 96, torch.ones(96), torch.zeros(96)),
     "lngen build layernorm.fwd:d=96,dtype=f32 --arch sm_90 --layout hf-kernel --out DIR"),
    (lambda p: p.layer_norm(torch.zeros(2, D), D, torch.ones(D), torch.zeros(D), 1e-6), "dtype=f32,eps=1e-06"),
    (lambda p: p.layer_norm(torch.zeros(2, D), D), f"d={D},dtype=f32,gamma=no,beta=no"),
    (lambda p: p.layer_norm(torch.zeros(2, D).half(), D, torch.ones(D), torch.zeros(D)),
     f"layernorm.fwd:d={D},dtype=f16,weight=f32"),
    (lambda p: p.layer_norm(torch.zeros(2, D).int(), D), "'x' is expected to be one of torch.float16"),
    (lambda p: p.layer_norm(torch.zeros(2, D), D, torch.ones(D), torch.zeros(D).half()),
     "weight and bias are expected to have one dtype"),
    (lambda p: p.layer_norm(torch.zeros(2, D), 32), "'x' is expected to have the last dimensions (32,)"),
    (lambda p: p.layer_norm(torch.zeros(2, D), D, torch.ones(32)), "'gamma' is expected to have the last dim"),
    (lambda p: p.norm("layernorm", d=96), "expected to have one norm layernorm(d=96)"),
])  # fmt: skip
def test_what_the_package_lacks_is_said_with_the_command_that_builds_it(
    package: Any, call: Callable[[Any], object], words: str
) -> None:
    with pytest.raises(Exception, match=re.escape(words)) as raised:
        call(package)
    assert type(raised.value) is LngenError
    specs = re.findall(r"\b\w+\.(?:fwd|bwd):[\w=,.-]+", str(raised.value))
    assert all(lngen.parse_spec(spec) for spec in specs)


def test_the_backward_with_the_fewest_gradients_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package for inference trains nothing, and one with dx alone no weight: the command says what to build."""
    forward, narrow, whole = (f"layernorm.{way}:{LAYER}" for way in ("fwd", "bwd", "bwd"))
    narrow += ",wrt=x"
    x, weight, bias = torch.randn(3, D, requires_grad=True), torch.ones(D), torch.zeros(D)
    for number, backwards in enumerate(((), (narrow,), (narrow, whole))):
        made(folder := tmp_path / str(number), forward, *backwards)
        gpu, package = served(monkeypatch, folder)
        for needed, has in ((False, narrow in backwards), (True, whole in backwards)):
            weight.requires_grad_(needed)
            if has:
                package.layer_norm(x, D, weight, bias).sum().backward()
                assert ("wrt_x" in gpu.launched[-1].kernel) is not needed
                continue
            with pytest.raises(
                Exception, match=f"no kernel of {whole}, but {', '.join(backwards) or 'none'}; build it"
            ):
                package.layer_norm(x, D, weight, bias)
