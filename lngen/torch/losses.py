"""The cross-entropy of class indices, in the place of torch.nn.functional.cross_entropy and its module.

    loss = cross_entropy(logits, target, weight, ignore_index=-100, reduction="mean", label_smoothing=0.1)
    loss = cross_entropy(logits, target, x_grad=True)  # the gradient is computed now, over logits

The loss is float32, also of 16-bit logits (``lngen help cross_entropy``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lngen.compiler.graphs.class_targets import MOST_EXACT
from lngen.compiler.spec import make_spec
from lngen.torch.any_graph import GraphFunction, function
from lngen.torch.bridge import Side, TorchError, constant, leading_of, run, side, text_of
from lngen.torch.graph_ops import INDEX, bound
from lngen.torch.graph_way import Direct, OfGraph
from lngen.torch.torch_functions import keys_of, norm

INDICES = (torch.int64, torch.int32)
KEYS = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap")
CROSS_ENTROPY = Direct(INDEX.name, ("x", "target", "class_weight"), KEYS)
FACTOR = Direct(INDEX.name, ("target", "class_weight"))


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    x_grad: bool = False,
) -> Tensor:
    """As torch.nn.functional.cross_entropy, for ``input`` of shape (N, C) or (C) and classes in int64 or int32.

    The loss is float32. PyTorch's own function takes over for more dimensions, probabilities, other dtypes of classes,
    float64 and an ``ignore_index`` beyond 2^24, unless ``z_loss``, ``softcap`` or ``x_grad`` are given.

    z_loss   this times lse^2 is added to the loss of a row
    softcap  the logits are softcap * tanh(input / softcap); 0: ``input``
    x_grad   the gradient of ``input`` is computed at once and written over ``input``, if that requires grad. Its
             numbers are lost, backward runs once, and there is no second derivative.

    RuntimeError for tensors that do not fit, SpecError for options that do not.
    """
    if size_average is not None or reduce is not None:
        reduction = nn._reduction.legacy_get_string(size_average, reduce)
    own = bool(z_loss or softcap or x_grad)
    if not own and not (_takes(input, target) and abs(ignore_index) <= MOST_EXACT):
        more: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return F.cross_entropy(input, target, weight, reduction=reduction, **more)
    factors = None if weight is None else weight.detach().float()
    options = (ignore_index, reduction, label_smoothing, z_loss, softcap)
    if x_grad and torch.is_grad_enabled() and input.requires_grad:
        return _at_once(input, target, factors, options)
    return norm(CROSS_ENTROPY, None, (input, target, factors, None), None, options)[0]


def _takes(input: Any, target: Any) -> bool:
    """True for what lngen computes, and for what is refused."""
    if not isinstance(input, Tensor) or not isinstance(target, Tensor):
        return True
    return input.dim() in (1, 2) and input.dtype != torch.float64 and target.dtype in INDICES


class CrossEntropyLoss(nn.CrossEntropyLoss):  # type: ignore[misc]
    """torch.nn.CrossEntropyLoss on lngen's kernels."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


# ---- a vocabulary in shards ----


