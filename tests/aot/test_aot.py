"""If these fail, a build differs from run to run, or its manifest does not say how to launch the kernels."""

from __future__ import annotations

import json
import re
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from child import output, start
from commands import call, prints
from lngen import toolchain
from lngen.aot.build import build
from lngen.compile import Compilation, KernelSet
from lngen.devices import device_for
from lngen.errors import LngenError, ScheduleError
from lngen.files import sha256
from lngen.lower import Plan, requested_shared
from lngen.problem import check_arch, fits, problem
from lngen.spec import parse_spec

ROOT = Path(__file__).resolve().parents[2]
FWD = "layernorm.fwd:d=64,dtype=bf16"
BWD = "layernorm.bwd:d=64,dtype=bf16"
STREAM = "rmsnorm.bwd:d=65536,dtype=f32"


@pytest.fixture(autouse=True)
def compiler() -> None:
    pytest.importorskip("cupy")


def built(*args: str | Path) -> str:
    return prints("build", *args)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def manifest(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "manifest.json").read_bytes())
    assert isinstance(document, dict)
    return document


def sets(folder: Path) -> dict[str, dict[str, Any]]:
    return {e["name"]: e for e in manifest(folder)["kernel_sets"]}


def plan(text: str, *arches: str, schedule: str = "") -> Plan:
    return Compilation(parse_spec(text)).changed(schedule, *(arches or ("sm_90",))).plan


