"""If these fail, ``lngen list`` and ``lngen show`` print something else than what is compiled."""

import json

import pytest

from commands import call, fails, prints
from lngen.compile import Compilation
from lngen.emit import emit
from lngen.errors import VerifyError
from lngen.ir import ORDERS
from lngen.lower import lower
from lngen.problem import Schedule, parse_schedule, problem
from lngen.schedule import ranked
from lngen.spec import parse_spec
from lngen.toolchain import compile_ptx

FWD = "layernorm.fwd:d=64,dtype=f32"
BWD = "layernorm.bwd:d=64,dtype=bf16"
ALL_KEYS = "form=registers,threads=16,rows_per_block=8,vec=4,blocks_per_sm=8,prefetch=no"


needs_nvrtc = pytest.mark.usefixtures("compiler")


# ---- list ----


def test_list_names_every_graph_input_and_key() -> None:
    text = prints("list")
    data = json.loads(prints("list", "--json"))
    order = f"Sums have the order {ORDERS[0]} (key order: {' '.join(ORDERS)}); another one gives other bits.\n"
    assert text.endswith(order)
    assert data["orders"] == [*ORDERS]
    for graph in data["graphs"]:
        assert f"  {graph['name']} " in text
        assert graph["summary"] in text
        described = prints("list", graph["name"])
        assert all(k["key"] in described for k in graph["keys"])
        spec = parse_spec(f"{graph['name']}.fwd:d=8")
        assert {p.name for p in spec.forward().params} <= {i["name"] for i in graph["inputs"]}
        # The defaults that are shown are the defaults that hold.
        shown = {k["key"]: k["default"] for k in graph["keys"]}
        assert {"d", "dtype", "weight", "save", "wrt", "of", "grad", "accumulate"} <= shown.keys()
        others = ("d", "wrt", "of", "weight", "out", "blocks", "grad", "accumulate")
        keys = ",".join(f"{k}={v}" for k, v in shown.items() if k not in others and v != "required")
        assert parse_spec(f"{graph['name']}.fwd:d=8,{keys}") == spec
        roles = {o["name"]: o["type"].partition("[")[0] for o in graph["outputs"]}
        assert ("out" in shown) == ("out" in roles.values())
        for dtype, out in (("f16", "bf16"), ("bf16", "f16")):
            held = {"dtype": dtype, "out": out, "f32": "f32", "compute": "f32"}
            for result in parse_spec(f"{graph['name']}.fwd:d=8,dtype={dtype},out={out},save=none").forward().results:
                assert str(result.type.dtype) == held[roles[result.name]], (graph["name"], result)
        (offered,) = (k["meaning"].rpartition(": ")[2] for k in graph["keys"] if k["key"] == "dtype")
        assert f"{offered} ".startswith("f16 bf16 f32")
        needed = offered.partition("f64")[2].removeprefix(" with ")
        wide = f"{graph['name']}.fwd:d=8,dtype=f64"
        if "f64" in offered:
            assert parse_spec(f"{wide}{',' * bool(needed)}{needed}").graph()
        if "f64" not in offered or needed:
            with pytest.raises(VerifyError):
                parse_spec(wide).graph()
    layernorm = data["graphs"][0]
    assert layernorm["inputs"][0] == {"name": "x", "type": "dtype[M, D]", "optional": False, "default": True}
    assert layernorm["outputs"] == [{"name": "y", "type": "out[M, D]"}]
    assert [s["name"] for s in layernorm["statistics"]] == ["mean", "rstd"]


# ---- show ----


def test_show_graph_is_the_final_graph() -> None:
    assert prints("show", BWD, "--stage", "graph") == str(parse_spec(BWD).graph())


def test_show_after_a_pass() -> None:
    trace = parse_spec(BWD).trace()
    for name, graph in trace.items():
        assert prints("show", BWD, "--stage", "graph", "--after", name) == str(graph)
    every = prints("show", BWD, "--stage", "graph", "--after", "all")
    headings = [line for line in every.splitlines() if line.startswith("// ----")]
    assert headings == [f"// ---- after {name} ----" for name in trace]


