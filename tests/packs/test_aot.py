"""If these fail, a build differs from run to run, its manifest tells wrong launches, or a fat binary lacks an image."""

import ctypes
import json
import re
import struct
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flashinfer_traces as traces
import lngen
from child import output, start
from commands import call, prints
from lngen.compiler import headers, toolchain
from lngen.compiler.compile import Compilation, KernelSet
from lngen.compiler.devices import described, device_for
from lngen.compiler.lower import Plan, requested_shared
from lngen.compiler.schedule import most_bytes, ranked, workload
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import compile_cubin, compile_ptx
from lngen.errors import LngenError, MissingError
from lngen.files import sha256
from lngen.launch.pack import FILE_NAME, class_for
from lngen.packs import fatbin as module
from lngen.packs.build import _dispatch, build
from lngen.packs.fatbin import Image, fatbin
from lngen.packs.request import Request, choices
from packs import contents, manifest_of
from plans import problem_of

FWD = "layernorm.fwd:d=64,dtype=bf16"
BWD = "layernorm.bwd:d=64,dtype=bf16"
QUICK = "form=registers,threads=8,rows_per_block=4,vec=8"  # a whole schedule, so that none is searched for

pytestmark = pytest.mark.usefixtures("compiler")


def sets(folder: Path) -> dict[str, dict[str, Any]]:
    return {e["name"]: e for e in manifest_of(folder)["kernel_sets"]}


def plan(text: str, arch: str = "sm_90", schedule: str = "", rows: int | None = None) -> Plan:
    return Compilation(parse_spec(text)).changed(schedule, arch, rows=rows).plan


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build of two specs for two archs, with PTX for newer GPUs, for two classes of rows."""
    folder = tmp_path_factory.mktemp("both") / "a" / "b"
    printed = prints("build", FWD, BWD, "--arch", "sm_90+ptx,sm_80", "--rows", "1,many", "--out", folder)
    assert {*printed.splitlines()} == {str(folder / name) for name in contents(folder)}
    assert printed.splitlines()[-1] == str(folder / FILE_NAME)
    return folder


# ---- bytes ----


def test_a_build_has_the_same_bytes_under_any_hash_seed_and_order(both: Path, tmp_path: Path) -> None:
    """In another process with its own hash seed, another order of specs, archs and rows; without a path or a date."""
    code = "import sys; from lngen.cli import cli; cli.main(sys.argv[1:])"
    args = ("build", BWD, FWD, BWD, "--arch", "sm_80,sm_90,sm_90+ptx,sm_90", "--rows", "many,1", "--out")
    output(start(code, *args, str(tmp_path / "two"), PYTHONHASHSEED="77"))
    assert contents(tmp_path / "two") == contents(both)
    text = contents(both)[FILE_NAME].decode()
    assert str(both) not in text
    assert not re.search(r"\b20\d\d-\d\d", text)


def test_hashes_and_resources_are_those_of_the_files(both: Path) -> None:
    document, files = manifest_of(both), contents(both)
    version = ".".join(map(str, toolchain.nvrtc_version()))
    major, minor = toolchain.nvrtc_version()
    named = dict(document["other_files"])
    for e in document["kernel_sets"]:
        made = plan(e["spec"]["text"], schedule=e["schedule"]["text"])
        assert e["text_sha256"] == sha256(KernelSet(made).bundle.encode())
        for arch, kernels in e["resources"].items():
            binary = KernelSet(made).cubin(arch)
            assert files[f"{e['name']}.{arch}.cubin"] == binary.image
            registers = {k: r.registers for k, r in binary.resources.items()}
            asked = requested_shared(made, registers, device_for(arch))
            found = {k: (r["registers"], r["launch_shared_bytes"]) for k, r in kernels.items()}
            assert found == {k: (registers[k], asked[k]) for k in registers}
        for name, facts in e["files"].items():
            source = facts["kind"] == "cu"
            oldest = 1000 * major + 10 * minor * (facts["kind"] == "ptx")
            assert (facts["nvrtc"], facts["driver"]) == ((None, None) if source else (version, oldest))
            named[name] = facts
    assert {n: (f["bytes"], f["sha256"]) for n, f in named.items()} == {
        n: (len(data), sha256(data)) for n, data in files.items() if n != FILE_NAME
    }


def test_headers_are_in_a_folder_of_their_hash(both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So two versions of lngen share a folder; a source that stands alone has none."""
    build([FWD], tmp_path, emit="cu", schedule=QUICK)
    first = {n: data for n, data in contents(tmp_path).items() if n.startswith("include/")}
    (name,) = sets(tmp_path)
    wanted = headers.included((tmp_path / f"{name}.cu").read_text())
    assert first == {f"include/{headers.headers_hash()}/{h}": text.encode() for h, text in wanted.items()}
    monkeypatch.setattr("lngen.packs.build.headers_hash", lambda: "0123456789abcdef")
    build([BWD], tmp_path, emit="cu", schedule="form=registers,threads=8,rows_per_block=128,vec=8")
    assert first.items() <= contents(tmp_path).items()
    includes = {e["spec"]["text"]: e["compile"]["include"] for e in manifest_of(tmp_path)["kernel_sets"]}
    assert includes == {FWD: f"include/{headers.headers_hash()}", BWD: "include/0123456789abcdef"}
    build([FWD], tmp_path / "alone", emit="cu", schedule=QUICK, bundle=True)
    assert contents(tmp_path / "alone").keys() == {f"{name}.cu", FILE_NAME}
    assert b"#include" not in contents(tmp_path / "alone")[f"{name}.cu"]
    assert sets(tmp_path / "alone")[name]["compile"]["include"] is None
    assert sets(tmp_path / "alone")[name]["text_sha256"] == sets(tmp_path)[name]["text_sha256"]


