"""Functions with the signatures of torch.nn.functional, on lngen's kernels.

A tensor of a GPU runs the kernels, one of the CPU the interpreter: the same bits. All are differentiable, any number of
times, and work under torch.compile, export, autocast and CUDA graphs. Under torch.func (vmap, grad, jvp and the like)
they are composed of PyTorch's own operators, with the same mathematics and without the promise about bits; such a
transform inside torch.compile raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lngen.compiler.spec import make_spec
from lngen.torch.bridge import FROM_TORCH, TorchError, TorchTypeError, TorchValueError, constant
from lngen.torch.given import CALLED, check_tensors, fitted
from lngen.torch.graph_ops import OPS, GraphOps, composed
from lngen.torch.graph_way import Direct
from lngen.torch.sharded import locally

Shape = int | Sequence[int]
OPTIONAL = ("gamma", "beta", "class_weight", "q_scale", "amax_max", "amax_in", "out")  # tensors that may be None

LAYER = ("x", "gamma", "beta")
LAYER_NORM = Direct("layernorm", LAYER, ("zero_centred", "casts"))
RMS_NORM = Direct("rmsnorm", LAYER[:2], ("zero_centred", "casts"))
ADD_LAYER_NORM = Direct("add_layernorm", ("x", "residual", "gamma", "beta"), ("zero_centred", "round_sum"))
ADD_RMS_NORM = Direct("add_rmsnorm", ("x", "residual", "gamma"), ("zero_centred", "casts", "round_sum"))
GATED_LAYER_NORM = Direct("gated_layernorm", ("x", "z", "gamma", "beta"), ("act", "gate_first"))
GATED_RMS_NORM = Direct("gated_rmsnorm", ("x", "z", "gamma"), ("act", "gate_first", "casts"))
LAYER_NORM_ACT = Direct("layernorm_act", LAYER, ("act",))
RMS_NORM_ACT = Direct("rmsnorm_act", LAYER[:2], ("act",))
DYT = Direct("dyt", ("x", "alpha", "gamma", "beta"))
L2_NORM = Direct("l2norm", ("x",), ("guard",))
MODULATED = ("x", "shift", "scale", "gate", "residual", "gamma", "beta")
ADA_LAYER_NORM = Direct("ada_layernorm", MODULATED)
ADA_RMS_NORM = Direct("ada_rmsnorm", MODULATED[:-1])
SOFTMAX, LOG_SOFTMAX = Direct("softmax", ("x",)), Direct("log_softmax", ("x",))


def layer_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centred: bool = False,
    casts: str = "once",
    out: Tensor | None = None,
) -> Tensor:
    """LayerNorm of the last dimensions of ``input``, as torch.nn.functional.layer_norm.

    ``zero_centred``: rows are multiplied by 1 + weight. ``casts``: the order of roundings of a model, ``once`` or
    ``nemotron``, which rounds 1 + weight to the dtype of weight. ``out``: a tensor for the result, without gradients;
    it may be ``input``. The result has the dtype of ``input``; under autocast on a GPU it is float32, as PyTorch's.
    RuntimeError for shapes, dtypes and devices that do not fit.
    """
    return norm(LAYER_NORM, normalized_shape, (input, weight, bias, out), eps, (zero_centred, casts))[0]


def rms_norm(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centred: bool = False,
    casts: str = "once",
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of the last dimensions of ``input``, as torch.nn.functional.rms_norm; without eps it is PyTorch's.

    ``casts``: the order of roundings of a model, ``once``, ``llama``, ``t5`` or ``gemma`` (``lngen help family``);
    the rest as of ``layer_norm``.
    """
    options = zero_centred, casts
    return norm(RMS_NORM, normalized_shape, (input, weight, out), eps, options)[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centred: bool = False,
    round_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """``h = input + residual`` and its LayerNorm, in one kernel: ``y, h``. h has the dtype of ``residual``.

    ``round_sum``: the norm is of h as it is stored (``lngen help family``).
    """
    tensors, options = (input, residual, weight, bias, None), (zero_centred, round_sum)
    y, h = norm(ADD_LAYER_NORM, normalized_shape, tensors, eps, options)
    return y, h


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centred: bool = False,
    casts: str = "once",
    round_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """``h = input + residual`` and its RMSNorm, in one kernel: ``y, h``; the rest as of ``add_layer_norm``."""
    tensors, options = (input, residual, weight, None), (zero_centred, casts, round_sum)
    y, h = norm(ADD_RMS_NORM, normalized_shape, tensors, eps, options)
    return y, h


def gated_layer_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    act: str = "silu",
    gate_first: bool = False,
) -> Tensor:
    """``layer_norm(input) * act(gate)``, or with ``gate_first`` ``layer_norm(input * act(gate))``.

    ``act``: silu, sigmoid, gelu (erf) or gelu_tanh.
    """
    tensors, options = (input, gate, weight, bias, None), (act, gate_first)
    return norm(GATED_LAYER_NORM, normalized_shape, tensors, eps, options)[0]


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    act: str = "silu",
    gate_first: bool = False,
    casts: str = "once",
) -> Tensor:
    """``rms_norm(input) * act(gate)``; ``casts`` as of ``rms_norm``, the rest as of ``gated_layer_norm``."""
    tensors, options = (input, gate, weight, None), (act, gate_first, casts)
    return norm(GATED_RMS_NORM, normalized_shape, tensors, eps, options)[0]


