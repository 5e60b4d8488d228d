"""The schedule model and the GPUs it knows: physics, what is sane on every GPU, and what a default costs."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from dataclasses import fields, replace
from importlib.resources import files
from itertools import cycle, product
from random import Random

import numpy as np
import pytest

import sampling
from lngen.cli.inspection import spilled_bytes
from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import (
    Device,
    capability,
    default_device,
    described,
    device_for,
    device_names,
    live_device,
    named,
)
from lngen.compiler.lower import lower
from lngen.compiler.problem import ANY, Schedule, fits, footprint, is_legal, legal, parse_schedule
from lngen.compiler.problem.footprint import has_room, register_limit, registers
from lngen.compiler.schedule import MOST_TRIED, ranked, workload
from lngen.compiler.schedule.model import MODEL, Features, Model, _row_work, estimated, estimates, features, last_resort
from lngen.compiler.schedule.space import FIELDS, WORTH, Schedules, roomy_space, space
from lngen.compiler.schedule.table import MANY, OF_NORMS, TIGHT, Key, fitted, measured, tables
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import supported_arches
from lngen.errors import MissingError
from plans import BACKWARD, FORWARD, H200, ROWS, STAGED, problem_of


def us(s: Schedule, spec: str = FORWARD, rows: int = 16384, device: Device = H200, model: Model = MODEL) -> float:
    """Microseconds that the model expects."""
    return float(estimates(features(Schedules.of([s]), problem_of(spec), rows, device), device, model)[0])


# ---- the model ----


def test_the_model_has_few_constants_each_with_a_reason() -> None:
    names = [f.name for f in fields(Model)]
    assert len(names) <= 15
    assert Model.__doc__ is not None
    for name in names:
        assert re.search(rf"\n    {name}\s{{2,}}\w+", Model.__doc__), f"{name} has no reason"
        assert replace(MODEL, **{name: 2 * getattr(MODEL, name)}) != MODEL


def test_every_constant_moves_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that none of these kernels feels would be none."""
    cases = [
        (ROWS, FORWARD), (STAGED, FORWARD), (replace(STAGED, dynamic=True), FORWARD),
        (replace(STAGED, threads=64, cluster=8, blocks_per_sm=1, grid=15), "layernorm.fwd:d=65536,dtype=bf16"),
        (Schedule("registers", 128, 2, 8, blocks_per_sm=4), BACKWARD),
    ]  # fmt: skip
    for f in fields(Model):
        more = replace(MODEL, **{f.name: 1.5 * getattr(MODEL, f.name)})
        assert any(us(s, spec, model=more) != us(s, spec) for s, spec in cases), f.name
    needed = [registers(s, problem_of(spec)) for s, spec in cases]
    for name in ("BASE_REGISTERS", "LIVE_REGISTERS", "REUSED_REGISTERS"):
        with monkeypatch.context() as changed:
            changed.setattr(footprint, name, 1.5 * getattr(footprint, name))
            assert [registers(s, problem_of(spec)) for s, spec in cases] != needed, name


@pytest.mark.parametrize("s", [ROWS, STAGED, replace(STAGED, form="cp_async")])
def test_time_follows_rows_and_memory(s: Schedule) -> None:
    times = [us(s, rows=rows) for rows in (1, 1000, 10_000, 100_000, 200_000)]
    assert times == sorted(times)
    assert 1.8 < times[4] / times[3] < 2.1, "many rows: twice the rows, twice the time"
    moved = 200_000 * 4096 * 4 / H200.bandwidth_gb_s / 1e3
    assert moved < times[4] < 2 * moved, "no faster than memory"
    slow = replace(H200, bandwidth_gb_s=H200.bandwidth_gb_s / 4)
    assert 2 < us(s, rows=200_000, device=slow) / times[4] < 4
    late = replace(H200, latency_ns=4 * H200.latency_ns)
    assert us(s, rows=1, device=late) - times[0] == pytest.approx(3 * H200.latency_ns / 1e3)


def test_a_sum_over_the_threads_of_a_row_takes_steps_of_shuffles() -> None:
    """Per sum: a shuffle and an addition for each doubling of threads in a warp, then what warps exchange."""
    f = features(Schedules.of([ROWS]), problem_of(FORWARD), 16384, H200)

    def cycles(threads: int, sums: int) -> float:
        one = replace(f, threads=np.array([threads]), reductions=sums, elements=np.array([0]))
        return float(_row_work(one, np.array([0.0]), 1.0, MODEL)[0])

    for threads, steps in ((1, 0), (2, 1), (8, 3), (32, 5)):
        assert cycles(threads, 1) - cycles(threads, 0) == pytest.approx(30 * steps)
        assert cycles(threads, 3) - cycles(threads, 0) == pytest.approx(90 * steps)
    assert cycles(64, 1) - cycles(64, 0) > 150


