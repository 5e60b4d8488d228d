"""What a model's own norm computes: its forward against each of lngen's variants, on a copy on the CPU.

The norms of Llama, T5 and Gemma have the same attributes, so their results must tell them apart. A variant
must agree twice: in float32, which fixes the mathematics, and in the dtype of the module's weight, which fixes the
order of roundings. For each other pair of dtypes it is used only if it agrees there.

*float32*: at most 32 units of 2^-23, relative to max(1, |y|). Sums in another order and PyTorch's root give 8 or less.
A divisor of D - 1 gives 2^22 / D, which is 64 at D = 65536. Half of the rows have a mean square of eps, so an eps that
is absent or outside of the root changes them by a quarter or more.

*bfloat16, float16*: at most 2 units, in at most 1/256 of the elements. A right variant is off by about 4 * 2^-24 before
it is rounded, so one float16 result in 2^11 is rounded otherwise (bfloat16: in 2^14), and twice as many where two
factors are rounded: 16 of 16384 elements. Another order of roundings changes a quarter of them, or 1/32 where bfloat16
rows are rounded to float16 in between: 512 of 16384. The limit of 64 is 12 standard deviations from either.

A module may be more than its formula. So it is tried in eval and in training, with 2 to 4 dimensions and rows of size
1e-3 to 1e4; and its copy is of a class that records what the forward reads and writes of ``self``.

A second argument is tried as a gate. Where a forward of one argument is no norm of rows, it is tried with images
[N, C, H, W] in the memory format channels_last: there the features of a pixel lie side by side and are a row.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import product
from types import BuiltinFunctionType, FunctionType, new_class
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lngen.compiler.graphs.norms import GATES
from lngen.torch.torch_functions import gated_layer_norm, gated_rms_norm, layer_norm, rms_norm

Pair = tuple[torch.dtype, torch.dtype | None]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
USUAL_EPS = (1e-5, 1e-6)  # where a module has no attribute for it
FIXED = (int, float, str, Enum, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type, type(None))
OF_MODULES = frozenset(vars(nn.Module()))  # the attributes of every module
ELEMENTS = 16384
F32_UNITS, UNITS, SHARE = 32, 2, 1 / 256
Form = Callable[[Tensor], Tensor]  # makes an argument of rows [2, rows, D]
ROWS: tuple[Form, ...] = (lambda x: x, lambda x: x.flatten(0, 1), lambda x: x.unflatten(1, (2, -1)))
IMAGES: tuple[Form, ...] = (lambda x: x.unflatten(1, (2, -1)).permute(0, 3, 1, 2),)


@dataclass(frozen=True)
class Variant:
    """One of lngen's norms, for modules of a class.

    eps    the attribute that holds it, or the number
    act    the function of the gate, which is the forward's second argument; empty without one
    taken  the names of the arguments of the module's forward
    pairs  the dtypes of rows and weight for which it was verified; None: all
    fixed  the attributes that the module's forward reads and lngen does not: it was verified for their values

    ``channels_first``: rows are the features of a pixel of images [N, C, H, W].
    """

    kind: str
    eps: str | float | None
    casts: str = "once"
    zero_centred: bool = False
    act: str = ""
    gate_first: bool = False
    channels_first: bool = False
    taken: tuple[str, ...] = ("input",)
    pairs: tuple[Pair, ...] | None = None
    fixed: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = {"casts": ("once", self.casts), "act": (self.act and "silu", self.act)}
        words = [f"{name}={value}" for name, (usual, value) in named.items() if value != usual]
        words += [name for name in ("zero_centred", "gate_first", "channels_first") if getattr(self, name)]
        return ", ".join([self.kind, *words])

    def takes(self, module: nn.Module, x: Any, gate: Any = None) -> bool:
        """True if the result for x is known to be the module's own; autocast changes that of 16-bit rows."""
        if self.pairs is None and type(x) is Tensor and x.is_cuda and x.layout is torch.strided:  # what is usual
            return True
        if not _dense(x):
            return False
        if self.pairs is None:
            return True
        if self.act and not (_dense(gate) and gate.dtype == x.dtype and gate.shape == x.shape):
            return False
        if self.channels_first and not (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
            return False  # its own forward may store the result otherwise, too
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if x.dtype != torch.float32 and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
            return False
        if weight is None:
            return (x.dtype, None) in self.pairs
        features = x.shape[1:2] if self.channels_first else x.shape[-1:]
        fits = features == weight.shape and (bias is None or bias.dtype == weight.dtype)
        return fits and (x.dtype, weight.dtype) in self.pairs

    def __call__(self, module: nn.Module, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if self.channels_first:
            return self._of_rows(module, x.permute(0, 2, 3, 1), gate).permute(0, 3, 1, 2)
        return self._of_rows(module, x, gate)

    def _of_rows(self, module: nn.Module, x: Tensor, gate: Any) -> Tensor:
        weight, bias = _weight(module, "weight"), _weight(module, "bias")
        eps: Any = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        dims = getattr(module, "normalized_shape", x.shape[-1:]) if weight is None else weight.shape
        if self.kind == "layer_norm":
            return layer_norm(x, dims, weight, bias, eps, zero_centred=self.zero_centred, casts=self.casts)
        if self.kind == "rms_norm":
            return rms_norm(x, dims, weight, eps, zero_centred=self.zero_centred, casts=self.casts)
        act, first = self.act, self.gate_first
        if self.kind == "gated_layer_norm":
            return gated_layer_norm(x, gate, dims, weight, bias, eps, act=act, gate_first=first)
        return gated_rms_norm(x, gate, dims, weight, eps, act=act, gate_first=first, casts=self.casts)


def _dense(x: Any) -> bool:
    """Whether it is a tensor that lngen's functions take."""
    strided = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested
    return strided and x.device.type in ("cpu", "cuda", "meta")


def _weight(module: nn.Module, name: str) -> Any:
    own = module._parameters  # getattr would look elsewhere first
    return own[name] if name in own else getattr(module, name, None)


def eps_name(module: nn.Module) -> str | None:
    """The attribute that holds the module's eps; nn.RMSNorm's may be None."""
    for name in EPS_NAMES:
        if isinstance(getattr(module, name, ""), int | float | None):
            return name
    return None


def probe(module: nn.Module) -> Variant | str:
    """The variant that computes what the module does, or why there is none."""
    taken = list(inspect.signature(module.forward).parameters.values())
    shown = f"its forward takes {', '.join(map(str, taken)) or 'nothing'}"
    if len(taken) not in (1, 2) or any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in taken):
        return shown
    gated = len(taken) == 2
    reasons, errors = [], []
    for forms in (ROWS,) if gated else (ROWS, IMAGES):
        try:
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False), _random_state_kept(), _eager():
                found = _Probe(module, forms, gated).choose()
        except Exception as error:  # a copy or a forward of a stranger's class
            errors.append(_untried(error))
            continue
        if isinstance(found, Variant):
            return replace(found, taken=tuple(p.name for p in taken))
        reasons.append(found if forms is ROWS else f"takes images [N, C, H, W]; {found}")
    reason = (reasons or errors)[0]
    return f"{shown}; {reason}" if gated else reason


