"""If these fail, a launcher takes kernels that its GPU does not run, or not those for its number of rows."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lngen
from fake_driver import FakeDriver
from limited_packs import BUILDS, BWD, WIDE, limited
from lngen.compiler.compile import Compilation
from lngen.compiler.devices import device_for
from lngen.errors import LngenError, ScheduleError
from lngen.launch import driver
from lngen.launch.pack import FILE_NAME, class_for, image_for, lacking, runs
from lngen.packs.build import build

# ---- rules, as tables ----

GPUS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
RUNS = {
    # arch: the capabilities that run its cubin, and those that run its PTX
    "sm_75": (GPUS[:1], GPUS),
    "sm_80": (GPUS[1:4], GPUS[1:]),
    "sm_86": (GPUS[2:4], GPUS[2:]),
    "sm_89": (GPUS[3:4], GPUS[3:]),
    "sm_90": (GPUS[4:5], GPUS[4:]),
    "sm_90a": (GPUS[4:5], GPUS[4:5]),
    "sm_100": (GPUS[5:7], GPUS[5:]),
    "sm_100a": (GPUS[5:6], GPUS[5:6]),
    "sm_100f": (GPUS[5:7], GPUS[5:7]),
    "sm_103": (GPUS[6:7], GPUS[6:]),
    "sm_103f": (GPUS[6:7], GPUS[6:7]),
    "sm_110": (GPUS[7:8], GPUS[7:]),
    "sm_120": (GPUS[8:], GPUS[8:]),
    "sm_120a": (GPUS[8:9], GPUS[8:9]),
    "sm_120f": (GPUS[8:], GPUS[8:]),
    "sm_121": (GPUS[9:], GPUS[9:]),
}


@pytest.mark.parametrize("arch", RUNS)
def test_which_gpu_runs_which_code(arch: str) -> None:
    for kind, wanted in zip(("cubin", "ptx"), RUNS[arch], strict=True):
        assert [gpu for gpu in GPUS if runs(arch, kind, gpu)] == wanted
    assert not any(runs(arch, "source", gpu) for gpu in GPUS)


def test_the_first_image_that_runs_is_taken() -> None:
    listed = "sm_100 cubin, sm_90 cubin, sm_86 cubin, sm_80 cubin, sm_90 ptx, sm_80 ptx, sm_75 source"
    images = [dict(zip(("arch", "kind"), one.split(), strict=True)) for one in listed.split(", ")]
    taken = {gpu: image_for(images, gpu) for gpu in GPUS}
    assert [" ".join(i.values()) if i else None for i in taken.values()] == [
        None, "sm_80 cubin", "sm_86 cubin", "sm_86 cubin", "sm_90 cubin", "sm_100 cubin", "sm_100 cubin", "sm_90 ptx",
        "sm_90 ptx", "sm_90 ptx",
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "most"), [(0, 10), (1, 10), (5, 10), (6, 20), (10, 20), (11, 20), (2**40, 20)])
def test_the_class_of_a_number_of_rows(rows: int, most: int) -> None:
    """Four bytes a row and two multiprocessors: up to 5 and 10 rows; beyond, the last."""
    assert class_for([{"most_bytes": 10}, {"most_bytes": 20}], rows, 4, 2)["most_bytes"] == most


@pytest.mark.parametrize("capability", GPUS[:-1])
def test_the_largest_cluster_is_that_of_the_described_gpu(capability: tuple[int, int]) -> None:
    described = device_for("sm_{}{}".format(*capability))

    def needs(cluster: int) -> str:
        kernel = {"name": "k", "cluster": cluster, "dynamic_shared_bytes": 0}
        return lacking({"kernels": [kernel], "resources": {}}, described.arch, capability, 2**20)

    assert [n for n in (1, 2, 4, 8, 16) if not needs(n)] == [
        n for n in (1, 2, 4, 8, 16) if n <= described.largest_cluster
    ]


# ---- what a GPU cannot launch ----


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: limited(name, tmp_path_factory)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeDriver]]:
    """Makes the fake GPU of a capability the one that is there."""

    def start(folder: Path, *capability: int, **how: Any) -> FakeDriver:
        fake = FakeDriver(capability, **{"version": 20000, **how})  # type: ignore[arg-type]
        fake.knows_pack(folder)
        fake.cuInit(0)
        monkeypatch.setattr(driver, "library", lambda: fake)
        return fake

    yield start
    driver._gpu.cache_clear()


def choice(folder: Path) -> tuple[str, str]:
    """The kernel set of the only class, and what is taken otherwise."""
    (facts,) = json.loads((folder / FILE_NAME).read_bytes())["specs"].values()
    entry = facts["images"][0]["classes"][0]
    return entry["kernel_set"], entry["otherwise"]["kernel_set"]


TAKEN = [
    ("single launch", (9, 0), {}, 0),
    ("single launch", (9, 0), {"multiprocessors": 2}, 1),
    ("shared memory", (8, 0), {}, 0),
    ("shared memory", (8, 6), {}, 1),
    ("shared memory", (8, 9), {}, 1),
    ("static shared memory", (8, 0), {}, 0),
    ("static shared memory", (8, 6), {}, 1),
    ("clusters", (9, 0), {}, 0),
    ("clusters", (10, 0), {}, 0),
    ("clusters", (12, 0), {}, 1),
]


@pytest.mark.parametrize(("name", "capability", "how", "place"), TAKEN)
def test_a_gpu_takes_what_it_can_launch(
    built: Any, on: Any, name: str, capability: tuple[int, int], how: dict[str, Any], place: int
) -> None:
    """Another kernel set of the same results, where the GPU has too few multiprocessors, bytes or clusters."""
    folder = built(name)
    on(folder, *capability, **how)
    pack, spec = lngen.load(folder), BUILDS[name][0][0]
    loaded = pack.kernels(spec, 0, 1000)
    assert loaded.described["name"] == choice(folder)[place]
    assert pack.kernels(spec, 0, 1) is loaded
    pack.prepare(0)
    assert pack.kernels(spec, 0, 1000) is loaded


def test_one_pack_on_several_devices(built: Any, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own image, loaded in its own context."""
    folder = built("clusters")
    on(folder, 9, 0, devices=3)
    gpus = [driver.gpu(0), driver.gpu(1)._replace(capability=(10, 0)), driver.gpu(2)]
    monkeypatch.setattr("lngen.launch.pack.gpu", gpus.__getitem__)
    pack = lngen.load(folder)
    found = [pack.kernels(WIDE, device, 1) for device in range(3)]
    assert [one.gpu.context for one in found] == [gpu.context for gpu in gpus]
    assert [(file.rpartition(".")[2], device) for file, device in pack._loaded] == [
        ("cubin", 0),
        ("ptx", 1),
        ("cubin", 2),
    ]
    assert all(pack.kernels(WIDE, device, 1) is found[device] for device in range(3))


