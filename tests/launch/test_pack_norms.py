"""If these fail, a norm of a pack gives other bits than the interpreter, or takes arrays that its kernels cannot.

Everything is launched through the C functions of a driver, whose GPU executes the PTX of the pack.
"""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lngen
from fake_driver import FakeDriver
from fake_images import cubins_of_ptx
from lngen.errors import ArrayError, LngenError, MissingError
from lngen.launch import driver

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

from host_tensors import gpu_with  # noqa: E402

D = 64
SPECS = [
    f"layernorm.fwd:d={D},dtype=f32", f"layernorm.bwd:d={D},dtype=f32", f"layernorm.fwd:d={D},dtype=bf16,eps=run",
    f"rmsnorm.fwd:d={D},dtype=f32,strides=2", f"rmsnorm.fwd:d={2 * D},dtype=f32",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pack")
    with cubins_of_ptx():
        lngen.build(SPECS, out, arch="sm_90", rows="1", emit="ptx,cubin")
    return out


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeDriver:
    return gpu_with(monkeypatch, folder)


@pytest.fixture
def pack(gpu: FakeDriver, folder: Path) -> Any:
    return lngen.load(folder)


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_a_copy_launches_and_takes_what_the_norm_saved(pack: Any, copied: Any) -> None:
    norm = pack.norm("layernorm", d=D, dtype="f32").prepare()
    inputs, dy = (numbers(3, D), numbers(D, seed=1), numbers(D, seed=2)), numbers(3, D, seed=3)
    y, saved = norm.forward(*inputs)
    other = copied(norm)
    found = (other.forward(*inputs)[0], *other.backward(dy, pickle.loads(pickle.dumps(saved))))
    assert all(map(torch.equal, found, (y, *norm.backward(dy, saved))))


# ---- captures, threads ----


def test_after_prepare_a_capture_loads_nothing(pack: Any, gpu: FakeDriver) -> None:
    norm = pack.norm("layernorm", d=D, dtype="f32").prepare(0)
    gpu.captures = {0: 1}
    y, _ = norm.forward(numbers(3, D), numbers(D), numbers(D))
    assert y.shape == (3, D)
    gpu.captures = {0: 2}
    with pytest.raises(
        LngenError, match=r"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED \(900\); load kernels before a capture, with prepare"
    ):
        pack.norm("rmsnorm", d=2 * D).forward(numbers(3, 2 * D), numbers(2 * D))


# ---- refusals ----


@pytest.mark.parametrize(("call", "message"), [
    (lambda n: n.forward(np.zeros((3, D)), *[numbers(D)] * 2), "'x' is expected on a GPU, got a NumPy array"),
    (lambda n: n.backward(numbers(3, D), "saved"), "is expected to be what forward returned .* got str"),
])  # fmt: skip
def test_what_a_norm_of_a_pack_refuses(pack: Any, gpu: FakeDriver, call: Any, message: str) -> None:
    with pytest.raises(ArrayError, match=message):
        call(pack.norm("layernorm", d=D, dtype="f32"))
    assert gpu.launched == []


def test_a_backward_takes_what_its_own_forward_saved(pack: Any) -> None:
    one, other = pack.norm("layernorm", d=D, dtype="f32"), pack.norm("rmsnorm", d=D, strides=2)
    _, saved = other.forward(numbers(3, D), numbers(D))
    with pytest.raises(
        ArrayError, match=re.escape(f"forward of '{one.spec}' returned beside y, got that of '{other.spec}'")
    ):
        one.backward(numbers(3, D), saved)


def test_a_tensor_of_negated_numbers_is_refused(pack: Any) -> None:
    """Its memory has the numbers without the sign that it shows."""
    x = torch.complex(numbers(3, D), numbers(3, D, seed=1)).conj().imag
    assert x.is_neg()
    with pytest.raises(ArrayError, match=r"'x', of .*, is not an array that can be used: .*resolve_neg\(\) first"):
        pack.norm("rmsnorm", d=D, strides=2).forward(x, numbers(D))


def test_keys_that_are_not_given_have_their_defaults(pack: Any) -> None:
    assert pack.norm("layernorm", d=D, dtype=torch.bfloat16).spec == f"layernorm.fwd:d={D},dtype=bf16,eps=run"
    assert pack.norm("rmsnorm", d=2 * D).backward_spec is None
    norm = pack.norm("rmsnorm", d=2 * D)
    _, saved = norm.forward(numbers(3, 2 * D), numbers(2 * D))
    with pytest.raises(LngenError, match=r"has no backward of .*; build it: lngen build rmsnorm\.bwd:d=128"):
        norm.backward(numbers(3, 2 * D), saved)


def test_a_gpu_that_is_not_there(pack: Any) -> None:
    with pytest.raises(MissingError, match="GPU 7 is expected, but 1 are found"):
        pack.prepare(7)


# ---- the standard library alone ----


def test_launching_imports_nothing_but_the_standard_library(folder: Path) -> None:
    """Nor does it need a dataclass, whose import takes as long as the rest."""
    code = """
        import sys
        before = {*sys.modules}
        import lngen
        pack = lngen.load(sys.argv[1])
        pack.described(pack.specs[0])
        own = {m.partition(".")[0] for m in {*sys.modules} - before}
        foreign = sorted(own - {"lngen"} - sys.stdlib_module_names)
        print(foreign, "dataclasses" in sys.modules, "pathlib" in sys.modules)
    """
    program = "\n".join(line[8:] for line in code.splitlines())
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(folder)],
        env={"PYTHONPATH": str(Path(lngen.__file__).parents[1])}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == "[] False False", done.stderr


def test_the_driver_is_asked_for_nothing_before_a_call(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(driver, "library", lambda: pytest.fail("the driver is loaded"))
    pack = lngen.load(folder)
    assert pack.norm("layernorm", d=D, dtype="f32").spec in pack.specs
