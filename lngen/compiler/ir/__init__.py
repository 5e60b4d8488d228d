"""The IR: typed equations over named axes, their text, their rules and their meaning."""

from lngen.compiler.ir.axes import WIDE, Axis, D, Lengths, M, S, axes_union
from lngen.compiler.ir.builder import VERSIONS, Builder, Draft, verify
from lngen.compiler.ir.functions import EXPANSIONS, FUNCTIONS
from lngen.compiler.ir.meanings import ctype
from lngen.compiler.ir.names import is_graph_name, is_name
from lngen.compiler.ir.numerics import bits_of, values_of
from lngen.compiler.ir.ops import OPS, Op, Ops
from lngen.compiler.ir.places import unequal
from lngen.compiler.ir.text import parse
from lngen.compiler.ir.types import (
    BF16,
    DEFAULT_EPS,
    F16,
    F32,
    F64,
    FOLDS,
    ORDERS,
    RUN,
    SUMS,
    Attr,
    ByValue,
    Eqn,
    Graph,
    Run,
    Type,
    Value,
    compute_dtype,
    derived_axes,
    independent_rows,
    is_block_fold,
    is_column_fold,
    is_join,
    is_number_fold,
    is_of_columns,
    is_of_halves,
    is_of_set,
    is_of_table,
    is_over_heads,
    is_over_segments,
    is_over_sets,
    is_row_fold,
    is_segment_size,
    is_segment_sum,
    is_set_fold,
    is_sum,
    preformatted,
    print_eqn,
    print_graph,
    recording,
    segment_of,
    sets_of,
)
from lngen.dtypes import DType
from lngen.rules import RULES
