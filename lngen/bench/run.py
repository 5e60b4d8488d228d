"""The benchmark: providers side by side over specs and rows, one record each."""

from __future__ import annotations

import contextlib
import gc
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

from lngen.bench import timing
from lngen.bench.cases import Case, complaint, make_case, poison
from lngen.bench.engines import Engine
from lngen.bench.floor import ceiling_bytes, floor_bytes, gb_s
from lngen.bench.providers import CEILINGS, Prepared, Provider
from lngen.spec import Spec
from lngen.version import __version__

IMPLAUSIBLE = 1.1  # times the ceiling: measured something else


@dataclass(frozen=True)
class Record:
    """One provider on one case. Without a time, ``note`` says why.

    gb_s       floor bytes over the median time; a ceiling's own bytes for a ceiling
    fraction   gb_s over that of the ceiling, which was timed in the same rounds
    launches   per replayed graph
    sets       argument sets rotated
    drifted    the ceiling's own time moved by more than 2 % meanwhile
    """

    spec: str
    graph: str
    direction: str
    rows: int
    d: int
    dtype: str
    provider: str
    us_median: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    us_min: float | None = None
    gb_s: float | None = None
    fraction: float | None = None
    launches: int = 0
    sets: int = 0
    schedule: str = ""
    drifted: bool = False
    note: str = ""


Progress = Callable[[int, int, str], None]


def benchmark(
    cases: Sequence[tuple[Spec, int]],
    providers: Sequence[Provider],
    engine: Engine,
    *,
    rounds: int = timing.ROUNDS,
    warm_ms: float = timing.WARM_MS,
    progress: Progress = lambda done, total, text: None,
) -> list[Record]:
    """Time the providers on every (spec, rows), side by side per case.

    What fails, a provider or a whole case, is a record with a note, and the rest goes on. ``progress`` is
    called before each case with the number of those done, of all, and the case as text.
    """
    records = []
    for done, (spec, rows) in enumerate(cases):
        progress(done, len(cases), f"{spec} rows={rows}")
        covering = [p for p in providers if p.covers(spec)]
        try:
            with engine.active():
                records += _measure(spec, rows, covering, engine, rounds, warm_ms)
        except Exception as error:  # a GPU error ends a case, and is reported in its rows
            records += [_record(spec, rows, p, note=f"failed: {timing.describe(error)}") for p in covering]
        gc.collect()
        with contextlib.suppress(Exception):  # after a fatal GPU error nothing works, and is reported above
            engine.release()
    return records


def conditions(engine: Engine, rounds: int = timing.ROUNDS, warm_ms: float = timing.WARM_MS) -> dict[str, str]:
    """What the figures depend on besides the records: device, versions, method."""
    import cupy

    peers = ("torch", "triton", "numpy", "liger-kernel", "quack-kernels")
    return {
        "device": engine.device()[1],
        "engine": engine.name,
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "runtime": str(cupy.cuda.runtime.runtimeGetVersion()),
        "cupy": str(cupy.__version__),
        "lngen": __version__,
        "python": platform.python_version(),
        "method": f"{rounds} interleaved rounds of CUDA graphs, {warm_ms:g} ms warm-up, rotating buffers",
        **{name: version for name in peers if (version := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _measure(
    spec: Spec, rows: int, providers: Sequence[Provider], engine: Engine, rounds: int, warm_ms: float
) -> list[Record]:
    free, l2 = engine.memory()
    nbytes = floor_bytes(spec, rows)
    # Some providers allocate results of their own, one per set: each may take as much as the sets do.
    sets = timing.set_count(nbytes, l2, free // (1 + len(providers)))
    case = make_case(spec, rows, sets, engine)
    prepared: dict[str, Prepared] = {}
    notes: dict[str, str] = {}
    for provider in providers:
        try:
            prepared[provider.name] = _prepare(provider, case, notes)
        except Exception as error:  # whatever a peer raises, the others go on
            notes[provider.name] = f"failed: {timing.describe(error)}"
    launches = {name: p.launch for name, p in prepared.items() if name not in notes}
    ceiling = CEILINGS[spec.direction]
    found = timing.time_side_by_side(launches, sets, engine, reference=ceiling, rounds=rounds, warm_ms=warm_ms)
    notes |= {name: f"failed: {reason}" for name, reason in found.failures.items()}
    warm = f"warm: {sets} sets are only {sets * nbytes / 1e6:.0f} MB" if sets * nbytes < 2 * l2 else ""
    top = found.stats.get(ceiling)
    top_gb_s = gb_s(ceiling_bytes(spec, rows, case.graph), top.median) if top else None
    records = []
    for provider in providers:
        name = provider.name
        record = _record(spec, rows, provider, sets=sets, note=notes.get(name, warm), drifted=found.drifted)
        if name in prepared:
            record = replace(record, schedule=prepared[name].schedule)
        if name in found.stats:
            speed = gb_s(nbytes, found.stats[name].median) if provider.checked else top_gb_s
            record = replace(record, launches=found.launches[name])
            record = _timed(record, found.stats[name], speed, top_gb_s)
        records.append(record)
    return records


def _prepare(provider: Provider, case: Case, notes: dict[str, str]) -> Prepared:
    """Prepare, run on every set, and check the first and the last; a wrong result becomes a note."""
    ends = sorted({0, len(case.sets) - 1})
    for index in ends:
        poison(case, index)
    prepared = provider.prepare(case)
    for index in range(len(case.sets)):
        prepared.launch(case.engine.stream(), index)
    case.engine.synchronize()
    if provider.checked:
        for index in ends:
            wrong = complaint(case, index, prepared.results(index))
            if wrong:
                notes[provider.name] = f"wrong: {wrong}"
    return prepared


def _timed(record: Record, stats: timing.Stats, speed: float | None, top: float | None) -> Record:
    fraction = None if speed is None or top is None else round(speed / top, 4)
    implausible = fraction is not None and fraction > IMPLAUSIBLE
    return replace(
        record,
        us_median=round(stats.median, 3),
        us_p10=round(stats.p10, 3),
        us_p90=round(stats.p90, 3),
        us_min=round(stats.minimum, 3),
        gb_s=None if speed is None else round(speed, 1),
        fraction=fraction,
        note="implausible: faster than the ceiling" if implausible and not record.note else record.note,
    )


def _record(
    spec: Spec, rows: int, provider: Provider, *, sets: int = 0, note: str = "", drifted: bool = False
) -> Record:
    names = str(spec), spec.definition.name, spec.direction
    return Record(*names, rows, spec.d, str(spec.dtype), provider.name, sets=sets, note=note, drifted=drifted)