def layer_norm_act(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    act: str = "silu",
) -> Tensor:
    """``act(layer_norm(input))``; ``act``: silu, gelu (erf), gelu_tanh, relu or sigmoid."""
    return norm(LAYER_NORM_ACT, normalized_shape, (input, weight, bias, None), eps, (act,))[0]


def rms_norm_act(
    input: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    act: str = "silu",
) -> Tensor:
    """``act(rms_norm(input))``; ``act`` as of ``layer_norm_act``."""
    return norm(RMS_NORM_ACT, normalized_shape, (input, weight, None), eps, (act,))[0]


def ada_layer_norm(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    casts: str = "once",
) -> Any:
    """``layer_norm(h) * (1 + scale) + shift`` over the last dimension, h = residual + gate * x, or x itself.

    ``shift``, ``scale`` and ``gate`` are of a sample, [B, D], [B, 1, D] or [B, F, 1, D] beside x of [B, T, D] or
    [B, F, T, D], or of a row, [B, T, D]; all of one dtype, which may be another than x's. The result is y; with a
    ``residual`` or a ``gate`` it is ``y, h``. ``casts`` is the order of roundings: once, norm (as SGLang) or eager (as
    PyTorch's operators one by one). RuntimeError for shapes, dtypes and devices that do not fit.
    """
    return _modulated(ADA_LAYER_NORM, (x, shift, scale, gate, residual, weight, bias), eps, casts)


def ada_rms_norm(
    x: Tensor,
    shift: Tensor | None,
    scale: Tensor,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    casts: str = "once",
) -> Any:
    """``rms_norm(h) * (1 + scale) + shift``; the rest as of ``ada_layer_norm``. ``shift`` may be None."""
    return _modulated(ADA_RMS_NORM, (x, shift, scale, gate, residual, weight), eps, casts)


def _modulated(direct: Direct, tensors: Sequence[Tensor | None], eps: float, casts: str) -> Any:
    eager = not torch.compiler.is_compiling()
    results = direct((*tensors, None), (eps, casts)) if eager else None
    if results is None:
        results = _first_modulated(direct, tensors, eps, casts, eager)
    return results[0] if len(results) == 1 else (results[0], results[1])


def _first_modulated(
    direct: Direct, tensors: Sequence[Tensor | None], eps: float, casts: str, eager: bool
) -> Sequence[Tensor]:
    """The outputs of a call that is not like an earlier one."""
    graph, given = direct.graph, {name: t for name, t in zip(direct.names[:-1], tensors, strict=True) if t is not None}
    check_tensors(graph, [(CALLED.get(n, n) if n != "x" else n, given.get(n)) for n in ("x", "scale", *given)])
    x, scale, ops = given["x"], given["scale"], OPS[graph]
    by_row = scale.dim() == x.dim() and scale.shape[:-1] == x.shape[:-1]
    keys = ({"modulation": "row"} if by_row else {}) | ({"casts": casts} if casts != "once" else {})
    own, weight = (FROM_TORCH.get(t.dtype) for t in (scale, given.get("gamma", scale)))
    if own is not weight:
        keys |= {"modulation_dtype": str(own), "weight": str(weight)}
    text = ",".join(f"{key}={value}" for key, value in keys.items())
    results = direct.prepare(ops, (*tensors, None), (eps, casts), text, eps) if eager else None
    if results is not None:
        return results
    return dispatched(ops, given, text, eps, ("y", "h") if "gate" in given or "residual" in given else ("y",))


