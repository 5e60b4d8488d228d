"""If these fail, a rank normalises parts of rows, or takes tensors that lie elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensor = pytest.importorskip("torch.distributed.tensor")

from lngen.compiler.ir import D, M  # noqa: E402
from lngen.torch import sharded  # noqa: E402
from lngen.torch.bridge import TorchError  # noqa: E402


@pytest.mark.parametrize(("placement", "dims", "rows"), [
    (tensor.Shard(0), 3, tensor.Shard(0)),
    (tensor.Shard(1), 3, tensor.Shard(1)),
    (tensor.Shard(2), 3, tensor.Replicate()),
    (tensor.Shard(-1), 3, tensor.Replicate()),
    (tensor.Shard(-2), 3, tensor.Shard(-2)),
    (tensor.Replicate(), 2, tensor.Replicate()),
    (tensor.Partial(), 2, tensor.Replicate()),
], ids=str)  # fmt: skip
def test_rows_stay_whole(placement: Any, dims: int, rows: Any) -> None:
    assert sharded._of_rows(tensor, placement, dims) == rows


class Local:
    """What a rank has of a DTensor, which says how it was asked for."""

    placements = (tensor.Shard(0), tensor.Partial())
    device_mesh = "a mesh"
    shape = torch.Size((4, 8))

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, list[Any]()

    def dim(self) -> int:
        return 2

    def redistribute(self, mesh: Any, placements: Any) -> "Local":
        self.asked += [mesh, [*placements]]
        return self

    def to_local(self, grad_placements: Any) -> str:
        self.asked.append([*grad_placements])
        return self.name


def test_each_rank_has_its_rows_and_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a weight is a partial sum where rows are sharded."""
    made = list[Any]()
    axes = {"x": (M, D), "gamma": (D,), "beta": (D,)}
    ops = SimpleNamespace(inputs=("x", "gamma", "beta"), lead="x", axes=axes, fwd=None)
    ops.fwd = lambda *given, **keys: (
        made.append((given, keys)) or (torch.zeros(2, 8), torch.zeros(2), torch.zeros(2, 4))
    )
    shard, whole, partial = tensor.Shard(0), tensor.Replicate(), tensor.Partial()

    class DTensor(Local):
        @staticmethod
        def from_local(y: Any, mesh: Any, placements: Any, **how: Any) -> Any:
            return mesh, placements, tuple(how["shape"]), how["stride"]

    module = SimpleNamespace(DTensor=DTensor, Shard=tensor.Shard, Replicate=tensor.Replicate, Partial=tensor.Partial)
    x, gamma = DTensor("x"), DTensor("gamma")
    found = sharded._sharded(module, ops, (x, gamma, None), {"eps": 1.0})
    assert made == [(("x", "gamma", None), {"eps": 1.0})]
    assert x.asked == ["a mesh", [shard, whole], [shard, whole]]
    assert gamma.asked == ["a mesh", [whole, whole], [partial, whole]]
    assert found == [
        ("a mesh", [shard, whole], shape, stride)
        for shape, stride in (((4, 8), (8, 1)), ((4,), (1,)), ((4, 4), (4, 1)))  # the last: scales of blocks
    ]
    for given, message in (((torch.zeros(4, 8), gamma, None), "input is a plain tensor"),
                           ((x, torch.zeros(8), None), "replicates a weight")):  # fmt: skip
        with pytest.raises(TorchError, match=message):
            sharded._sharded(module, ops, given, {})
