"""The names that values, graphs and inputs may have: a value's name is its C identifier, beside the kernels' own.

Emitted kernels use lower-case names for what changes and upper-case names for constants. A value is lower case, too, so
the names that C++, the compilers and the kernels use are reserved here, and those that kernels derive from a value's.
"""

from __future__ import annotations

import re
from collections.abc import Container

# C++ reserves names with two underscores in a row; without one at the end, no derived name has them either.
_NAME = re.compile(r"[a-z][a-z0-9]*+(?:_[a-z0-9]++)*+")

_CPP = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""

# Macros of NVRTC, of the compilers that nvcc works with, and of the headers it always includes; a GNU keyword.
_COMPILERS = "assert errno linux stderr stdin stdout typeof unix va_arg va_copy va_end va_start"

_KERNELS = """
arrivals arrive async_chunk at await barrier barrier_init barriers_ready before_bulk_copies begin behind bf16
bf16_from_f32 bf16_from_f64 bits_of block blocks bring bring_next bulk_load bulk_store bytes centres chunk claim
claimed cluster_barrier cluster_fold cluster_meet cluster_rank cluster_spread col cols column combine coming
commit_copies commit_stores copy_chunk count_up early_word ended exchanged expect_bytes expect_more f16 f16_from_f32
f16_from_f64 f32_from_bf16 f32_from_f16 f32_from_f64 f64_from_bf16 f64_from_f16 f64_from_f32 far_sums fetch filled
first first_number fmaf fold fold_lanes grid_barrier group i join_segments k landed lane last leaf leave_packed length
let_next_kernel_begin live load load_chunk load_rest load_span maximum meetings met offset own owned owns parity part
partials prefetch r real refill result row row_barrier row_fold row_spread rows scratch seen seg segment_sums send
set_zero shift_of slot sqrt sqrtf stage staged start stash stash_size stashed stay stay_wide stay_word step
store_chunk store_partial store_row store_span store_sums strand strand_sums sums taken tell there tile to_stay
together told totals turn wait_for_bytes wait_for_copies wait_for_previous_kernel wait_for_stores warp within
"""
_RESERVED = frozenset((_CPP + _COMPILERS + _KERNELS).split())

# What kernels append to the names of values, and their numbered arrays.
_ENDINGS = (
    "acc|centre|chunk|far|from|held|kept|moments|next|numbers|partial|ptr|segments?|shift|squares|stage|strands?|stride"
    "|there|to|whole|wide"
)
_NUMBERED = "chunks|chunk_maxima|maxima|sums"
_DERIVED = re.compile(rf".*_(?:{_ENDINGS})|(?:{_NUMBERED})_\d+")


def is_name(name: object) -> bool:
    """True for lower-case words of letters and digits, one underscore between two."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """True for a name that C++, the compilers or the kernels need."""
    return name in _RESERVED or _DERIVED.fullmatch(name) is not None


def fresh(name: str, taken: Container[str]) -> str:
    """``name``, or ``name_1``, ``name_2``, ... if it is taken or reserved."""
    # Kernels number some arrays of their own: sums_0, sums_1, ...
    stem = f"{name}_value" if is_reserved(f"{name}_1") else name
    found, n = name, 0
    while found in taken or is_reserved(found):
        n += 1
        found = f"{stem}_{n}"
    return found
