"""If these fail, a model with lngen.torch trains otherwise on two ranks than on one.

This process and another do with gloo what a test asks for.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

import child

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("PyTorch without torch.distributed and gloo", allow_module_level=True)

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import lngen.torch as L
from torch_calls import CALLS, D, gradients, leaves

ROWS = (4, 6)
NAMES = ("layer_norm", "rms_norm", "add_layer_norm", "dyt", "softmax", "l2_norm")
PLACEMENTS = {
    "rows": Shard(0), "sequence": Shard(1), "features": Shard(2), "replicated": Replicate(), "sums": Partial(),
}  # fmt: skip
# A gradient of a weight is a sum over rows, here of parts on two ranks: a few roundings of sums of order 10.
CLOSE = 1e-5
ROUNDING = 2.0**-22  # two roundings of a parameter of order 1: gradients of ranks are added in another order
LIMIT = timedelta(seconds=300)  # of waiting for the other rank, which imports what this one has on a busy machine


class Net(torch.nn.Module):  # type: ignore[misc]
    """Two norms and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.linear, self.rms = L.LayerNorm(D), torch.nn.Linear(D, D), L.RMSNorm(D)

    def forward(self, x: Any) -> Any:
        return self.rms(self.linear(self.layer(x)))


def step(net: Any, x: Any) -> list[Any]:
    """The parameters after a step."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(x).sin().mean().backward()
    optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]


def of_this_rank(x: Any) -> Any:
    return x.detach().chunk(dist.get_world_size())[dist.get_rank()]


# ---- what a process does: each returns what a test asserts ----


def data_parallel() -> dict[str, float]:
    """The largest difference from a step of one process, for DDP and FSDP2."""
    x, found = leaves(rows=ROWS)[0].detach(), {}
    alone = step(Net(), x)
    sharded = Net()
    for module in sharded.children():
        fully_shard(module)
    fully_shard(sharded)
    for name, net in (("ddp", torch.nn.parallel.DistributedDataParallel(Net())), ("fsdp", sharded)):
        pairs = zip(step(net, of_this_rank(x)), alone, strict=True)
        found[name] = max(float((p - q).detach().abs().max()) for p, q in pairs)
    found["trained"] = max(float((p - q).detach().abs().max()) for p, q in zip(alone, Net().parameters(), strict=True))
    return found


def placed(tensor: Any, placement: Any, mesh: Any) -> Any:
    """The tensor on the mesh; partial sums are halves."""
    tensor = tensor.detach()
    if isinstance(placement, Partial):
        return DTensor.from_local(tensor / 2, mesh, [placement]).requires_grad_()
    return distribute_tensor(tensor, mesh, [placement]).requires_grad_()


def of_placement(name: str, placement: Any, weight: Any = None) -> dict[str, Any]:
    """A call of DTensors beside one of whole tensors."""
    mesh, plain = init_device_mesh("cpu", (2,)), leaves(rows=ROWS)
    sharded = [placed(plain[0], placement, mesh), *(placed(t, weight or Replicate(), mesh) for t in plain[1:])]
    y, expected = CALLS[name](*sharded), CALLS[name](*plain)
    dy = torch.linspace(-1, 2, expected.numel()).reshape(expected.shape)
    found = torch.autograd.grad(y, sharded, distribute_tensor(dy, mesh, y.placements), allow_unused=True)
    wanted = gradients(expected, plain)
    whole = [g if g is None else g.full_tensor() for g in found]
    differences = [float((f - g).abs().max()) for f, g in zip(whole, wanted, strict=True) if g is not None]
    return {
        "placements": y.placements,
        "equal": torch.equal(y.full_tensor(), expected),
        "dx": torch.equal(whole[0], wanted[0]),
        "same": [g is None for g in whole] == [g is None for g in wanted],
        "difference": max(differences),
    }


def uneven_and_two_dimensional() -> list[bool]:
    """Five rows on two ranks, and a mesh of two dimensions."""
    found, weights = [], [t.detach() for t in leaves()[1:]]
    for shape, placements, rows in (((2,), [Shard(0)], (5, 3)), ((1, 2), [Shard(0), Shard(1)], ROWS)):
        mesh, x = init_device_mesh("cpu", shape), leaves(rows=rows)[0].detach()
        every = [Replicate()] * len(placements)
        given = [distribute_tensor(x, mesh, placements), *(distribute_tensor(w, mesh, every) for w in weights)]
        y = CALLS["layer_norm"](*given)
        equal = torch.equal(y.full_tensor(), CALLS["layer_norm"](x, *weights))
        found.append(equal and y.placements == tuple(placements))
    return found


def numbers_of_rows() -> list[bool]:
    """A loss and a factor per row are sharded with the rows, also where there are as many rows as features."""
    mesh = init_device_mesh("cpu", (2,))
    x, residual = leaves(rows=(D,))[0].detach(), torch.randn(D, D)
    target, factor, gamma = torch.softmax(residual, -1), torch.rand(D), torch.randn(D)
    x_, residual_, target_, factor_ = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, residual, target, factor))
    gamma_ = distribute_tensor(gamma, mesh, [Replicate()])
    loss = L.function("cross_entropy")
    norm = L.function("add_rmsnorm", rowscale=True)
    pairs = [(loss(x_, target_), loss(x, target))]
    given = {"residual": residual_, "rowscale": factor_, "gamma": gamma_}
    plain = {"residual": residual, "rowscale": factor, "gamma": gamma}
    pairs += zip(norm(x_, eps=1e-5, **given), norm(x, eps=1e-5, **plain), strict=True)
    return [y.placements == (Shard(0),) and torch.equal(y.full_tensor(), wanted) for y, wanted in pairs]


def mixed() -> list[str]:
    """The errors for a plain weight with a DTensor, and the other way round."""
    mesh, tensors = init_device_mesh("cpu", (2,)), leaves(rows=ROWS)
    spread = [placed(t, Replicate(), mesh) for t in tensors]
    found = []
    for given in ([spread[0], *tensors[1:]], [tensors[0], *spread[1:]]):
        try:
            CALLS["layer_norm"](*given)
        except RuntimeError as error:
            found.append(str(error))
    return found


def compiled() -> bool:
    """torch.compile of a call of DTensors, which have no dynamic shapes; earlier tests of a process may bring them."""
    mesh, tensors = init_device_mesh("cpu", (2,)), [t.detach() for t in leaves(rows=ROWS)]
    given = [placed(tensors[0], Shard(0), mesh), *(placed(t, Replicate(), mesh) for t in tensors[1:])]
    function = torch.compile(CALLS["layer_norm"], backend="aot_eager", fullgraph=True, dynamic=False)
    return torch.equal(function(*given).full_tensor(), CALLS["layer_norm"](*tensors))


TASKS: dict[str, Callable[[], Any]] = {
    "data parallel": data_parallel,
    **{f"{n} {p}": lambda n=n, p=p: of_placement(n, PLACEMENTS[p]) for n in NAMES for p in PLACEMENTS},  # type: ignore[misc]
    "sharded weights": lambda: of_placement("layer_norm", Shard(0), Shard(0)),
    "uneven": uneven_and_two_dimensional,
    "numbers of rows": numbers_of_rows,
    "mixed": mixed,
    "compiled": compiled,
}


def join(rank: int, folder: str) -> None:
    """This process is a rank of two."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=LIMIT)


