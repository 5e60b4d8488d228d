"""Which of lngen's graphs are defined for what, so that a table of cases names no spec that is refused."""

from lngen.compiler.graphs import GRAPHS
from lngen.compiler.spec import parse_spec
from lngen.errors import VerifyError

HEADS = {name: 128 for name, graph in GRAPHS.items() if graph.group == "heads"}  # features of a head, by default


def whole_heads(name: str, d: int) -> int:
    """``d``, or for a graph of heads the features of as many whole heads as have so many."""
    head = HEADS.get(name, 1)
    return -(-d // head) * head


def _in_f64(name: str) -> bool:
    try:
        parse_spec(f"{name}.fwd:d={whole_heads(name, 4)},dtype=f64").graph()
    except VerifyError:  # functions are defined in f32
        return False
    return True


IN_F64 = tuple(name for name in GRAPHS if _in_f64(name))


def dtypes_of(name: str, *dtypes: str) -> list[str]:
    """Those of ``dtypes``, texts that may have further keys, for which the graph is defined."""
    return [t for t in dtypes if name in IN_F64 or "f64" not in t]
