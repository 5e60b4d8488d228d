"""If these fail, operations, bytes, phases or places that are shown are not those of the kernels, or times of none."""

import json
import re
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest

from explained import subject_of
from lngen import config
from lngen.compiler.devices import described
from lngen.compiler.ir import FOLDS, WIDE
from lngen.compiler.ir.places import depths, upstream
from lngen.compiler.lower import Plan
from lngen.compiler.problem import Schedule
from lngen.compiler.problem.footprint import vectors_per_thread
from lngen.compiler.spec import Spec, parse_spec
from lngen.lab.explain import Section, Subject, cost, explain, fusion, reasons
from lngen.lab.explain.cost import _table, at, flops, is_free, measured, moved, operations, peak
from lngen.lab.explain.fusion import unfused
from lngen.lab.explain.section import WIDTH, Table
from lngen.lab.explain.steps import CLUSTER, GLOBAL, REGISTERS, SHARED, lives, reads, steps
from lngen.lab.tune.trials import Trial
from lngen.proof.check.inputs import random_inputs
from lngen.proof.ptx import Traffic, run_plan
from own_graphs import own
from plans import own_spec, plans_of_every_template, weights_alone
from schedules import cp_async, multipass, registers, tma, unaligned
from whole_arrays import computed

BACK = "layernorm.bwd:d=1024,dtype=bf16,blocks=2"
CASES = {
    "registers": (BACK, registers(64, 8, 8), 32),
    "prefetch": (BACK, registers(64, 8, 8, "prefetch"), 20),
    "single": (BACK, tma(64, 8, 8, 2, "cached store single"), 16),
    "tma": ("layernorm.bwd:d=1000,dtype=bf16,blocks=2", tma(64, 8, 8, 2, "regs early"), 16),
    "unaligned": ("rmsnorm.fwd:d=1001,dtype=bf16", unaligned(64, 2, 1, 2, grid=2), 5),
    "cp_async": ("rmsnorm.fwd:d=1000,dtype=f32", cp_async(64, 4, 4, 2, "cached", grid=2), 11),
    "multipass": ("layernorm.fwd:d=9001,dtype=f32", multipass(128, 1), 2),
    "columns": ("layernorm.bwd:d=5000,dtype=f32,blocks=2,save=none", multipass(128, 4), 3),
    "quantised": ("rmsnorm.fwd:d=1024,dtype=bf16,quant=e4m3,scales=block", registers(64, 2, 8), 6),
    "cluster": ("layernorm.fwd:d=12288,dtype=bf16", registers(256, 1, 8, cluster=2), 2),
}