def dyt(input: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """``tanh(alpha * input) * weight + bias`` over the last dimension (dynamic tanh); ``alpha`` has one element."""
    number = alpha.reshape(()) if isinstance(alpha, Tensor) else alpha
    return norm(DYT, None, (input, number, weight, bias, None), None, ())[0]


def l2_norm(input: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """``input / max(norm, eps)``, as torch.nn.functional.normalize, which takes over for any dimension but the last."""
    if not _last(input, dim):
        return F.normalize(input, 2.0, dim, eps)
    return norm(L2_NORM, None, (input, None), eps, ("max",))[0]


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """As torch.nn.functional.softmax, which takes over for another dimension than the last, a ``dtype`` and float64."""
    if not _softmaxes(input, dim, dtype):
        return F.softmax(input, dim, _stacklevel + 1, dtype)
    return norm(SOFTMAX, None, (input, None), None, ())[0]


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """As torch.nn.functional.log_softmax, which takes over as in ``softmax``."""
    if not _softmaxes(input, dim, dtype):
        return F.log_softmax(input, dim, _stacklevel + 1, dtype)
    return norm(LOG_SOFTMAX, None, (input, None), None, ())[0]


# ---- the way of all of them ----


def norm(
    direct: Direct,
    shape: Shape | None,
    tensors: Sequence[Tensor | None],
    eps: float | None,
    options: tuple[bool | str | float, ...],
) -> Sequence[Tensor]:
    """The outputs for tensors, the last of which is ``out``, whose last dimensions are ``shape``, by default one."""
    if type(shape) is list:
        shape = tuple(shape)
    fixed = shape, eps, options
    eager = not torch.compiler.is_compiling()
    if eager:
        results = direct(tensors, fixed)
        if results is not None:
            return results
    graph = direct.graph
    named = list(zip(direct.names, tensors, strict=True))
    check_tensors(graph, [(CALLED.get(name, name), t) for name, t in named if t is not None or name not in OPTIONAL])
    given = {name: t for name, t in named if t is not None}
    x, out, ops = given["x"], given.pop("out", None), OPS[graph]
    dims = (shape,) if isinstance(shape, int) else tuple(x.shape[-1:] if shape is None else shape)
    _check(graph, x, dims, given)
    _check_out(out, given)
    if ops.takes_eps and eps is None:
        eps = _default_eps(graph, x)
    if other := fitted(ops, given, len(dims)):
        found, restored = other
        results = norm(direct, dims, [*(found.get(name) for name in direct.names[:-1]), None], eps, options)
        return [y if out is None else _copied(y, out) for y in map(restored, results)]
    if len(dims) > 1:
        flat = [t.flatten(-len(dims)) if t is not None and t.dim() >= len(dims) else t for t in tensors[:-1]]
        rows = x.flatten(-len(dims)).shape
        of_rows = norm(direct, math.prod(dims), [*flat, None], eps, options)
        results = [y.reshape(x.shape) if y.shape == rows else y for y in of_rows]  # scales have no features
        return results if out is None else [_copied(results[0], out)]
    keys = keys_of(direct, options)
    if eager:
        results = direct.prepare(ops, tensors, fixed, keys, eps or 0.0)
        if results is not None:
            return results
    outputs = outputs_of(graph, keys)
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64 and outputs[0] not in ("q", "loss"):
        keys = f"{keys},out=f32" if keys else "out=f32"
    results = dispatched(ops, given, keys, eps, outputs)
    return results if out is None else [_copied(results[0], out)]


def keys_of(direct: Direct, options: Sequence[bool | str | float]) -> str:
    """The keys of the operator for the options of a function."""
    chosen, defaults = zip(direct.options, options, strict=True), OPS[direct.graph].defaults
    return ",".join([f"{name}={word(v)}" for name, v in chosen if v != defaults[name]])


@constant
def outputs_of(graph: str, keys: str) -> tuple[str, ...]:
    """The names of the outputs of a graph under the keys of its operator."""
    options = {**OPS[graph].base, **dict(part.split("=") for part in keys.split(",") if part)}
    return make_spec(OPS[graph].definition, "fwd", {"d": 1, **options}, f"{graph}.fwd:{keys}").differentiated


def _default_eps(graph: str, x: Tensor) -> float:
    """PyTorch's for RMSNorm: the epsilon of the dtype that it computes in. TypeError for another norm."""
    if "rmsnorm" not in graph:
        raise TorchTypeError(f"'{graph}': 'eps' must be float, not NoneType; pass for example eps=1e-5.")
    eps: float = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return eps


def _copied(result: Tensor, out: Tensor) -> Tensor:
    """``out`` with the result in it."""
    if (out.shape, out.dtype) != (result.shape, result.dtype):
        raise TorchError(
            f"out= is expected to have shape {list(result.shape)} and dtype {result.dtype}, got {list(out.shape)} and "
            f"{out.dtype}."
        )
    return out.copy_(result)


def _check_out(out: Tensor | None, tensors: Mapping[str, Tensor]) -> None:
    if out is not None and torch.is_grad_enabled() and any(t.requires_grad for t in (out, *tensors.values())):
        raise TorchError(
            "functions with out=... arguments don't support automatic differentiation, but one of the arguments "
            "requires grad."
        )


def dispatched(
    ops: GraphOps, tensors: Mapping[str, Tensor], keys: str, eps: float | None, outputs: Sequence[str]
) -> Sequence[Tensor]:
    """The outputs, by the registered operator or composed of PyTorch's own."""
    given = [tensors.get(name) for name in ops.inputs]
    if not torch.compiler.is_compiling() and transformed():
        return composed(ops.side(given, keys).spec, tensors, outputs, eps or 0.0)
    numbers: dict[str, Any] = {} if eps is None else {"eps": eps}
    return locally(ops, given, keys=keys, **numbers)[: len(outputs)]


def transformed() -> bool:
    """True inside torch.func's transforms and forward-mode differentiation, which see no operator of lngen's."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def word(value: bool | str | float) -> str:
    """The value of an option as a spec has it."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _softmaxes(x: Tensor, dim: int | None, dtype: torch.dtype | None) -> bool:
    """True for the softmaxes that lngen has, and for what is refused."""
    return not isinstance(x, Tensor) or (_last(x, dim) and dtype is None and x.dtype != torch.float64)


def _last(x: Tensor, dim: int | None) -> bool:
    """True for the last dimension of a tensor with rows, and for what is refused."""
    if not isinstance(x, Tensor) or (x.is_nested and x.layout is torch.strided):
        return True
    return dim is not None and x.dim() > 0 and dim in (-1, x.dim() - 1) and x.shape[-1] > 0


def _check(graph: str, x: Tensor, dims: tuple[int, ...], tensors: Mapping[str, Tensor]) -> None:
    """RuntimeError, for few dimensions of rms_norm ValueError, in PyTorch's words, for shapes that do not fit."""
    if not dims:
        raise TorchError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
            "normalized_shape = []. Name the dimensions to normalise, for example input.shape[-1:]."
        )
    if x.dim() < len(dims) and graph == "rmsnorm":
        raise TorchValueError(
            f"Input tensor must have at least {len(dims)} dimensions, but got {x.dim()}. normalized_shape="
            f"{list(dims)} names the last dimensions of input."
        )
    if tuple(x.shape[-len(dims) :]) != dims:
        shown = ", ".join(map(str, dims))
        raise TorchError(
            f"Given normalized_shape=[{shown}], expected input with shape [*, {shown}], but got input of size"
            f"{list(x.shape)}. normalized_shape names the last dimensions of input."
        )
    if 0 in dims:
        raise TorchError(f"normalized_shape={list(dims)} has no elements; a row is expected to have one or more.")
    for name, called in (("gamma", "weight"), ("beta", "bias")):
        tensor = tensors.get(name)
        if tensor is not None and tuple(tensor.shape) != dims:
            raise TorchError(
                f"Expected {called} to be of same shape as normalized_shape, but got {called} of shape "
                f"{list(tensor.shape)} and normalized_shape = {list(dims)}. Reshape {called}, or leave it out."
            )
