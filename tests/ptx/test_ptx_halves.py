"""The PTX executor on accesses narrower than a word: neighbours in a word are no race, the same bytes are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lngen.ptx import Outcome, parse
from lngen.ptx.analysis import narrowest
from lngen.toolchain import compile_ptx
from ptx_source import kinds, run

pytest.importorskip("cupy")

U4 = np.uint32
# A warp barrier makes the executor keep clocks of what threads have seen of each other.
CLOCKS = ["", "__syncwarp();"]
TYPES = {"unsigned short": np.uint16, "unsigned char": np.uint8}


SHARED = """extern "C" __global__ void k(const T* a, T* o, unsigned long long at) {
    __shared__ T s[256];
    int t = threadIdx.x, i = FIRST;
    s[t] = 7; s[t + 128] = 7;
    __syncthreads(); CLOCK
    s[i] = a[t];
    BETWEEN
    o[t] = s[SECOND];
}"""


def shared(kind: str, clock: str, first: str, second: str, between: str = "") -> Outcome:
    source = SHARED.replace("CLOCK", clock).replace("FIRST", first).replace("SECOND", second)
    source = source.replace("BETWEEN", between).replace("T", kind)
    n = np.arange(128).astype(TYPES[kind])
    return run(source, 1, 128, n, np.zeros(128, TYPES[kind]), 0)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("kind", TYPES)
def test_parts_of_a_word_in_shared_memory(kind: str, clock: str) -> None:
    """Threads that write neighbours, read their own, read another's behind a barrier."""
    clean = shared(kind, clock, "t", "t")
    assert clean.findings == ()
    assert (clean.results["1"] == np.arange(128)).all()
    assert shared(kind, clock, "t", "t ^ 1", "__syncthreads();").findings == ()
    assert kinds(shared(kind, clock, "t ^ 1", "t", "__syncthreads();")) == set()


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("kind", TYPES)
def test_the_same_part_of_a_word_in_shared_memory(kind: str, clock: str) -> None:
    assert kinds(shared(kind, clock, "t & ~1", "t & ~1", "__syncthreads();")) == {"shared-race"}  # two write
    found = shared(kind, clock, "t", "t ^ 1")  # one writes, the other reads
    assert kinds(found) == {"shared-race"}
    width = TYPES[kind]().itemsize
    assert f"bytes {width} to {2 * width - 1} of shared memory" in found.findings[0].message


WHOLE = """extern "C" __global__ void k(unsigned* o) {
    __shared__ unsigned words[64];
    unsigned short* halves = reinterpret_cast<unsigned short*>(words);
    int t = threadIdx.x;
    __syncthreads(); CLOCK
    if (t < 32) words[t] = t;
    else *reinterpret_cast<volatile unsigned short*>(halves + AT) = t;
    __syncthreads();
    o[t] = words[t];
}"""


@pytest.mark.parametrize(("at", "found"), [("2 * t", set()), ("2 * t - 63", {"shared-race"})])
@pytest.mark.parametrize("clock", CLOCKS)
def test_a_word_and_its_halves(clock: str, at: str, found: set[str]) -> None:
    """Threads write words, others halves of the same or of other words."""
    source = WHOLE.replace("CLOCK", clock).replace("AT", at)
    source = source.replace("volatile ", "") if clock == "" else source
    outcome = run(source.replace("o[t] = words[t]", "if (t < 32) o[t] = words[t]"), 1, 64, np.zeros(64, U4))
    assert kinds(outcome) == found


GLOBAL = """extern "C" __global__ void k(const T* a, void* o) {
    int t = 2 * threadIdx.x + blockIdx.x;
    CLOCK
    static_cast<T*>(o)[WHERE] = a[t];
}"""


@pytest.mark.parametrize("clock", [*CLOCKS, 'asm volatile("red.relaxed.gpu.global.add.u32 [%0], 0;" :: "l"(p));'])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("item", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_parts_of_a_word_in_global_memory(item: Any, kind: str, clock: str) -> None:
    """Blocks that write neighbours, and the same place; the array's own elements are wider, or narrower."""
    source = GLOBAL.replace("CLOCK", clock).replace("T", kind)
    if "red." in clock:
        source = source.replace("void* o", "void* o, unsigned* p")
    a, o = np.arange(64).astype(TYPES[kind]), np.zeros(64 * TYPES[kind]().itemsize, np.uint8).view(item)
    more = [np.zeros(1, U4)] if "red." in clock else []
    clean = run(source.replace("WHERE", "t"), 2, 32, a, o, *more)
    assert clean.findings == ()
    assert (clean.results["1"].view(TYPES[kind]) == a).all()
    assert kinds(run(source.replace("WHERE", "t & ~1"), 2, 32, a, o, *more)) == {"global-race"}


PROXY = """extern "C" __global__ void k(unsigned* o) {
    extern __shared__ __align__(128) unsigned short s[];
    int t = threadIdx.x;
    s[t] = t;
    if (FENCED) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (t == 0) {
        unsigned from = (unsigned)__cvta_generic_to_shared(s);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" :: "l"(o), "r"(from) : "memory");
        asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
    }
}"""


def test_each_half_is_fenced_by_who_wrote_it() -> None:
    def fenced(who: str) -> Outcome:
        return run(PROXY.replace("FENCED", who), 1, 128, np.zeros(64, U4), dynamic=256)

    clean = fenced("t >= 0")
    assert clean.findings == ()
    assert (clean.results["0"].view(np.uint16) == np.arange(128)).all()
    assert kinds(fenced("t % 2 == 0")) == {"proxy"}
    assert kinds(fenced("t % 2 == 1")) == {"proxy"}


def test_words_stay_the_unit_where_nothing_is_narrower() -> None:
    """What is noted for each word costs time; a vector of halves is as wide as the words it fills."""

    def unit(body: str, space: str) -> int:
        head = 'extern "C" __global__ void k(const unsigned* a, unsigned short* o) { __shared__ unsigned s[64]; '
        text = head + body + " }"
        return narrowest(parse(compile_ptx(text, "sm_90", name="k.cu")).entries["k"], space)

    words = "s[threadIdx.x] = a[threadIdx.x]; __syncthreads(); o[threadIdx.x] = s[threadIdx.x ^ 1];"
    assert (unit(words, "shared"), unit(words, "global")) == (4, 2)
    pair = words + 'asm volatile("st.shared.v2.b16 [%0], {%1, %1};" :: "r"(0), "h"(o[0]) : "memory");'
    assert unit(pair, "shared") == 4
    half = words + 'asm volatile("st.shared::cta.b16 [%0], %1;" :: "r"(0), "h"(o[0]) : "memory");'
    assert unit(half, "shared") == 2
    generic = words + 'asm volatile("st.b8 [%0], %1;" :: "l"(o), "h"(o[0]) : "memory");'
    assert (unit(generic, "shared"), unit(generic, "global")) == (1, 1)
