"""GPUs of a test's own, and the fake measurer."""

from pathlib import Path

import pytest

import tune_fakes
from tune_cases import Fake


@pytest.fixture
def private_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs a compiler; leases of their own, so that tests side by side do not wait for each other."""
    pytest.importorskip("cupy")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def fake(private_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch, tmp_path / "asked.log")()


@pytest.fixture
def command(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The command with one fake GPU, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    tune_fakes.use(monkeypatch, "7")
    return fake