# ---- which schedule, for whom ----


def entries(folder: Path) -> Iterator[tuple[str, str, str, dict[str, Any], dict[str, Any]]]:
    """Each class of rows of a pack: its spec, arch and kind, the entry, and its kernel set."""
    for spec, facts in manifest_of(folder)["specs"].items():
        for image in facts["images"]:
            for entry in image["classes"]:
                yield spec, image["arch"], image["kind"], entry, sets(folder)[entry["kernel_set"]]


def test_each_arch_and_class_has_the_schedule_of_a_compilation_there(both: Path) -> None:
    """And every file is of the kind and arch of its image, stored once."""
    schedules, seen = set(), 0
    for spec, arch, kind, entry, kernels in entries(both):
        rows = {most_bytes(workload(problem_of(spec), rows, device_for(arch))): rows for rows in (1, None)}
        wanted = lngen.compile("layernorm", d=64, dtype="bf16").plan(spec[10:13], arch, rows[entry["most_bytes"]])
        assert kernels["schedule"]["text"] == str(wanted.schedule)
        assert entry["file"] == f"{wanted.name}.{arch}.{kind}"
        assert kernels["files"][entry["file"]]["arch"] == arch
        schedules.add((spec, str(wanted.schedule)))
        seen += 1
    assert seen == 12
    used = {e["kernel_set"] for *_, e, _ in entries(both)}
    used |= {e["otherwise"]["kernel_set"] for *_, e, _ in entries(both) if e["otherwise"]}
    assert used == sets(both).keys()
    assert len(schedules) < seen, "kernels that coincide are one set"
    shared = [e for e in sets(both).values() if len(e["resources"]) == 2]
    assert shared, "a set for two archs"


