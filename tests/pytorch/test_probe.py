"""If these fail, patch() takes a module for a norm that is more than its formula: what it does besides is lost."""

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import lngen.torch as L
from lngen.torch.patching import PatchedNorm
from lngen.torch.probe import agree

D = 48
Step = Callable[[Any, Tensor], Any]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 + torch.arange(D) / D)
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Any:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def norm(after: Step = lambda self, y: y, before: Step = lambda self, x: x, **attributes: Any) -> Callable[[], Any]:
    """A class of norms that do something before or after, with attributes and buffers (``_name``)."""

    class More(Norm):
        def __init__(self) -> None:
            super().__init__()
            for name, value in copy.deepcopy(attributes).items():
                (self.register_buffer if name.startswith("_") else self.__setattr__)(name, value)

        def forward(self, x: Tensor) -> Any:
            return after(self, super().forward(before(self, x)))

    return More


class SetEps(Norm):
    """Its eps is a number, whatever the attribute is."""

    def forward(self, x: Tensor) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Scaled(Norm):
    def forward(self, x: Tensor) -> Any:
        return self.scaled(super().forward(x))

    def scaled(self, y: Tensor) -> Tensor:
        return y


class StraightGradient(torch.autograd.Function):
    """The identity, whose derivative is 2."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


def does(change: Callable[[Any, Tensor], Any]) -> Step:
    """A step that changes the module or something else and returns its tensor."""

    def step(self: Any, tensor: Tensor) -> Tensor:
        copied = tensor.clone()
        change(self, tensor)
        return copied

    return step


def when(branch: Callable[[Any, Tensor], bool], then: Step) -> Step:
    return lambda self, tensor: then(self, tensor) if branch(self, tensor) else tensor


TRAINING = lambda self, y: self.training  # noqa: E731
TWICE = lambda self, y: 2 * y  # noqa: E731

LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (norm(lambda s, y: nn.functional.dropout(y, 0.5, s.training)), "computes another function in training"),
    "noise": (norm(when(TRAINING, lambda s, y: y + torch.randn_like(y))), "computes another function in training"),
    "two results in training": (norm(when(TRAINING, lambda s, y: (y, y))), "computes another function in training"),
    "a gradient in training": (
        norm(when(TRAINING, lambda s, y: StraightGradient.apply(y))),
        "has gradients of its own",
    ),
    "two results": (norm(lambda s, y: (y, y)), "computes another function"),
    "2 dimensions": (norm(when(lambda s, y: y.dim() == 2, TWICE)), "computes another function for 2 dimensions"),
    "4 dimensions": (norm(when(lambda s, y: y.dim() == 4, TWICE)), "computes another function for 4 dimensions"),
    "a clamp": (norm(before=lambda s, x: x.clamp(-100, 100)), "computes another function"),
    "a mask": (norm(lambda s, y: y * s._mask, _mask=torch.ones(D)), "has buffers: _mask"),
    "a dictionary": (norm(lambda s, y: y * s.c["k"], c={"k": 1.0}), "reads what can change unseen: c, a dict"),
    "a list in a tuple": (norm(lambda s, y: y * s.c[0][0], c=([1.0],)), "reads what can change unseen: c, a tuple"),
    "an object": (norm(lambda s, y: y * s.c.k, c=SimpleNamespace(k=1.0)), "reads what can change unseen: c, a Simple"),
    "a tensor": (norm(lambda s, y: y * s.c, c=torch.ones(D)), "reads what can change unseen: c, a Tensor"),
    "a dictionary of all": (norm(lambda s, y: y * vars(s)["c"], c=1.0), "reads what can change unseen: __dict__"),
    "a count": (norm(does(lambda s, y: setattr(s, "c", s.c + 1)), c=0), "writes its attributes: c"),
    "a last result": (norm(does(lambda s, y: setattr(s, "last", y))), "writes its attributes: last"),
    "a deleted attribute": (norm(does(lambda s, y: vars(s).pop("c", None)), c=0), "changes its attributes"),
    "a log": (norm(does(lambda s, y: s.c.append(1)), c=[]), "changes its attributes"),
    "its weight": (norm(does(lambda s, y: s.weight.data.clamp_(max=0.5))), "changes its attributes"),
    "its input": (norm(before=does(lambda s, x: x.data.zero_())), "writes into its input"),
    "random numbers": (norm(does(lambda s, y: torch.rand(1))), "draws random numbers"),
    "Python's": (norm(does(lambda s, y: random.random())), "draws random numbers"),
    "NumPy's": (norm(does(lambda s, y: np.random.rand())), "draws random numbers"),
}


@pytest.fixture(autouse=True)
def _no_warning_of_the_cpu() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lngen.torch.patch")
        yield


def rows(*lead: int) -> Tensor:
    return torch.randn((*lead, D), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", LEFT)
def test_a_norm_that_is_more_than_its_formula_is_left(name: str) -> None:
    make, reason = LEFT[name]
    model = make().eval()
    assert L.patch(model).left[""].startswith(reason)
    assert type(model) is make


def test_the_probe_leaves_random_numbers_as_they_are() -> None:
    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = states()
    L.patch(nn.Sequential(*(LEFT[name][0]() for name in ("random numbers", "Python's", "NumPy's"))))
    assert states() == before


def test_a_forward_that_torch_compile_wraps_is_tried_as_it_is_written() -> None:
    class Compiled(Norm):
        forward = torch.compile(Norm.forward, backend="eager", fullgraph=True)

    assert L.patch(Compiled()).patched


# ---- what holds a patched norm ----

SCALED = norm(lambda self, y: y * self.scale, scale=1.0)
GATED = norm(lambda self, y: y * getattr(self, "gate", 1.0))
TWO = torch.full((D,), 2.0)

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an attribute": (SCALED, lambda m: setattr(m, "scale", 2.0)),
    "an attribute that it had not": (GATED, lambda m: setattr(m, "gate", 2.0)),
    "a buffer": (GATED, lambda m: m.register_buffer("gate", TWO)),
    "a parameter": (GATED, lambda m: m.register_parameter("gate", nn.Parameter(TWO))),
    "a method": (Scaled, lambda m: setattr(m, "scaled", lambda y: 2 * y)),
    "a deleted attribute": (norm(lambda s, y: 2 * y if not hasattr(s, "c") else y, c=0), lambda m: delattr(m, "c")),
}


@pytest.mark.parametrize("carried", [lambda model: model, copy.copy, copy.deepcopy], ids=["itself", "copy", "deepcopy"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_the_forward_reads_gives_the_class_back(name: str, carried: Callable[[Any], Any]) -> None:
    make, change = CHANGES[name]
    twin, model = make(), make()
    assert L.patch(model).patched
    model = carried(model)
    assert isinstance(model, PatchedNorm)
    for module in (twin, model):
        change(module)
    assert type(model) is make
    assert torch.equal(model(rows(4)), twin(rows(4)))


KEPT: dict[str, Callable[[Any], Any]] = {
    "mode": lambda m: m.train().eval(),
    "eps": lambda m: setattr(m, "eps", 0.5),
    "a weight": lambda m: setattr(m, "weight", nn.Parameter(TWO)),
    "a state": lambda m: m.load_state_dict({"weight": TWO}),
    "an assigned state": lambda m: m.load_state_dict({"weight": TWO}, assign=True),
    "another name": lambda m: setattr(m, "other", 1),
    "a dtype": lambda m: m.half().float(),
    "a hook": lambda m: m.register_forward_hook(lambda module, args, y: y + 1),
}


@pytest.mark.parametrize("make", [SCALED, SetEps])
@pytest.mark.parametrize("name", KEPT)
def test_other_changes_keep_the_patch_and_are_followed(name: str, make: Callable[[], Any]) -> None:
    twin, model = make(), make()
    assert L.patch(model).patched
    for module in (twin, model):
        KEPT[name](module)
    assert isinstance(model, PatchedNorm)
    assert agree(twin(rows(4)), model(rows(4)))


def test_a_compiled_model_follows_the_class() -> None:
    twin, model = SCALED(), SCALED()
    L.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert agree(twin(rows(4)), compiled(rows(4)))
    twin.scale = model.scale = 2.0
    assert torch.equal(compiled(rows(4)), twin(rows(4)))


def test_a_sharded_norm_keeps_fsdp_when_its_class_is_given_back() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        twin, model = SCALED(), SCALED()
        L.patch(model)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        assert agree(twin(rows(4)), model(rows(4)))  # parameters are set here
        assert isinstance(model, PatchedNorm)
        twin.scale = model.scale = 2.0
        assert not isinstance(model, PatchedNorm)
        assert isinstance(model, FSDPModule)
        assert torch.equal(model(rows(4)), twin(rows(4)))
    finally:
        dist.destroy_process_group()


def test_pickle_stores_the_own_class_of_a_norm_that_is_held() -> None:
    model = Scaled()
    L.patch(model)
    assert type(pickle.loads(pickle.dumps(model))) is Scaled
