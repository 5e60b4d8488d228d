"""Plans and their description: if these fail, an equation stands in a wrong place, or a launcher is told wrongly."""

import json
import pickle
import random
import re
from dataclasses import fields, replace

import pytest

from bits import spec_of
from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.contract import described
from lngen.compiler.emit import emit
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, M, S, is_segment_sum
from lngen.compiler.ir.places import depths
from lngen.compiler.lower import Extent, Plan, lower
from lngen.compiler.lower.cuda.spelling import declaration, note
from lngen.compiler.lower.kept import in_loop, saved
from lngen.compiler.problem import Schedule, problem
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import make_spec, parse_spec
from lngen.compiler.toolchain import compile_cubin
from lngen.config import data_dir
from lngen.errors import LowerError
from lngen.files import sha256
from plans import PLANS, SHARED, best, gated, notes, own_spec, plan_of
from schedules import multipass, registers
from smooth_graphs import smooth_graph
from spills import REPORTED


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PLANS[request.param])


def test_every_template_is_covered() -> None:
    used = {k.template for args in PLANS.values() for k in plan_of(*args).kernels}
    used |= {"elementwise.cu.jinja", "numbers.cu.jinja"}  # of no named graph; tests/compiler/bits runs them
    used |= {f"{part}_of_sets.cu.jinja" for part in ("columns", "finish", "sums")}  # test_sets.py there does
    assert used | SHARED == {p.name for p in data_dir("templates").glob("*.cu.jinja")}


def test_every_equation_is_a_note_of_some_kernel(plan: Plan) -> None:
    found = set().union(*map(notes, plan.kernels))
    assert found == {note(e) for e in plan.graph.eqns}


@pytest.mark.parametrize(("extent", "text", "blocks"), [
    (Extent(), "1", [1, 1, 1, 1]),
    (Extent(5), "5", [5, 5, 5, 5]),
    (Extent(per=1), "M", [0, 1, 7, 1000]),
    (Extent(per=2), "ceil(M / 2)", [0, 1, 4, 500]),
    (Extent(per=1, limit=132), "min(132, M)", [0, 1, 7, 132]),
    (Extent(per=2, limit=3), "min(3, ceil(M / 2))", [0, 1, 3, 3]),
    (Extent(per=1, limit=30, times=4), "4 * min(30, M)", [0, 4, 28, 120]),
    (Extent(per=8, limit=3, least=1), "max(1, min(3, ceil(M / 8)))", [1, 1, 1, 3]),
    (Extent(per=2, times=2, least=2), "max(2, 2 * ceil(M / 2))", [2, 2, 8, 1000]),
])  # fmt: skip
def test_extents(extent: Extent, text: str, blocks: list[int]) -> None:
    assert str(extent) == text
    assert [extent(rows) for rows in (0, 1, 7, 1000)] == blocks


@pytest.mark.parametrize(("spec", "alone", "of_all"), [
    ("cross_entropy.fwd:d=4096,dtype=bf16,target=index", {"known", "hit", "log", "loss"}, {"top", "class_index"}),
    ("cross_entropy.fwd:d=4096,dtype=bf16,target=index,x_grad=yes", {"hit", "log", "loss"}, {"top", "known"}),
    ("layernorm.fwd:d=4096,dtype=bf16", set(), {"mean", "rstd"}),
])  # fmt: skip
def test_the_thread_that_stores_computes_what_nothing_else_needs(spec: str, alone: set[str], of_all: set[str]) -> None:
    for nest in (kernel.nest for kernel in best(parse_spec(spec)).kernels):
        found = {e.out.name for phase in nest.phases for e in phase.alone}
        every = {e.out.name for eqns in (nest.row, *(phase.after for phase in nest.phases)) for e in eqns}
        assert found >= alone
        assert bool(found) == bool(alone)
        assert every >= of_all
        assert not found & every


