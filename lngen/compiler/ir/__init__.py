"""The IR: typed equations over named axes, their text, their rules and their meaning."""

from lngen.compiler.ir.builder import Builder, Draft, verify
from lngen.compiler.ir.meanings import ctype
from lngen.compiler.ir.names import is_graph_name, is_name
from lngen.compiler.ir.numerics import bits_of, values_of
from lngen.compiler.ir.ops import OPS, Op, Ops
from lngen.compiler.ir.text import parse
from lngen.compiler.ir.types import (
    BF16,
    DEFAULT_EPS,
    F16,
    F32,
    F64,
    FOLDS,
    OF_SEGMENTS,
    ORDERED,
    ORDERS,
    REDUCTIONS,
    RULES,
    RUN,
    SEGMENT_SUMS,
    SUMS,
    WIDE,
    Attr,
    Axis,
    ByValue,
    D,
    DType,
    Eqn,
    Graph,
    M,
    Run,
    S,
    Type,
    Value,
    compute_dtype,
    has_segments,
    independent_rows,
    indexed_by_elements,
    is_column_fold,
    is_number_fold,
    is_row_fold,
    is_sum,
    preformatted,
    print_eqn,
    print_graph,
    recording,
    segment_of,
)
