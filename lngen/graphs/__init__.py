"""lngen's own graphs, by name; a program's own are given to ``lngen.compile``."""

from types import MappingProxyType

from lngen.graphs.definition import Definition, GraphBuilder, Options
from lngen.graphs.norms import layernorm, rmsnorm

GRAPHS = MappingProxyType(
    {
        d.name: d
        for d in (
            Definition("layernorm", layernorm, "(x - mean) * rstd * gamma + beta"),
            Definition("rmsnorm", rmsnorm, "x * rstd * gamma, rstd of the mean square"),
        )
    }
)

__all__ = ["GRAPHS", "Definition", "GraphBuilder", "Options"]