@pytest.mark.parametrize(("spec", "more", "stages", "fitting"), [
    ("rmsnorm.fwd:d=4096,dtype=bf16", 0, 6, [(128, 6)]),
    ("add_rmsnorm.fwd:d=4096,dtype=bf16", 1, 6, [(128, 6)]),
    ("add_rmsnorm.fwd:d=4096,dtype=bf16", 0, 6, [(128, 3), (256, 3)]),
    ("add_rmsnorm.fwd:d=4096,dtype=bf16", 0, 3, [(128, 2), (256, 2)]),
    ("rmsnorm.fwd:d=4096,dtype=bf16", 1, 3, [(128, 6), (256, 6)]),
    ("add_rmsnorm.bwd:d=4096,dtype=bf16", 0, 6, [(128, 4), (256, 4)]),
])  # fmt: skip
def test_rows_of_other_inputs_have_as_many_bytes_in_flight(
    spec: str, more: int, stages: int, fitting: list[tuple[int, int]]
) -> None:
    """Fewer stages where there are more inputs than in the entry, but two at least; and once twice the threads."""
    entry, key = replace(STAGED, stages=stages), Key("fwd", 2, 4096, more)
    assert [(s.threads, s.stages) for s in fitted(entry, problem_of(spec), H200, key)] == fitting


def test_bytes_in_flight_hide_latency() -> None:
    """Little's law: with few rows on their way, more blocks or stages are faster, until memory is the limit."""
    few, more = (us(replace(STAGED, blocks_per_sm=n, grid=132 * n)) for n in (1, 4))
    assert few > 1.3 * more
    assert us(replace(STAGED, blocks_per_sm=1, grid=132, stages=2)) > us(replace(STAGED, blocks_per_sm=1, grid=132))


def test_what_only_few_can_do_costs() -> None:
    wide = "layernorm.fwd:d=65536,dtype=bf16"
    spread = replace(STAGED, threads=256, cluster=8, blocks_per_sm=1, grid=15, row_in_registers=True)
    assert us(replace(spread, dynamic=True), wide, 15) > us(spread, wide, 15) + 1, "the first claims are waited for"
    assert us(Schedule("registers", 32, 1, 8), "layernorm.fwd:d=256,dtype=bf16", 10**6) > us(
        Schedule("registers", 32, 4, 8), "layernorm.fwd:d=256,dtype=bf16", 10**6
    ), "a block is started for each row"
    tight = replace(ROWS, threads=32, blocks_per_sm=16)
    assert registers(tight, problem_of(FORWARD)) > register_limit(tight)
    assert us(tight) > us(tight, device=replace(H200, registers=2 * H200.registers)), "registers spill"


# ---- columns ----

SPREAD = [
    *("layernorm.fwd:d=4096,dtype=bf16", "layernorm.fwd:d=4093,dtype=bf16", "gated_rmsnorm.fwd:d=16384,dtype=bf16"),
    *("layernorm.bwd:d=768,dtype=bf16", "layernorm.bwd:d=20000,dtype=bf16", "rmsnorm.bwd:d=65536,dtype=f32"),
    "rmsnorm.fwd:d=65536,dtype=f64,gamma=no",
]


@pytest.mark.parametrize("spec", SPREAD)
def test_features_of_many_are_those_of_each(spec: str) -> None:
    """A formula that depended on a field it does not name would get the value of another schedule."""
    p = problem_of(spec)
    listed = space(p)
    together = features(Schedules.of(listed), p, 1000, H200)
    for n in range(0, len(listed), 37):
        alone = features(Schedules.of([listed[n]]), p, 1000, H200)
        for f in fields(Features):
            assert getattr(together, f.name)[n] == getattr(alone, f.name)[0], (f.name, str(listed[n]))


def test_a_formula_is_computed_once_for_what_is_alike() -> None:
    listed = space(problem_of(FORWARD))
    seen: list[Schedule] = []
    values = Schedules.of(listed).each(lambda s: seen.append(s) or s.threads + s.cluster, "threads", "cluster")
    assert values.tolist() == [s.threads + s.cluster for s in listed]
    assert len(seen) == len({(s.threads, s.cluster) for s in listed}) < len(listed) / 100