@pytest.mark.parametrize(("name", "capability", "more"), [("clusters", (9, 0), 512), ("clusters", (10, 0), 0)])
def test_the_arch_of_the_resources_is_launched_with_their_memory(
    built: Any, on: Any, name: str, capability: tuple[int, int], more: int
) -> None:
    """Blocks are spread evenly by it; another GPU gets what the kernels use."""
    folder = built(name)
    on(folder, *capability)
    pack = lngen.load(folder)
    (kernel,) = pack.kernel_set(choice(folder)[0])["kernels"]
    used = pack.kernel_set(choice(folder)[0])["resources"]["sm_90"][kernel["name"]]
    used["launch_shared_bytes"] = kernel["dynamic_shared_bytes"] + 512
    assert pack.kernels(WIDE, 0, 1).shared == [kernel["dynamic_shared_bytes"] + more]


def test_where_nothing_fits_weaker_gpus_a_class_has_nothing_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_fits(*_: Any, **__: Any) -> Any:
        raise ScheduleError("no schedule fits.")

    monkeypatch.setattr(Compilation, "schedule", none_fits)
    built = build([BWD], tmp_path, emit="cu", **BUILDS["shared memory"][1])
    assert built.manifest.specs[BWD]["images"][0]["classes"][0]["otherwise"] is None


NEEDS = [
    ("single launch", (9, 0), {"multiprocessors": 2}, "room for all blocks of a cooperative kernel at the same time"),
    ("shared memory", (8, 6), {}, "131072 bytes of shared memory for a block"),
    ("clusters", (12, 0), {}, "clusters of 16 blocks"),
]


