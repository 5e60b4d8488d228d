"""If these fail, ``generated/kernels`` is not what the code emits, or what it emits depends on the hash seed."""

import json
from collections.abc import Callable
from itertools import accumulate, chain, product
from pathlib import Path

import pytest

import seeded
from child import output, start
from commands import call
from lngen.compiler.compile import Compilation
from lngen.compiler.emit import emit
from lngen.compiler.ir import DType
from lngen.compiler.problem.schedule import FORMS
from lngen.config import data_dir
from lngen.packs import catalog
from plans import SHARED

GOLDEN = data_dir("generated") / "kernels"


def test_the_golden_set_is_what_the_code_emits() -> None:
    done = call("generated", "--check")  # if it fails, run: lngen generated, and read the difference
    assert (done.exit_code, done.output) == (0, f"{len(catalog.CATALOG)} kernels, 0 differ\n")


def test_the_catalog_covers_what_it_should_and_asks_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compilation, "schedule", lambda *_: pytest.fail("a schedule is not written out"))
    plans = catalog.plans()
    assert {str(plan.spec): str(plan.schedule) for plan in plans} == catalog.CATALOG
    specs, schedules = [plan.spec for plan in plans], [plan.schedule for plan in plans]
    assert 8 <= len(specs) <= 22
    plain = [s for s in specs if not ("quant" in dict(s.chosen) or s.dx_quant)]
    named = {*product(("layernorm", "rmsnorm"), ("fwd", "bwd")), ("ada_layernorm", "bwd"), ("ada_rmsnorm", "bwd")}
    named |= {("qk_rmsnorm", "fwd"), ("cross_entropy", "fwd")}
    assert {(s.definition.name, s.direction) for s in plain} == named
    quantised = [dict(s.chosen) for s in specs if "quant" in dict(s.chosen)]
    assert {keys.get("scales", "row") for keys in quantised} == {"row", "block"}
    assert {s.dtype for s in specs} == {DType.F16, DType.BF16, DType.F32}
    assert {s.d for s in specs} == {
        64,
        128,
        768,
        1000,
        1001,
        1024,
        3072,
        4096,
        5120,
        8192,
        8320,
        12288,
        16384,
        32768,
        50257,
        65536,
    }
    assert any(s.weight is not s.dtype for s in specs)
    assert {s.strides for s in specs} == {1, 2}
    assert {s.form for s in schedules} == set(FORMS)
    options = "prefetch tma_store cached_weights single_launch row_in_registers early_release dynamic"
    for option in options.split():
        assert {getattr(s, option) for s in schedules} == {False, True}, option
    assert {plan.spec.direction for plan in plans if plan.schedule.cluster > 1} == {"fwd", "bwd"}
    kernels = {p.name for p in data_dir("templates").glob("*.cu.jinja")} - SHARED
    kernels -= {"elementwise.cu.jinja", "numbers.cu.jinja"}  # of no named graph
    assert {k.template for plan in plans for k in plan.kernels} == kernels, "a template that no golden kernel shows"


def test_differences_are_seen_and_repaired(tmp_path: Path) -> None:
    """A changed byte, another line ending, a file that is missing and one too many; only .cu files are lngen's."""
    folder = tmp_path / "new" / "set"
    assert call("generated", "--dir", folder).exit_code == 0
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in GOLDEN.iterdir()}
    changed, missing, endings, *_ = sorted(folder.iterdir())
    changed.write_bytes(changed.read_bytes().replace(b"has_row", b"had_row", 1))
    missing.unlink()
    endings.write_bytes(endings.read_bytes().replace(b"\n", b"\r\n"))
    (folder / "other.cu").write_text("// by hand\n")
    (folder / "README.md").touch()
    found = {changed.name: "stale", missing.name: "missing", endings.name: "stale", "other.cu": "superfluous"}
    lines, count = [f"{what:<11} {name}" for name, what in found.items()], len(catalog.CATALOG)
    for options, code, last in ((("--check",), 1, "4 differ"), ((), 0, "4 rewritten or removed")):
        data = json.loads(call("generated", "--check", "--json", "--dir", folder).output)
        assert data["differences"] == [{"file": name, "what": what} for name, what in found.items()]
        done = call("generated", *options, "--dir", folder)
        assert (done.exit_code, done.output.splitlines()) == (code, [*lines, f"{count} kernels, {last}"])
    assert catalog.differences(folder) == {}
    assert (folder / "README.md").exists()


def test_times_are_medians_of_processor_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each kernel is compiled though it is cached. One of another set is found by its spec, whatever it is called."""
    pytest.importorskip("cupy")
    few, done = catalog.plans()[:2], list[tuple[str, bool]]()
    texts = [emit(plan) for plan in few]
    for n, text in enumerate(texts):
        (tmp_path / f"{n}.cu").write_text(f"{text}// another\n")
    rounds = (9, 1, 2, 8), (3, 5, 7, 4), (6, 4, 8, 5)  # emit, compile, read from the cache, compile the other

    def now(columns: int) -> Callable[[], float]:
        spent = (ms * kernel / 1e3 for kernel in (1, 2) for times in rounds for ms in times[:columns])
        clock = accumulate(step for ms in spent for step in (0.0, ms))
        return lambda: next(clock)

    monkeypatch.setattr("lngen.packs.catalog.plans", lambda: few)
    monkeypatch.setattr(
        "lngen.packs.catalog.compile_cubin", lambda source, *, fresh=False, **_: done.append((source, fresh))
    )
    for columns, options in ((3, ()), (4, ("--against", tmp_path))):
        wanted = {"emit_ms": 6, "compile_ms": 4, "total_ms": 10, "cached_ms": 7, "against_ms": 5}
        wanted = dict([*wanted.items()][: columns + 1])
        listed = {plan.name: {key: n * ms for key, ms in wanted.items()} for n, plan in enumerate(few, 1)}
        listed |= {name: {key: n * ms for key, ms in wanted.items()} for name, n in (("total", 3), ("median", 1.5))}
        done.clear()
        monkeypatch.setattr("lngen.packs.catalog.time.process_time", now(columns))
        found = json.loads(call("generated", "--time", *options, "--json").output)
        kernels = {times.pop("kernel"): times for times in found["kernels"]} | {
            n: found[n] for n in ("total", "median")
        }
        assert [times.pop("ratio", 0.8) for times in kernels.values()] == [0.8] * 4
        assert kernels == {name: pytest.approx(times) for name, times in listed.items()}
        each = [[(text, True), (text, False), (f"{text}// another\n", True)][: columns - 1] * 3 for text in texts]
        assert done == [*chain(*each)]
        monkeypatch.setattr("lngen.packs.catalog.time.process_time", now(columns))
        head, _, *rows = call("generated", "--time", *options).output.splitlines()
        assert ("| ratio" in head) is (columns == 4)
        assert [row.split("|")[1].strip() for row in rows] == [*listed]


def test_every_hash_seed_gives_the_same_bytes() -> None:
    """Of kernels, plans, graphs of every stage, rankings and names; this process has a seed, and knows some of them."""
    other = start("import seeded; print(*seeded.hashes())", PYTHONHASHSEED="12345")
    hashes = seeded.hashes()
    assert len({*hashes}) == len(catalog.CATALOG) + seeded.SCHEDULED + len(seeded.OWN) + 1
    assert output(other).split() == hashes
