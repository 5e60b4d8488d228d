"""Records of a benchmark that was never run: what reports, plots and files are tested with."""

from __future__ import annotations

from typing import Any

from lngen.bench.records import Record
from lngen.bench.verdict import judge


def bench_record(provider: str, rows: int = 4096, d: int = 1024, **values: Any) -> Record:
    spec = f"layernorm.fwd:d={d},dtype=bf16"
    return Record(spec, "layernorm", "fwd", rows, d, "bf16", provider, **values)


RECORDS = judge(
    [
        bench_record("copy", us_median=5.6, gb_s=2995.0, fraction=1.0, launches=1400, sets=18, drifted=True),
        bench_record("lngen", us_median=6.1, gb_s=2750.4, fraction=0.918, schedule="threads=32", drifted=True),
        bench_record("torch", note="wrong: y is off by 2.0e+00 of its size", drifted=True),
        bench_record("copy", d=4096, us_median=18.4, gb_s=3650.0, fraction=1.0),
        bench_record("lngen", d=4096, us_median=19.2, gb_s=3490.0, fraction=0.956),
        bench_record("torch", d=4096, us_median=24.0, gb_s=2800.0, fraction=0.767),
        bench_record("copy", rows=32768, us_median=34.3, gb_s=3908.0, fraction=1.0),
        bench_record("lngen", rows=32768, us_median=35.6, gb_s=3765.0, fraction=0.96, note="implausible: x"),
        bench_record("torch", rows=32768, note="wrong: y is off by 2.0e+00 of its size"),
    ]
)
