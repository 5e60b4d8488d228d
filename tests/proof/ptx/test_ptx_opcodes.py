"""Of the modifiers in the PTX manual, one is executed wrongly, or ignored in place of refused, if these fail."""

from itertools import permutations, product

import numpy as np
import pytest

from lngen.errors import PtxError
from lngen.proof.ptx.opcodes import access, atomic, fence
from ptx_source import OPERATIONS, TYPES, bound, clean, run_ptx

U4 = np.uint32


def words(*slots: list[str]) -> set[str]:
    return {".".join(p for p in chosen if p) for chosen in product(*slots)}


SCOPES = ["cta", "cluster", "gpu", "sys"]
LEVEL1 = ["L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"]
SIZES = ["L2::64B", "L2::128B", "L2::256B"]
SHARED = ["shared", "shared::cta", "shared::cluster"]
CACHED = ["", "global"]


def scoped(order: str) -> list[str]:
    return [f"{order}.{scope}" for scope in SCOPES]


# The manual's lines, without .unified, .mmio, the priorities of 32-byte accesses and what belongs to functions.
LOADS = {
    *words(["ld"], ["", "weak"], CACHED, ["", "ca", "cg", "cs", "lu", "cv"], ["", "L2::cache_hint"], ["", *SIZES]),
    *words(["ld"], ["", "weak"], CACHED, LEVEL1, ["", "L2::cache_hint"], ["", *SIZES]),
    *words(["ld"], ["", "weak"], ["local", "const", "param", "param::entry", *SHARED]),
    *words(["ld.volatile"], CACHED, ["", *SIZES]),
    *words(["ld.volatile"], ["local", *SHARED]),
    *words(["ld"], scoped("relaxed") + scoped("acquire"), CACHED, ["", *LEVEL1], ["", "L2::cache_hint"], ["", *SIZES]),
    *words(["ld"], scoped("relaxed") + scoped("acquire"), ["local", *SHARED]),
    *words(["ld.global"], ["", "ca", "cg", "cs", "lu", "cv"], ["nc"], ["", "L2::cache_hint"], ["", *SIZES]),
    *words(["ld.global.nc"], LEVEL1, ["", "L2::cache_hint"], ["", *SIZES]),
}

STORES = {
    *words(["st"], ["", "weak"], CACHED, ["", "wb", "cg", "cs", "wt"], ["", "L2::cache_hint"]),
    *words(["st"], ["", "weak"], CACHED, LEVEL1, ["", "L2::cache_hint"]),
    *words(["st"], ["", "weak", "volatile"], ["local", *SHARED]),
    *words(["st.volatile"], CACHED),
    *words(["st"], scoped("relaxed") + scoped("release"), CACHED, ["", *LEVEL1], ["", "L2::cache_hint"]),
    *words(["st"], scoped("relaxed") + scoped("release"), ["local", *SHARED]),
}

ORDERS = ["", "weak", "volatile", "mmio.relaxed.sys", "relaxed", "acquire", "release", "acq_rel"]
SPACES = ["", "global", "local", "const", "param", "param::entry", "param::func", *SHARED]
OPERATORS = ["", "ca", "cg", "cs", "lu", "cv", "wb", "wt"]


def ordered() -> list[str]:
    return [*ORDERS, *(s for order in ("relaxed", "acquire", "release", "weak", "volatile") for s in scoped(order))]


@pytest.mark.parametrize(("name", "known"), [("ld", LOADS), ("st", STORES)])
def test_loads_and_stores_have_the_modifiers_of_the_manual(name: str, known: set[str]) -> None:
    """All others, and all other orders of them, are refused."""
    tried, hints = set(), ["", "L2::cache_hint"]
    for order in ordered():
        tried |= set(words([name], [order], SPACES, OPERATORS, ["", "nc"], ["", LEVEL1[0]], hints, ["", SIZES[0]]))
        tried |= set(words([name], [order], ["", "global", "shared"], ["", "unified"], ["", *LEVEL1], ["", *SIZES]))
        tried |= set(words([name], [order], ["", "global"], ["L2::evict_first", "L2::evict_last", "L2::evict_normal"]))
    for prefix in tried | known:
        assert (access(f"{prefix}.u32") is not None) == (prefix in known), prefix
    for suffix in ("u32", "v2.u32", "v4.f32", "s8", "v2.b64"):
        assert access(f"{name}.global.{suffix}") is not None
    for suffix in ("v8.b32", "b128", "f16", "v3.u32", "v4.v4.u32", "u32.cg", "u32.global", "pred"):
        assert access(f"{name}.global.{suffix}") is None


