"""The IR: typed equations over named axes, their text, their rules and their meaning."""

from lngen.ir.builder import Builder
from lngen.ir.ops import OPS, Op
from lngen.ir.parser import parse
from lngen.ir.printer import print_eqn, print_graph
from lngen.ir.reductions import OF_SEGMENTS, ORDERED, REDUCTIONS, SUMS, is_row_fold, is_sum, spread_sums
from lngen.ir.types import BF16, F16, F32, F64, WIDE, Axis, D, DType, Eqn, Graph, M, Type, Value
from lngen.ir.verify import verify

__all__ = [
    "BF16", "F16", "F32", "F64", "OF_SEGMENTS", "OPS", "ORDERED", "REDUCTIONS", "SUMS", "WIDE", "Axis", "Builder", "D",
    "DType", "Eqn", "Graph", "M", "Op", "Type", "Value", "is_row_fold", "is_sum", "parse", "print_eqn", "print_graph",
    "spread_sums", "verify",
]  # fmt: skip
