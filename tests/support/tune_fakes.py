"""A measurer without a GPU, for worker processes of the tuner; what it does is said in FAKE_TUNE, as JSON.

crash, hang, fail, broken, wrong   ranks of candidates that do so when they are checked
time_crash                         ranks that kill the process when they are timed
moved                              of the reference, in rounds that were repeated; drift: in those that count
refuse                             ranks whose launch the driver refuses
log                                a file that gets a line per question
pause                              seconds a check takes; start: those before the first one
seed                               of the noise on the times
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lngen.compiler.spec import Spec
from lngen.errors import LngenError
from lngen.lab.bench.timing import Stats
from lngen.lab.tune.candidates import Candidate
from lngen.lab.tune.trials import Device
from lngen.lab.tune.workers import Timed

NAME = "tune_fakes:FakeMeasurer"
DEVICE = Device("Fake GPU", "sm_90", "NVRTC 1.2")
REFERENCE_US = 8.0
# By rank: the fastest of the first six are 2 and 4, which tie.
TIMES = {0: 12.0, 1: 14.0, 2: 10.0, 3: 10.6, 4: 10.01, 5: 20.0}


class FakeMeasurer:
    """Right, quick and always the same, but for what FAKE_TUNE says."""

    def __init__(self) -> None:
        self.say: dict[str, Any] = json.loads(os.environ.get("FAKE_TUNE", "{}"))
        self.rng = np.random.default_rng(self.say.get("seed", 0))

    def log(self, text: str) -> None:
        if "log" in self.say:
            with Path(self.say["log"]).open("a") as file:
                file.write(f"{text} gpu={os.environ['CUDA_VISIBLE_DEVICES']} pid={os.getpid()}\n")

    def device(self) -> Device:
        if self.say.get("no_device"):
            os._exit(9)
        return DEVICE

    def healthy(self) -> bool:
        return False

    def open(self, spec: Spec, rows: int) -> None:
        self.log(f"open {spec} {rows}")
        time.sleep(self.say.get("start", 0))
        if self.say.get("too_large"):
            raise LngenError("choose fewer rows.")

    def check(self, candidate: Candidate) -> str:
        self.log(f"check {candidate.rank}")
        time.sleep(self.say.get("pause", 0))
        rank = candidate.rank
        if rank in self.say.get("crash", ()):
            print("an illegal instruction", flush=True)
            os._exit(5)
        if rank in self.say.get("hang", ()):
            time.sleep(600)
        if rank in self.say.get("fail", ()):
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        if rank in self.say.get("refuse", ()):
            raise LngenError("The driver refuses the launch of 'rows': CUDA_ERROR_INVALID_VALUE (1).")
        return "y: 3 numbers differ with 1 rows" if rank in self.say.get("wrong", ()) else ""

    def time(self, candidates: Sequence[Candidate], rounds: int) -> Timed:
        ranks = [c.rank for c in candidates]
        self.log(f"time {','.join(map(str, ranks))} {rounds}")
        if set(ranks) & {*self.say.get("time_crash", ())}:
            os.kill(os.getpid(), 11)
        stats: list[Stats | str] = []
        for rank in ranks:
            if rank in self.say.get("uncaptured", ()):
                stats.append("RuntimeError: operation not permitted")
                continue
            us = TIMES.get(rank, 30.0 + rank) * (1 + 0.003 * self.rng.uniform(-1, 1))
            stats.append(Stats(us, us - 0.02, us + 0.02, us - 0.05))
        return Timed(tuple(stats), REFERENCE_US, self.say.get("drift", 0.001), tuple(self.say.get("moved", ())))


class SameFake(FakeMeasurer):
    """The same under another name."""


def use(patch: Any, *gpus: str) -> None:
    """Let the tuner of this process find ``gpus`` and measure with the fake."""
    for module in ("job", "tuner"):
        patch.setattr(f"lngen.lab.tune.{module}.visible_devices", lambda: gpus)
    patch.setattr("lngen.lab.tune.job.GPU", NAME)


def main() -> None:
    """The command line with the fake and one GPU; for tests that kill a whole process."""
    import pytest

    import lngen.cli

    with pytest.MonkeyPatch.context() as patch:
        use(patch, "7")
        lngen.cli.main()


if __name__ == "__main__":
    main()