def test_hints_and_orders_change_no_value() -> None:
    """Each load and store of global memory once: what it reads, what it writes."""
    loads = sorted(p for p in LOADS if not any(s in p for s in ("shared", "local", "const", "param")))
    stores = sorted(p for p in STORES if not any(s in p for s in ("shared", "local")))

    def policy(opcode: str) -> str:
        return ", %rd9" if "cache_hint" in opcode else ""

    body = "createpolicy.fractional.L2::evict_last.b64 %rd9, 0f3F800000;\n"
    for n, opcode in enumerate(loads):
        body += f"{opcode}.u32 %r1, [%rd0+{4 * n}]{policy(opcode)};\nst.global.u32 [%rd1+{4 * n}], %r1;\n"
    for n, opcode in enumerate(stores):
        body += f"ld.global.u32 %r1, [%rd0+{4 * n}];\n{opcode}.u32 [%rd2+{4 * n}], %r1{policy(opcode)};\n"
    source = np.arange(1, 1 + max(len(loads), len(stores)), dtype=U4)
    source.flags.writeable = False
    found = clean(run_ptx(body, source, np.zeros(len(loads), U4), np.zeros(len(stores), U4)))
    assert (found["1"] == source[: len(loads)]).all()
    assert (found["2"] == source[: len(stores)]).all()


def test_atomics_have_the_modifiers_of_the_manual() -> None:
    kinds = [*TYPES, "f16", "bf16", "f16x2", "bf16x2", "b128"]
    operations = [*OPERATIONS, "add.noftz", "sub", "popc"]
    for name, op, kind in product(("atom", "red"), operations, kinds):
        known = kind in OPERATIONS.get(op, []) and not (name == "red" and op in ("exch", "cas"))
        assert (atomic(f"{name}.global.{op}.{kind}") is not None) == known, (name, op, kind)
    for name, orders in (("atom", ["relaxed", "acquire", "release", "acq_rel"]), ("red", ["relaxed", "release"])):
        tried = ["", *ORDERS[1:], "sc", *(s for o in orders for s in scoped(o)), *SCOPES]
        known_orders = {"", *orders, *(s for o in orders for s in scoped(o)), *SCOPES}
        for order, space in product(tried, [*SPACES, "shared::entry"]):
            found = atomic(".".join(p for p in (name, order, space, "add.u32") if p))
            wanted = order in known_orders and space in ("", "global", *SHARED)
            assert (found is not None) == wanted, (name, order, space)
            if found:
                assert found.how.acquire == order.startswith(("acq",))
                assert found.how.release == order.startswith(("release", "acq_rel"))
                scope = next((s for s in SCOPES if s in order.split(".")), "gpu")
                assert found.how.level == SCOPES.index(scope)
    for more in ("atom.global.add.L2::cache_hint.u32", "red.global.add.v2.f32", "atom.add.global.u32"):
        assert atomic(more) is None


def test_fences_have_the_modifiers_of_the_manual() -> None:
    orders = ["", "sc", "acq_rel", "acquire", "release", "relaxed", "weak"]
    limits = ["", "sync_restrict::shared::cta", "sync_restrict::shared::cluster"]
    for order, limit, scope in product(orders, limits, ["", *SCOPES, "gl"]):
        opcode = ".".join(p for p in ("fence", order, limit, scope) if p)
        whole = order in orders[:5] and scope in SCOPES and not limit
        part = (order, limit, scope) == ("acquire", limits[2], "cluster")
        found = fence(opcode)
        assert (found is not None) == (whole or part), opcode
        if found:
            assert (found.acquire, found.release) == (order != "release", order != "acquire")
            assert (found.scope, found.restricted) == (scope, part)
    for scope in ("cta", "gl", "sys", "gpu", ""):
        assert (fence(f"membar.{scope}") is not None) == (scope in ("cta", "gl", "sys"))


def known(line: str) -> bool:
    """False if the executor refuses an instruction, with a sentence that names it."""
    try:
        bound(line)
    except PtxError as e:
        return f"line 14: instruction '{line.split()[0]}'" not in str(e)
    return True


SCOPED = ["release.cta", "release.cluster", "relaxed.cta", "relaxed.cluster", "acquire.cta", "acquire.cluster"]
WINDOWS = ["", "shared", "shared::cta", "shared::cluster"]
BULK = "mbarrier::complete_tx::bytes"