def test_build_writes_what_it_lists(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    printed = built(FWD, BWD, "--arch", "sm_80,sm_90", "--out", out)
    made = [plan(text, "sm_80", "sm_90") for text in (FWD, BWD)]
    names = [f"{p.name}{end}" for p in made for end in (".cu", *ends("sm_80"), *ends("sm_90"))]
    assert [Path(line) for line in printed.splitlines()] == [out / n for n in (*names, "manifest.json")]
    assert contents(out).keys() == {*names, "manifest.json"}


def ends(arch: str) -> tuple[str, str]:
    return f".{arch}.ptx", f".{arch}.cubin"


def test_two_builds_have_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and in another with its own hash seed and an empty cache; without a path or a date."""
    args = ("build", BWD, FWD, "--arch", "sm_90,sm_80", "--out")
    prints(*args, tmp_path / "one")
    monkeypatch.setenv("LNGEN_CACHE_DIR", str(tmp_path / "cache"))
    prints(*args, tmp_path / "two")
    code = "import sys; from lngen.cli import cli; cli.main(sys.argv[1:])"
    output(start(code, *args, str(tmp_path / "three"), PYTHONHASHSEED="77", LNGEN_CACHE_DIR=str(tmp_path / "cache2")))
    one, two, three = (contents(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two == three
    text = one["manifest.json"].decode()
    assert str(tmp_path) not in text
    assert not re.search(r"\b20\d\d-\d\d", text)


def test_the_hashes_and_resources_are_those_of_the_files(tmp_path: Path) -> None:
    built(FWD, BWD, "--arch", "sm_80,sm_90", "--out", tmp_path)
    document = manifest(tmp_path)
    version = ".".join(map(str, toolchain.nvrtc_version()))
    assert (document["schema_version"], document["nvrtc_version"]) == (2, version)
    named = {}
    for e in document["kernel_sets"]:
        for name, facts in e["files"].items():
            data = (tmp_path / name).read_bytes()
            assert [*facts] == ["kind", "arch", "bytes", "sha256"]
            assert (facts["sha256"], facts["bytes"]) == (sha256(data), len(data))
            named[name] = facts
        made = plan(e["spec"]["text"], "sm_80", "sm_90")
        for arch in ("sm_80", "sm_90"):
            binary = KernelSet(made).cubin(arch)
            assert (tmp_path / f"{e['name']}.{arch}.cubin").read_bytes() == binary.image
            registers = {k: r.registers for k, r in binary.resources.items()}
            asked = requested_shared(made, registers, device_for(arch))
            found = {k: (r["registers"], r["launch_shared_bytes"]) for k, r in e["resources"][arch].items()}
            assert found == {k: (registers[k], asked[k]) for k in registers}
    assert named.keys() | {"manifest.json"} == contents(tmp_path).keys()


LAUNCHES = {
    FWD: "form=registers,threads=32,rows_per_block=1,vec=8",
    BWD: "form=cp_async,threads=8,rows_per_block=128,vec=8,stages=2",
    STREAM: "form=multipass,threads=512,rows_per_block=1,vec=4",
    "rmsnorm.fwd:d=65536,dtype=bf16": "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,cluster=4,grid=30,"
    "tma_store=yes",
    "layernorm.bwd:d=8192,dtype=bf16": "form=tma,threads=256,rows_per_block=1,vec=8,stages=3,single_launch=yes",
}


@pytest.mark.parametrize("text", LAUNCHES)
def test_the_manifest_says_how_to_launch(tmp_path: Path, text: str) -> None:
    """Arguments against the source's signature; grid, workspace and tensors against the plan."""
    built(text, "--emit", "cu", "--schedule", LAUNCHES[text], "--out", tmp_path)
    made, (e,) = plan(text, schedule=LAUNCHES[text]), sets(tmp_path).values()
    source = (tmp_path / f"{made.name}.cu").read_text()
    assert e["graph_sha256"] == sha256(str(made.graph).encode())
    assert [k["name"] for k in e["kernels"]] == [k.name for k in made.kernels]
    for described, kernel in zip(e["kernels"], made.kernels, strict=True):
        signature = re.search(rf"^{kernel.name}\((.*?)\)", source, re.MULTILINE | re.DOTALL)
        assert signature
        declared = [" ".join(part.split()) for part in signature[1].split(",")]
        types = ["const long long" if a["ctype"] == "long long" else a["ctype"] for a in described["arguments"]]
        names = [a["name"] for a in described["arguments"]]
        assert [d.replace(" __restrict__", "") for d in declared] == [*map(" ".join, zip(types, names, strict=True))]
        for rows in (0, 1, 7, 1000, 10**6):
            assert [blocks(described["grid"][axis], rows) for axis in "xy"] == [g(rows) for g in kernel.grid]
        assert (described["block"], described["launch_for_no_rows"]) == (kernel.block, kernel.always)
        assert described["launch_rule"] == kernel.launch_rule()
        assert described["cluster"] == kernel.cluster
        assert described["dynamic_shared_bytes"] == kernel.dynamic
        assert described["cooperative"] == kernel.cooperative
        assert [described["grid"][axis]["text"] for axis in "xy"] == [str(g) for g in kernel.grid]
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
    assert e["minimum_arch"] == {"cp_async": "sm_80", "tma": "sm_90"}.get(made.schedule.form, "sm_75")
    assert [t["name"] for t in e["tensors"]] == [v.name for v in (*made.inputs, *made.outputs)]
    by_name = {t["name"]: t for t in e["tensors"]}
    wide = by_name["x" if "fwd" in text else "dx"]
    assert wide["shape"] == ["rows", made.spec.d]
    assert wide["row_stride_multiple"] * wide["element_bytes"] == wide["alignment"] == 16
    used = {a["tensor"] for k in e["kernels"] for a in k["arguments"] if a["kind"] in ("input", "output")}
    assert used <= by_name.keys()


def blocks(rule: dict[str, Any], rows: int) -> int:
    if rule["fixed"] is not None:
        return int(rule["fixed"])
    owners = -(-rows // rule["per"])
    count = rule["times"] * (owners if rule["limit"] is None else min(rule["limit"], owners))
    return int(max(rule["least"], count))


def test_the_manifest_of_rows_at_two_distances(tmp_path: Path) -> None:
    """Both strides of a tensor, the arguments that hold them, and how an address follows; of one distance nothing."""
    text = "rmsnorm.fwd:d=128,dtype=bf16"
    built(text, f"{text},strides=2", "--emit", "cu", "--out", tmp_path)
    one, two = sets(tmp_path).values()
    assert (one["spec"]["strides"], two["spec"]["strides"]) == (1, 2)
    rule = "row r of a tensor begins (r / inner) * outer_stride + (r % inner) * stride elements after its pointer"
    assert rule in two["argument_rule"]
    assert "outer" not in json.dumps(one)
    for tensor in two["tensors"]:
        wide = tensor["axes"] == ["M", "D"]
        assert ("outer_stride_multiple" in tensor) == wide
        if wide:
            assert tensor["outer_stride_multiple"] == tensor["row_stride_multiple"] == 8
            assert "; outer stride a multiple of 8" in tensor["layout"]
            assert tensor["layout"].endswith(", rows do not overlap") == (tensor["role"] == "output")
    (kernel,) = two["kernels"]
    kinds = [(a["kind"], a["tensor"], a["ctype"]) for a in kernel["arguments"] if a["ctype"] == "long long"]
    assert kinds == [
        ("rows", None, "long long"),
        ("inner", None, "long long"),
        *((kind, name, "long long") for name in ("x", "y") for kind in ("outer_stride", "stride")),
    ]


def test_the_manifest_states_its_rules(tmp_path: Path) -> None:
    """What a launcher has to know that is not a number."""
    built(BWD, "--emit", "cu", "--out", tmp_path)
    (e,) = sets(tmp_path).values()
    assert "8 bytes" in e["argument_rule"]
    assert all(key in e["grid_rule"] for key in ("fixed", "per", "limit", "times", "least"))
    assert all(key in e["launch_rule"] for key in ("cluster", "cooperatively", "dynamic shared memory"))
    assert "before the first launch" in e["workspace"]["zeroed_rule"]
    dependent = e["programmatic_stream_serialization"]
    assert (dependent["minimum_arch"], "may be set" in dependent["rule"]) == ("sm_90", True)


def test_the_manifest_says_what_a_value_follows_from_and_how(tmp_path: Path) -> None:
    """Arguments of other kinds, and the rule of a set without values, are as they were."""
    guarded = "l2norm.fwd:d=64,dtype=f64,guard=max,eps=run"
    built(FWD, f"{FWD},eps=run", guarded, "--emit", "cu", "--out", tmp_path)
    plain, run, square = (sets(tmp_path)[plan(text).name] for text in (FWD, f"{FWD},eps=run", guarded))
    arguments = [{a["name"]: a for a in e["kernels"][0]["arguments"]} for e in (plain, run, square)]
    value = {"kind": "value", "tensor": None, "of": "eps"}
    assert arguments[1].pop("eps") == {"name": "eps", "ctype": "float", "dtype": "f32", "rule": "eps", **value}
    assert arguments[1] == arguments[0]
    rule = "max(eps * eps, 0x1p-126)"
    assert arguments[2]["eps2"] == {"name": "eps2", "ctype": "double", "dtype": "f64", "rule": rule, **value}
    assert [t["name"] for t in run["tensors"]] == [t["name"] for t in plain["tensors"]]
    assert (run["spec"]["eps"], run["spec"]["inputs"]) == ("run", plain["spec"]["inputs"])
    assert run["argument_rule"].startswith(f"{plain['argument_rule']}; but a value has the size of its ctype")


BULK = "form=tma,threads=8,rows_per_block=128,vec=8,stages=2"
ASYNC = "form=cp_async,threads=8,rows_per_block=128,vec=8,stages=2"
WIDE = "rmsnorm.fwd:d=131072,dtype=bf16"
FEW = "form=registers,threads=256,rows_per_block=1,vec=8,cluster="
TOO_OLD = [
    (BWD, BULK, "sm_80", "form=tma needs sm_90 or later, got sm_80; use form=registers, cp_async or multipass."),
    (BWD, BULK, "sm_75", "form=tma needs sm_90 or later, got sm_75; use form=registers or multipass."),
    (BWD, ASYNC, "sm_75", "form=cp_async needs sm_80 or later, got sm_75; use form=registers or multipass."),
    (WIDE, f"{FEW}8", "sm_80", "cluster is at most 1 on sm_80, got 8."),
    (WIDE, f"{FEW}16", "sm_120", "cluster is at most 8 on sm_120, got 16."),
]


@pytest.mark.parametrize(("spec", "schedule", "arch", "message"), TOO_OLD)
def test_a_form_an_arch_does_not_have_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, schedule: str, arch: str, message: str
) -> None:
    """For a plan, a build and what is shown; nothing is compiled, nothing written."""
    for where, name in product(("lngen.compile", "lngen.aot.build"), ("compile_cubin", "compile_ptx")):
        monkeypatch.setattr(import_module(where), name, lambda *_, **__: pytest.fail("NVRTC was called"))
    with pytest.raises(ScheduleError) as error:
        KernelSet(plan(spec, schedule=schedule)).cubin(arch)
    assert str(error.value) == message
    done = call("build", spec, "--schedule", schedule, "--arch", f"sm_90,{arch}", "--out", tmp_path / "out")
    assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")
    assert not (tmp_path / "out").exists()
    for stage in ("ptx", "resources", "traffic"):
        shown = call("show", spec, "--stage", stage, "--schedule", schedule, "--arch", arch)
        assert (shown.exit_code, shown.stderr) == (2, f"error: {message}\n"), stage


def test_clusters_of_registers_ask_for_an_arch(tmp_path: Path) -> None:
    """In the manifest, too: the form alone would be for any."""
    for cluster, oldest in ((1, 75), (8, 90)):
        schedule = "form=multipass,threads=512,rows_per_block=1,vec=8" if cluster == 1 else f"{FEW}{cluster}"
        built(WIDE, "--schedule", schedule, "--arch", "sm_90", "--emit", "cu", "--out", tmp_path / str(cluster))
        (e,) = sets(tmp_path / str(cluster)).values()
        assert e["minimum_arch"] == f"sm_{oldest}"
        assert {k["cluster"] for k in e["kernels"]} == {cluster}


@pytest.mark.parametrize("arches", ["sm_90,sm_80", "sm_80,sm_90", "sm_75,sm_90", "sm_80,sm_86,sm_120"])
def test_one_default_schedule_exists_on_every_arch(tmp_path: Path, arches: str) -> None:
    """The order in which they are named does not matter."""
    listed = arches.split(",")
    schedule = plan(BWD, *listed).schedule
    assert schedule == plan(BWD, *sorted(listed)).schedule
    spec = parse_spec(BWD)
    for arch in listed:
        check_arch(schedule, arch)
        assert fits(schedule, problem(spec.graph(), spec.d), device_for(arch))
    built(BWD, "--arch", arches, "--emit", "cubin", "--out", tmp_path)
    ((name, e),) = sets(tmp_path).items()
    assert e["schedule"]["text"] == str(schedule)
    assert {p.name for p in tmp_path.iterdir()} == {"manifest.json", *(f"{name}.{arch}.cubin" for arch in listed)}


def test_only_the_kinds_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources alone compile nothing, so that they are for any arch."""
    name, bulk = plan(FWD).name, plan(BWD, schedule=BULK)
    built(FWD, "--emit", "ptx", "--arch", "sm_90", "--out", tmp_path / "ptx")
    assert contents(tmp_path / "ptx").keys() == {f"{name}.sm_90.ptx", "manifest.json"}
    assert sets(tmp_path / "ptx")[name]["resources"]["sm_90"]
    for function in ("compile_cubin", "compile_ptx", "nvrtc_version"):
        monkeypatch.setattr(f"lngen.aot.build.{function}", lambda *_, **__: pytest.fail("NVRTC was called"))
    build([KernelSet(bulk)], tmp_path / "cu", arches=["sm_80"], version="1", kinds=["cu"])
    assert contents(tmp_path / "cu").keys() == {f"{bulk.name}.cu", "manifest.json"}
    assert (manifest(tmp_path / "cu")["nvrtc_version"], sets(tmp_path / "cu")[bulk.name]["resources"]) == (None, {})


def test_one_schedule_that_is_not_the_best_of_an_arch_is_said_so(tmp_path: Path) -> None:
    spec, archs = "rmsnorm.fwd:d=4096,dtype=bf16", ("--arch", "sm_80,sm_90")
    alone = [plan(spec, arch).schedule for arch in ("sm_80", "sm_90")]
    assert plan(spec, "sm_80", "sm_90").schedule == alone[0] != alone[1]
    said = (
        f"{spec}: the one schedule for sm_80, sm_90 is not the best for sm_90; build each arch alone, into a folder of "
        "its own, to give each its best.\n"
    )
    assert call("build", spec, *archs, "--emit", "cu", "--out", tmp_path / "both").stderr == said
    for n, request in enumerate([("--arch", "sm_90"), (*archs, "--schedule", str(alone[0]))]):
        assert call("build", spec, *request, "--emit", "cu", "--out", tmp_path / str(n)).stderr == ""


def test_one_folder_holds_several_builds(tmp_path: Path) -> None:
    """Merged by name: another schedule is another kernel set, the same spec twice is built once."""
    one, two = tmp_path / "one", tmp_path / "two"
    built(FWD, "--emit", "cu", "--out", one)
    data = json.loads(built(BWD, "--emit", "cu", "--out", one, "--json"))
    assert data["kernel_sets"] == [e for e in manifest(one)["kernel_sets"] if e["spec"]["text"] == BWD]
    assert len(built(BWD, FWD, FWD, "--emit", "cu", "--out", two).splitlines()) == 3
    assert contents(one) == contents(two)
    assert list(sets(one)) == sorted(sets(one))
    built(FWD, "--emit", "cu", "--schedule", "vec=4", "--out", one)
    assert {e["schedule"]["vec"] for e in sets(one).values() if e["spec"]["text"] == FWD} == {4, 8}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((FWD, "layernorm.fwd:d=x"), "'d' is expected to be a whole number"),
        ((FWD, BWD, "--schedule", "rows_per_block=3"), "schedule 'form=registers"),
        ((FWD, "--arch", "sm_90,sm_1"), "Unknown arch 'sm_1'"),
        ((FWD, "--emit", "cu,fatbin"), "there is no kind of file 'fatbin', expected cu, ptx, cubin."),
        ((FWD, "--emit", ""), "expected at least one value"),
        ((), "Missing argument"),
    ],
)
def test_what_fails_leaves_nothing(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    done = call("build", *args, "--out", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_kernel_that_does_not_compile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [KernelSet(plan(FWD)), KernelSet(plan(BWD))]
    for kernels, text in zip(made, ("// fine\n", "nonsense"), strict=True):
        monkeypatch.setattr(kernels, "text", text)
    with pytest.raises(LngenError, match="NVRTC refused"):
        build(made, tmp_path / "out", arches=["sm_90"], version="1")
    assert not (tmp_path / "out").exists()


def test_the_order_of_the_archs_changes_no_byte(tmp_path: Path) -> None:
    """Neither on the command line nor in a call; an arch that comes twice is one."""
    found = []
    for number, listed in enumerate((["sm_80", "sm_90"], ["sm_90", "sm_80", "sm_90"])):
        built(BWD, "--arch", ",".join(listed), "--emit", "cubin", "--out", tmp_path / f"by_command{number}")
        build([KernelSet(plan(BWD, "sm_80"))], tmp_path / f"by_call{number}", arches=listed, version="1")
        found.append([contents(tmp_path / f"{how}{number}") for how in ("by_command", "by_call")])
    assert found[0] == found[1]
    assert list(json.loads(found[0][0]["manifest.json"])["kernel_sets"][0]["resources"]) == ["sm_80", "sm_90"]


def test_progress_counts_compilations(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    arches, made = ["sm_80", "sm_90"], [KernelSet(plan(FWD))]
    build(made, tmp_path, arches=arches, version="1", progress=lambda *counts: seen.append(counts))
    assert seen == [(n, 4) for n in range(1, 5)]


def test_a_plan_takes_the_default_schedule_and_its_changes() -> None:
    spec = parse_spec(FWD)
    base = Compilation(spec).schedule()
    assert Compilation(spec).changed("", "sm_90").plan.schedule == base
    assert Compilation(spec).changed("vec=2", "sm_90").plan.schedule.vec == 2
    assert Compilation(spec).changed(str(base), "sm_90").plan.schedule == base
