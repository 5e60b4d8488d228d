"""LayerNorm and RMSNorm, forward and backward, from kernels that lngen compiled ahead of time.

Nothing is compiled here. Every result is that of lngen's interpreter, bit for bit, on any GPU that the kernels are for.

    layer_norm, rms_norm   as in torch.nn.functional, differentiable
    layers                 LayerNorm, RMSNorm and LlamaRMSNorm, for ``kernels.kernelize``
    norm                   any norm of the package: forward and backward on tensors

``lngen build SPEC... --layout hf-kernel --out DIR`` writes this package, or adds kernels to it.
"""

from . import layers
from .functional import layer_norm, norm, rms_norm

__all__ = ["layer_norm", "layers", "norm", "rms_norm"]