@pytest.mark.parametrize(("spec", "arch"), [*zip(SPREAD, cycle(("sm_75", "sm_80", "sm_90", "sm_120")), strict=False)])
def test_the_roomy_space_is_what_has_room(spec: str, arch: str) -> None:
    p, device = problem_of(spec), device_for(arch)
    assert [*roomy_space(p, device)] == [s for s in space(p, device) if has_room(s, p, device)]
    clean = [s for s in space(p, device) if fits(s, p, device)]
    assert sorted(estimated(p, device)) == (clean or [*roomy_space(p, device)])


# ---- what a default costs ----

COSTLY = [
    "layernorm.fwd:d=32768,dtype=f32", "layernorm.fwd:d=4096,dtype=bf16", "layernorm.bwd:d=768,dtype=f16,wrt=x",
    "layernorm.bwd:d=16384,dtype=bf16", "rmsnorm.fwd:d=5000,dtype=f64,gamma=no", "layernorm.fwd:d=1001,dtype=bf16",
]  # fmt: skip


@pytest.mark.parametrize("spec", COSTLY)
def test_enumerating_looks_at_few_rules(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule once for what is alike in its fields: some 6,000 schedules take 30 ms."""
    looked = Counter[str]()

    def counting(names: str, rules: legal.Rules) -> legal.Rules:
        return lambda s, p: looked.update([names]) or rules(s, p)

    monkeypatch.setattr("lngen.compiler.schedule.space.RULES", [(n, counting(n, rules)) for n, rules in legal.RULES])
    p = problem_of(spec)
    found = space(p, replace(H200, name=f"for {spec}"))  # nobody has asked for it yet
    assert len(found) < 9000
    assert looked.keys() == dict(legal.RULES).keys()
    assert looked.total() < 0.5 * len(found)
    monkeypatch.undo()
    assert len(set(found)) == len(found)
    assert all(is_legal(s, p) for s in found)


@pytest.mark.parametrize("spec", [*COSTLY, "layernorm.bwd:d=65536,dtype=bf16", "rmsnorm.bwd:d=1001,dtype=f16"])
def test_the_space_is_what_the_rules_say(spec: str) -> None:
    """A rule depends on no field but its own; a schedule near one of the space is in it if it is legal and worth it."""
    p, random = problem_of(spec), Random(4)
    listed = space(p)
    there, values = {*listed}, {f: sorted({getattr(s, f) for s in listed}) for f in FIELDS if f != "vec"}
    rules = [(names, lambda s, r=r: [holds for holds, _ in r(s, p)]) for names, r in legal.RULES]
    worth = [(names, lambda s, r=r: r(p, H200, s)) for names, r in WORTH]
    for s in random.sample(listed, 200):
        other = replace(s, **{f: random.choice(found) for f, found in values.items()})
        for names, rule in (*rules, *worth):
            assert rule(replace(other, **{n: getattr(s, n) for n in names.split()})) == rule(s), (names, s, other)
        for _ in range(10):
            near = replace(s, **{f: getattr(other, f) for f in random.sample(FIELDS, 2)})
            grids = 0, H200.resident_clusters(near.cluster) * near.blocks_per_sm
            wanted = near.grid in grids and is_legal(near, p) and all(rule(near) for _, rule in worth)
            assert (near in there) == wanted, near


def test_the_search_for_a_clean_default_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight are compiled, first those that are each less tight than those before, then others in the model's order.

    Then form multipass, with each number of threads that leaves them all registers. The one that spills least is taken.
    """
    tried: list[Schedule] = []

    def spill(kernels: KernelSet, *arches: str) -> int:
        tried.append(kernels.plan.schedule)
        return 100 - 10 * (len(tried) == 2)

    monkeypatch.setattr(KernelSet, "spilled", spill)
    monkeypatch.setenv("LNGEN_DEBUG", "1")
    spec = parse_spec("layernorm.bwd:d=1024,dtype=f64")
    assert Compilation(spec).schedule() == tried[1]
    p = problem_of(str(spec))
    last = last_resort(p, H200)
    assert {s.form for s in last} == {"multipass"}
    assert sorted(s.block for s in last) == [32, 64, 128, 256]
    assert {register_limit(s) for s in last} == {255}
    assert len(tried) == len({*tried}) == MOST_TRIED + len(last) == 8 + 4
    listed = ranked(p)
    tight = [registers(s, p) / register_limit(s) for s in listed]
    falling = [s for n, s in enumerate(listed) if tight[n] < min(tight[:n], default=math.inf)]
    others = [s for s in listed if s not in falling]
    assert 2 <= len(falling) < MOST_TRIED
    assert tried == [*[*falling, *others][:MOST_TRIED], *last]
    told = f"{spec}: registers spill, 90 bytes a thread, the least of {len(tried)} schedules: "
    assert told in capsys.readouterr().err
    monkeypatch.setenv("LNGEN_DEBUG", "0")
    Compilation(spec).schedule()
    assert capsys.readouterr().err == ""


def test_without_a_compiler_nothing_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise MissingError("no compiler")

    monkeypatch.setattr(KernelSet, "cubin", missing)
    assert spilled_bytes(KernelSet(lower(parse_spec(FORWARD), ROWS)), "sm_90") == 0
    assert Compilation(parse_spec(FORWARD)).schedule() == ranked(problem_of(FORWARD))[0]


# ---- sane on every GPU ----

WIDTHS = (64, 1000, 1024, 4093, 4096, 12288, 65536)
KINDS = product(
    ("layernorm.fwd", "layernorm.bwd"),
    WIDTHS,
    ("bf16", "f32"),
    ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"),
)


@sampling.grid(("what", "d", "dtype", "arch"), KINDS, strength=1)
def test_the_default_is_clean_on_every_arch(what: str, d: int, dtype: str, arch: str) -> None:
    pytest.importorskip("cupy")
    if arch not in supported_arches():
        pytest.skip(f"this compiler has no {arch}")
    spec = parse_spec(f"{what}:d={d},dtype={dtype}")
    schedule = Compilation(spec).schedule(arch)
    used = KernelSet(lower(spec, schedule)).cubin(arch).resources
    spilled = [(n.split("__")[-1], r) for n, r in used.items() if r.spills]
    assert not spilled, schedule


def test_the_table_serves_what_is_like_the_norms_that_were_measured() -> None:
    """More inputs where they were measured, or where a cluster shares rows; not much more arithmetic."""
    device = device_for("sm_90")

    def first(spec: str) -> list[Schedule]:
        p = problem_of(spec)
        return list(measured(p, workload(p, None, device), device))

    (own,) = first("layernorm.bwd:d=16384,dtype=bf16")
    more = first("add_layernorm.bwd:d=16384,dtype=bf16")
    assert [(s.cluster, s.rows_per_block) for s in more] == [(own.cluster, own.rows_per_block)] * 2
    assert [s.threads for s in more] == [own.threads, 2 * own.threads]
    assert [s.stages for s in more] == [max(2, own.stages * 2 // 3)] * 2  # as many bytes in flight
    assert first("add_layernorm.bwd:d=4096,dtype=bf16") == []  # no cluster
    assert len(first("add_layernorm.fwd:d=4096,dtype=bf16")) == 1
    assert first("add_layernorm.fwd:d=4096,dtype=f32") == []  # two inputs of 4 bytes, no column sums
    assert first("rmsnorm_act.bwd:d=4096,dtype=bf16") == []  # arithmetic, of which none was measured
    assert first("layernorm_act.bwd:d=4096,dtype=bf16") != first("layernorm.bwd:d=4096,dtype=bf16") != []
    assert problem_of("parallel_layernorm.bwd:d=4096,dtype=bf16").operations <= OF_NORMS["bwd"]
    softmax = problem_of("softmax.fwd:d=16384,dtype=bf16")  # more arithmetic than norms, of which none was measured
    assert {key.heavy for table in tables() for key, _ in table.near(softmax, MANY)} == {0}


ENTRIES = [
    (graph, key, line, dtype)
    for table in tables()
    for key, lines in table.entries.items()
    if not (key.more or key.heavy or key.sets) and (key.direction, key.element, key.d) not in TIGHT
    for line in dict.fromkeys(lines.values())
    for graph in ("layernorm", "rmsnorm")
    for dtype in {2: ("bf16",), 4: ("f32",), 8: ("f64",)}[key.element]
]


@pytest.mark.full
@pytest.mark.parametrize(("graph", "key", "line", "dtype"), ENTRIES[::32], ids=str)
def test_a_measured_schedule_is_clean_and_asks_no_compiler(graph: str, key: Key, line: str, dtype: str) -> None:
    """So a default that was measured needs no compile log to be shown."""
    pytest.importorskip("cupy")
    compilation = Compilation(parse_spec(f"{graph}.{key.direction}:d={key.d},dtype={dtype}"))
    (schedule,) = fitted(parse_schedule(line, ANY), compilation.problem, H200, key)
    kernels = compilation.kernels(schedule)
    assert kernels.known_clean("sm_90")
    assert not kernels.known_clean("sm_80")
    assert kernels.spilled("sm_90") == 0


@pytest.mark.parametrize("spec", ["layernorm.fwd:d=4096,dtype=f16", "layernorm.fwd:d=4096,dtype=bf16,weight=f32",
                                  "softmax.fwd:d=4096,dtype=bf16", "layernorm.bwd:d=12800,dtype=bf16"])  # fmt: skip
def test_what_was_not_measured_asks_the_compiler(spec: str) -> None:
    compilation = Compilation(parse_spec(spec))
    schedule = next(measured(compilation.problem, 1024, H200), None)
    assert schedule is None or not compilation.kernels(schedule).known_clean("sm_90")


# ---- described GPUs ----


WANTED = {"h200", "h100", "a100", "l40s", "rtx4090", "b200", "t4"}


def test_every_device_is_described() -> None:
    assert {*device_names()} >= WANTED
    for name in device_names():
        device = named(name)
        assert device.clusters[0] == device.multiprocessors, name
        assert device.shared_block_kib + device.shared_reserved_kib <= device.shared_kib, name
        assert 100 < device.bandwidth_gb_s < 20_000, name
        assert 300 < device.latency_ns < 3000, name
        # What Little's law asks of a multiprocessor fits its shared memory.
        assert device.bandwidth_gb_s * device.latency_ns / device.multiprocessors < device.shared_kib * 1024, name


def test_clusters_of_more_blocks_are_fewer_and_fit_the_multiprocessors() -> None:
    for name, device in described().items():
        assert len(device.clusters) == device.largest_cluster.bit_length(), name
        assert all(n << k <= device.multiprocessors for k, n in enumerate(device.clusters)), name
        assert [*device.clusters] == sorted(device.clusters, reverse=True), name
        assert device.resident_clusters(1) == device.multiprocessors
        assert device.resident_clusters(2 * device.largest_cluster) == 0, name


def test_every_figure_of_a_device_has_a_source() -> None:
    for name in device_names():
        text = files("lngen.compiler.devices").joinpath(f"{name}.toml").read_text(encoding="utf-8")
        figures = text[text.index("multiprocessors") :].splitlines()
        for number, line in enumerate(figures):
            if "=" in line and not line.startswith("#"):
                assert "#" in line or figures[number - 1].startswith("#"), f"{name}: {line}"
        assert set(tomllib.loads(text)) <= {f.name for f in fields(Device)} | {"stands_for"}, name


def test_an_arch_has_one_device_that_stands_for_it_and_the_limits_of_its_own() -> None:
    assert default_device() == named("h200") == device_for("sm_90")
    assert device_for("sm_90a").multiprocessors == 132
    assert device_for("sm_86").shared_kib == 100
    assert device_for("sm_86").blocks == 16
    assert device_for("sm_87").shared_kib == 164
    assert device_for("sm_87").name == named("a100").name
    assert device_for("sm_120").barriers == 24
    assert device_for("sm_120").clusters == (170, 85, 40, 20)
    assert device_for("sm_103").barriers == 32
    assert device_for("sm_75").tma is False
    assert device_for("sm_75").clusters == (40,)
    for arch in ("sm_50", "compute_90", ""):
        assert device_for(arch) == device_for("sm_75"), "whatever the compiler will say to it"
    assert device_for("sm_999").arch == "sm_999"
    assert capability("sm_100a") == 100
    assert capability("sm_9") == 0


def test_a_name_is_found_in_any_case() -> None:
    assert named("H200") == named("h200")


def test_a_live_device_completes_its_description() -> None:
    reported = {
        "name": b"NVIDIA H200", "multiProcessorCount": 66, "l2CacheSize": 30 * 2**20, "sharedMemPerBlockOptin": 0,
        "regsPerMultiprocessor": 65536, "unknown": 3,
    }  # fmt: skip
    half = live_device("sm_90", reported)
    assert (half.multiprocessors, half.l2_mib, half.shared_block_kib) == (66, 30, 227)
    assert half.clusters == (66, 33, 15, 7, 3), "of half the multiprocessors"
    assert half.bandwidth_gb_s == 4800
    other = live_device("sm_90", {"name": "Some GPU", "multiProcessorCount": 114})
    assert (other.name, other.multiprocessors, other.arch) == ("Some GPU", 114, "sm_90")
    assert live_device("sm_89", {"name": b"NVIDIA GeForce RTX 4090"}) == named("rtx4090")
