"""If these fail, ``generated/kernels`` is not what the code emits, or what it emits depends on the hash seed."""

import json
import shutil
import statistics
from pathlib import Path

import pytest

import seeded
from child import output, start
from commands import call
from lngen.aot import catalog
from lngen.compile import Compilation
from lngen.config import data_dir
from lngen.ir import DType
from lngen.problem.schedule import FORMS
from lngen.spec import parse_spec
from plans import SHARED

GOLDEN = data_dir("generated") / "kernels"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "kernels"))


def test_the_golden_set_is_what_the_code_emits() -> None:
    done = call("generated", "--check")  # if it fails, run: lngen generated, and read the difference
    assert (done.exit_code, done.output) == (0, f"{len(catalog.CATALOG)} kernels, 0 differ\n")


def test_the_catalog_covers_what_it_should() -> None:
    specs = [parse_spec(text) for text in catalog.CATALOG]
    assert 8 <= len(specs) <= 15
    assert {(s.definition.name, s.direction) for s in specs} == {
        (graph, direction) for graph in ("layernorm", "rmsnorm") for direction in ("fwd", "bwd")
    }
    assert {s.dtype for s in specs} == {DType.F16, DType.BF16, DType.F32}
    assert {s.d for s in specs} == {64, 128, 768, 1000, 1001, 1024, 4096, 8192, 12288, 16384, 32768, 65536}
    assert any(s.weight is not s.dtype for s in specs)
    assert {s.strides for s in specs} == {1, 2}
    schedules = [plan.schedule for plan in catalog.plans()]
    assert {s.form for s in schedules} == set(FORMS)
    options = "prefetch tma_store cached_weights single_launch row_in_registers early_release dynamic"
    for option in options.split():
        assert {getattr(s, option) for s in schedules} == {False, True}, option
    assert {plan.spec.direction for plan in catalog.plans() if plan.schedule.cluster > 1} == {"fwd", "bwd"}
    templates = {k.template for plan in catalog.plans() for k in plan.kernels}
    kernels = {p.name for p in data_dir("templates").glob("*.cu.jinja")}
    kernels -= SHARED
    kernels -= {"elementwise.cu.jinja", "numbers.cu.jinja"}  # of no named graph
    assert templates == kernels, "a template that no golden kernel shows"


def test_the_catalog_asks_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compilation, "schedule", lambda *_: pytest.fail("a schedule is not written out"))
    for plan in catalog.plans():
        assert str(plan.spec) in catalog.CATALOG
        assert str(plan.schedule) == catalog.CATALOG[str(plan.spec)]


def test_a_changed_byte_a_missing_and_a_superfluous_file_are_seen(copy: Path) -> None:
    stale, missing, *_ = sorted(copy.iterdir())
    stale.write_bytes(stale.read_bytes().replace(b"has_row", b"had_row", 1))
    missing.unlink()
    (copy / "other.cu").write_text("// by hand\n")
    done = call("generated", "--check", "--dir", str(copy))
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        f"stale       {stale.name}", f"missing     {missing.name}", "superfluous other.cu",
        f"{len(catalog.CATALOG)} kernels, 3 differ",
    ]  # fmt: skip
    assert not missing.exists(), "--check wrote a file"
    data = json.loads(call("generated", "--check", "--json", "--dir", str(copy)).output)
    assert data["differences"][2] == {"file": "other.cu", "what": "superfluous"}


def test_line_endings_are_bytes(copy: Path) -> None:
    path = next(copy.iterdir())
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert catalog.differences(copy) == {path.name: "stale"}


def test_rewriting_repairs_and_removes(copy: Path) -> None:
    stale, missing, *_ = sorted(copy.iterdir())
    stale.write_text("")
    missing.unlink()
    (copy / "other.cu").touch()
    (copy / "README.md").touch()
    done = call("generated", "--dir", str(copy))
    assert done.exit_code == 0
    assert done.output.endswith("3 rewritten or removed\n")
    assert catalog.differences(copy) == {}
    assert (copy / "README.md").exists(), "only .cu files are lngen's"


