"""If these fail, a hub package does not load, computes other bits, or imports what it may not."""

import ast
import gc
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import lngen
from child import output, start
from hub_packages import LAYER, VARIANT, D, loaded, made, on_fake_gpu, seen_on, taken_by


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that no test changes."""
    folder = tmp_path_factory.mktemp("hub") / "package"
    made(folder)
    return folder


@pytest.fixture
def package(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its module, on a fake GPU; a copy, so that no test sees what another has loaded."""
    copied = shutil.copytree(whole, tmp_path / "package")
    module = loaded(copied / VARIANT)
    on_fake_gpu(monkeypatch, module, copied / VARIANT / "pack")
    return module


# ---- what it may import, and the Python it needs ----

# Imports that are not reached with tensors of PyTorch, all inside functions.
UNREACHED = {"arrays.py": {"ml_dtypes", "numpy"}, "cupy_import.py": {"cupy"}, "files.py": {"filelock"}}


def imported(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """The top level of what is imported, "" for the package itself, and whether the import runs with its module."""

    def visit(node: ast.AST, early: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], early) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield ("" if node.level else str(node.module).partition(".")[0], early)
        inner = early and not isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    return visit(tree, True)


def newer(tree: ast.AST) -> list[str]:
    """What Python 3.9 lacks and runs outside annotations: unions by |, zip(strict=), dataclass(slots=) and the like."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        skipped |= {id(inner) for note in notes if note is not None for inner in ast.walk(note)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            keywords = {k.arg for k in node.keywords}
            if (name == "zip" and "strict" in keywords) or (name == "dataclass" and keywords & {"slots", "kw_only"}):
                found.append(f"{node.lineno}: {name}")
            if name in {"isinstance", "issubclass"} and isinstance(node.args[1], ast.BinOp):
                found.append(f"{node.lineno}: {name} with |")
        if isinstance(node, ast.Attribute) and node.attr in {"pairwise", "batched", "bit_count", "add_note", "walk_up"}:
            found.append(f"{node.lineno}: {node.attr}")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and id(node) not in skipped:
            sides = (node.left, node.right)
            if any(isinstance(s, ast.Subscript) or (isinstance(s, ast.Constant) and s.value is None) for s in sides):
                found.append(f"{node.lineno}: |")
    return found


def test_every_file_is_python_3_9_and_imports_only_pytorch(whole: Path) -> None:
    files = [*(whole / VARIANT).rglob("*.py")]
    assert len(files) > 15
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, feature_version=(3, 9))
        for name, early in imported(tree):
            known = name in {"", "torch", *sys.stdlib_module_names}
            assert known or (not early and name in UNREACHED.get(path.name, ())), f"{path.name} imports {name}"
        assert newer(tree) == [], path.name
        assert "from __future__ import annotations" in text or "|" not in text


@pytest.mark.parametrize("code", [
    "zip(a, b, strict=True)", "@dataclass(slots=True)\nclass A: pass", "A = int | None", "isinstance(a, int | str)",
])  # fmt: skip
def test_what_python_3_9_lacks_is_seen(code: str) -> None:
    assert newer(ast.parse(code))
    assert newer(ast.parse("def f(a: int | None) -> str | None: b: int | None = a")) == []


def test_the_package_runs_without_lngen_numpy_and_cupy(whole: Path) -> None:
    """It loads its kernels and chooses one; the CPU tensor is then refused, without a driver."""
    code = """
        import sys
        for name in ("lngen", "numpy", "cupy", "ml_dtypes", "filelock", "jinja2", "platformdirs"):
            sys.modules[name] = None
        import warnings
        warnings.simplefilter("ignore")  # of PyTorch, which misses NumPy
        import importlib.util
        import torch
        before = {*sys.modules}
        spec = importlib.util.spec_from_file_location("_hub", sys.argv[1] + "/__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["_hub"] = module
        spec.loader.exec_module(module)
        print(module.norm("layernorm", d=64, dtype=torch.float32))
        try:
            module.layer_norm(torch.zeros(2, 64), (64,), torch.ones(64), torch.zeros(64))
        except Exception as error:
            print(error)
        tops = {name.partition(".")[0] for name in {*sys.modules} - before}
        print(sorted(tops - {"_hub", "torch"} - sys.stdlib_module_names))
    """
    norm, refused, others = output(start(code, str(whole / VARIANT))).splitlines()
    assert "layernorm.fwd:d=64" in norm
    assert "'x' is expected on a GPU" in refused
    assert others == "[]"


def test_old_loaders_find_the_package_under_its_name(whole: Path) -> None:
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import lngen_norms, torch
        print(lngen_norms.__all__, lngen_norms.layers.LayerNorm.__name__, lngen_norms.norm("layernorm", d=64))
    """
    printed = output(start(code, str(whole / VARIANT)))
    assert printed.startswith("['layer_norm', 'layers', 'norm', 'rms_norm'] LayerNorm <PackNorm")


# ---- results ----


class LlamaRMSNorm(nn.Module):
    """As transformers has it."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the package's forward takes the place of this")


@dataclass(frozen=True)
class Case:
    """A layer of a model, the package's layer for it, and the keys of the norm that it computes."""

    layer: str
    model: Callable[[], nn.Module]
    graph: str
    keys: Mapping[str, Any]


CASES = {
    "LayerNorm": Case("LayerNorm", lambda: nn.LayerNorm(D), "layernorm", {"dtype": "f32"}),
    "RMSNorm": Case("RMSNorm", lambda: nn.RMSNorm(D, eps=1e-3), "rmsnorm", {"dtype": "f32", "eps": 1e-3}),
    "no eps": Case("RMSNorm", lambda: nn.RMSNorm(D), "rmsnorm", {"dtype": "f32", "eps": 2.0**-23}),
    "once": Case("RMSNorm", lambda: nn.RMSNorm(D, eps=1e-5).bfloat16(), "rmsnorm", {"dtype": "bf16"}),
    "Llama": Case(
        "LlamaRMSNorm", lambda: LlamaRMSNorm(D, 1e-5).bfloat16(), "rmsnorm", {"dtype": "bf16", "casts": "llama"}
    ),
    "transformers": Case(
        "RMSNorm", lambda: LlamaRMSNorm(D, 1e-5).bfloat16(), "rmsnorm", {"dtype": "bf16", "casts": "llama"}
    ),
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


@pytest.mark.parametrize("name", CASES)
def test_layers_give_the_interpreters_bits(package: ModuleType, name: str) -> None:
    case = CASES[name]
    model = case.model()
    taken_by(getattr(package.layers, case.layer), model)
    compare(case, model)


@pytest.mark.parametrize("name", ["LayerNorm", "Llama"])
@pytest.mark.parametrize("direct", [True, False])
def test_kernels_loads_the_package(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, direct: bool
) -> None:
    """Hugging Face kernels: the folder, or its variant, and kernelize; its digest and its metadata are ours."""
    kernels = pytest.importorskip("kernels")
    from kernels import importer
    from kernels._rust import Digest, Metadata

    case, model = CASES[name], nn.Sequential(CASES[name].model())
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
        on_fake_gpu(monkeypatch, importer._loaded_kernels[variant].module, variant / "pack")
        compare(case, model[0])
    finally:
        del type(model[0]).kernel_layer_name, type(model[0]).kernel_condition


def test_functions_take_any_layout_and_any_leading_dimensions(package: ModuleType) -> None:
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


def test_a_frozen_weight_has_no_gradient_and_results_hold_no_memory(package: ModuleType) -> None:
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
        seen_on(package).clear()
        assert gone() is None
    finally:
        gc.enable()


def test_other_graphs_are_in_the_package_without_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = f"softmax.fwd:d={D},dtype=f32"
    made(tmp_path, spec)
    module = loaded(tmp_path / VARIANT)
    on_fake_gpu(monkeypatch, module, tmp_path / VARIANT / "pack")
    x = torch.randn(3, D)
    y, _ = module.norm(spec).forward(x)
    expected, _ = lngen.compile("softmax", d=D, dtype="f32").forward(x.numpy())
    assert same(y, expected)


# ---- the choice of a norm ----


def test_a_built_in_eps_comes_before_one_at_run_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = f"d={D},dtype=f32"
    made(tmp_path, f"rmsnorm.fwd:{keys},eps=1e-6", f"rmsnorm.fwd:{keys},eps=run", f"rmsnorm.fwd:{keys},casts=llama")
    module = loaded(tmp_path / VARIANT)
    gpu = on_fake_gpu(monkeypatch, module, tmp_path / VARIANT / "pack")
    x, weight = torch.randn(3, D), torch.randn(D)
    for eps, casts in ((1e-6, ("once",)), (1e-5, ("once",)), (0.25, ("once",)), (1e-5, ("llama", "once"))):
        y = module.rms_norm(x, D, weight, eps, casts)
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
    package: ModuleType, call: Callable[[ModuleType], object], words: str
) -> None:
    with pytest.raises(Exception, match=re.escape(words)) as raised:
        call(package)
    assert type(raised.value).__name__ == "LngenError"
    specs = re.findall(r"\b\w+\.(?:fwd|bwd):[\w=,.-]+", str(raised.value))
    assert all(lngen.parse_spec(spec) for spec in specs)


def test_the_backward_with_the_fewest_gradients_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package for inference trains nothing, and one with dx alone no weight: the command says what to build."""
    forward, narrow, whole = (f"layernorm.{way}:{LAYER}" for way in ("fwd", "bwd", "bwd"))
    narrow += ",wrt=x"
    x, weight, bias = torch.randn(3, D, requires_grad=True), torch.ones(D), torch.zeros(D)
    for number, backwards in enumerate(((), (narrow,), (narrow, whole))):
        made(folder := tmp_path / str(number), forward, *backwards)
        module = loaded(folder / VARIANT)
        gpu = on_fake_gpu(monkeypatch, module, folder / VARIANT / "pack")
        for needed, has in ((False, narrow in backwards), (True, whole in backwards)):
            weight.requires_grad_(needed)
            if has:
                module.layer_norm(x, D, weight, bias).sum().backward()
                assert ("wrt_x" in gpu.launched[-1].kernel) is not needed
                continue
            with pytest.raises(
                Exception, match=f"no kernel of {whole}, but {', '.join(backwards) or 'none'}; build it"
            ):
                module.layer_norm(x, D, weight, bias)
