"""If these fail, a program of the pages about packs does not run, or it launches other kernels than lngen does."""

import ctypes
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lngen
from commands import prints
from fake_driver import SHARED_OPTIN, FakeDriver
from fake_images import cubins_of_ptx
from host_tensors import pass_for_gpu_tensors
from limited_packs import BUILDS, limited
from lngen.compiler.compile import Compilation
from lngen.compiler.contract import described
from lngen.compiler.devices import device_for
from lngen.compiler.spec import parse_spec
from lngen.launch import driver
from lngen.launch.driver import Launch
from lngen.launch.kernels import Bound
from lngen.launch.pack import FILE_NAME, Pack
from packs import SCHEMA

DOCS = Path(lngen.__file__).parent / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def programs(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    pytest.importorskip("cupy")
    yield
    driver._gpu.cache_clear()


def test_the_programs_about_packs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, with what the last one defined; the GPU of their tensors is a fake one."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    gpu, names, folder = FakeDriver(version=20000), dict[str, Any](), tmp_path / "build"
    pass_for_gpu_tensors(monkeypatch, gpu)
    real = lngen.build

    def known(*args: Any, **options: Any) -> Any:
        built = real(*args, **options)
        gpu.knows_pack(folder)
        return built

    monkeypatch.setattr(lngen, "build", known)
    with cubins_of_ptx():
        for program in programs(page("packs")):
            exec(compile(program.replace('"cuda"', '"cpu"'), "packs.md", "exec"), names)
    assert not gpu.findings
    x, dy, gamma, beta = (names[key] for key in ("x", "dy", "gamma", "beta"))
    assert [g.shape for g in (names["dx"], names["dgamma"], names["dbeta"])] == [x.shape, gamma.shape, beta.shape]
    assert dy.shape == x.shape
    wide = names["y"].float() / x.float()
    assert torch.allclose(wide, (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().expand_as(wide), rtol=0.02)
    assert names["q"].float().square().mean(-1).sub(1).abs().max() < 0.02  # in the place of q
    assert (names["k"].float().square().mean(-1) - 1).abs().max() > 0.02


def test_the_table_of_the_page_is_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for sizes, which depend on the compiler."""
    monkeypatch.chdir(tmp_path)
    block, rest = re.findall(r"^```\n(.*?)^```$(.*?)^## Python", page("packs"), re.MULTILINE | re.DOTALL)[0]
    with cubins_of_ptx():
        printed = [prints(*line.split()[1:]) for line in block.splitlines()][-1]
    heading, *lines = (re.sub(r"\|[^|]*\|$", "|", line) for line in printed.splitlines())
    assert f"`{heading.split(': ')[1]}`" in rest
    told = [re.sub(r"\|[^|]*\|$", "|", line) for line in re.findall(r"^\|.*", rest, re.MULTILINE)]
    assert told[-len(lines) :] == lines


# ---- a launcher by the page about the manifest ----

DEVICES = {
    "T4": ((7, 5), 40, 1), "A100": ((8, 0), 108, 1), "RTX 4090": ((8, 9), 128, 1), "H200": ((9, 0), 132, 16),
    "B200": ((10, 0), 148, 16), "RTX 5090": ((12, 0), 170, 8),
}  # fmt: skip
ROWS = (0, 1, 5, 200, 1000, 4096, 100_000)


@pytest.fixture
def pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: limited(name, tmp_path_factory)


@cache
def launcher() -> dict[str, Any]:
    """What the program of the page defines."""
    found: dict[str, Any] = {}
    (program,) = programs(page("manifest"))
    exec(compile(program, "manifest.md", "exec"), found)
    return found


def recorded(bound: Bound, pointers: list[int], workspace: int) -> list[tuple[int, int, list[int]]]:
    """Blocks in x and y and arguments of each launch, which is not done."""
    made = []
    for place, launch in enumerate(bound.launches):

        def record(stream: int, launch: Launch = launch) -> None:
            grid, table = launch.config.grid, launch.given[2]
            made.append((grid[0], grid[1], [ctypes.c_longlong.from_address(at).value for at in table]))

        bound.launches[place] = record  # type: ignore[call-overload]
    bound.run(pointers, workspace, 0)
    return made


def last_rows(pack: Pack, spec: str, multiprocessors: int) -> list[int]:
    """The most rows of each class."""
    facts = pack.dispatch(spec)
    classes = [c for image in facts["images"] for c in image["classes"]]
    return sorted({c["most_bytes"] * multiprocessors // facts["row_bytes"] for c in classes})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["archs and rows", "static shared memory", "single launch", "clusters"])
def test_the_launcher_takes_and_launches_what_lngen_does(
    name: str, device: str, pack: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (capability, multiprocessors, cluster) = pack(name), DEVICES[device]
    fake = FakeDriver(capability, multiprocessors, device, version=20000)
    fake.knows_pack(folder)
    fake.cuInit(0)
    monkeypatch.setattr(driver, "library", lambda: fake)
    here = {
        "capability": capability, "multiprocessors": multiprocessors, "shared": fake.attributes[SHARED_OPTIN],
        "cluster": cluster,
    }  # fmt: skip
    assert cluster == device_for("sm_{}{}".format(*capability)).largest_cluster
    own, own_choice = Pack(folder), launcher()
    if name in ("static shared memory", "clusters"):
        assert own.dispatch(BUILDS[name][0][0])["images"][0]["classes"][0]["otherwise"]
    for spec in BUILDS[name][0]:
        for rows in (*ROWS, *last_rows(own, spec, multiprocessors)):
            try:
                loaded = own.kernels(spec, 0, rows)
            except lngen.LngenError:
                with pytest.raises(StopIteration):
                    own_choice["choose"](folder, spec, rows, here)
                continue
            found, file = own_choice["choose"](folder, spec, rows, here)
            assert found == loaded.described
            assert (file, 0) in own._loaded
            places = {t: 4096 * n for n, t in enumerate(loaded.tensors, 1)}
            strides = {t: 4096 + 8 * n for n, t in enumerate(loaded.tensors)}
            wanted = recorded(loaded.bind(rows, strides), [*places.values()], 2**30)
            assert [tuple(one)[1:] for one in own_choice["launches"](found, rows, places, strides, 2**30)] == wanted


# ---- the page about the manifest names all keys ----


def test_the_page_has_every_key_in_the_order_of_the_file(pack: Callable[[str], Path]) -> None:
    document = json.loads((pack("clusters") / FILE_NAME).read_bytes())
    top, kernel_set = re.findall(r"\| key \| holds \|\n\|---\|---\|\n(.*?)\n\n", page("manifest"), re.DOTALL)

    def named(table: str) -> list[str]:
        cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        return [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]

    assert named(top) == [*document]
    assert named(kernel_set) == [*document["kernel_sets"][0]]
    (kinds,) = re.findall(r"\| kind \| is passed \|\n\|---\|---\|\n(.*?)\n\n", page("manifest"), re.DOTALL)
    listed = json.dumps(SCHEMA["$defs"]["argument"])
    assert {*re.findall(r'"(\w+)"', re.findall(r'"kind": .*?"enum": \[(.*?)\]', listed)[0])} == {*named(kinds)}
    assert f"| `schema_version` | {document['schema_version']} |" in top


def test_the_page_shows_a_call() -> None:
    (text,) = re.findall(r"## One call\n.*?```json\n(.*?)```", page("manifest"), re.DOTALL)
    compilation = Compilation(parse_spec("rmsnorm.fwd:d=64,dtype=bf16,eps=run"))
    made = described(compilation.kernels(compilation.schedule("sm_90")).plan)
    shown = json.loads(text)
    assert shown == {key: made[key] for key in shown}
    assert [*shown] == ["tensors", "call", "in_place", "kernels", "workspace"]