# By operands: the opcodes that are executed, and others that are tried.
CASES: dict[str, tuple[str, set[str], set[str]]] = {
    "barriers": ("%r0", {"bar.sync", "bar.cta.sync", *words(["barrier"], ["", "cta"], ["sync"], ["", "aligned"])},
     words(["bar", "barrier"], ["", "cta"], ["sync", "red.popc", "red.and"], ["", "aligned"], ["", "u32"])),
    "arrivals": ("%r0, %r1", {"bar.arrive", "bar.sync", "barrier.sync.aligned", "barrier.arrive.aligned",
     "barrier.cta.arrive"}, {"bar.arrive.aligned", "bar.aligned.arrive", "barrier.aligned.arrive", "bar.red.popc.u32",
     "bar.cluster.sync"}),
    "clusters": ("", {*words(["barrier.cluster.arrive"], ["", "release", "relaxed"], ["", "aligned"]),
     *words(["barrier.cluster.wait"], ["", "acquire"], ["", "aligned"])}, {"barrier.cluster",
     *words(["barrier.cluster"], ["arrive", "wait"], ["", "aligned"], ["", "release", "relaxed", "acquire"], ["",
     "aligned"])}),
    "warps": ("%r0", {"bar.warp.sync"}, {"bar.warp.arrive", "bar.warp.sync.aligned", "bar.warp"}),
    "proxies": ("", words(["fence", "membar"], ["proxy"],
     ["alias", "async", "async.global", "async.shared::cta", "async.shared::cluster"]), words(["fence", "membar"],
     ["proxy"], ["", "tensormap::generic", "async::generic", "generic"], ["", "acquire", "release"], ["", "gpu",
     "shared::cta"]) | {"fence.mbarrier_init.acquire.cluster", "fence.mbarrier_init.release.gpu",
     "fence.proxy.alias.async", "fence.async", "fence.proxy.async.local"}),
    "beginnings": ("", {"fence.mbarrier_init.release.cluster"}, {"fence.mbarrier_init", "fence.mbarrier_init.release"}),
    "dependents": ("", {"griddepcontrol.wait", "griddepcontrol.launch_dependents"},
     {"griddepcontrol", "griddepcontrol.wait.aligned", "griddepcontrol.launch"}),
    "mbarrier init": ("[%rd0], %r0", words(["mbarrier.init"], WINDOWS[1:3], ["b64"]),
                      words(["mbarrier.init"], ["", "release", "relaxed.cta"], WINDOWS, ["b64", "b32", "u64"])),
    "mbarrier expect": ("[%rd0], %r0", words(["mbarrier.expect_tx"], ["", *SCOPED[2:4]], WINDOWS[1:], ["b64"]),
                        words(["mbarrier.expect_tx"], ["relaxed", "cta", *SCOPED], WINDOWS, ["b64", "u64"])),
    "mbarrier arrive": ("%rd1, [%rd0], %r0",
                        words(["mbarrier.arrive"], ["", "expect_tx"], ["", *SCOPED[:4]], WINDOWS[1:], ["b64"]),
                        words(["mbarrier.arrive", "mbarrier.arrive_drop"], ["", "expect_tx", "noComplete"],
                              ["", "release", "cta", *SCOPED], WINDOWS, ["b64"])),
    "mbarrier parity": ("%p0, [%rd0], %r0",
     words(["mbarrier"], ["test_wait.parity", "try_wait.parity"], ["", *SCOPED[2:]], WINDOWS[1:3], ["b64"]),
     words(["mbarrier"], ["test_wait.parity", "try_wait.parity", "wait.parity"], ["", "acquire", *SCOPED], WINDOWS,
     ["b64"])),
    "cp.async": ("[%r0], [%rd0], 16",
     words(["cp.async"], ["ca", "cg"], WINDOWS[1:3], ["global"], ["", "L2::64B", "L2::128B", "L2::256B"]),
     words(["cp.async"], ["", "ca", "cg", "cs"], WINDOWS, ["", "global"], ["", "L2::cache_hint", "L2::32B"])),
    "groups": ("0", {"cp.async.wait_group", "cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"},
               {"cp.async.wait_group.read", "cp.async.bulk.wait_group.write", "cp.async.wait_all"}),
    "commits": ("", {"cp.async.commit_group", "cp.async.bulk.commit_group", "cp.async.wait_all"},
                {"cp.async.bulk.wait_all", "cp.async.commit", "cp.async.mbarrier.arrive.b64"}),
    "bulk loads": ("[%r0], [%rd0], %r1, [%r2]",
     {f"cp.async.bulk.shared::{window}.global.{BULK}" for window in ("cta",
     "cluster")} | {f"cp.async.bulk.shared::cluster.shared::cta.{BULK}"}, words(["cp.async.bulk"], ["shared",
     "shared::cta", "global"], ["global", "shared::cta", "shared::cluster"], [BULK, "bulk_group",
     ""]) - {f"cp.async.bulk.shared::cta.global.{BULK}"}),
    "bulk stores": ("[%rd0], [%r0], %r1", {"cp.async.bulk.global.shared::cta.bulk_group"},
     {"cp.async.bulk.global.shared::cta", "cp.async.bulk.global.shared::cta.bulk_group.cp_mask",
     "cp.async.bulk.global.shared::cluster.bulk_group", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"}),
    "st.async": ("[%r0], %r1, [%r2]",
     {f"st.async{weak}{window}.{BULK}.{kind}" for weak in ("", ".weak") for window in ("",
     ".shared::cluster") for kind in ("b32", "u32", "s32")}, {f"st.async.{word}.{BULK}.b32" for word in ("volatile",
     "shared::cta", "global", "relaxed.cluster")} | {f"st.async.{BULK}.b16", f"st.async.{BULK}.v3.b32",
     "st.async.b32"}),
    "mapa": ("%rd1, %rd0, %r0", {"mapa.u64", "mapa.shared::cluster.u64"}, {"mapa.shared::cta.u64", "mapa.s64"}),
    "policies": ("%rd0, %f0", words(["createpolicy.fractional"],
     ["L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged"], ["", "L2::evict_first",
     "L2::evict_unchanged"], ["b64"]), {"createpolicy.fractional.L2::evict_last.L2::evict_last.b64",
     "createpolicy.range.L2::evict_last.b64", "createpolicy.fractional.L1::evict_last.b64",
     "createpolicy.fractional.b64", "createpolicy.cvt.L2.b64"}),
    "prefetches": ("[%rd0]", {"prefetch.L1", "prefetch.L2", "prefetch.global.L1", "prefetch.global.L2",
     "prefetch.global.L2::evict_last", "prefetch.global.L2::evict_normal", "prefetchu.L1"}, {"prefetch.local.L1",
     "prefetch.L3", "prefetch.tensormap", "prefetchu.L2", "prefetch.L2::evict_last",
     "prefetch.global.L2::evict_first"}),
    "bulk prefetches": ("[%rd0], %r0", {"cp.async.bulk.prefetch.L2.global"},
                        {"cp.async.bulk.prefetch.L1.global", "cp.async.bulk.prefetch.L2"}),
    "elections": ("%r0|%p0, %r1", {"elect.sync"}, {"elect", "elect.sync.b32"}),
    "jumps": ("$nowhere", set(), {"bra.convergent", "brx.idx", "call"}),
    "ends": ("", {"ret", "ret.uni", "exit"}, {"trap", "brkpt", "exit.uni", "pmevent", "ret.sync"}),
    "sleep": ("%r0", {"nanosleep.u32"}, {"nanosleep", "nanosleep.u64", "nanosleep.b32", "activemask.u32"}),
    "masks": ("%r0", {"activemask.b32"}, {"activemask", "activemask.pred"}),
    "shuffles": ("%r0|%p0, %r1, %r2, 31, -1", words(["shfl.sync"], ["up", "down", "bfly", "idx"], ["b32"]),
     words(["shfl"], ["", "sync"], ["up", "down", "bfly", "idx", "xor", ""], ["b32", "b64", "u32", ""])),
    "votes": ("%p0, %p1, -1", words(["vote.sync"], ["all", "any", "uni"], ["pred"]),
              words(["vote"], ["", "sync"], ["all", "any", "uni", "none"], ["pred", "b32", "b64"])),
    "ballots": ("%r0, %p1, -1", {"vote.sync.ballot.b32"},
                {"vote.ballot.b32", "vote.sync.ballot.pred", "vote.sync.ballot.b64"}),
    "loads": ("%r0, [%rd0]", {"ld.global.u32"}, {"ld.global.f16", "ld.global.xy.u32", "ld.global.q.u32"}),
    "atomics": ("%r0, [%rd0], %r1", {"atom.global.add.u32"}, {"atom.global.add.s64", "atom.global.sub.u32"}),
    "reductions": ("[%rd0], %r1", {"red.global.add.u32"}, {"red.global.exch.b32"}),
    "fences": ("", {"fence.sc.gpu", "membar.gl"}, {"fence.sc", "membar.gpu"}),
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
