"""lngen in PyTorch: functions, modules and registered operators (``lngen help torch``).

    layer_norm, rms_norm, softmax, ...   torch.nn.functional's signatures (``torch_functions``)
    rms_norm_quant, dequantise, ...      norms with results of 8 bits (``quantised_norms``)
    function                             any graph as such a function (``any_graph``)
    cross_entropy, CrossEntropyLoss, ... the loss of class indices, also in shards (``losses``)
    qk_norm_rope, QKNormRope             norms of heads with RoPE, on a packed projection (``qk_norms``)
    LayerNorm, RMSNorm, AdaLayerNorm     torch.nn's modules and state dicts (``modules``)
    patch, unpatch                       lngen's norms in a model that has its own (``patching``)
    fuse                                 sums and the norms that read them as one operator (``fused_sums``)
    FusePass                             that for Inductor; torch.compile's backend ``lngen`` (``compile_backend``)
    use_extension                        the direct way in C++, an option (``extension``)
    torch.ops.lngen.layernorm_fwd, ...   an operator for each graph and direction (``graph_ops``)
    decompositions                       these in PyTorch's operators, for ONNX and other back ends (``graph_ops``)

It needs PyTorch; ``import lngen`` does not import it. Dynamo, whose import takes a second, waits for what needs it.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any

from lngen.torch.any_graph import function
from lngen.torch.extension import use_extension
from lngen.torch.graph_ops import decompositions
from lngen.torch.losses import CrossEntropyLoss, cross_entropy, cross_entropy_join, cross_entropy_shard
from lngen.torch.modules import AdaLayerNorm, AdaRMSNorm, LayerNorm, RMSNorm
from lngen.torch.patching import Patched, patch, unpatch
from lngen.torch.qk_norms import QKNormRope, qk_norm_rope
from lngen.torch.quantised_norms import (
    add_layer_norm_quant,
    add_rms_norm_quant,
    dequantise,
    layer_norm_quant,
    rms_norm_quant,
)
from lngen.torch.torch_functions import (
    ada_layer_norm,
    ada_rms_norm,
    add_layer_norm,
    add_rms_norm,
    dyt,
    gated_layer_norm,
    gated_rms_norm,
    l2_norm,
    layer_norm,
    layer_norm_act,
    log_softmax,
    rms_norm,
    rms_norm_act,
    softmax,
)

if TYPE_CHECKING:
    from lngen.torch.compile_backend import FusePass
    from lngen.torch.fused_sums import fuse

__all__ = [
    "AdaLayerNorm",
    "AdaRMSNorm",
    "CrossEntropyLoss",
    "FusePass",
    "LayerNorm",
    "Patched",
    "QKNormRope",
    "RMSNorm",
    "ada_layer_norm",
    "ada_rms_norm",
    "add_layer_norm",
    "add_layer_norm_quant",
    "add_rms_norm",
    "add_rms_norm_quant",
    "cross_entropy",
    "cross_entropy_join",
    "cross_entropy_shard",
    "decompositions",
    "dequantise",
    "dyt",
    "function",
    "fuse",
    "gated_layer_norm",
    "gated_rms_norm",
    "l2_norm",
    "layer_norm",
    "layer_norm_act",
    "layer_norm_quant",
    "log_softmax",
    "patch",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_act",
    "rms_norm_quant",
    "softmax",
    "unpatch",
    "use_extension",
]

OF_DYNAMO = {"FusePass": "compile_backend", "fuse": "fused_sums"}


def __getattr__(name: str) -> Any:
    if name not in OF_DYNAMO:
        raise AttributeError(f"module 'lngen.torch' has no attribute '{name}'")
    return getattr(import_module(f"lngen.torch.{OF_DYNAMO[name]}"), name)


try:
    distribution("lngen")  # PyTorch finds the backend of an installed package by itself
except PackageNotFoundError:
    import_module("lngen.torch.compile_backend")