@cache
def counted(case: str) -> tuple[Subject, Traffic]:
    subject = subject_of(*CASES[case])
    plan, inputs = subject.plan, random_inputs(subject.plan.spec, subject.rows)
    return subject, run_plan(plan, inputs, source=subject.kernels.text).traffic


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_that_the_kernels_move(case: str) -> None:
    """Idle row groups read the row of another, prefetch one more; TMA reads whole units of unaligned rows."""
    subject, traffic = counted(case)
    plan, s, rows, d = subject.plan, subject.schedule, subject.rows, subject.problem.d
    values, kernels = plan.graph.values(), {k.role: k for k in plan.kernels}
    wide_bytes = idle = 0
    for read in reads(plan):
        kernel, value = kernels[read["kernel"]], values[read["tensor"]]
        wide, blocks = value.type.axes == WIDE, kernel.grid[0](rows) // kernel.cluster
        filled = -(-rows // s.rows_per_block) * s.rows_per_block if kernel.row else rows
        each = blocks * s.rows_per_block if read["per"] == "row group" else filled
        each += blocks * s.rows_per_block if wide and s.prefetch else 0
        found = traffic.tensors[kernel.name][value.name]["bytes_read"]
        more = found - read["count"] * each * d * value.type.dtype.size
        assert 0 <= more <= (32 * each if wide and s.form == "tma_unaligned" else 0), read
        wide_bytes += found * wide
        idle += (each - rows + more) * wide
    written = Counter({n: t["bytes_written"] for k in traffic.tensors.values() for n, t in k.items()})
    sizes = {v.name: prod(v.type.shape(rows, d)) * v.type.dtype.size for v in plan.outputs}
    assert {name: written[name] for name in sizes} == sizes
    assert cost(subject).data["bytes written"]["value"] == sum(sizes.values())
    wide_bytes += sum(written[v.name] for v in plan.outputs if v.type.axes == WIDE)
    assert (moved(plan)[WIDE] * rows * d == wide_bytes) is (idle == 0)


@pytest.mark.parametrize("case", ["registers", "single", "tma", "cluster"])
def test_an_fma_of_an_element_is_an_instruction(case: str) -> None:
    """Exactly, with the elements that pad a row; of other operations at least as many, some in several phases."""
    subject, traffic = counted(case)
    s, p = subject.schedule, subject.problem
    elements = vectors_per_thread(s, p) * p.chunk * s.threads * s.cluster * subject.rows
    ran = Counter[str]()
    for opcode, count in traffic.instructions[subject.plan.kernels[0].name].items():
        ran[opcode.partition(".")[0]] += 32 * count * (".f32" in opcode)
    work = {kind: n[WIDE] * elements for kind, n in operations(subject.plan.graph).items()}
    assert ran["fma"] == work["fma"]
    assert ran["add"] + ran["sub"] >= work["add"]
    assert ran["mul"] >= work["mul"]


WORK = dict.fromkeys(("add", "sub", "mul", "div", "sqrt", "reduce_sum"), 1)
WORK |= dict.fromkeys(("fma", "reduce_dot"), 2)
GRAPHS = [
    "layernorm.fwd:d=7,dtype=bf16",
    "layernorm.bwd:d=9001,dtype=f32,save=none",
    "gated_rmsnorm.bwd:d=13,dtype=f16",
]
GRAPHS += ["cross_entropy.bwd:d=10,dtype=f32", "dyt.bwd:d=6,dtype=f32", "layernorm_act.fwd:d=5,dtype=bf16"]


@pytest.mark.parametrize("spec", [*map(parse_spec, GRAPHS), own("scaled", "bwd"), own("larger"), own("loss", "bwd")])
def test_flops_are_those_of_the_interpreter(spec: Spec) -> None:
    """It computes arrays, or reduces them; each counts by the length that it has."""
    subject, done = subject_of(spec, rows=3), Counter[str]()
    for eqn, args, out in computed(subject.plan.graph, random_inputs(spec, 3)):
        done[eqn.op] += np.broadcast(*args).size if eqn.op in FOLDS else out.size
    assert at(flops(subject.plan.graph), subject) == sum(WORK.get(op, 0) * n for op, n in done.items())


def test_what_is_kept_depends_on_what_is_saved() -> None:
    """Of 5 rows of 12: two statistics and x, gamma; x and gamma alone; y, a statistic, gamma and beta."""
    for save, kept in {"stats": (40, 288), "none": (0, 288), "y": (260, 96)}.items():
        data = cost(subject_of(f"layernorm.fwd:d=12,dtype=f32,save={save}", rows=5)).data
        assert (data["saved by forward"]["value"], data["inputs kept"]["value"]) == kept


def test_peaks_are_those_of_the_datasheets() -> None:
    """Tflops of f32 without tensor cores, as NVIDIA states them."""
    stated = {"t4": 8.1, "a100": 19.5, "h100": 67, "h200": 67, "l40s": 91.6, "rtx4090": 82.6, "rtx5090": 104.8}
    assert {name: peak(described()[name]) / 1e12 for name in stated} == pytest.approx(stated, rel=0.02)


BOUND = {
    ("layernorm.bwd:d=1024,dtype=bf16", tma(64, 8, 8, 2), 2**20): "memory",
    ("layernorm.bwd:d=1024,dtype=bf16", tma(64, 8, 8, 2), 1): "latency",
    ("layernorm.bwd:d=1024,dtype=bf16", multipass(64, 8), 2**20): "waiting",
    ("layernorm.fwd:d=65536,dtype=bf16", multipass(1024, 1), 2**14): "memory",
    ("layernorm_act.fwd:d=1024,dtype=bf16,act=gelu", "", 2**20): "issuing",
}


@pytest.mark.parametrize("case", BOUND, ids=str)
def test_one_split_of_the_time_adds_up_in_every_section(case: tuple[str, Schedule | str, int]) -> None:
    """Memory takes what the roofline says."""
    subject = subject_of(*case)
    sections = cost(subject), reasons(subject)
    found, why = sections[0].data["bound"], sections[1].data
    assert sum(found["parts"].values()) == pytest.approx(found["us"])
    assert min(found["parts"].values()) >= 0
    assert (found["us"], found["parts"], found["by"]) == (why["predicted_us"], why["parts"], why["by"])
    assert found["by"] == BOUND[case]
    (roof,) = (r["memory us"] for r in sections[0].data["roofline"] if r["GPU"] == subject.device.name)
    assert found["parts"]["memory"] == pytest.approx(roof)
    assert f"memory {roof:.4g}," in " ".join(str(sections[0]).split())
    assert re.search(rf"^  memory +{roof:.4g} +every", str(sections[1]), re.MULTILINE)
    assert not re.search(r"^  \w+ +0  ", str(sections[1]), re.MULTILINE), "no part without a time"


def test_without_rows_all_sections_are_about_the_same_ones() -> None:
    subject = subject_of("layernorm.bwd:d=4096,dtype=bf16", rows=None)
    assert {section.data.get("rows", subject.rows) for section in explain(subject, ["cost", "schedule"])} == {8192}
    assert cost(subject).blocks[0].columns[2] == "at 8192 rows"


def test_a_record_is_the_nearest_of_this_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("layernorm.fwd:d=1024,dtype=bf16", rows=1000)
    spec, mine = str(subject.plan.spec), str(subject.schedule)
    trial = Trial(spec, 1024, "A", "NVRTC 1", mine, "", 0, "correct", us_median=3.0).to_json()
    lines = [trial, {**trial, "us_median": 2.0, "schedule": "form=old"}, {**trial, "rows": 9, "us_median": 1.0}]
    lines += [{**trial, "spec": f"{spec},eps=1.0", "us_median": 1.0}, {**trial, "in_turn": True, "us_median": 4.0}]
    about = {"device": "B", "lngen": "0.0.9", "kernels": "0", "method": "each call waits"}
    at = {"spec": spec, "rows": 500}
    latency = {**at, "kind": "latency", "records": [["lngen", 1, "form=old"]]}
    points = [{**at, "records": [["copy"], ["lngen", 5, "form=old"]]}, latency]
    packed = {"columns": ["provider", "us_median", "schedule"], "points": points}
    benched = {"conditions": about, "records": packed}
    swept = {"device": "C", "points": [{"spec": spec, "rows": 1000, "us": {mine: 6}}]}
    files = {"tuned/x.jsonl": lines, "tune/trials.jsonl": [{**trial, "device": "mine"}]}  # the last is the user's own
    for name, listed in {**files, "bench/y.json": [benched], "bench/z.json": [swept]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(map(json.dumps, listed)))
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "data_dir", lambda name: tmp_path)
    found = measured(subject)
    assert {(r["GPU"], r["calls"]): (r["rows"], r["us"], r["schedule"] == mine, r["version"]) for r in found} == {
        ("mine", "overlapped"): (1024, 3, True, "NVRTC 1"),
        ("A", "overlapped"): (1024, 3, True, "NVRTC 1"),
        ("A", "in turn"): (1024, 4, True, "NVRTC 1"),
        ("B", "in turn"): (500, 5, False, "lngen 0.0.9"),
        ("C", "not recorded"): (1000, 6, True, ""),
    }


