"""Modifiers of instructions that synchronise, copy and hint: those of the manual that are executed, no others."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from lngen.errors import PtxError
from lngen.ptx import parse
from lngen.ptx.compiler import compile_entry
from lngen.ptx.parser import integer
from lngen.ptx.program import DTYPES, immediate

HEAD = """.version 8.6
.target sm_90
.address_size 64
.visible .entry k(
.param .u64 p0
)
{{
.reg .pred %p<4>;
.reg .b16 %rs<4>;
.reg .b32 %r<4>;
.reg .b64 %rd<4>;
.reg .f32 %f<4>;
{line};
ret;
}}"""


def known(line: str) -> bool:
    """False if the executor refuses an instruction, with a sentence that names it."""
    entry = parse(HEAD.format(line=line)).entries["k"]
    try:
        compile_entry(entry, ())
    except PtxError as e:
        return f"line 13: instruction '{line.split()[0]}'" not in str(e)
    return True


def words(*slots: list[str]) -> set[str]:
    return {".".join(p for p in chosen if p) for chosen in product(*slots)}


SCOPED = ["release.cta", "release.cluster", "relaxed.cta", "relaxed.cluster", "acquire.cta", "acquire.cluster"]
WINDOWS = ["", "shared", "shared::cta", "shared::cluster"]
BULK = "mbarrier::complete_tx::bytes"

# By operands: the opcodes that are executed, and others that are tried.
CASES: dict[str, tuple[str, set[str], set[str]]] = {
    "barriers": (
        "%r0",
        {"bar.sync", "bar.cta.sync", *words(["barrier"], ["", "cta"], ["sync"], ["", "aligned"])},
        words(["bar", "barrier"], ["", "cta"], ["sync", "red.popc", "red.and"], ["", "aligned"], ["", "u32"]),
    ),
    "arrivals": (
        "%r0, %r1",
        {"bar.arrive", "bar.sync", "barrier.sync.aligned", "barrier.arrive.aligned", "barrier.cta.arrive"},
        {"bar.arrive.aligned", "bar.aligned.arrive", "barrier.aligned.arrive", "bar.red.popc.u32", "bar.cluster.sync"},
    ),
    "clusters": (
        "",
        {*words(["barrier.cluster.arrive"], ["", "release", "relaxed"], ["", "aligned"]),
         *words(["barrier.cluster.wait"], ["", "acquire"], ["", "aligned"])},
        {"barrier.cluster", *words(["barrier.cluster"], ["arrive", "wait"], ["", "aligned"],
                                   ["", "release", "relaxed", "acquire"], ["", "aligned"])},
    ),
    "warps": ("%r0", {"bar.warp.sync"}, {"bar.warp.arrive", "bar.warp.sync.aligned", "bar.warp"}),
    "proxies": (
        "",
        words(["fence", "membar"], ["proxy"], ["alias", "async", "async.global", "async.shared::cta",
                                               "async.shared::cluster"]),
        words(["fence", "membar"], ["proxy"], ["", "tensormap::generic", "async::generic", "generic"],
              ["", "acquire", "release"], ["", "gpu", "shared::cta"]) | {"fence.mbarrier_init.acquire.cluster",
              "fence.mbarrier_init.release.gpu", "fence.proxy.alias.async", "fence.async", "fence.proxy.async.local"},
    ),
    "beginnings": ("", {"fence.mbarrier_init.release.cluster"}, {"fence.mbarrier_init", "fence.mbarrier_init.release"}),
    "dependents": (
        "",
        {"griddepcontrol.wait", "griddepcontrol.launch_dependents"},
        {"griddepcontrol", "griddepcontrol.wait.aligned", "griddepcontrol.launch"},
    ),
    "mbarrier init": ("[%rd0], %r0", words(["mbarrier.init"], WINDOWS[1:3], ["b64"]),
                      words(["mbarrier.init"], ["", "release", "relaxed.cta"], WINDOWS, ["b64", "b32", "u64"])),
    "mbarrier expect": ("[%rd0], %r0", words(["mbarrier.expect_tx"], ["", *SCOPED[2:4]], WINDOWS[1:], ["b64"]),
                        words(["mbarrier.expect_tx"], ["relaxed", "cta", *SCOPED], WINDOWS, ["b64", "u64"])),
    "mbarrier arrive": ("%rd1, [%rd0], %r0",
                        words(["mbarrier.arrive"], ["", "expect_tx"], ["", *SCOPED[:4]], WINDOWS[1:], ["b64"]),
                        words(["mbarrier.arrive", "mbarrier.arrive_drop"], ["", "expect_tx", "noComplete"],
                              ["", "release", "cta", *SCOPED], WINDOWS, ["b64"])),
    "mbarrier parity": (
        "%p0, [%rd0], %r0",
        words(["mbarrier"], ["test_wait.parity", "try_wait.parity"], ["", *SCOPED[2:]], WINDOWS[1:3], ["b64"]),
        words(["mbarrier"], ["test_wait.parity", "try_wait.parity", "wait.parity"], ["", "acquire", *SCOPED], WINDOWS,
              ["b64"]),
    ),
    "cp.async": (
        "[%r0], [%rd0], 16",
        words(["cp.async"], ["ca", "cg"], WINDOWS[1:3], ["global"], ["", "L2::64B", "L2::128B", "L2::256B"]),
        words(["cp.async"], ["", "ca", "cg", "cs"], WINDOWS, ["", "global"], ["", "L2::cache_hint", "L2::32B"]),
    ),
    "groups": ("0", {"cp.async.wait_group", "cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"},
               {"cp.async.wait_group.read", "cp.async.bulk.wait_group.write", "cp.async.wait_all"}),
    "commits": ("", {"cp.async.commit_group", "cp.async.bulk.commit_group", "cp.async.wait_all"},
                {"cp.async.bulk.wait_all", "cp.async.commit", "cp.async.mbarrier.arrive.b64"}),
    "bulk loads": (
        "[%r0], [%rd0], %r1, [%r2]",
        {f"cp.async.bulk.shared::{window}.global.{BULK}" for window in ("cta", "cluster")}
        | {f"cp.async.bulk.shared::cluster.shared::cta.{BULK}"},
        words(["cp.async.bulk"], ["shared", "shared::cta", "global"], ["global", "shared::cta", "shared::cluster"],
              [BULK, "bulk_group", ""]) - {f"cp.async.bulk.shared::cta.global.{BULK}"},
    ),
    "bulk stores": (
        "[%rd0], [%r0], %r1",
        {"cp.async.bulk.global.shared::cta.bulk_group"},
        {"cp.async.bulk.global.shared::cta", "cp.async.bulk.global.shared::cta.bulk_group.cp_mask",
         "cp.async.bulk.global.shared::cluster.bulk_group",
         "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"},
    ),
    "st.async": (
        "[%r0], %r1, [%r2]",
        {f"st.async{weak}{window}.{BULK}.{kind}" for weak in ("", ".weak") for window in ("", ".shared::cluster")
         for kind in ("b32", "u32", "s32")},
        {f"st.async.{word}.{BULK}.b32" for word in ("volatile", "shared::cta", "global", "relaxed.cluster")}
        | {f"st.async.{BULK}.b16", f"st.async.{BULK}.v3.b32", "st.async.b32"},
    ),
    "mapa": ("%rd1, %rd0, %r0", {"mapa.u64", "mapa.shared::cluster.u64"}, {"mapa.shared::cta.u64", "mapa.s64"}),
    "policies": (
        "%rd0, %f0",
        words(["createpolicy.fractional"], ["L2::evict_last", "L2::evict_normal", "L2::evict_first",
                                            "L2::evict_unchanged"], ["", "L2::evict_first", "L2::evict_unchanged"],
              ["b64"]),
        {"createpolicy.fractional.L2::evict_last.L2::evict_last.b64", "createpolicy.range.L2::evict_last.b64",
         "createpolicy.fractional.L1::evict_last.b64", "createpolicy.fractional.b64", "createpolicy.cvt.L2.b64"},
    ),
    "prefetches": (
        "[%rd0]",
        {"prefetch.L1", "prefetch.L2", "prefetch.global.L1", "prefetch.global.L2", "prefetch.global.L2::evict_last",
         "prefetch.global.L2::evict_normal", "prefetchu.L1"},
        {"prefetch.local.L1", "prefetch.L3", "prefetch.tensormap", "prefetchu.L2", "prefetch.L2::evict_last",
         "prefetch.global.L2::evict_first"},
    ),
    "bulk prefetches": ("[%rd0], %r0", {"cp.async.bulk.prefetch.L2.global"},
                        {"cp.async.bulk.prefetch.L1.global", "cp.async.bulk.prefetch.L2"}),
    "elections": ("%r0|%p0, %r1", {"elect.sync"}, {"elect", "elect.sync.b32"}),
    "jumps": ("$nowhere", set(), {"bra.convergent", "brx.idx", "call"}),
    "ends": ("", {"ret", "ret.uni", "exit"}, {"trap", "brkpt", "exit.uni", "pmevent", "ret.sync"}),
    "sleep": ("%r0", {"nanosleep.u32"}, {"nanosleep", "nanosleep.u64", "nanosleep.b32", "activemask.u32"}),
    "masks": ("%r0", {"activemask.b32"}, {"activemask", "activemask.pred"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_exactly_these_modifiers_are_executed(name: str) -> None:
    operands, executed, tried = CASES[name]
    for opcode in executed:
        assert known(f"{opcode} {operands}".strip()), opcode
    for opcode in tried - executed:
        assert not known(f"{opcode} {operands}".strip()), opcode
    for opcode in executed:  # in no other order, nothing twice, nothing more
        first, *parts = opcode.split(".")
        others = {".".join((first, *p)) for p in permutations(parts)} if 2 < len(parts) < 5 else set()
        others |= {f"{opcode}.{parts[-1]}", f"{opcode}.sat", f"{opcode}.ftz"} if parts else {f"{opcode}.sat"}
        for other in others - executed:
            assert not known(f"{other} {operands}".strip()), other


@pytest.mark.parametrize(
    "line",
    [
        "setp.eq.and.s32 %p0, %r0, %r1, !%p1",
        "ld.global.u32 %r0, [%rd0].unified",
        "ld.global.u32 %r0, [%rd0+%r1]",
        "add.rn.f32 %f0, %f1, -%f2",
        "mov.f32 %f0, -0f3F800000",
        "mov.u32 %r0, 089",
        "mov.u32 %r0, %r1.x",
        "add.s32 %r0|%p0, %r1, %r2",
        "add.s32 %r0, %r1",
        "add.s32 %r0, %r1, %r2, %r3",
        "ld.global.v2.u32 {%r0}, [%rd0]",
        "ld.global.v2.u32 %r0, [%rd0]",
    ],
)
def test_operands_are_executed_or_refused_too(line: str) -> None:
    with pytest.raises(PtxError, match="PTX line 13"):
        compile_entry(parse(HEAD.format(line=line)).entries["k"], ())


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("-0", 0), ("17", 17), ("-1", -1), ("017", 15), ("-010", -8), ("0x1F", 31), ("0b101", 5), ("7U", 7)],
)
def test_integer_constants(text: str, number: int) -> None:
    assert integer(text) == number
    assert int(immediate(text, DTYPES["s32"])) == number
    assert known(f"mov.u32 %r0, {text}")
    entry = parse(HEAD.format(line=f"ld.global.u32 %r0, [%rd0+{text}]")).entries["k"]
    assert entry.instructions[0].operands[1].offset == number


def test_float_constants() -> None:
    for text, number in (("1.5", 1.5), ("-2.0e3", -2000.0), ("1e2", 100.0), ("0f3FC00000", 1.5), ("2", 2.0)):
        assert immediate(text, DTYPES["f32"]) == number
        assert known(f"mov.f32 %f0, {text}")


def test_parameters_beside_the_name_of_an_entry_are_an_error() -> None:
    """They were left out."""
    text = HEAD.format(line="mov.u32 %r0, 1").replace("k(\n.param .u64 p0\n)", "k(.param .u64 p0)")
    with pytest.raises(PtxError, match=r"PTX line 4: each parameter is expected on a line of its own, got '\.visible"):
        parse(text)