def test_rewriting_makes_the_folder(tmp_path: Path) -> None:
    assert call("generated", "--dir", str(tmp_path / "new" / "set")).exit_code == 0
    names = {p.name for p in (tmp_path / "new" / "set").iterdir()}
    assert names == {p.name for p in GOLDEN.iterdir()}


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = call("generated", "--dir", str(tmp_path / "file" / "kernels"))
    assert done.exit_code == 2
    assert done.output.startswith("error: cannot write ")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Times are measured of two kernels alone; their names."""
    few = catalog.plans()[:2]
    monkeypatch.setattr("lngen.aot.catalog.plans", lambda: few)
    return [plan.name for plan in few]


def test_the_time_a_kernel_takes(two: list[str]) -> None:
    """Each is compiled although it is cached; sums and medians are those of the columns."""
    pytest.importorskip("cupy")
    shown = call("generated", "--time").output
    assert "| total " in shown
    assert "| median " in shown
    assert "against" not in shown
    data = json.loads(call("generated", "--time", "--json").output)
    assert [k["kernel"] for k in data["kernels"]] == two
    for times in (*data["kernels"], data["total"], data["median"]):
        assert 0 < times["cached_ms"] < times["compile_ms"] < times["total_ms"]
    for column in ("emit_ms", "compile_ms", "total_ms", "cached_ms"):
        values = [k[column] for k in data["kernels"]]
        assert data["total"][column] == pytest.approx(sum(values), abs=0.01)
        assert data["median"][column] == pytest.approx(statistics.median(values), abs=0.01)


def test_times_are_medians_of_three(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is that of the processor, which other processes do not touch."""
    pytest.importorskip("cupy")
    spent = iter([9.0, 1.0, 2.0, 3.0, 5.0, 7.0, 6.0, 4.0, 8.0] * 2)  # emit, compile, cached, three times over
    clock = [0.0]

    def now() -> float:
        clock.append(clock[-1] + (next(spent) if len(clock) % 2 == 0 else 0.0))
        return clock[-1]

    monkeypatch.setattr("lngen.aot.catalog.time.process_time", now)
    for times in json.loads(call("generated", "--time", "--json").output)["kernels"]:
        assert (times["emit_ms"], times["compile_ms"], times["cached_ms"]) == (6000, 4000, 7000)


def test_times_beside_those_of_another_set(two: list[str], copy: Path) -> None:
    """A kernel of the other set is found by its spec, whatever it is called; a text that is longer takes longer."""
    pytest.importorskip("cupy")
    for path in copy.iterdir():
        path.rename(path.with_stem(path.stem[::-1]))
    slow = next(path for path in copy.iterdir() if path.stem[::-1] == two[0])
    work = "#pragma unroll\nfor (int i = 0; i < 99; ++i) p[i] /= p[i + 1];"
    slow.write_text(slow.read_text() + f'extern "C" __global__ void more(float* p) {{\n{work}\n}}\n')
    data = json.loads(call("generated", "--time", "--against", str(copy), "--json").output)
    assert [k["kernel"] for k in data["kernels"]] == two
    for times in (*data["kernels"], data["total"], data["median"]):
        assert times["ratio"] == pytest.approx(times["compile_ms"] / times["against_ms"], abs=0.01)
    assert data["kernels"][0]["ratio"] < data["kernels"][1]["ratio"]
    assert "| ratio |" in call("generated", "--time", "--against", str(copy)).output


def test_what_times_cannot_be_compared_with(two: list[str], copy: Path) -> None:
    next(path for path in copy.iterdir() if path.stem == two[1]).unlink()
    done = call("generated", "--time", "--against", str(copy))
    spec = [*catalog.CATALOG][1]
    assert done.exit_code == 2
    assert done.output == (
        f"error: {copy} is expected to hold a golden set, but no .cu file there is of {spec}; name the folder "
        "generated/kernels of another checkout.\n"
    )
    assert "--against goes with --time alone" in call("generated", "--against", str(copy)).output
    assert call("generated", "--time", "--check").exit_code == 2


def test_every_hash_seed_gives_the_same_bytes() -> None:
    """Of kernels, plans, graphs of every stage, rankings and names."""
    seeds = ("0", "1", "12345")
    started = [start("import seeded; seeded.main()", PYTHONHASHSEED=seed) for seed in seeds]
    hashes = [output(child).split() for child in started]
    assert len({*hashes[0]}) == len(catalog.CATALOG) + seeded.SCHEDULED + len(seeded.OWN) + 1
    assert all(found == hashes[0] for found in hashes)