def test_show_cuda_is_the_source_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete schedule needs no search, and no compiler."""
    monkeypatch.setattr(Compilation, "schedule", lambda *_: pytest.fail("the default schedule was looked for"))
    spec = parse_spec(FWD)
    for text in (ALL_KEYS, "form=cp_async,threads=16,rows_per_block=8,vec=4,stages=3,grid=128"):
        source = emit(lower(spec, parse_schedule(text, Schedule("registers", 1, 1, 1))))
        assert prints("show", FWD, "--schedule", text) == source


def test_show_plan_and_its_diff() -> None:
    plan = prints("show", FWD, "--stage", "plan", "--schedule", ALL_KEYS)
    assert plan.startswith("plan layernorm_fwd__f32_d64__t16_r8_v4_b8\n")
    diff = prints("show", FWD, "--stage", "plan", "--schedule", ALL_KEYS, "--diff", "vec=2").splitlines()
    assert diff[0].startswith("--- layernorm_fwd__f32_d64__t16_r8_v4_b8")
    assert diff[1].startswith("+++ layernorm_fwd__f32_d64__t16_r8_v2_b8")
    assert prints("show", FWD, "--stage", "plan", "--schedule", ALL_KEYS, "--diff", "vec=4") == ""


def test_few_rows_have_a_schedule_of_their_own() -> None:
    few, many = (prints("show", "layernorm.fwd:d=4096", "--stage", "plan", *rows) for rows in (("--rows", "1"), ()))
    assert few.startswith("plan layernorm_fwd__f32_d4096__t128_r1_v4_b1_cached")
    assert many.startswith("plan layernorm_fwd__f32_d4096__t128_r1_v4_b2_tma_s3_g264_cached_regs_early_dynamic\n")


@needs_nvrtc
def test_show_ptx_is_what_the_compiler_made() -> None:
    spec = parse_spec(FWD)
    plan = lower(spec, parse_schedule(ALL_KEYS, ranked(problem(spec.graph(), 64))[0]))
    ptx = prints("show", FWD, "--stage", "ptx", "--schedule", ALL_KEYS, "--arch", "sm_80")
    assert ptx == compile_ptx(emit(plan), "sm_80")


@needs_nvrtc
def test_show_resources_of_several_arches() -> None:
    args = ("show", BWD, "--stage", "resources", "--arch", "sm_80,sm_90")
    data = json.loads(prints(*args, "--json"))
    assert list(data["resources"]) == ["sm_80", "sm_90"]
    table = prints(*args)
    for arch, kernels in data["resources"].items():
        for kernel, found in kernels.items():
            (row,) = [line for line in table.splitlines() if kernel in line and arch in line]
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            assert cells[2:4] == [str(found["registers"]), str(found["spill_stores"])]
    assert table.isascii()


@needs_nvrtc
def test_shared_memory_has_one_name_where_it_is_used_and_another_where_a_launch_asks_for_more() -> None:
    spec = "layernorm.bwd:d=4096,dtype=bf16"
    schedule = "form=tma,threads=128,rows_per_block=2,vec=8,stages=2,cached_weights=yes,row_in_registers=yes"
    plan, table = (prints("show", spec, "--stage", s, "--schedule", schedule) for s in ("plan", "resources"))
    head, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[:3:2])
    cells = dict(zip(head, row, strict=True))
    assert f"{cells['dynamic shared']} bytes of dynamic shared memory" in plan
    assert int(cells["launch shared"]) > int(cells["dynamic shared"]), "so that a multiprocessor has one block"


def test_a_device_brings_its_arch() -> None:
    """A default for a GPU that is not there."""
    here, there = (prints("show", FWD, "--stage", "plan", *device) for device in ((), ("--device", "a100")))
    assert here != there
    assert there == prints("show", FWD, "--stage", "plan", "--arch", "sm_80", "--device", "a100")


def test_a_default_that_spills_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.cli.inspection.spilled_bytes", lambda plan, arch: 64)
    done = call("show", FWD, "--stage", "plan")
    assert done.exit_code == 0
    assert "registers spill, 64 bytes a thread: form=" in done.stderr
    done = call("show", FWD, "--stage", "plan", "--schedule", "blocks_per_sm=1")
    assert done.stderr == "", "of a schedule of one's own, --stage resources tells"


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_1", "hopper"])
def test_an_unknown_arch_is_one_sentence(arch: str) -> None:
    assert f"error: Unknown arch '{arch}'" in fails(2, "show", FWD, "--arch", arch, "--stage", "ptx")
