"""The rules a graph keeps, checked after build, after parse and after every pass.

Every value is defined once and has a name that C allows; every use comes after its definition and has
its type; each equation's type is what its op's rule gives; every result is defined.
"""

from __future__ import annotations

import re

from lngen.errors import VerifyError
from lngen.ir.ops import OPS
from lngen.ir.printer import print_eqn
from lngen.ir.types import Eqn, Graph, Value

_NAME = re.compile(r"[a-z][a-z0-9_]*")

# Words of C++ and of the emitted kernels, which use lower-case locals; IR names go into the same scope.
_RESERVED_WORDS = """
alignas alignof and asm auto bool break case catch char class const constexpr continue default delete do
double else enum explicit export extern false float for friend goto if inline int long mutable namespace new
not operator or private protected public register return short signed sizeof static struct switch template
this throw true try typedef typename union unsigned using virtual void volatile while xor f16 bf16 real row
tile lane group live chunk slot seg block warp scratch turn i k col leaf part rows f32_from_bf16 f32_from_f16
bf16_from_f32 f16_from_f32 f64_from_f16 f64_from_bf16 f64_from_f32 f16_from_f64 bf16_from_f64 f32_from_f64
fmaf sqrtf sqrt r first step load column strand blocks filled fold row_fold maximum load_chunk store_chunk store_partial
result and_eq bitand bitor char16_t char32_t compl decltype noexcept not_eq nullptr or_eq static_assert
thread_local typeid wchar_t xor_eq static_cast reinterpret_cast const_cast dynamic_cast
await barrier_init barriers_ready before_bulk_copies begin bulk_load bulk_store cluster_barrier cluster_fold
cluster_rank commit_copies commit_stores exchanged expect_bytes fetch grid_barrier landed length
let_next_kernel_begin meetings met parity prefetch refill row_barrier stage staged start stash stash_size stashed
store_row store_sums strand_sums totals wait_for_bytes wait_for_copies wait_for_previous_kernel wait_for_stores
async_chunk copy_chunk at bytes cols early_word last offset partials sums there load_rest
load_span shift_of store_span stay_word behind together owned owns
to_stay arrivals arrive within leave_packed stay_wide first_number bring bring_next
claimed coming count_up ended own set_zero taken claim expect_more tell told
centres cluster_meet stay combine far_sums row_spread join_segments fold_lanes
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())

# What kernels append to the names of values, and their numbered arrays.
_DERIVED = re.compile(
    r".*_(ptr|stride|next|acc|chunk|partial|segments?|strands?|kept|held|stage|to|from|shift|there|wide|whole|far|centre|squares|moments|numbers)|(sums|chunks|maxima|chunk_maxima)_\d+"
)


def verify(graph: Graph, stage: str) -> Graph:
    """``graph`` itself, or a VerifyError that names the stage, the equation and the rule."""
    known: dict[str, Value] = {}
    if not _NAME.fullmatch(graph.name):
        raise VerifyError(f"graph @{graph.name} needs a lower-case name of letters, digits and _, for its kernels.")
    for value in graph.params:
        _define(graph, stage, known, value, f"parameter '{value}'")
    for number, eqn in enumerate(graph.eqns):
        problem = _problem(eqn, known)
        if problem:
            raise VerifyError(_message(graph, stage, f"equation {number}: {problem}", print_eqn(eqn)))
        _define(graph, stage, known, eqn.out, f"equation {number}: '{eqn.out}'")
    for result in graph.results:
        if known.get(result.name) != result:
            raise VerifyError(_message(graph, stage, f"result '{result}: {result.type}' is not defined"))
    if len(set(graph.results)) != len(graph.results):
        raise VerifyError(_message(graph, stage, "a value is returned twice"))
    return graph


def is_reserved(name: str) -> bool:
    """True for a name that C or the kernels need."""
    return name in _RESERVED or _DERIVED.fullmatch(name) is not None


def _define(graph: Graph, stage: str, known: dict[str, Value], value: Value, where: str) -> None:
    if value.name in known:
        raise VerifyError(_message(graph, stage, f"{where} is defined twice"))
    if not _NAME.fullmatch(value.name) or is_reserved(value.name):
        raise VerifyError(_message(graph, stage, f"{where} needs a lower-case name that C and the kernels leave free"))
    known[value.name] = value


def _problem(eqn: Eqn, known: dict[str, Value]) -> str | None:
    op = OPS.get(eqn.op)
    if op is None:
        return f"there is no op '{eqn.op}'; the ops are {', '.join(OPS)}"
    if len(eqn.args) != op.arity:
        return f"'{eqn.op}' takes {op.arity} operands, got {len(eqn.args)}"
    for arg in eqn.args:
        if arg.name not in known:
            return f"'{arg}' is used before it is defined"
        if known[arg.name].type != arg.type:
            return f"'{arg}' is used as {arg.type} but defined as {known[arg.name].type}"
    for key, _ in eqn.attrs:
        if key not in op.attrs:
            return f"'{eqn.op}' has no attribute '{key}'; its attributes are {', '.join(op.attrs) or 'none'}"
    try:
        expected = op.typ(tuple(a.type for a in eqn.args), eqn.attrs)
    except ValueError as e:
        return str(e)
    return None if expected == eqn.out.type else f"the result is {expected}, not {eqn.out.type}"


def _message(graph: Graph, stage: str, problem: str, eqn: str = "") -> str:
    return f"graph @{graph.name} is malformed after '{stage}': {problem}." + (f"\n    {eqn}" if eqn else "")
