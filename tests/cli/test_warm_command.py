"""If these fail, ``lngen warm`` leaves nothing for later programs, or something else than they ask for."""

from pathlib import Path

import pytest

import lngen
from commands import fails, prints
from lngen.launch.runtime.lock_file import Lock, Locked

pytest.importorskip("torch")
pytest.importorskip("cupy")

from remembering import Remembering, remembering

SPECS = "softmax.fwd:d=64,dtype=f32", "softmax.bwd:d=64,dtype=f32"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Remembering:
    return remembering(monkeypatch, tmp_path / "cache")


def test_later_programs_find_all(process: Remembering) -> None:
    """For any number of rows, and each kernel once in the table."""
    lines = prints("warm", *SPECS).splitlines()
    assert len(lines) == 2 + len({*process.compiled})
    process.forget()
    norm = lngen.compile("softmax", d=64)
    for made in (norm._forward, norm._backward):
        for rows in (0, 1, 5000, 10**6):
            assert made.launcher(0, rows=rows).described["schedule"]["text"] in "".join(lines)
    assert process.idle


def test_what_a_lock_file_has_for_so_many_rows(process: Remembering, tmp_path: Path) -> None:
    schedule = "form=registers,threads=8,rows_per_block=16,vec=4"
    (path := tmp_path / "lock.toml").write_text(Lock((Locked("NVIDIA H100", "sm_90", SPECS[0], 7, schedule),)).render())
    assert f"| {SPECS[0]} | {schedule}" in prints("warm", SPECS[0], "--lock", str(path), "--rows", "7")
    process.forget()
    lngen.compile("softmax", d=64, lock=path)._forward.launcher(0, rows=7)
    assert process.idle


def test_without_a_gpu_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lngen.cli.warm.device_count", lambda: 0)
    assert f"build a pack: lngen build {SPECS[0]} --arch sm_90 --out DIR." in fails(3, "warm", *SPECS)