def _untried(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return f"cannot be tried on the CPU: {type(error).__name__}: {line}"


def configuration(module: nn.Module) -> Any:
    """What the results of a class may depend on, besides the values of weights."""
    own = {k: v for k, v in vars(module).items() if k not in OF_MODULES and not k.startswith("__")}
    plain = (int, float, str, tuple, list, dict, set, torch.dtype, type(None))
    shapes = [(n, p.shape, p.dtype) for n, p in module._parameters.items() if p is not None]
    values = [(k, v if isinstance(v, plain) else id(v)) for k, v in sorted(own.items())]
    return type(module), str(shapes), str(values), *module._buffers, *module._modules


class _Probe:
    """The results of a module, and of each variant that agrees with them, by pair of dtypes.

    inputs         rows, and a gate for a forward of two arguments
    forms          what makes arguments of them; results are compared in the first form
    read, written  the attributes that the module's forward reads and writes
    more           what else it does, in words
    varied         where its result is another one, in words, by pair
    """

    def __init__(self, module: nn.Module, forms: tuple[Form, ...], gated: bool) -> None:
        self.module, self.forms, weight = module, forms, module._parameters.get("weight")
        self.dtype = None if weight is None else weight.dtype
        self.found: dict[Pair, dict[Variant, Tensor]] = {}
        self.failed: dict[Pair, Exception] = {}
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.more: list[str] = []
        self.varied: dict[Pair, str] = {}
        self.watched = _watched(type(module), self.read, self.written)
        shape = weight.shape if weight is not None else getattr(module, "normalized_shape", (256,))
        generator = torch.Generator("cpu").manual_seed(0)
        self.random = {"generator": generator, "dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
        self.weights = {n: self._weights(p) for n, p in module._parameters.items() if p is not None}
        eps = eps_name(module)
        x = self._rows(int(shape[-1]), float((getattr(module, eps) if eps else USUAL_EPS[0]) or 0.0))
        self.inputs = (x, 4 * torch.randn(x.shape, **self.random)) if gated else (x,)

    def choose(self) -> Variant | str:
        whole = (torch.float32, None if self.dtype is None else torch.float32)
        usual = (self.dtype or torch.float32, self.dtype)
        state = _random_state()
        every = self._compare(whole, list(candidates(self.module, len(self.inputs) > 1, self.forms is IMAGES)))
        for w in (None,) if self.dtype is None else DTYPES if every else ():
            for x in DTYPES:
                if (x, w) != whole:
                    self._compare((x, w), every)
        if whole in self.failed:
            raise self.failed[whole]
        if usual in self.failed:
            return _untried(self.failed[usual])
        fitting = [v for v in every if v in self.found[usual]]
        if not every and self.forms is ROWS and self._of_groups():
            return "normalises groups of features; lngen's norms take whole rows"
        if not fitting:
            return f"computes another function{f' in {usual[0]}' if every else ''}".replace("torch.", "")
        for pair in (whole, usual):
            if pair in self.varied:
                return f"computes another function {self.varied[pair]}"
        best = max(fitting, key=lambda v: len(self._pairs(v)))
        if any(not torch.equal(y, same[best]) for same in self.found.values() if best in same for y in same.values()):
            return "ambiguous: several of lngen's norms agree with it"
        if not self._same_gradients(best):
            self.more.append("has gradients of its own")
        if _random_state() != state:
            self.more.append("draws random numbers")
        return next(self._besides(), None) or self._held(best)

    def _besides(self) -> Iterator[str]:
        """What the module is besides its formula."""
        if self.written:
            yield f"writes its attributes: {', '.join(sorted(self.written))}"
        yield from self.more
        values = {**vars(self.module), "__dict__": vars(self.module)}
        for name in sorted(self.read & values.keys() - OF_MODULES):
            if not _fixed(values[name]):
                yield f"reads what can change unseen: {name}, a {type(values[name]).__name__}"

    def _held(self, variant: Variant) -> Variant:
        """The variant with what it was verified for; eps is the number if the forward does not read the attribute."""
        eps = variant.eps
        if isinstance(eps, str) and eps not in self.read:
            eps = getattr(self.module, eps)
        fixed = {n for n in self.read if not n.startswith("__")} - OF_MODULES - self.weights.keys() - {eps}
        return replace(variant, eps=eps, pairs=self._pairs(variant), fixed=tuple(sorted(fixed)))

    def _pairs(self, variant: Variant) -> tuple[Pair, ...]:
        return tuple(pair for pair, same in self.found.items() if variant in same and pair not in self.varied)

    def _compare(self, pair: Pair, variants: list[Variant]) -> list[Variant]:
        """The variants that agree with the module for these dtypes."""
        module, inputs = self._copy(pair[1]), self._inputs(self.forms[0], pair[0])
        same = self.found[pair] = {}
        with torch.no_grad():
            try:
                own = self._own(pair)
            except Exception as error:
                self.failed[pair] = error
                return []
            for variant in variants:
                try:
                    y = variant(module, *inputs)
                except (RuntimeError, TypeError):  # what lngen does not take, as no eps for layer_norm
                    continue
                if agree(own, y) and own.stride() == y.stride():
                    same[variant] = y
        return list(same)

    def _inputs(self, form: Form, dtype: torch.dtype) -> list[Tensor]:
        return [form(t.to(dtype, copy=True)) for t in self.inputs]

    def _own(self, pair: Pair) -> Any:
        """The module's result; ``varied`` if another mode or number of dimensions changes it."""
        first = None
        for training, form in product((False, True), self.forms):
            module, inputs = self._copy(pair[1], training), self._inputs(form, pair[0])
            before = configuration(module)
            try:
                y = self._forward(module)(*inputs)
            except Exception:
                if form is not self.forms[0]:  # the module does not take so many dimensions
                    continue
                raise
            if not all(map(torch.equal, inputs, self._inputs(form, pair[0]))):
                self.more.append("writes into its input")
            weights = all(torch.equal(module._parameters[n], w.to(pair[1])) for n, w in self.weights.items())
            if configuration(module) != before or not weights:
                self.more.append("changes its attributes")
            shape = inputs[0].shape
            if first is None:
                first = y
            elif not isinstance(y, Tensor) or y.shape != shape or not agree(first, y.reshape(first.shape)):
                self.varied.setdefault(pair, "in training" if training else f"for {len(shape)} dimensions")
        return first

    def _of_groups(self) -> bool:
        """Whether the first result of a row depends on the feature beside it, and not on the last one."""

        def first(features: slice, factor: float) -> Any:
            inputs = self._inputs(ROWS[0], torch.float32)
            inputs[0][..., features] *= factor
            y = self._forward(self._copy(torch.float32))(*inputs)
            return y[..., 0] if isinstance(y, Tensor) else torch.empty(0)

        beside, last = slice(1, 2), slice(-1, None)
        with torch.no_grad():
            own = first(last, 1.0)
            return not torch.equal(first(beside, 3.0), own) and torch.equal(first(last, 3.0), own)

    def _same_gradients(self, variant: Variant) -> bool:
        """Whether those of all inputs agree, in float32; a forward may keep a statistic out of its derivative."""
        form = self.forms[0]
        dy = form(torch.randn(self.inputs[0].shape, **self.random))

        def gradients(module: nn.Module, forward: Callable[..., Tensor]) -> list[Tensor]:
            inputs = [t.requires_grad_() for t in self._inputs(form, torch.float32)]
            y = forward(*inputs)
            return [y, *torch.autograd.grad(y, [*inputs, *module.parameters()], dy)]

        with torch.enable_grad():
            plain, *modules = (self._copy(torch.float32, training) for training in (False, False, True))
            found = gradients(plain, partial(variant, plain))
            try:
                own = [gradients(module, self._forward(module)) for module in modules]
            except RuntimeError:  # it has none
                return False
            return all(
                bool((a - b).norm() <= 2**-10 * b.norm()) for one in own for a, b in zip(one, found, strict=True)
            )

    def _forward(self, module: nn.Module) -> Callable[..., Any]:
        """The module's forward, of which is recorded what it reads and writes of the module."""
        seen: Any = object.__new__(self.watched)
        object.__setattr__(seen, "__dict__", vars(module))
        return partial(self.watched.forward, seen)

    def _copy(self, dtype: torch.dtype | None, training: bool = False) -> Any:
        """The module with random weights, on the CPU, without hooks, which may hold the whole model."""
        parts = {k: v for k, v in vars(self.module).items() if not k.startswith("__")}  # those are fully_shard's
        memo: dict[int, Any] = {}
        for name, weight in self.weights.items():
            memo[id(parts["_parameters"][name])] = nn.Parameter(weight.to(dtype, copy=True))
        memo |= {id(v): type(v)() for name, v in parts.items() if "hooks" in name and isinstance(v, dict)}
        made: Any = object.__new__(type(self.module))  # fully_shard's classes refuse deepcopy
        memo[id(self.module)] = made
        made.__dict__ = copy.deepcopy(parts, memo)
        return made.train(training)

    def _weights(self, like: Tensor) -> Tensor:
        """From 0.1 to 2, of both signs: 1 + weight, weight and no weight differ."""
        size = 0.1 + 1.9 * torch.rand(like.shape, **self.random)
        return size * (1 - 2 * torch.randint(2, like.shape, **self.random))

    def _rows(self, d: int, eps: float) -> Tensor:
        """[2, rows, D]: rows that have a mean, of size 1e-3 to 1e4, and rows whose mean square is about eps."""
        rows = 2 * max(2, -(-ELEMENTS // (4 * d)))
        x = torch.randn((2, rows, d), **self.random)
        x[0] += torch.randn((rows, 1), **self.random)
        x[0] *= torch.logspace(-3, 4, rows, dtype=torch.float32, device="cpu")[:, None]
        x[1] *= math.sqrt(abs(eps)) or 1e-3
        return x


def candidates(module: nn.Module, gated: bool = False, channels_first: bool = False) -> Iterator[Variant]:
    """lngen's norms with the weights that the module has; those that are the same for all dtypes once."""
    name = eps_name(module)
    weighted, biased = (module._parameters.get(n) is not None for n in ("weight", "bias"))
    for eps in USUAL_EPS if name is None else (name,):
        every = _gated if gated else _plain
        for variant in every(eps, weighted, biased):
            yield replace(variant, channels_first=channels_first)


def _plain(eps: str | float, weighted: bool, biased: bool) -> Iterator[Variant]:
    yield Variant("layer_norm", eps)
    if weighted:
        yield Variant("layer_norm", eps, zero_centred=True)
        yield Variant("layer_norm", eps, "nemotron")
    if biased:
        return
    yield Variant("rms_norm", eps)
    if weighted:
        for casts in ("t5", "llama"):  # on a tie the first: T5 gives fewer pairs a dtype that lngen has
            yield Variant("rms_norm", eps, casts)
            yield Variant("rms_norm", eps, casts, zero_centred=True)
        yield Variant("rms_norm", eps, "gemma")


def _gated(eps: str | float, weighted: bool, biased: bool) -> Iterator[Variant]:
    for act, gate_first in product(GATES, (False, True)):
        yield Variant("gated_layer_norm", eps, act=act, gate_first=gate_first)
        if biased:
            continue
        for casts in ("once", "t5", "llama") if weighted else ("once",):
            yield Variant("gated_rms_norm", eps, casts, act=act, gate_first=gate_first)


def agree(own: Any, y: Tensor) -> bool:
    """Whether a module's result is lngen's but for the rounding of sums and roots; the module text has the bounds.

    16 bits are compared where the module's own result is finite: float16 rows may overflow in it.
    """
    if not isinstance(own, Tensor) or own.dtype != y.dtype or own.shape != y.shape:
        return False
    exact = y.double()
    units = (own.double() - exact).abs() / (torch.finfo(y.dtype).eps * exact.abs().clamp(min=1.0))
    if y.dtype == torch.float32:
        return bool(units.max() <= F32_UNITS)
    units = units[own.isfinite()]
    return units.numel() > 0 and bool(units.max() <= UNITS) and bool((units > 0).double().mean() <= SHARE)


def _watched(cls: Any, read: set[str], written: set[str]) -> Any:
    """A subclass that records the attributes which are read and written of ``self``; super() works, as in no proxy."""

    def __getattribute__(self: Any, name: str) -> Any:
        read.add(name)
        return cls.__getattribute__(self, name)

    def __getattr__(self: Any, name: str) -> Any:
        before = {"__dict__"} & read  # nn.Module's looks for parameters there
        try:
            return cls.__getattr__(self, name)
        finally:
            read.difference_update({"__dict__"} - before)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        written.add(name)
        cls.__setattr__(self, name, value)

    def __delattr__(self: Any, name: str) -> None:
        written.add(name)
        cls.__delattr__(self, name)

    members = (__getattribute__, __getattr__, __setattr__, __delattr__)
    return new_class(cls.__name__, (cls,), {}, lambda namespace: namespace.update({m.__name__: m for m in members}))


def _fixed(value: Any) -> bool:
    """Whether a value stays the same as long as its attribute is not set."""
    return all(map(_fixed, value)) if isinstance(value, tuple | frozenset) else isinstance(value, FIXED)


def _random_state() -> Any:
    """What a module's random numbers come from on the CPU."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), *numpy[2:]


@contextmanager
def _random_state_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _eager() -> AbstractContextManager[None]:
    """Where a forward that torch.compile wraps runs as it is written: records of what it reads cannot be compiled."""
    stance: Any = getattr(torch.compiler, "set_stance", None)  # PyTorch 2.6 has it
    return stance("force_eager") if stance and "torch._dynamo" in sys.modules else nullcontext()