@pytest.mark.parametrize("spec", [FWD, BWD, "rmsnorm.fwd:d=1048576,dtype=f32", "layernorm.bwd:d=999,dtype=f64"])
def test_class_boundaries_follow_from_the_manifest_alone(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every described GPU and numbers of rows around each boundary.

    A class that is empty on the GPU that represents the arch is not built: the next one is taken for it.
    """
    p, archs = problem_of(spec), sorted({d.arch for d in described().values()})
    portable = ranked(p, device_for("sm_75"))[0]
    monkeypatch.setattr(Compilation, "schedule", lambda *_, **__: portable)
    built = _dispatch(choices(Compilation(parse_spec(spec)), Request.of(archs, "all")), ["cu"])[spec]
    for image, gpu in product(built["images"], described().values()):
        if image["arch"] != gpu.arch:
            continue
        steps = [c["most_bytes"] for c in image["classes"]]
        edges = [most * gpu.multiprocessors // built["row_bytes"] for most in steps]
        for rows in {0, 1, 2, 100, 10**6, 2**40, *(max(0, e + n) for e in edges for n in (-1, 0, 1))}:
            wanted = most_bytes(workload(p, rows, gpu))
            found = class_for(image["classes"], rows, built["row_bytes"], gpu.multiprocessors)
            assert found["most_bytes"] == next(m for m in steps if m >= wanted), (gpu.name, rows)


# ---- what is refused ----


def test_a_kernel_that_does_not_compile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSet, "text", property(lambda kernels: "nonsense" * ("bwd" in kernels.plan.name)))
    with pytest.raises(LngenError, match="NVRTC refused"):
        build([FWD, BWD], tmp_path / "out", schedule="form=registers,threads=8,rows_per_block=128,vec=8")
    assert not (tmp_path / "out").exists()


def test_a_build_that_would_lose_files_is_refused_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build([FWD], tmp_path, arch="sm_80,sm_90", emit="fatbin", schedule=QUICK)
    before = contents(tmp_path)
    monkeypatch.setattr("lngen.packs.build._compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(LngenError, match=r"also as \.fatbin for sm_80, which this build does not make"):
        build([FWD], tmp_path, arch="sm_90", emit="fatbin", schedule=QUICK)
    assert contents(tmp_path) == before


# ---- kinds, devices, locks, and what is told ----


def test_only_the_kinds_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources alone compile nothing, so that they are for any arch."""
    name = plan(FWD, schedule=QUICK).name
    seen: list[tuple[int, int]] = []
    archs: dict[str, Any] = {"arch": "sm_80,sm_90", "progress": lambda *counts: seen.append(counts)}
    build([FWD, FWD], tmp_path / "both", emit="ptx", schedule=QUICK, **archs)
    assert seen == [(n, 2) for n in (1, 2)] + [(n, 4) for n in range(1, 5)], "schedules, then compilations"
    build([FWD], tmp_path / "ptx", emit="ptx", schedule=QUICK)
    assert contents(tmp_path / "ptx").keys() == {f"{name}.sm_90.ptx", FILE_NAME}
    assert sets(tmp_path / "ptx")[name]["resources"]["sm_90"]
    build([FWD], tmp_path / "fatbin", arch="sm_80+ptx,sm_90", emit="fatbin", schedule=QUICK)
    assert contents(tmp_path / "fatbin").keys() == {f"{name}.fatbin", f"{name}.sm_80.ptx", FILE_NAME}
    facts_ = sets(tmp_path / "fatbin")[name]["files"][f"{name}.fatbin"]
    assert (facts_["arches"], facts_["ptx_arches"]) == (["sm_80", "sm_90"], ["sm_80"])
    for function in ("compile_cubin", "compile_ptx", "nvrtc_version"):
        monkeypatch.setattr(f"lngen.packs.build.{function}", lambda *_, **__: pytest.fail("NVRTC was called"))
    build([FWD], tmp_path / "cu", emit="cu", schedule=QUICK, bundle=True)
    assert contents(tmp_path / "cu").keys() == {f"{name}.cu", FILE_NAME}
    assert sets(tmp_path / "cu")[name]["resources"] == {}


def test_a_device_chooses_the_schedule_of_its_arch(tmp_path: Path) -> None:
    """A described GPU with other limits gets another schedule; alone it names the arch as well."""
    spec = "rmsnorm.fwd:d=64,dtype=f32"
    for device in ("l40s", "rtx4090"):
        prints("build", spec, "--device", device, "--emit", "cu", "--rows", "100000", "--out", tmp_path / device)
        (image,) = manifest_of(tmp_path / device)["specs"][spec]["images"]
        wanted = Compilation(parse_spec(spec)).schedule("sm_89", rows=100000, device=described()[device])
        assert image["arch"] == "sm_89"
        assert [e["schedule"]["text"] for e in sets(tmp_path / device).values()] == [str(wanted)]


@pytest.mark.parametrize(("spec", "vec"), [
    ("rmsnorm.fwd:d=8192,dtype=f16", 1), ("rmsnorm.fwd:d=8192,dtype=f16", 4), ("layernorm.bwd:d=768,dtype=bf16", 2),
    ("rmsnorm.fwd:d=1001,dtype=bf16", 1),
])  # fmt: skip
def test_a_build_for_unaligned_arrays_takes_a_form_that_reads_them(spec: str, vec: int, tmp_path: Path) -> None:
    """What a pack says of arrays that do not suit it: build it with --schedule vec=N."""
    default = next(iter(build([spec], tmp_path / "default", emit="cu").manifest.kernel_sets.values()))
    assert default["schedule"]["form"].startswith("tma")
    narrow = build([spec], tmp_path / "narrow", emit="cu", schedule=f"vec={vec}").manifest
    (made,) = narrow.kernel_sets.values()
    assert made["schedule"]["form"] != "tma_unaligned"
    assert made["schedule"]["vec"] <= vec
    assert max(t.get("stride_multiple", 1) for t in made["tensors"]) <= vec


def test_a_lock_file_replaces_defaults_and_what_it_lacks_is_said(tmp_path: Path) -> None:
    lock = tmp_path / "lock.toml"
    lock.write_text(f'version = 1\n\n["NVIDIA H200"]\narch = "sm_90"\n\n["NVIDIA H200"."{FWD}"]\n4096 = "{QUICK}"\n')
    done = call("build", FWD, BWD, "--lock", lock, "--emit", "cu", "--arch", "sm_80,sm_90", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    found = {(spec, arch): kernels["schedule"]["text"] for spec, arch, _, _, kernels in entries(tmp_path / "out")}
    assert found[FWD, "sm_90"] == QUICK
    assert found[FWD, "sm_80"] != QUICK
    assert f"{FWD} is not in '{lock}' for sm_80; its default schedule is built." in done.stderr
    assert f"{BWD} is not in '{lock}' for sm_80, sm_90; its default schedule is built." in done.stderr


def test_a_second_build_says_what_it_replaces(tmp_path: Path) -> None:
    one, two = QUICK, QUICK.replace("rows_per_block=4", "rows_per_block=8")
    args = ("build", FWD, "--emit", "cu", "--out", tmp_path, "--schedule")
    assert call(*args, one).stderr == call(*args, one).stderr == ""
    before = contents(tmp_path).keys()
    names = [plan(FWD, schedule=s).name for s in (one, two)]
    said = f"{FWD} on sm_90, up to 1048576 bytes a multiprocessor: {names[1]} replaces {names[0]}.\n"
    assert call(*args, two).stderr == said
    assert before < contents(tmp_path).keys()
    assert [e["kernel_set"] for *_, e, _ in entries(tmp_path)] == [names[1]]
    data = json.loads(prints(*args, two, "--rows", "1", "--json"))
    assert [e["name"] for e in data["kernel_sets"]] == [names[1]]
    assert len([*entries(tmp_path)]) == 2


def test_a_trace_is_built_with_its_rows(tmp_path: Path) -> None:
    """Beside the specs; what is no norm, and that a trace does not say its eps, is told."""
    trace, norm = tmp_path / "trace", traces.dumped("rmsnorm", 64, reference="...", description="")
    traces.write(trace, traces.dumped("silu"))
    none = r"got none; name one\. The trace has none: 'silu_h4096\.json': lngen has no operation"
    with pytest.raises(LngenError, match=none):
        build([], tmp_path / "out", trace=trace)
    traces.write(trace, norm)
    (trace / "rows.jsonl").write_text(traces.lines(traces.workload(norm["name"], batch_size=4)))
    done = call("build", FWD, "--trace", trace, "--emit", "cu", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "which eps" in done.stderr
    assert "1 entries of the trace are no norms of lngen: 'silu_h4096.json': lngen has no operation" in done.stderr
    rows = {spec: entry["most_bytes"] for spec, *_, entry, _ in entries(tmp_path / "out")}
    assert rows == {FWD: 2**20, "rmsnorm.fwd:d=64,dtype=bf16,save=none": 2**13}


# ---- verify; tests/messages/verify.txt has what it finds ----


def test_verify_tells_faults_on_stdout_and_notes_on_stderr(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    built = build([FWD], tmp_path, arch="sm_80+ptx,sm_90", emit="cu,cubin", schedule=QUICK)
    found = lngen.verify(tmp_path, progress=lambda *counts: seen.append(counts))
    count = len(built.files) - 1
    assert (found.ok, found.files, found.recompiled, found.rebuilt) == (True, count, 3, 1)
    assert (found.faults, found.skipped, found.unlisted) == ((), (), ())
    assert seen == [(n, 4) for n in range(1, 5)]
    told = "compiled again with the same bytes, 1 kernel set of the same launch data"
    assert prints("verify", tmp_path) == f"{count} files as listed, 3 {told}, no fault\n"
    (tmp_path / "mine.cubin").touch()
    next(tmp_path.glob("*.cu")).write_bytes(b"")
    done = call("verify", tmp_path)
    fault, total = done.stdout.splitlines()
    assert (done.exit_code, fault) == (1, lngen.verify(tmp_path).faults[0])
    assert total == f"{count - 1} files as listed, 0 {told}, 1 fault"
    assert done.stderr.startswith("the pack has no CUDA source of them, which a build with --emit cu adds: 3 files ")
    assert done.stderr.endswith("'mine.cubin' is not in the manifest.\n")


# ---- fat binaries ----

SOURCE = 'extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1.0f; } // a comment'
MAGIC = 0xBA55ED50  # the first four bytes, little-endian
PTX, CUBIN = 1, 2  # the kind of a member, as its header has it


@pytest.fixture(scope="module")
def images() -> tuple[Image, ...]:
    pytest.importorskip("cuda.pathfinder")
    cubins = [Image(arch, "cubin", compile_cubin(SOURCE, arch).image) for arch in ("sm_80", "sm_90", "sm_120")]
    return (*cubins, Image("sm_120", "ptx", compile_ptx(SOURCE, "sm_120").encode()))


def members(data: bytes) -> list[tuple[int, int, bytes]]:
    """Kind, arch and payload of each member: a header of 16 bytes, then a header and a payload for each."""
    magic, version, header, size = struct.unpack_from("<IHHQ", data)
    assert (magic, version, header, size) == (MAGIC, 1, 16, len(data) - 16)
    found, at = [], header
    while at < len(data):
        kind, _, own, payload = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        found.append((kind, arch, data[at + own : at + own + payload]))
        at += own + payload
    assert at == len(data)
    return found


def test_every_image_is_there_uncompressed(images: tuple[Image, ...]) -> None:
    """A driver of CUDA 12.0 reads no Zstandard, with which the library compresses PTX by default."""
    data = fatbin(images)
    found = members(data)
    assert [(kind, arch) for kind, arch, _ in found] == [(CUBIN, 80), (CUBIN, 90), (CUBIN, 120), (PTX, 120)]
    for image, (_, _, payload) in zip(images[:3], found[:3], strict=True):
        assert payload.startswith(image.data)
        assert not payload[len(image.data) :].strip(b"\0")
    text = found[3][2].decode()
    assert re.search(r"^\.target sm_120$", text, re.MULTILINE)
    assert ".visible .entry one(" in text
    assert len(data) - sum(len(i.data) for i in images) < 1024
    ptx = images[-1]
    assert fatbin([ptx]) == fatbin([ptx._replace(data=ptx.data.rstrip(b"\0") + b"\0")]), "with a NUL at its end or not"


WRONG = {
    "no cubin": (Image("sm_80", "cubin", b""), "cubin for sm_80: empty input"),
    "no ELF": (Image("sm_80", "cubin", b"no ELF" * 99), "cubin for sm_80: fatbinary elf mismatch"),
    "no PTX": (Image("sm_80", "ptx", b""), "ptx for sm_80: empty input"),
    "a text": (Image("sm_80", "ptx", b"no PTX"), "ptx for sm_80: could not find ptx version"),
}


def test_a_wrong_image_is_one_sentence(images: tuple[Image, ...]) -> None:
    another = images[0]._replace(arch="sm_90"), "cubin for sm_90: fatbinary elf mismatch: elf arch"
    for image, message in (*WRONG.values(), another):
        with pytest.raises(LngenError, match=f"nvFatbin refused the {message}"):
            fatbin([image])


def test_each_fat_binary_is_destroyed(monkeypatch: pytest.MonkeyPatch, images: tuple[Image, ...]) -> None:
    """Also that of a refused image."""
    library, count = module._library(), []
    names = ("Create", "AddCubin", "AddPTX", "Size", "Get", "GetErrorString")
    fake = SimpleNamespace(**{f"nvFatbin{n}": getattr(library, f"nvFatbin{n}") for n in names})
    fake.nvFatbinDestroy = lambda handle: count.append(library.nvFatbinDestroy(handle))
    monkeypatch.setattr(module, "_library", lambda: fake)
    fatbin(images)
    with pytest.raises(LngenError, match="refused"):
        fatbin([Image("sm_80", "cubin", b"no ELF")])
    assert count == [0, 0]


@pytest.mark.parametrize("missing", ["cuda.pathfinder", "the library", "a function"])
def test_a_missing_library_is_a_sentence_with_the_command(
    monkeypatch: pytest.MonkeyPatch, images: tuple[Image, ...], missing: str
) -> None:
    module._library.cache_clear()
    from cuda import pathfinder

    def not_found(name: str) -> SimpleNamespace:
        raise pathfinder.DynamicLibNotFoundError(f"no {name}\nmuch more")

    if missing == "cuda.pathfinder":
        monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    elif missing == "the library":
        monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace())
    with pytest.raises(MissingError, match=r'pip install "\.\[fatbin\]" in the checkout') as raised:
        fatbin(images)
    assert "\n" not in str(raised.value)
    assert "pip install nvidia-nvfatbin" in str(raised.value)