@pytest.mark.parametrize(("name", "capability", "how", "needs"), NEEDS)
def test_without_another_kernel_set_the_reason_is_told(
    built: Any, on: Any, name: str, capability: tuple[int, int], how: dict[str, Any], needs: str
) -> None:
    folder = built(name)
    on(folder, *capability, name="A GPU", **how)
    pack, spec = lngen.load(folder), BUILDS[name][0][0]
    for image in pack.dispatch(spec)["images"]:
        image["classes"][0]["otherwise"] = None
    with pytest.raises(LngenError) as error:
        pack.kernels(spec, 0, 1)
    assert str(error.value) == (
        f"'{choice(folder)[0]}' of the pack '{folder}' needs {needs}, which A GPU does not have; build it for this "
        f"GPU: lngen build {spec} --arch sm_{capability[0]}{capability[1]} --out DIR."
    )


# ---- what is not there ----


def test_a_gpu_without_an_image_and_a_spec_that_is_not_there(built: Any, on: Any) -> None:
    folder = built("clusters")
    on(folder, 8, 0, name="A GPU")
    pack = lngen.load(folder)
    with pytest.raises(LngenError) as error:
        pack.kernels(WIDE, 0, 1)
    assert str(error.value) == (
        f"the pack '{folder}' has no kernel of {WIDE} for A GPU, which is sm_80: it has sm_90 (cubin), sm_90 (ptx); "
        f"build it: lngen build {WIDE} --arch sm_80 --out DIR."
    )
    with pytest.raises(LngenError, match="has no kernel of"):
        pack.prepare()
    with pytest.raises(LngenError) as error:
        pack.kernels(BWD, 0, 1)
    assert str(error.value) == (
        f"the pack '{folder}' does not have '{BWD}', but {WIDE}; build it: lngen build {BWD} --out DIR."
    )


@pytest.mark.parametrize(("capability", "file", "least"), [((9, 0), "cubin", 0), ((10, 0), "ptx", 1)])
def test_a_driver_that_is_too_old_is_one_sentence(built: Any, on: Any, capability: Any, file: str, least: int) -> None:
    """Machine code runs under every minor version of its CUDA, PTX needs its own or a newer one."""
    folder = built("clusters")
    (facts,) = [f for f in lngen.load(folder).kernel_set(choice(folder)[0])["files"].values() if f["kind"] == file]
    major, minor = map(int, facts["nvrtc"].split("."))
    oldest = 1000 * major + 10 * minor * least
    assert facts["driver"] == oldest
    on(folder, *capability, version=oldest)
    lngen.load(folder).kernels(WIDE, 0, 1)
    for version, text in ((12090, "12.9"), (oldest - 10, f"{(oldest - 10) // 1000}.{(oldest - 10) % 1000 // 10}")):
        on(folder, *capability, version=version)
        driver._gpu.cache_clear()
        with pytest.raises(LngenError) as error:
            lngen.load(folder).kernels(WIDE, 0, 1)
        assert str(error.value) == (
            f"'{choice(folder)[0]}.sm_90.{file}' was made by NVRTC {facts['nvrtc']} and needs a driver for CUDA "
            f"{major}.{minor * least} or newer, got one for {text}; update the driver, or build with an older NVRTC."
        )


def test_a_file_that_is_not_as_listed_is_never_loaded(built: Any, on: Any, tmp_path: Path) -> None:
    for source in built("clusters").iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    fake = on(tmp_path, 9, 0)
    file = tmp_path / f"{choice(tmp_path)[0]}.sm_90.cubin"
    whole = file.read_bytes()
    for data, message in (
        (whole[:-1], "is not the file that the"),
        (whole + b"?", "is not the"),
        (None, "cannot be read"),
    ):
        file.unlink() if data is None else file.write_bytes(data)
        with pytest.raises(LngenError, match=rf"'.*\.sm_90\.cubin' (of the pack )?{message}.*; build the pack again\."):
            lngen.load(tmp_path).prepare()
    assert "cuModuleLoadDataEx" not in fake.calls
    file.write_bytes(whole)
    lngen.load(tmp_path).prepare()
    assert fake.calls.count("cuModuleLoadDataEx") == 1