def cross_entropy_shard(
    input: Tensor,
    target: Tensor,
    first_class: int,
    classes: int,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``rowmax, rowsum, logit``: what ``cross_entropy_join`` needs of a shard, a float32 number of each row.

    input        (N, C), the logits of the classes from ``first_class`` on, of a vocabulary of so many ``classes``
    target       (N), classes of the whole vocabulary

    Its gradients are those of rowsum and logit. RuntimeError for a shard that is not in the vocabulary.
    """
    if not 0 <= first_class <= classes - input.shape[-1]:
        raise TorchError(
            f"a shard of {input.shape[-1]} classes is expected to lie in a vocabulary of {classes}, got first_class="
            f"{first_class}."
        )
    options = (("ignore_index", ignore_index), ("softcap", softcap), ("target_dtype", _word(target)))
    first = torch.full((), first_class, dtype=torch.int64, device=input.device)
    rowmax, rowsum, logit = _of_shards("shard", classes, options)(input, target, first)
    return rowmax, rowsum, logit


def cross_entropy_join(
    rowmax: Tensor,
    rowsum: Tensor,
    logit: Tensor,
    target: Tensor,
    classes: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """The loss by the numbers of all shards, each of shape (N, shards), in any order of the shards.

    The collective that brings them together is the caller's, and so is that of their gradients.
    """
    options = ("ignore_index", ignore_index), ("reduction", reduction), ("z_loss", z_loss)
    join = _of_shards("join", classes, (*options, ("target_dtype", _word(target))))
    loss: Tensor = join(rowmax.detach(), rowsum, logit, target)
    return loss


def _word(target: Tensor) -> str:
    return "i32" if target.dtype == torch.int32 else "i64"


@constant
def _of_shards(vocabulary: str, classes: int, options: tuple[tuple[str, Any], ...]) -> GraphFunction:
    """The function of a shard, or of what joins them."""
    return function("cross_entropy", target="index", vocabulary=vocabulary, classes=classes, **dict(options))


# ---- the gradient in the forward pass ----


ONE = torch.ones((), dtype=torch.float32, device="cpu")  # has the dtype of x_grad_factor


@torch._disable_dynamo  # type: ignore[untyped-decorator]
def _at_once(input: Tensor, target: Tensor, weight: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    """The loss, with the gradient over ``input``."""
    if not input.is_contiguous():
        raise TorchError("x_grad=True writes the gradient over input, which is expected to be contiguous.")
    keys = ",".join(filter(None, (keys_of(CROSS_ENTROPY, options), "x_grad=yes", "save=none")))
    found: Tensor = _AtOnce.apply(input, target, weight, keys, options)
    return found


class _AtOnce(Function):  # type: ignore[misc]
    """A loss whose backward multiplies the gradient that forward has written."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, target: Tensor, weight: Tensor | None, keys: str, options: tuple[Any, ...]
    ) -> Tensor:
        ignored, reduction = options[:2]
        given = {"x": input, "target": target, "x_grad_factor": ONE}
        given |= {} if weight is None else {"class_weight": weight}
        found = INDEX.side([given.get(name) for name in INDEX.inputs], keys)
        given["x_grad_factor"] = _factor(input, target, weight, ignored, reduction)
        tensors = bound(INDEX.name, found.spec, (), given)
        loss, _ = run(found, tensors, 0.0, (None, input.view(-1, input.shape[-1])))
        torch.autograd.graph.increment_version(input)
        ctx.save_for_backward(input)
        ctx.used = False
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise TorchError("the gradient of x_grad=True is used up by the first backward; leave x_grad away for two.")
        ctx.used = True
        (gradient,) = ctx.saved_tensors
        with torch.no_grad():
            gradient.mul_(cotangent.unsqueeze(-1) if cotangent.dim() else cotangent)
        return gradient, None, None, None, None


def _factor(input: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str) -> Tensor:
    """What the sum of the losses is divided by, inverted: a float32 tensor of one element; one launch."""
    if reduction != "mean":
        return torch.ones((), device=input.device)
    tensors, fixed = (target, weight, None), (input.shape[-1], ignored)
    found = FACTOR(tensors, fixed)
    if found is None:
        one = _of_targets(input.shape[-1], _word(target), weight is not None, ignored)
        given = [t for t in tensors if t is not None]
        leading_of(one, given)  # refuses shapes
        found = FACTOR.prepared(lambda named: OfGraph(INDEX, one), tensors, fixed, 0.0) or run(one, given, 0.0)
    return found[0]


@cache
def _of_targets(classes: int, target_dtype: str, weighted: bool, ignored: int) -> Side:
    """The kernel of a factor."""
    keys = {"d": classes, "target": "index", "vocabulary": "none", "target_dtype": target_dtype}
    return side(text_of(make_spec(INDEX.definition, "fwd", keys | {"class_weight": weighted, "ignore_index": ignored})))


fx.wrap("cross_entropy")
