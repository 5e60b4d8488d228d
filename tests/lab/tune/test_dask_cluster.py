"""Builds or tuning on a real Dask cluster give something else than on this machine if these fail."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import tune_fakes
from commands import call
from lngen.errors import LngenError
from lngen.lab.tune import trials
from lngen.launch.runtime.lock_file import read_lock
from lngen.packs import build as builds
from lngen.packs.build import build
from packs import contents
from tune_cases import SPEC

FWD = "layernorm.fwd:d=64,dtype=bf16"
pytestmark = pytest.mark.filterwarnings("default")  # what Dask warns of is Dask's


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two processes of one thread each, and an environment they share."""
    distributed = pytest.importorskip("distributed")
    pytest.importorskip("cupy")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as made:
        yield made


def test_a_build_on_a_cluster_has_the_same_bytes(cluster: Any, tmp_path: Path) -> None:
    args = ["build", FWD, SPEC, "--arch", "sm_80,sm_90", "--out"]
    assert call(*args, str(tmp_path / "here")).exit_code == 0
    done = call(*args, str(tmp_path / "there"), "--dask", cluster.scheduler_address)
    assert done.exit_code == 0, done.output
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert {Path(n).suffix for n in contents(tmp_path / "here")} == {".cu", ".ptx", ".cubin", ".json", ".cuh"}


def test_a_build_on_processes_has_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    build([FWD], tmp_path / "here", emit="cu,ptx,fatbin")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        build([FWD], tmp_path / "there", emit="cu,ptx,fatbin", executor=pool)
        assert pool.submit(abs, -1).result() == 1  # it is the caller's, and still open
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_a_worker_with_another_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "nvrtc_version", lambda: (12, 9))
    with pytest.raises(LngenError, match=r"a worker has NVRTC 12\.9 and this machine 13\.4; install the same on both"):
        builds._one("a", "sm_90", "ptx", "", (13, 4))


def test_specs_are_tuned_on_a_cluster_one_per_gpu(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four jobs, two Dask workers, two pretended GPUs: each job runs on one that nobody else uses meanwhile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lngen.lab.tune.job.GPU", tune_fakes.NAME)
    log = tmp_path / "log"
    say = json.dumps({"log": str(log), "pause": 0.05, "wrong": [0]})

    def prepare(say: str, path: list[str], temporary: str) -> None:
        import sys
        import tempfile

        import lngen.lab.tune.job

        os.environ["FAKE_TUNE"] = say
        sys.path[:] = path
        tempfile.tempdir = temporary  # leases of their own, so that tests side by side do not wait for each other
        lngen.lab.tune.job.visible_devices = lambda: ("4", "9")  # type: ignore[attr-defined]

    with cluster.get_client() as client:
        client.run(prepare, say, sys.path, str(tmp_path))
    args = ["tune", SPEC, "--rows", "1,2,3,4", "--trials", "6", "--budget", "5m", "--database", "t.jsonl", "--json"]
    done = call(*args, "--dask", cluster.scheduler_address)
    assert done.exit_code == 0, done.output
    tuned = json.loads(done.stdout)["tuned"]
    assert [t["rows"] for t in tuned] == [1, 2, 3, 4]
    assert {t["chosen"]["rank"] for t in tuned} == {2}
    assert {t["trials"][0]["status"] for t in tuned} == {"correctness"}
    assert len(trials.read(tmp_path / "t.jsonl").trials) == 4 * 10
    assert {e.rows for e in read_lock("lngen.lock.toml").entries} == {1, 2, 3, 4}
    lines = [line.split() for line in log.read_text().splitlines()]
    assert {line[-2] for line in lines} == {"gpu=4", "gpu=9"}
    # From a job's first question to its last, nobody else asks on its GPU.
    for gpu in ("gpu=4", "gpu=9"):
        processes = [line[-1] for line in lines if line[-2] == gpu]
        assert processes == sorted(processes, key=processes.index)


def test_a_cluster_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("lngen.cli.shared_options.DASK_TIMEOUT", "0.2s")
    done = call("build", FWD, "--out", str(tmp_path / "x"), "--dask", "tcp://127.0.0.1:9")
    assert done.exit_code == 2, done.output
    assert "there is none at 'tcp://127.0.0.1:9'" in done.stderr
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = call("build", FWD, "--out", str(tmp_path / "x"), "--dask", "a")
    assert done.exit_code == 3
    assert 'pip install ".[cluster]"' in done.stderr
    assert not (tmp_path / "x").exists()