def test_a_column_of_which_nothing_is_recorded_is_left_out() -> None:
    """And a long text goes on below its cell."""
    earlier = [{"calls": calls, "generator": "earlier"} for calls in ("in turn", "not recorded")]
    for rows, columns in (([{"rows": 1, "calls": "not recorded", "version": ""}], ("rows",)),
                          (earlier, ("calls", "lngen's generator"))):  # fmt: skip
        assert _table(rows).columns == columns
        assert "not recorded" not in str(Section("s", "S", (_table(rows),)))
    long = ",".join(f"field_{n}={n}" for n in range(20))
    head, *lines = str(Section("s", "S", (Table(("us", "as"), (("1", long), ("2", ""))),))).splitlines()[2:]
    assert (head, lines[0][:13], lines[-1]) == ("  us  as", "  1   field_0", "  2")
    assert "".join(line[6:] for line in lines) == long
    assert max(map(len, lines)) <= WIDTH


# ---- fusion: phases, places and reasons ----


def test_steps_and_places_are_those_of_the_kernels() -> None:
    for plan in plans_of_every_template():
        check_steps(plan)
        check_places(plan)


def check_steps(plan: Plan) -> None:
    """Each value comes after what it needs, in its kernel or an earlier one; a phase ends for sums of later values."""
    graph, made, levels = plan.graph, plan.graph.values(), depths(plan.graph)
    args = {e.out.name: {a.name for a in e.args} for e in graph.eqns}
    handed = {p.name for p in graph.params}
    every, known, kernel = steps(plan), {*handed}, ""
    for n, step in enumerate(every):
        known = {*known, *step["defines"]} if step["kernel"] == kernel else {*handed, *step["defines"]}
        kernel = step["kernel"]
        assert all(args[name] <= known for name in step["defines"] if name not in step["columns"]), (plan.name, step)
        handed |= {*step["stores"], *step["columns"]}
        again = any(s["inside"] and s["kernel"] == kernel for s in every[n + 1 :])
        assert any(step["needs"].values()) or not (again and step["inside"]), (plan.name, "no reason for a phase")
        for name, users in step["needs"].items():
            assert all(made[name] in upstream(graph.eqns, [made[u]]) for u in users), (plan.name, name)
            assert all(levels[made[u]] > step["phase"] for u in users), (plan.name, "no earlier phase can compute it")
    assert {*args} == {name for step in every for name in step["defines"]}, plan.name


