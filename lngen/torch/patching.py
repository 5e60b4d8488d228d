"""Put lngen's norms and its cross-entropy into a model, in place, and take them out again."""

from __future__ import annotations

import copy
import copyreg
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import new_class
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lngen.compiler.graphs.heads import HEADS
from lngen.torch import warm_norms
from lngen.torch.bridge import FROM_TORCH, TorchError
from lngen.torch.losses import CrossEntropyLoss
from lngen.torch.modulated_norms import CLASSES, Modulation, modulation
from lngen.torch.modules import LayerNorm, RMSNorm
from lngen.torch.probe import DTYPES, configuration, probe
from lngen.torch.variants import Variant, eps_name

OF_TORCH = {
    nn.LayerNorm.forward: Variant("layer_norm", "eps"),
    nn.RMSNorm.forward: Variant("rms_norm", "eps", taken=("x",)),
    nn.CrossEntropyLoss.forward: Variant("cross_entropy", None),
}
NO_ROWS = (nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)
SUBCLASSES: dict[tuple[type[Any], Variant | Modulation], type[Any]] = {}


@dataclass
class Patched:
    """What ``patch`` did, by module path: what norms became, why others were left, and the names of their classes.

    ``already``: what norms became when they were patched before.

    Printed, it is a table; layers that differ only in their numbers share a line.
    """

    patched: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    already: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        before = f", {len(self.already)} already patched" if self.already else ""
        lines = [f"{len(self.patched)} norms patched{before}, {len(self.left)} left"]
        texts = self.patched | {path: f"already patched: {text}" for path, text in self.already.items()}
        texts |= {path: f"left: {reason}" for path, reason in self.left.items()}
        rows = list(_grouped([(path, self.classes[path], text) for path, text in texts.items()]))
        widths = [max((len(row[n]) for row in rows), default=0) for n in range(2)]
        lines += [f"{path:{widths[0]}}  {name:{widths[1]}}  {text}" for path, name, text in rows]
        return "\n".join(lines)


def patch(model: nn.Module, *, warm: bool = False) -> Patched:
    """Let the norms of a model run lngen's kernels, in place; print the result to see which.

    These are torch.nn's LayerNorm and RMSNorm, and each class whose name or attributes are those of a norm and whose
    forward, tried on a copy on the CPU, computes one of lngen's norms (``lngen.torch.probe``): of rows, of rows and a
    gate, or of images [N, C, H, W] in the memory format channels_last. Modulated norms of diffusers are taken, too. A
    norm gets a subclass of its class. The module, its parameters, hooks and state dict stay, and so do isinstance and
    ``copy.deepcopy``. Where the norm was not found to agree (other dtypes, devices or memory formats, None for a gate,
    autocast of 16-bit rows), its own forward runs. A norm whose forward reads other attributes than weights and eps
    gets its own class back when one of them is set.

    A torch.nn.CrossEntropyLoss is taken, too; its loss is float32, also of 16-bit logits.

    Pickle and ``torch.save(model)`` store the original classes, so that a program without lngen can load them: patch
    again after loading. ``warm``: the kernels of all these norms are compiled in the background meanwhile, for tensors
    of the weights' dtype and device (GPU 0 for weights of the CPU); a first call waits for its own alone, and reports
    what cannot be compiled. TorchError for what is no module; a warning on the CPU, where the interpreter runs.
    """
    _check(model)
    found = Patched()
    known: dict[Any, Variant | Modulation | str] = {}
    norms = [(path, module) for path, module in model.named_modules() if _like_a_norm(module)]
    for path, module in norms:
        found.classes[path] = _name(module)
        if isinstance(module, PatchedNorm):
            found.already[path] = str(module.variant)
            continue
        outcome = _outcome(module, known)
        if isinstance(outcome, Variant | Modulation):
            module.__class__ = _subclass(type(module), outcome)
            found.patched[path] = str(outcome)
        else:
            found.left[path] = outcome
    if warm:
        dtypes = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
        warm_norms.warm((m for _, m in norms if isinstance(m, PatchedNorm)), (*dtypes, torch.get_default_dtype())[0])
    if found.patched and any(p.device.type == "cpu" for p in model.parameters()):
        warnings.warn(
            "lngen.torch.patch: on the CPU, where parameters of this model are, lngen's norms run in an interpreter "
            "that is 50 to 300 times slower than PyTorch; move the model to a GPU.",
            stacklevel=2,
        )
    return found


def unpatch(model: nn.Module) -> int:
    """Give the norms that ``patch`` changed their classes back; the number of norms."""
    _check(model)
    norms = [module for module in model.modules() if isinstance(module, PatchedNorm)]
    for module in norms:
        _give_back(module)
    return len(norms)


