"""The graphs that have a name."""

from lngen.graphs.definition import Definition, GraphBuilder, Options
from lngen.graphs.norms import layernorm, rmsnorm

GRAPHS = {
    d.name: d
    for d in (
        Definition("layernorm", layernorm, "(x - mean) * rstd * gamma + beta"),
        Definition("rmsnorm", rmsnorm, "x * rstd * gamma, rstd of the mean square"),
    )
}

__all__ = ["GRAPHS", "Definition", "GraphBuilder", "Options"]
