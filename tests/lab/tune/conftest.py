"""GPUs of a test's own, and the fake measurer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tune_fakes
from tune_cases import Fake, on_fake_gpu
from tune_nursery import Nursery


@pytest.fixture
def private_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs a compiler; leases of their own, so that tests side by side do not wait for each other."""
    pytest.importorskip("cupy")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as found:
        yield found


@pytest.fixture
def fake(private_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery) -> Fake:
    """Its workers are forked; see ``tune_nursery``."""
    return on_fake_gpu(monkeypatch, tmp_path, nursery)


@pytest.fixture
def command(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The command with one fake GPU, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    tune_fakes.use(monkeypatch, "7")
    return fake
