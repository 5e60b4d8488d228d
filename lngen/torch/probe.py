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

A weight of two dimensions is that of heads: rows are [..., heads, features], and each head is normalised by itself.

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
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import product
from types import BuiltinFunctionType, FunctionType, new_class
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lngen.torch.variants import USUAL_EPS, Pair, Variant, candidates, eps_name, heads_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FIXED = (int, float, str, Enum, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type, type(None))
OF_MODULES = frozenset(vars(nn.Module()))  # the attributes of every module
ELEMENTS = 16384
F32_UNITS, UNITS, SHARE = 32, 2, 1 / 256
Form = Callable[[Tensor], Tensor]  # makes an argument of rows [2, rows, D]
ROWS: tuple[Form, ...] = (lambda x: x, lambda x: x.flatten(0, 1), lambda x: x.unflatten(1, (2, -1)))
IMAGES: tuple[Form, ...] = (lambda x: x.unflatten(1, (2, -1)).permute(0, 3, 1, 2),)


def probe(module: nn.Module) -> Variant | str:
    """The variant that computes what the module does, or why there is none."""
    taken = list(inspect.signature(module.forward).parameters.values())
    shown = f"its forward takes {', '.join(map(str, taken)) or 'nothing'}"
    if len(taken) not in (1, 2) or any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in taken):
        return shown
    gated = len(taken) == 2
    reasons, errors = [], []
    for forms in (ROWS,) if gated or heads_of(module) else (ROWS, IMAGES):
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
        self.module, weight, heads = module, module._parameters.get("weight"), heads_of(module)
        self.forms = tuple(partial(_by_heads, form, heads) for form in forms) if heads else forms
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
        x = self._rows(
            math.prod(shape) if heads else int(shape[-1]), float((getattr(module, eps) if eps else USUAL_EPS[0]) or 0.0)
        )
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


def _by_heads(form: Form, heads: tuple[int, ...], x: Tensor) -> Tensor:
    return form(x).unflatten(-1, heads)


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