def test_a_large_finish_has_sixteen_bytes_of_columns_a_thread() -> None:
    """Of f32 four columns, of f64 two; 128 threads, so that 4 strands have 128 columns and 64, 16 strands 16."""
    wide = {
        "rmsnorm.bwd:d=32768,dtype=bf16": (4, 128, 256),
        "rmsnorm.bwd:d=33000,dtype=f32": (4, 128, 258),
        "rmsnorm.bwd:d=32768,dtype=f64": (2, 64, 512),
        "rmsnorm.bwd:d=8192,dtype=bf16,blocks=126": (4, 32, 256),
        "rmsnorm.bwd:d=33002,dtype=bf16": (1, 32, 1032),  # not whole units
        "rmsnorm.bwd:d=32760,dtype=bf16": (1, 32, 1024),  # not as large
    }
    for spec, (side, columns, launched) in wide.items():
        vec = 2 if "33002" in spec or "f64" in spec else 4
        *_, finish = plan_of(spec, multipass(256, vec)).kernels
        found = finish.finish
        assert (found.columns_per_thread, found.columns, finish.grid[0](1)) == (side, columns, launched), spec
        assert finish.block == columns // side * found.interleave


@pytest.mark.parametrize(("more", "blocks", "batch"), [
    ("", 128, 8), ("", 63, 8), (",wrt=beta", 63, 16), ("", 300, 8), ("", 5, 2), ("", 2, 1),
])  # fmt: skip
def test_a_strand_waits_for_all_its_partial_rows_at_once(more: str, blocks: int, batch: int) -> None:
    """A strand in 16, or of less than 64 blocks in 4, has so many of them; 16 numbers are on their way at most."""
    text = f"layernorm.bwd:d=1000,dtype=f32,blocks={blocks}{more}"
    finish = plan_of(text, "form=registers,threads=64,rows_per_block=4").kernels[-1]
    assert finish.finish.batch == batch


def test_the_plan_s_text_has_all_of_it(plan: Plan) -> None:
    text = str(plan)
    assert text.startswith(f"plan {plan.name}\n")
    assert str(lower(plan.spec, plan.schedule)) == text
    words = set(re.findall(r"\w+", text))
    assert words >= {e.out.name for e in plan.graph.eqns}
    for kernel in plan.kernels:
        assert f"kernel {kernel.name}\n" in text
        assert kernel.launch_rule() in text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


def test_the_plan_s_text_shows_shared_memory_and_clusters() -> None:
    text = str(plan_of(*PLANS["bulk, a cluster for each"]))
    for line in (
        "launch    grid 4 * min(30, M), block 256, clusters of 4, at least 98304 bytes of dynamic shared memory; "
        "no launch for M = 0",
        "stage     x at byte 0",
        "leaving   y at byte 0",
        "cached    gamma, beta",
        "shared    98304 bytes of stages",
        "policy    Exchange = ClusterExchange<Row, float, /* values */ 4, AcquireShared>",
    ):
        assert f"\n  {line}\n" in text
    once = str(plan_of(*PLANS["row_columns, one launch"]))
    assert "workspace arrivals_: u32[1], zero before the first call\n" in once
    assert ", cooperative\n" in once
    assert re.search(r"\n  columns   dgamma dbeta\n", once)


@pytest.mark.parametrize(("text", "shared"), [
    ("layernorm.fwd:d=64", {"x", "y"}),
    ("layernorm.bwd:d=64", {"x", "dy", "dx"}),
    ("layernorm.bwd:d=64,wrt=gamma", set()),  # no [M, D] result
    ("layernorm.bwd:d=64,accumulate=gamma", {"x", "dy", "dx", "dgamma", "dgamma_in"}),
    ("add_rmsnorm.fwd:d=64", {"x", "residual", "y", "h"}),
    ("add_rmsnorm.fwd:d=64,dtype=bf16,residual_dtype=f32", {"x", "residual", "y", "h"}),
])  # fmt: skip
def test_pointers_that_may_be_the_same_are_not_declared_to_differ(text: str, shared: set[str]) -> None:
    """Those are all for which the manifest permits it, or undefined behaviour would follow."""
    spec = parse_spec(text)
    plan = lower(spec, Compilation(spec).schedule())
    arguments = [a for k in plan.kernels for a in k.arguments if a.kind in ("input", "output")]
    assert not re.search(rf"<Row, ReadOnlyLoad>\(({'|'.join(shared) or 'none'})_ptr_", emit(plan))
    assert {a.tensor for a in arguments if "__restrict__" not in declaration(a)} == shared
    pairs = described(plan)["in_place"]["outputs"]
    assert {name for output, inputs in pairs.items() for name in (output, *inputs)} <= shared


