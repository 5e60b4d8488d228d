"""lngen's own graphs, by name; a program's own are given to ``lngen.compile``."""

from collections.abc import Callable
from types import MappingProxyType

from lngen.compiler.graphs import heads, modulated, norms, rotary, softmax
from lngen.compiler.graphs.definition import GRAPH_ENDING, Definition, definition_from, is_source, split_source
from lngen.compiler.graphs.graph_builder import Chosen, GraphBuilder, Option, Options

_Described = tuple[Callable[[GraphBuilder], None], str]

_GROUPS: dict[str, tuple[_Described, ...]] = {
    "norms": (
        (norms.layernorm, "(x - mean) * rstd * gamma + beta"),
        (norms.rmsnorm, "x * rstd * gamma, rstd of the mean square"),
        (softmax.l2norm, "x / sqrt(sum(x^2) + eps)"),
    ),
    "norms of a sum": (
        (norms.add_layernorm, "layernorm(h), h = x + residual, and h itself"),
        (norms.add_rmsnorm, "rmsnorm(h), h = x + residual, and h itself"),
        (norms.parallel_layernorm, "two layernorms of h = x + residual, and h itself"),
        (norms.parallel_rmsnorm, "two rmsnorms of h = x + residual, and h itself"),
    ),
    "modulation": (
        (modulated.ada_layernorm, "layernorm(x) * (1 + scale) + shift, of each sample; also of residual + gate * x"),
        (modulated.ada_rmsnorm, "rmsnorm(x) * (1 + scale) + shift, of each sample; also of residual + gate * x"),
    ),
    "heads": (
        (heads.qk_rmsnorm, "rmsnorm(x) of each head of q and k, whose weights repeat along a row"),
        (heads.qk_layernorm, "layernorm(x) of each head of q and k, whose weights repeat along a row"),
        (rotary.rope, "x * cos + rotate(x) * sin of each head, by row or by position (RoPE)"),
    ),
    "gates and activations": (
        (norms.gated_layernorm, "layernorm(x) * silu(z), or layernorm(x * silu(z))"),
        (norms.gated_rmsnorm, "rmsnorm(x) * silu(z), or rmsnorm(x * silu(z))"),
        (norms.layernorm_sigmoid_mul, "x * sigmoid(layernorm(x))"),
        (norms.rmsnorm_sigmoid_mul, "x * sigmoid(rmsnorm(x))"),
        (norms.layernorm_act, "silu, gelu, relu or sigmoid of layernorm(x)"),
        (norms.rmsnorm_act, "silu, gelu, relu or sigmoid of rmsnorm(x)"),
        (norms.dyt, "tanh(alpha * x) * gamma + beta"),
    ),
    "rows": (
        (softmax.softmax, "exp(x) / sum(exp(x))"),
        (softmax.log_softmax, "x - log(sum(exp(x)))"),
        (softmax.cross_entropy, "-sum(target * log_softmax(x)), a loss per row"),
    ),
}

GRAPHS = MappingProxyType(
    {
        describe.__name__: Definition(describe.__name__, describe, summary, group=group)
        for group, described in _GROUPS.items()
        for describe, summary in described
    }
)
