"""If these fail, a norm of a pack gives other bits than the interpreter, or takes arrays that its kernels cannot.

Everything is launched through the C functions of a driver, whose GPU executes the PTX of the pack.
"""

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lngen
from bits import spec_of
from fake_driver import FakeDriver
from fake_images import cubins_of_ptx
from lngen.errors import ArrayError, LngenError, MissingError
from lngen.launch import driver
from lngen.launch.kernels import MOST_BLOCKS

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

from host_tensors import pass_for_gpu_tensors  # noqa: E402

D = 64
BLOCKS = spec_of(f"block_scaled.fwd:d={D},dtype=bf16")
SPECS = [
    f"layernorm.fwd:d={D},dtype=f32", f"layernorm.bwd:d={D},dtype=f32",
    f"layernorm.fwd:d={D},dtype=bf16,eps=run", f"layernorm.bwd:d={D},dtype=bf16,eps=run,save=none",
    f"layernorm.fwd:d={D},dtype=bf16,eps=run,save=none",
    f"l2norm.fwd:d={D},dtype=f32,guard=max,eps=run", f"l2norm.bwd:d={D},dtype=f32,guard=max,eps=run",
    f"rmsnorm.fwd:d={D},dtype=f32,strides=2", f"rmsnorm.bwd:d={D},dtype=f32,strides=2",
    f"add_rmsnorm.fwd:d={D},dtype=f32", f"add_rmsnorm.bwd:d={D},dtype=f32,accumulate=gamma",
    f"rmsnorm.fwd:d={2 * D},dtype=f32", BLOCKS,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pack")
    with cubins_of_ptx():
        lngen.build(SPECS, out, arch="sm_90", rows="1,many", emit="ptx,cubin")
    return out


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeDriver:
    found = FakeDriver(version=13090)
    found.knows_pack(folder)
    pass_for_gpu_tensors(monkeypatch, found)
    return found


@pytest.fixture
def pack(gpu: FakeDriver, folder: Path) -> Any:
    return lngen.load(folder)


def numbers(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return found.to(dtype or torch.float32)


def host(tensor: Any) -> Any:
    """A NumPy array of a tensor, with ml_dtypes' bfloat16."""
    import ml_dtypes

    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def same(tensors: Any, arrays: Any) -> bool:
    """True if all bits are equal."""
    pairs = [(host(t.contiguous()), np.asarray(a)) for t, a in zip(tensors, arrays, strict=True)]
    return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


# ---- bits ----


@pytest.mark.parametrize("shape", [(0, D), (1, D), (2, 9, D)])
def test_forward_and_backward_have_the_bits_of_the_interpreter(pack: Any, shape: tuple[int, ...]) -> None:
    x, gamma, beta, dy = numbers(*shape), numbers(D, seed=1), numbers(D, seed=2), numbers(*shape, seed=3)
    norm, reference = pack.norm("layernorm", d=D, dtype="f32"), lngen.compile("layernorm", d=D, dtype="f32")
    y, saved = norm.forward(x, gamma, beta)
    wanted, kept = reference.forward(*map(host, (x, gamma, beta)))
    assert same((y, *norm.backward(dy, saved)), (wanted, *reference.backward(host(dy), kept)))


@pytest.mark.parametrize("lead", [(), (0,), (5,), (2, 3)])
def test_a_number_per_block_is_an_array(pack: Any, lead: tuple[int, ...]) -> None:
    x, gamma = (numbers(*shape, D, dtype=torch.bfloat16) for shape in (lead, ()))
    found, _ = pack.norm(str(BLOCKS)).forward(x, gamma)
    wanted, _ = lngen.compile(BLOCKS.definition, d=D, dtype="bf16").forward(host(x), host(gamma))
    assert [tuple(t.shape) for t in found] == [(*lead, D), (*lead, D // 32)]
    assert same(found, wanted)


@pytest.mark.parametrize(
    ("graph", "keys"), [("layernorm", {"dtype": "bf16", "save": "none"}), ("l2norm", {"dtype": "f32", "guard": "max"})]
)
@pytest.mark.parametrize("eps", [1e-6, 0.0, -1e-3, np.int64(2)])
def test_eps_of_a_call(pack: Any, gpu: FakeDriver, graph: str, keys: dict[str, str], eps: float) -> None:
    dtype = torch.bfloat16 if keys["dtype"] == "bf16" else torch.float32
    weights = [numbers(D, seed=n, dtype=dtype) for n in (1, 2)] if graph == "layernorm" else []
    inputs, dy = [numbers(5, D, dtype=dtype), *weights], numbers(5, D, seed=3, dtype=dtype)
    norm, reference = (of(graph, d=D, eps="run", **keys) for of in (pack.norm, lngen.compile))
    norm.prepare()
    loaded = sum(name.startswith("cuModuleLoad") for name in gpu.calls)
    y, saved = norm.forward(*inputs, eps=eps)
    wanted, kept = reference.forward(*map(host, inputs), eps=eps)
    assert same((y, *norm.backward(dy, saved)), (wanted, *reference.backward(host(dy), kept)))
    assert sum(name.startswith("cuModuleLoad") for name in gpu.calls) == loaded, "nothing is loaded for an eps"


def test_heads_of_a_packed_projection(pack: Any, gpu: FakeDriver) -> None:
    """In place, forward and backward, beside k and v."""
    qkv, gamma, dy = numbers(4, 3, 2, D), numbers(D, seed=1), numbers(4, 2, D, seed=2)
    norm, reference = pack.norm("rmsnorm", d=D, strides=2), lngen.compile("rmsnorm", d=D, strides=2)
    before, wanted = qkv.clone(), reference.forward(host(qkv[:, 0].contiguous()), host(gamma))
    gradients = reference.backward(host(dy), wanted[1])
    y, saved = norm.forward(qkv[:, 0], gamma)
    assert same((y, *norm.backward(dy, saved)), (wanted[0], *gradients))
    gpu.raises = False  # row groups without a row read the last one again, and drop it
    norm.forward(qkv[:, 0], gamma, out=(qkv[:, 0], None))
    assert same((qkv[:, 0],), (wanted[0],))
    assert torch.equal(qkv[:, 1:], before[:, 1:])


def test_gradients_that_are_equal_or_added(pack: Any) -> None:
    """dresidual is dx; dgamma is added to an array."""
    inputs, dy = [numbers(3, D), numbers(3, D, seed=1), numbers(D, seed=2)], numbers(3, D, seed=3)
    norm = pack.norm("add_rmsnorm", d=D)
    reference = lngen.compile("add_rmsnorm", d=D, accumulate="gamma")
    y, saved = norm.forward(*inputs)
    _, kept = reference.forward(*map(host, inputs))
    cotangents = (dy, torch.zeros_like(dy)) if isinstance(y, tuple) else dy
    sums = torch.ones(D)
    found = norm.backward(cotangents, saved, out=(None, None, sums))
    known = tuple(map(host, cotangents)) if isinstance(y, tuple) else host(dy)
    assert same(found, reference.backward(known, kept, out=(None, None, np.ones(D, np.float32))))
    assert found[2] is sums
    assert found[0] is found[1]


def test_x_in_place(pack: Any, gpu: FakeDriver) -> None:
    x, gamma, beta = numbers(3, D), numbers(D, seed=1), numbers(D, seed=2)
    norm = pack.norm(f"layernorm.fwd:d={D},dtype=f32")
    wanted, _ = lngen.compile("layernorm", d=D).forward(*(host(a).copy() for a in (x, gamma, beta)))
    gpu.raises = False  # as above
    _, saved = norm.forward(x, gamma, beta, out=x)
    assert same((x,), (wanted,))
    with pytest.raises(ArrayError, match="'x' is needed, but a result was written over it"):
        norm.backward(torch.ones(3, D), saved)


def test_a_second_backward_lacks_what_the_first_overwrote(pack: Any, gpu: FakeDriver) -> None:
    norm, dy = pack.norm("layernorm", d=D, dtype="f32"), torch.ones(3, D)
    x, gamma, beta = numbers(3, D), numbers(D, seed=1), numbers(D, seed=2)
    _, saved = norm.forward(x, gamma, beta)
    gpu.raises = False  # as above
    norm.backward(dy, saved, out=(x, None, None))
    with pytest.raises(ArrayError, match="'x' is needed, but a result was written over it"):
        norm.backward(dy, saved)


def test_results_are_given_in_turns(pack: Any) -> None:
    """Arrays of one layout, now for y, now for h: rows of what is given lie apart, those of a new one do not."""
    inputs, norm = [numbers(3, D), numbers(3, D, seed=1), numbers(D, seed=2)], pack.norm("add_rmsnorm", d=D)
    wanted, _ = norm.forward(*inputs)
    for place in (0, 1, 0):
        out = [None, None, None]
        out[place] = torch.zeros(3, 2 * D)[:, :D]
        found, _ = norm.forward(*inputs, out=tuple(out))
        assert found[place] is out[place]
        assert same(found, map(host, wanted))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_a_copy_launches_and_takes_what_the_norm_saved(pack: Any, copied: Any) -> None:
    norm = pack.norm("layernorm", d=D, dtype="f32").prepare()
    inputs, dy = (numbers(3, D), numbers(D, seed=1), numbers(D, seed=2)), numbers(3, D, seed=3)
    y, saved = norm.forward(*inputs)
    other = copied(norm)
    found = (other.forward(*inputs)[0], *other.backward(dy, pickle.loads(pickle.dumps(saved))))
    assert same(found, map(host, (y, *norm.backward(dy, saved))))


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


def refusals() -> Iterator[tuple[str, Any, str]]:
    one = f"layernorm.fwd:d={D},dtype=f32"
    run = f"layernorm.fwd:d={D},dtype=bf16,eps=run"
    good = (3, D)
    yield one, lambda n: n.forward(numbers(3, D + 1), numbers(D), numbers(D)), rf"shape \(\.\.\., {D}\), the spec's D"
    yield one, lambda n: n.forward(numbers(*good).double(), numbers(D), numbers(D)), "'x' is expected to be f32, got"
    yield one, lambda n: n.forward(numbers(*good), numbers(D)), "expects the input 'beta', which is missing"
    yield one, lambda n: n.forward(numbers(*good), *[numbers(D)] * 2, eps=1e-6), "has eps=1e-05 built in, got eps="
    yield one, lambda n: n.forward(np.zeros(good), *[numbers(D)] * 2), "'x' is expected on a GPU, got a NumPy array"
    yield one, lambda n: n.forward(numbers(3, D + 1)[:, 1:], *[numbers(D)] * 2), r"multiples of so many bytes: 'x' 16,"
    yield (
        one,
        lambda n: n.backward(numbers(*good), "saved"),
        "is expected to be what forward returned .* got str",
    )
    yield run, lambda n: n.forward(numbers(*good), *[numbers(D)] * 2), "expects eps in every call, which is missing"
    for eps in (float("nan"), float("inf"), "1e-6", True, 10**400, np.ones(1)):
        yield run, lambda n, e=eps: n.forward(*[numbers(D)] * 3, eps=e), "expects eps to be a finite number, got"


@pytest.mark.parametrize(("spec", "call", "message"), [*refusals()])
def test_what_a_norm_of_a_pack_refuses(pack: Any, gpu: FakeDriver, spec: str, call: Any, message: str) -> None:
    norm = pack.norm(spec)
    with pytest.raises(ArrayError, match=message):
        call(norm)
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


def test_too_many_rows_are_one_sentence(pack: Any) -> None:
    """A grid wraps around in the driver's structure, and would leave rows unwritten."""
    loaded = pack.kernels(f"rmsnorm.fwd:d={2 * D},dtype=f32", 0, 1)
    with pytest.raises(LngenError, match=rf"at most {MOST_BLOCKS} blocks, but {2**45} rows take \d+; call it"):
        loaded.bind(2**45, dict.fromkeys(loaded.tensors, 2 * D))


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