# ---- graphs of one's own ----


def test_the_finish_of_one_launch_declares_no_number_again() -> None:
    """What both halves compute from a scalar is declared once, whatever the dtype of the scalar."""
    spec = spec_of("halved.fwd:d=96,dtype=bf16,weight=f16")
    one = lower(spec, registers(8, problem(spec.graph(), 96).groups, 4, "single"))
    assert len(re.findall(r"const float s32 = ", emit(one))) == 1


def test_columns_read_in_several_passes_have_no_segments() -> None:
    def columns(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        far = b.sub("far", x, b.reduce_sum("parts", x, axis=D, to=S))
        b.output("y", b.reduce_sum("column", far, axis=M))

    spec = make_spec(Definition("own", columns), "fwd", {"d": 40000})
    with pytest.raises(LowerError):
        lower(spec, Schedule("multipass", 256, 1, 4))
    assert Compilation(spec).refusal is None, "of other forms"


def test_what_no_schedule_can_lower_is_refused_before_one_is_chosen() -> None:
    """A gradient of gamma under scales per block that no warp has whole, in rows that are read in several passes."""

    def scaled(b: GraphBuilder) -> None:
        x = b.input("x", M, D)
        b.output("y", x * b.input("gamma", D) / (b.max(abs(x), to=b.axis("B", D / 128)) + 1.0))

    for d, refused in ((4096, False), (2**20, True)):
        spec = make_spec(Definition("scaled", scaled), "bwd", {"d": d, "dtype": "f64", "wrt": "gamma"})
        assert (Compilation(spec).refusal is not None) == refused


def test_row_and_scalar_inputs_are_lowered() -> None:
    (kernel,) = best(own_spec(gated, dtype="bf16", weight="f32")).kernels
    assert [t.name for t in kernel.inputs.row] == ["shift"]
    assert [t.name for t in kernel.inputs.launch] == ["scale"]
    assert {s.text.split(" = ")[0] for s in kernel.per_row} == {"const float shift32", "const float factor"}


def test_both_variances_of_two_tensors_come_from_segments() -> None:
    """Whichever of their uses is first in the graph."""
    assert sum(is_segment_sum(e) and e.op == "reduce_dot" for e in spec_of("crossed.fwd:d=32768").graph().eqns) == 2


# ---- column sums that registers do not hold well ----


@pytest.mark.parametrize("spec", ["sums8.fwd:d=1", "sums9.fwd:d=2,dtype=f64", "sums33.fwd:d=37,dtype=f64"])
def test_many_column_sums_fit_the_gpu(spec: str) -> None:
    """Many leave few row groups to a block, and large totals to the finish: a block has the shared memory."""
    pytest.importorskip("cupy")
    made = spec_of(spec)
    schedules = ranked(problem(made.graph(), made.d))
    for single in (False, True):
        compile_cubin(emit(lower(made, next(s for s in schedules if s.single_launch == single))), "sm_90")


@pytest.mark.parametrize(("groups", "text"), [
    (2, "layernorm.bwd:d=4096,dtype=bf16"), (4, "layernorm.bwd:d=1500,dtype=f32,blocks=2"),
    (8, "rmsnorm.bwd:d=381,dtype=f64,blocks=3"), (16, REPORTED[2][0]),
    (32, "parallel_layernorm.bwd:d=96,dtype=f32,x1=yes,colscale=yes,blocks=2"), (64, REPORTED[1][0]),
    (128, f"{REPORTED[0][0]},blocks=2"),
])  # fmt: skip
def test_multipass_has_the_row_groups_of_the_graph(groups: int, text: str) -> None:
    """Sums for which a block has no registers are added by a kernel of their own."""
    spec = parse_spec(text)
    facts = problem(spec.graph(), spec.d)
    assert facts.groups == groups
    finish = lower(spec, Schedule("multipass", 32, 1, facts.run)).kernels[-1].finish
    assert (finish.partials, finish.rows_per_term, finish.rows_per_block) == (facts.blocks, 1, groups)


FWD = "layernorm.fwd:d=64,dtype=bf16"
BWD = "layernorm.bwd:d=64,dtype=bf16"
STREAM = "rmsnorm.bwd:d=65536,dtype=f32"


def kernel_set(text: str, schedule: str = "") -> KernelSet:
    return Compilation(parse_spec(text)).changed(schedule, "sm_90", compiled=False)


LAUNCHES = {
    FWD: "form=registers,threads=32,rows_per_block=1,vec=8",
    BWD: "form=cp_async,threads=8,rows_per_block=128,vec=8,stages=2",
    STREAM: "form=multipass,threads=512,rows_per_block=1,vec=4",
    "rmsnorm.fwd:d=65536,dtype=bf16": "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cluster=4,grid=30,"
    "tma_store=yes",
    "layernorm.bwd:d=8192,dtype=bf16": "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,single_launch=yes",
}


@pytest.mark.parametrize("text", LAUNCHES)
def test_the_description_says_how_to_launch(text: str) -> None:
    """Arguments against the source's signature; grid, workspace and tensors against the plan."""
    kernels = kernel_set(text, LAUNCHES[text])
    made, e, source = kernels.plan, described(kernels.plan), kernels.text
    assert e["graph_sha256"] == sha256(str(made.graph).encode())
    assert [k["name"] for k in e["kernels"]] == [k.name for k in made.kernels]
    for of_kernel, kernel in zip(e["kernels"], made.kernels, strict=True):
        signature = re.search(rf"^{kernel.name}\((.*?)\)", source, re.MULTILINE | re.DOTALL)
        assert signature
        declared = [" ".join(part.split()) for part in signature[1].split(",")]
        types = ["const long long" if a["ctype"] == "long long" else a["ctype"] for a in of_kernel["arguments"]]
        names = [a["name"] for a in of_kernel["arguments"]]
        assert [d.replace(" __restrict__", "") for d in declared] == [*map(" ".join, zip(types, names, strict=True))]
        for rows in (0, 1, 7, 1000, 10**6):
            assert [Extent.of(of_kernel["grid"][axis])(rows) for axis in "xy"] == [g(rows) for g in kernel.grid]
        assert (of_kernel["block"], of_kernel["launch_for_no_rows"]) == (kernel.block, kernel.always)
        assert (of_kernel["cluster"], of_kernel["cooperative"]) == (kernel.cluster, kernel.cooperative)
        assert of_kernel["dynamic_shared_bytes"] == kernel.dynamic
    assert source.count("\n    pdl_wait();\n") == len(made.kernels), "launches may overlap, it says"
    for rows in (0, 1, 100):
        offset = 0
        for b in e["workspace"]["buffers"]:
            assert made.workspace_offsets(rows)[b["name"]] == offset
            assert b["element_bytes"] == {"f32": 4, "f64": 8, "u32": 4}[b["dtype"]]
            size = (b["fixed"] + b["per_row"] * rows) * b["element_bytes"]
            offset += -(-size // 256) * 256
        assert made.workspace_bytes(rows) == offset
    assert [b["name"] for b in e["workspace"]["buffers"] if b["zeroed"]] == ["arrivals_"] * made.schedule.single_launch
    oldest = {"cp_async": "sm_80", "tma": "sm_90"}.get(made.schedule.form, "sm_75")
    assert e["minimum_arch"] == ("sm_90" if made.schedule.cluster > 1 else oldest)
    assert [t["name"] for t in e["tensors"]] == [v.name for v in (*made.inputs, *made.outputs)]
    by_name = {t["name"]: t for t in e["tensors"]}
    wide = by_name["x" if "fwd" in text else "dx"]
    assert (wide["shape"], wide["strides"]) == (["M", "D"], ["stride", "1"])
    assert wide["stride_multiple"] * wide["element_bytes"] == wide["alignment"] == 16
    used = {a["tensor"] for k in e["kernels"] for a in k["arguments"] if a["kind"] in ("input", "output")}
    assert used <= by_name.keys()


def test_rows_at_two_distances() -> None:
    """Both strides of a tensor, the arguments that hold them, and how an address follows; of one distance nothing."""
    text = "rmsnorm.fwd:d=128,dtype=bf16"
    one, two = (described(kernel_set(t).plan) for t in (text, f"{text},strides=2"))
    assert (one["spec"]["strides"], two["spec"]["strides"]) == (1, 2)
    assert "outer" not in json.dumps(one)
    for tensor in two["tensors"]:
        wide = tensor["axes"] == ["M", "D"]
        assert (tensor["strides"][:-1] == ["outer_stride", "stride"]) == (tensor.get("stride_multiple") == 8) == wide
    (kernel,) = two["kernels"]
    kinds = [(a["kind"], a["tensor"]) for a in kernel["arguments"] if a["ctype"] == "long long"]
    strides = [(kind, name) for name in ("x", "y") for kind in ("outer_stride", "stride")]
    assert kinds == [("rows", None), ("inner", None), *strides]


def test_what_a_value_follows_from_and_how() -> None:
    """Arguments of other kinds are as they were."""
    guarded = "l2norm.fwd:d=64,dtype=f64,guard=max,eps=run"
    plain, run, square = (described(kernel_set(text).plan) for text in (FWD, f"{FWD},eps=run", guarded))
    arguments = [{a["name"]: a for a in e["kernels"][0]["arguments"]} for e in (plain, run, square)]
    assert arguments[1].pop("eps") == {
        "name": "eps",
        "ctype": "float",
        "kind": "value",
        "tensor": None,
        "number": "eps",
    }
    assert arguments[1] == arguments[0]
    assert (arguments[2]["eps2"]["ctype"], arguments[2]["eps2"]["number"]) == ("double", "eps2")
    wanted = {"dtype": "f64", "of": "eps", "rule": "max(eps * eps, 0x1p-126)"}
    assert {**wanted, "name": "eps2"} in square["call"]["numbers"]
    assert [t["name"] for t in run["tensors"]] == [t["name"] for t in plain["tensors"]]
    assert (run["spec"]["eps"], run["spec"]["inputs"]) == ("run", plain["spec"]["inputs"])
    number = {"name": "eps", "dtype": "f32", "of": "eps", "rule": "eps"}
    assert (run["call"]["numbers"], plain["call"]["numbers"]) == ([number], [])
    assert [e["call"]["eps"] for e in (plain, run)] == [1e-5, "run"]


@pytest.mark.parametrize(("text", "outputs"), [
    ("rmsnorm.fwd:d=64,dtype=bf16", {"y": ["x"]}),
    ("rmsnorm.fwd:d=64,dtype=bf16,out=f32", {}),
    ("rmsnorm.bwd:d=64,dtype=bf16,accumulate=gamma", {"dx": ["dy", "x"], "dgamma": ["dgamma_in"]}),
    ("add_rmsnorm.fwd:d=64,dtype=bf16,residual_dtype=f32", {"y": ["x"], "h": ["residual"]}),
])  # fmt: skip
def test_an_output_may_overwrite_rows_of_its_own_size(text: str, outputs: dict[str, list[str]]) -> None:
    assert described(kernel_set(text).plan)["in_place"]["outputs"] == outputs


# ---- what is worth a register, and what a graph keeps ----


def test_what_a_value_saves_is_what_goes_with_it() -> None:
    """Of random graphs: the equations that a later loop needs no more once a value is given, counted one by one."""
    most = 0
    for seed in range(40):
        definition = smooth_graph(seed)
        graph = make_spec(definition, "fwd", {"d": 64, "dtype": "f32"}).graph()
        wide = [e for e in graph.eqns if D in e.out.type.axes]
        ends = [r for r in graph.results if D in r.type.axes]
        computed = [e.out for e in wide][: random.Random(seed).randrange(1, len(wide) + 1)]
        needed = in_loop(wide, ends)
        wanted = {
            v: sum(u in needed and u not in in_loop([e for e in wide if e.out is not v], ends) for u in computed)
            for v in computed
            if v in needed
        }
        assert saved(wide, ends, {*computed}) == wanted
        most = max(most, *wanted.values(), 0)
    assert most > 5


def test_a_graph_keeps_its_phases_and_pickles_do_not() -> None:
    graph = parse_spec("layernorm.bwd:d=64").graph()
    assert depths(graph) is depths(graph)
    assert depths(graph) is not depths(replace(graph))
    copied = pickle.loads(pickle.dumps(graph))
    assert copied == graph
    assert vars(copied).keys() == {f.name for f in fields(graph)} < vars(graph).keys()