class PatchedNorm:
    """The base of a patched norm's class, before the norm's own class."""

    variant: Any  # or a Modulation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        taken = self.variant.taken
        tensors = (*args, *[kwargs.get(name) for name in taken[len(args) :]])
        if len(args) + len(kwargs) == len(taken) and self.variant.takes(self, *tensors):
            return self.variant(self, *tensors)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def extra_repr(self) -> str:
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}{', ' if own else ''}lngen: {self.variant}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle: the original class, without a reference to lngen."""
        make, given, *rest = self._reduced(protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle refuses it for another class
            return copyreg._reconstructor, (original(type(self)), object, None), *rest  # type: ignore[attr-defined]
        return make, tuple(original(type(self)) if part is type(self) else part for part in given), *rest

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, given, state, *_ = self._reduced(4)
        made = memo[id(self)] = make(*given)
        made.__setstate__(copy.deepcopy(state, memo))
        return made

    def __copy__(self) -> Any:
        make, given, state, *_ = self._reduced(4)
        made = make(*given)
        made.__setstate__(state)
        return made

    def _reduced(self, protocol: int) -> tuple[Any, ...]:
        """What copies and pickles are made of, with the class that this is."""
        found: Any = super().__reduce_ex__(max(2, protocol))
        return tuple(found)


class HeldNorm(PatchedNorm):
    """A patched norm whose own forward reads more than lngen's: it has its own class again when one of these is set.

    FSDP sets the parameters of a class with a ``__setattr__`` of its own in a slower way, so not all have it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        self._holder(name).__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._holder(name).__delattr__(name)

    def register_parameter(self, name: str, param: Any) -> None:
        self._holder(name).register_parameter(name, param)

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._holder(name).register_buffer(name, *args, **kwargs)

    def add_module(self, name: str, module: Any) -> None:
        self._holder(name).add_module(name, module)

    def _holder(self, name: str) -> Any:
        """What to call the same method of: the next class's, or that of the module with its own class."""
        if name not in self.variant.fixed:
            return super()
        _give_back(self)
        return self


class PatchedModulation(PatchedNorm):
    """A patched norm with a projection inside (``lngen.torch.modulated_norms``)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.variant.result(self, *args, **kwargs)
        return super(PatchedNorm, self).forward(*args, **kwargs) if found is None else found  # type: ignore[misc]


class PatchedLoss(PatchedNorm):
    """A patched CrossEntropyLoss."""

    forward = CrossEntropyLoss.forward


def _give_back(module: Any) -> None:
    module.__class__ = original(type(module))


def _subclass(own: type[Any], variant: Variant | Modulation) -> type[Any]:
    if (own, variant) not in SUBCLASSES:
        first = PatchedLoss if issubclass(own, nn.CrossEntropyLoss) else HeldNorm if variant.fixed else PatchedNorm
        first = PatchedModulation if isinstance(variant, Modulation) else first
        bases = (first, own)
        SUBCLASSES[own, variant] = _named(own, bases, {"variant": variant, "__module__": __name__})
    return SUBCLASSES[own, variant]


def original(cls: Any) -> Any:
    """The class without lngen's forward; fully_shard and parametrisations build subclasses of a patched one."""
    if not {PatchedNorm, HeldNorm, PatchedLoss, PatchedModulation}.isdisjoint(cls.__bases__):
        return cls.__bases__[1]
    bases = tuple(map(original, cls.__bases__))
    if bases == cls.__bases__:
        return cls
    return _named(cls, bases, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})


def _named(cls: Any, bases: tuple[Any, ...], members: dict[str, Any]) -> type[Any]:
    return new_class(cls.__name__, bases, {}, lambda namespace: namespace.update(members))


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TorchError(f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself.")


def _like_a_norm(module: nn.Module) -> bool:
    """By name, by attributes, a weight of one dimension and an eps, or as a CrossEntropyLoss."""
    name, weight = _name(module), dict(module.named_parameters(recurse=False)).get("weight")
    shaped = weight is not None and weight.dim() == 1 and eps_name(module) is not None
    return shaped or "norm" in name.lower() or "GRN" in name or isinstance(module, nn.CrossEntropyLoss)


def _name(module: nn.Module) -> str:
    """The name of its class; TorchScript's modules have that of the class that was scripted."""
    return str(module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__)


def _outcome(module: nn.Module, known: dict[Any, Variant | Modulation | str]) -> Variant | Modulation | str:
    """What a norm becomes, or why it is left; ``known``: that of modules of one class, shape and configuration."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript; patch before that"
    if type(module).__name__ in CLASSES and "forward" not in vars(module):
        key = configuration(module), str(module)
        if key not in known:
            known[key] = modulation(module)
        return known[key]
    weight = module._parameters.get("weight")
    exact = OF_TORCH.get(type(module).forward)
    others = sorted(n for n, p in module._parameters.items() if p is not None and n not in ("weight", "bias"))
    reasons = {
        "is lngen's already": isinstance(module, LayerNorm | RMSNorm | CrossEntropyLoss),
        "its instance has a forward of its own": "forward" in vars(module),
        "its weights are parametrised; patch before that": is_parametrized(module),
        "normalises no rows": isinstance(module, NO_ROWS) or type(module).__module__.startswith("torch.nn.utils."),
        "has modules inside": bool(module._modules),
        f"has other parameters: {', '.join(others)}": bool(others),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    if weight is not None and weight.dtype not in (FROM_TORCH if exact else DTYPES):
        return f"its weight is {weight.dtype}".replace("torch.", "")
    if exact:
        return exact
    if weight is None and getattr(module, "weight", None) is not None:
        return "its weight is no parameter"
    if weight is not None and (weight.dim() > 2 or (weight.dim() == 2 and weight.shape[-1] not in HEADS)):
        return f"its weight has {weight.dim()} dimensions"
    if module._buffers:
        return f"has buffers: {', '.join(module._buffers)}"
    key = configuration(module)
    if key not in known:
        known[key] = probe(module)
    return known[key]


def _grouped(rows: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Rows that differ only in the numbers of the path as one, with the first and last number and how many they are."""
    groups: dict[tuple[str, str, str], list[list[int]]] = defaultdict(list)
    for path, name, text in rows:
        groups[re.sub(r"\b\d+\b", "#", path), name, text].append([int(n) for n in re.findall(r"\b\d+\b", path)])
    for (path, name, text), numbers in groups.items():
        for column in zip(*numbers, strict=True):
            low, high = min(column), max(column)
            path = path.replace("#", str(low) if low == high else f"{low}..{high}", 1)
        yield (path or "(the model)") + (f" x{len(numbers)}" if len(numbers) > 1 else ""), name, text
