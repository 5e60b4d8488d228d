"""The device headers: what each provides, which ones a kernel includes, and the text that stands alone.

The headers lie in ``templates/include/lngen``. An emitted kernel includes those that provide a name it uses. A header
includes what it needs itself, and has an include guard, so each compiles alone and any number of kernels can share a
translation unit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache

from lngen.config import data_dir

PREFIX = "lngen/"  # of an include: #include "lngen/tma.cuh"
# The compiler option that finds them, for a shell: this module prints their folder.
SEARCH = '-I "$(python -m lngen.headers)"'

# The names that each header declares in namespace lngen. A value of a graph takes none of them.
PROVIDES = {
    "cluster": "AcquireAll AcquireShared cluster_barrier cluster_rank remote_address send",
    "column_sums": "Unit begin_column_sums group_stride reduce_row_groups share_column_sums store_column_sums"
    " store_partial store_partial_of_many store_partial_vector swizzled",
    "cp_async": "CpAsyncStream cp_async",
    "dynamic_tma": "ClusterDynamicTmaStream DynamicTmaRing DynamicTmaStream",
    "exchange": "ClusterExchange",
    "finish": "ColumnFinish L2Load column_total interleaved_sums partials_per_column share_totals",
    "grid_barrier": "grid_barrier",
    "launch": "pdl_trigger pdl_wait",
    "mbarrier": "mbarrier_arrive mbarrier_arrive_expect mbarrier_expect_more mbarrier_init mbarrier_init_fence"
    " mbarrier_wait shared_address",
    "numeric": "__nv_half2float bf16 bf16_from_f32 bf16_from_f64 copysign_of exponent f16 f16_from_f32 f16_from_f64"
    " f32_from_bf16 f32_from_bool f32_from_f16 f32_from_f16_at_use f32_from_f64 f32_from_i32 f32_from_i64"
    " f32_from_int8 f64_from_bf16 f64_from_bool f64_from_f16 f64_from_f32 f64_from_i32 f64_from_i64"
    " f64_from_int8 materialised maximum minimum significand",
    "preload": "bits_of vector_bits",
    "row_layout": "Block Cluster ColumnLayout GroupedColumnLayout PartialRowLayout RowLayout",
    "row_place": "RowPlace row_of",
    "row_reduce": "Add BlockReduce Max WarpReduce add_terms half_of name_sums reduce_lanes row_barrier row_sums"
    " thread_sums tree_reduce warp_barrier",
    "row_scheduler": "OneRow RowCounter StaticRows previous_stage",
    "segments": "cluster_sums exchange_segments join_segments joined_sums multipass_segment_sums multipass_sums"
    " segment_size segment_sums",
    "tma": "TmaRing TmaStream tma_load tma_store tma_store_commit tma_store_fence tma_store_wait",
    "unaligned_tma": "Span load_tail misalignment tma_load_span tma_store_span",
    "vector": "Access EvictLastStore16 EvictLastStore4 EvictLastStore8 GlobalStore Load PlainLoad PlainStore"
    " ReadOnlyLoad RowLoad UnmovedLoad1 UnmovedLoad16 UnmovedLoad2 UnmovedLoad4 UnmovedLoad8 Vec Word load"
    " load_row load_scalar packed prefetch_l2 store widen_row widened write",
    "vector_sums": "tree_reduce_shared vector_sums",
}
HEADER_OF = {name: header for header, names in PROVIDES.items() for name in names.split()}

_COMMENT = re.compile(r"//.*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_INCLUDE = re.compile(rf'^#include "{PREFIX}(\w+)\.cuh"\n', re.MULTILINE)


@cache
def text_of(header: str) -> str:
    """The text of a header."""
    return (data_dir("templates") / "include" / "lngen" / f"{header}.cuh").read_text(encoding="utf-8")


def includes(code: str) -> str:
    """The sorted include lines for CUDA ``code``: the headers that provide the names it uses."""
    words = {*_WORD.findall(_COMMENT.sub("", code))}
    headers = sorted({header for name, header in HEADER_OF.items() if name in words})
    return "\n".join(f'#include "{PREFIX}{header}.cuh"' for header in headers)


def included(text: str, texts: Callable[[str], str] | None = None) -> dict[str, str]:
    """Every header that ``text`` includes, directly or through another, by the name of its include.

    A header follows those that it includes itself. ``texts``: the text of a header, by default lngen's own.
    """
    found: dict[str, str] = {}
    for header in _INCLUDE.findall(text):
        of_header = (texts or text_of)(header)
        found |= included(of_header, texts) | {f"{PREFIX}{header}.cuh": of_header}
    return found


@cache
def headers_hash() -> str:
    """16 hex digits that stand for the texts of all headers."""
    texts = "".join(f"{header}\0{text_of(header)}\0" for header in sorted(PROVIDES))
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def bundled(text: str, texts: Callable[[str], str] | None = None) -> str:
    """``text`` with whole headers in place of its includes: one file that stands alone, as its commands say.

    The headers keep their guards, so that several such files can be one translation unit.
    """
    first = _INCLUDE.search(text)
    if not first:
        return text
    headers = (_INCLUDE.sub("", of_header) for of_header in included(text, texts).values())
    kernels = _INCLUDE.sub("", text[first.start() :]).lstrip()
    comment = text[: first.start()]
    for option, alone in ((f"{SEARCH} ", ""), ("lngen show ", "lngen show --bundle "), ("bundle=False", "bundle=True")):
        comment = comment.replace(option, alone, 1)
    return comment + "\n".join([*headers, kernels])


if __name__ == "__main__":
    print(data_dir("templates") / "include")