def other_rank(folder: str) -> None:
    """Does the tasks that standard input names, one a line."""
    warnings.simplefilter("ignore")
    join(1, folder)
    for line in sys.stdin:
        TASKS[line.rstrip()]()
    dist.destroy_process_group()


Ask = Callable[[str], Any]  # for a task


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """What a task finds that two ranks do together."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    code = "import sys, test_distributed; test_distributed.other_rank(sys.argv[1])"
    other = child.start(code, folder, OMP_NUM_THREADS="1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def of(task: str) -> Any:
        assert other.poll() is None, child.output(other)
        other.stdin.write(task + "\n")
        other.stdin.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP warns of the view that a linear layer returns
            try:
                return TASKS[task]()
            except Exception:
                other.kill()  # it may wait for this rank
                raise

    try:
        join(0, folder)
        yield of
        dist.destroy_process_group()
        if other.poll() is None:
            child.output(other)
    finally:
        torch.set_num_threads(threads)
        other.kill()
        other.communicate()


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_step_of_two_ranks_is_that_of_one(found: Ask, way: str) -> None:
    """Each rank has half of the rows; gradients are averages."""
    differences = found("data parallel")
    assert differences[way] < ROUNDING < 1e-4 < differences["trained"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_sharded_rows_have_the_bits_of_whole_tensors(found: Ask, name: str, placement: str) -> None:
    """Rows stay where they are; features and partial sums are redistributed. Weights have the sums over ranks."""
    result, kept = found(f"{name} {placement}"), placement in ("rows", "sequence")
    given = PLACEMENTS[placement] if kept else Replicate()
    assert result == {**result, "placements": (given,), "equal": True, "dx": True, "same": True}, result
    assert result["difference"] < CLOSE


def test_sharded_weights_are_gathered(found: Ask) -> None:
    result = found("sharded weights")
    assert result == {**result, "placements": (Shard(0),), "equal": True, "dx": True, "same": True}, result
    assert result["difference"] < CLOSE


def test_uneven_rows_and_a_mesh_of_two_dimensions(found: Ask) -> None:
    assert found("uneven") == [True, True]


def test_numbers_of_rows_are_sharded_with_the_rows(found: Ask) -> None:
    assert found("numbers of rows") == [True] * 3


def test_plain_tensors_beside_dtensors_raise(found: Ask) -> None:
    words = "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
    messages = found("mixed")
    assert len(messages) == 2, messages
    assert all(message.startswith(words) and "distribute_tensor" in message for message in messages)


def test_compiled_calls_take_dtensors(found: Ask) -> None:
    assert found("compiled") is True