def check_places(plan: Plan) -> None:
    """What is in registers or in shared memory has an array there."""
    every, text = steps(plan), subject_of(plan.spec, plan.schedule).kernels.text
    for rows in (k for k in plan.kernels if k.row):
        found = lives(rows, plan)
        assert all(begin < end for stays in found.values() for _, begin, end in stays), plan.name
        assert any(level == CLUSTER for stays in found.values() for level, *_ in stays) is (rows.cluster > 1), plan.name
        for name in {t.name for t in rows.inputs.element} & {name for step in every for name in step["loads"]}:
            held, staged = f" {name}_row_[Row::VECTORS];" in text, f" {name}_shared_ = " in text
            assert {level for level, *_ in found[name]} == {GLOBAL, *[SHARED] * staged, *[REGISTERS] * held}, (
                plan.name,
                name,
            )


FUSED = [*map(parse_spec, ("layernorm.bwd:d=24,dtype=bf16", "gated_rmsnorm.fwd:d=7,dtype=f16"))]


@pytest.mark.parametrize("spec", [*FUSED, own("scaled", "bwd"), own("loss"), own("larger")], ids=str)
def test_unfused_bytes_are_those_of_the_arrays(spec: Spec) -> None:
    """Of the interpreter, which has an array for each equation."""
    graph = spec.trace()["cse"]
    numbers = {e.out for e in graph.eqns if is_free(e) and not e.out.type.axes}
    done = computed(graph, random_inputs(spec, 5))
    apart = [(e, args, out) for e, args, out in done if e in graph.eqns and not is_free(e)]
    read = [{a: x.nbytes for a, x in zip(e.args, args, strict=True) if a not in numbers} for e, args, _ in apart]
    moved = sum(out.nbytes for *_, out in apart) + sum(sum(of.values()) for of in read)
    count, amount = unfused(spec)
    assert (count, at(amount, subject_of(spec, rows=5))) == (len(apart), moved)


def test_the_section_says_why_there_is_a_second_kernel() -> None:
    found = [fusion(subject_of("layernorm.bwd:d=1024,dtype=bf16", s)) for s in (
        tma(64, 8, 8, 2), tma(64, 8, 8, 2, "single"), multipass(64, 8),
    )]  # fmt: skip
    roles = [[k["role"] for k in section.data["kernels"]] for section in found]
    assert roles == [["rows", "finish"], ["rows"], ["rows", "columns", "finish"]]
    texts = [" ".join(str(section).split()) for section in found]
    for text, why in zip(texts, ("by a kernel of its own", "after a grid barrier", "reads rows again"), strict=True):
        assert why in text
    assert "mean_dy_gamma_xhat_sum over the whole row, before dx32_part, dx32_part_1" in texts[0]
    assert max(map(len, str(found[0]).splitlines())) <= WIDTH
    assert "Results without rows" in str(fusion(subject_of(own_spec(weights_alone))))
