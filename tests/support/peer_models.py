"""Stand-ins for operators of vLLM and FlashInfer that quantise a norm: NumPy models of their sources, line by line.

They have the parameters of the operators, and write results where those do. They share nothing with lngen. A peer's
reciprocal square root is approximate: a model takes what computes it, by default the correctly rounded one.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from float8 import nearest
from lngen.compiler.ir import DType

Array = Any
Root = Callable[[Array, float], Array]  # of f32 rows and eps
F32 = np.float32
Q = {ml_dtypes.float8_e4m3fn: DType.E4M3, ml_dtypes.float8_e5m2: DType.E5M2, np.int8: DType.INT8}


def exact(x: Array, eps: float) -> Array:
    """1 / rms of each row, rounded once."""
    square = np.square(x.astype(np.float64)).mean(1, keepdims=True)
    return (1 / np.sqrt(square + eps)).astype(F32)


def write(out: Array, y: Array) -> None:
    """y, which a peer clamps to the largest numbers and then converts."""
    out[...] = nearest(y, Q[out.dtype.type]).view(out.dtype)


# ---- FlashInfer, include/flashinfer/norm.cuh: one chain in f32 ----


def rmsnorm_quant(out: Array, input: Array, weight: Array, scale: Array, eps: float, root: Root = exact) -> None:
    x = input.astype(F32)
    write(out, x * root(x, eps) * weight.astype(F32) * (F32(1) / scale))


def fused_add_rmsnorm_quant(
    out: Array, input: Array, residual: Array, weight: Array, scale: Array, eps: float, root: Root = exact
) -> None:
    """The statistics and the value are of the sum in f32."""
    x = input.astype(F32) + residual.astype(F32)
    residual[...] = x.astype(residual.dtype)
    write(out, x * root(x, eps) * weight.astype(F32) * (F32(1) / scale))


# ---- vLLM, csrc/layernorm_quant_kernels.cu: the product with the weight is one of its dtype ----


def twice_rounded(x: Array, weight: Array, r: Array) -> Array:
    narrow = weight.dtype
    return ((x * r).astype(narrow).astype(F32) * weight.astype(F32)).astype(narrow).astype(F32)


def rms_norm_static_fp8_quant(
    result: Array, input: Array, weight: Array, scale: Array, epsilon: float, root: Root = exact
) -> None:
    x = input.astype(F32)
    write(result, twice_rounded(x, weight, root(x, epsilon)) * (F32(1) / scale))


def fused_add_rms_norm_static_fp8_quant(
    result: Array, input: Array, residual: Array, weight: Array, scale: Array, epsilon: float, root: Root = exact
) -> None:
    """The statistics and the value are of the sum as it is stored."""
    residual[...] = (input.astype(F32) + residual.astype(F32)).astype(residual.dtype)
    rms_norm_static_fp8_quant(result, residual, weight, scale, epsilon, root)


# ---- vLLM, csrc/quantization/fused_kernels: layernorm_utils.cuh and quant_conversions.cuh ----


def rms_norm_per_block_quant(
    result: Array,
    input: Array,
    weight: Array,
    scale: Array,
    epsilon: float,
    scale_ub: Array | None,
    residual: Array | None,
    group_size: int,
    is_scale_transposed: bool = False,
    root: Root = exact,
) -> None:
    """The statistics and the value are of the sum in f32, the residual is stored rounded."""
    x = input.astype(F32)
    if residual is not None:
        x = x + residual.astype(F32)
    y = twice_rounded(x, weight, root(x, epsilon)).reshape(len(x), -1, group_size)
    if residual is not None:
        residual[...] = x.astype(residual.dtype)
    int8 = result.dtype == np.int8
    amax = np.abs(y).max(2)
    if scale_ub is not None:
        amax = np.minimum(amax, scale_ub)
    s = np.maximum(amax / F32(127 if int8 else 448), F32(2.0**-23) if int8 else F32(1) / F32(448 * 512))
    write(result, (y * (F32(1) / s)[..., None] if int8 else y / s[..., None]).reshape(x.shape))
    scale[...] = s


def rms_norm_dynamic_per_token_quant(
    result: Array,
    input: Array,
    weight: Array,
    scale: Array,
    epsilon: float,
    scale_ub: Array | None,
    residual: Array | None,
    root: Root = exact,
) -> None:
    size = input.shape[1]
    rms_norm_per_block_quant(result, input, weight, scale, epsilon, scale_ub, residual, size, root=root)
