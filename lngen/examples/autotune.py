"""Choose the block size of a backward kernel by measuring, and lock it; without a GPU, see what would be measured.

python -m lngen.examples.autotune [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import lngen
from lngen.compiler.devices import DEFAULT_ARCH
from lngen.errors import MissingError
from lngen.lab.tune.candidates import ranking
from lngen.lab.tune.job import Job
from lngen.lab.tune.tuner import store_choices, tune

SPEC = lngen.parse_spec("layernorm.bwd:d=1024,dtype=bf16")
ROWS = 4096
SECONDS = 10.0
SHOWN = 5


def main(folder: Path) -> None:
    """Tune ``SPEC`` into a lock file; its schedules change the speed and no bit of any result."""
    lock_file = folder / "lngen.lock.toml"
    try:
        report = tune([Job(SPEC, ROWS, SECONDS)], folder / "trials.jsonl")
    except MissingError as missing:
        print(f"not measured: {missing}")
        print(f"the model's order for {ROWS} rows on {DEFAULT_ARCH}:")
        for rank, schedule in enumerate(ranking(SPEC, ROWS, DEFAULT_ARCH)[:SHOWN], 1):
            print(f"{rank:3}  {schedule}")
        return
    store_choices(lock_file, report.outcomes)
    for outcome in report.outcomes:
        if outcome.choice is not None:
            print(f"{outcome.choice.trial.us_median} us: {outcome.choice.trial.schedule}")
    print(f'use it: lngen.compile("layernorm", d=1024, dtype="bf16", lock="{lock_file}")')


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
