"""The tuner on a GPU: real candidates, real bits, real times, a kernel that never ends."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import lngen
from lngen.compiler.compile import Compilation
from lngen.compiler.interpret import interpret
from lngen.compiler.spec import parse_spec
from lngen.compiler.toolchain import compile_cubin
from lngen.lab.tune import trials
from lngen.lab.tune.candidates import build_all, candidates
from lngen.lab.tune.job import GPU, Job, Listener, run_job
from lngen.lab.tune.tuner import store_choices, tune
from lngen.lab.tune.workers import Failure, Limits, Worker, visible_devices
from lngen.launch.runtime.launcher import device_count, device_name
from lngen.proof.check.inputs import random_inputs

pytestmark = pytest.mark.gpu

FWD = "layernorm.fwd:d=4096,dtype=bf16"
BWD = "layernorm.bwd:d=1024,dtype=f16"


@pytest.mark.parametrize(
    ("text", "rows"), [(FWD, 4096), (BWD, 4096), ("rmsnorm.bwd:d=1000,dtype=f32,save=none", 777), (FWD, 1)]
)
def test_a_spec_is_tuned_within_its_budget(text: str, rows: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    path = tmp_path / "trials.jsonl"
    found = tune([Job(parse_spec(text), rows, trials=10)], path).outcomes[0]
    assert time.monotonic() - begin < 40
    assert not found.error
    assert found.choice is not None
    assert found.device is not None
    assert {t.status for t in found.trials} <= {"correct", "compile"}, [t.reason for t in found.trials]
    best = found.choice.trial
    assert best.us_median is not None
    assert best.reference is not None
    assert 0.3 < best.ratio < 30
    known = trials.read(path).trials
    again = run_job(Job(parse_spec(text), rows, trials=10, known=known))
    if found.complete:  # other processes on this GPU may take so much of the budget that something is left
        assert again.new == ()
        assert again.choice == found.choice


def test_wrong_bits_a_crash_and_a_hang_are_seen_and_survived() -> None:
    """Sources that were tampered with: one adds nothing, one writes to nowhere, one never ends."""
    from lngen.compiler.emit import emit
    from lngen.compiler.lower import lower

    spec = parse_spec(FWD)
    ranked = [*enumerate(candidates(Compilation(spec), 64, "sm_90")[:2])]
    arch = f"sm_{_capability()}"
    right, other = build_all(Compilation(spec), ranked, arch)
    source = emit(lower(spec, other.schedule))
    body = source.index("{", source.rindex("__global__"))

    def tampered(statement: str) -> bytes:
        return compile_cubin(f"{source[: body + 1]}\n{statement}\n{source[body + 1 :]}", arch).image

    nothing = replace(other, kernel="nothing", image=tampered("if (blockIdx.x >= 0) return;"))
    nowhere = replace(other, kernel="nowhere", image=tampered("*(volatile int*)8 = 1;"))
    forever = replace(other, kernel="forever", image=tampered("for (volatile int i = 0; i >= 0; i = 1) {}"))
    with Worker(GPU, visible_devices()[0], Limits(check=8.0)) as worker:
        worker.open(spec, 64)
        assert worker.check(right) == ""
        assert "differ with 1 rows" in worker.check(nothing)
        for broken, status in ((nowhere, "runtime"), (forever, "timeout")):
            with pytest.raises(Failure) as caught:
                worker.check(broken)
            assert caught.value.status == status
            assert worker.check(right) == ""
        assert worker.starts == 3
        timed = worker.time([right, other], 4)
        assert all(not isinstance(s, str) for s in timed.stats)


def _capability() -> str:
    import cupy

    return str(cupy.cuda.Device(0).compute_capability)


def test_a_tuned_norm_has_the_same_bits(tmp_path: Path) -> None:
    import cupy

    spec = parse_spec("rmsnorm.fwd:d=1024,dtype=f32")
    outcome = run_job(Job(spec, 256, trials=6))
    path = tmp_path / "lngen.lock.toml"
    store_choices(path, [outcome])
    norm = lngen.compile("rmsnorm", d=1024, dtype="f32", lock=path)
    assert outcome.choice is not None
    assert str(norm._forward.launcher(0, rows=256).plan.schedule) == outcome.choice.trial.schedule
    inputs = random_inputs(spec, 300)
    y, _ = norm.forward(*(cupy.asarray(inputs[n]) for n in ("x", "gamma")))
    np.testing.assert_array_equal(y.get(), interpret(spec.graph(), inputs)["y"])
    assert outcome.device is not None
    assert outcome.device.name == device_name(0)


def test_every_gpu_gets_a_job(tmp_path: Path) -> None:
    if device_count() < 2:
        pytest.skip("one GPU")
    running: list[str] = []

    class Noticing(Listener):
        def progress(self, job: Job, done: int, total: int, best: object) -> None:
            running.append(str(job))

    jobs = [Job(parse_spec(text), 2048, trials=8) for text in (FWD, BWD)]
    report = tune(jobs, tmp_path / "t", listener=Noticing())
    assert all(o.choice is not None for o in report.outcomes)
    assert running.index(str(jobs[1])) < len(running) - 1 - running[::-1].index(str(jobs[0]))


def test_two_dask_workers_have_a_gpu_each(tmp_path: Path) -> None:
    if device_count() < 2:
        pytest.skip("one GPU")
    distributed = pytest.importorskip("distributed")
    jobs = [Job(parse_spec(text), 2048, trials=8) for text in (FWD, BWD)]
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        cluster.get_client() as client,
    ):
        report = tune(jobs, tmp_path / "t", executor=client.get_executor())
    assert [o.error for o in report.outcomes] == ["", ""]
    assert all(o.choice is not None for o in report.outcomes)
    assert {t.spec for t in trials.read(tmp_path / "t").trials} == {FWD, BWD}
