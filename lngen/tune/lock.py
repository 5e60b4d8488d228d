"""Tuning and the lock file: adds choices, looks up specs. runtime/lock_file.py has the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lngen.errors import LockError
from lngen.files import exclusive, resolved, write_in_order
from lngen.runtime.lock_file import Lock, Locked, read_lock
from lngen.spec import Spec
from lngen.tune.job import Outcome


def existing(path: Path) -> Lock:
    """The lock file, or an empty one if there is none yet."""
    return read_lock(path, missing_ok=True)


def store(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Put the choices of outcomes into the lock file; they replace those for the same device, spec and rows.

    The replacement is atomic, and concurrent additions of others are kept.
    """
    chosen = [
        Locked(o.device.name, o.device.arch, o.spec, o.rows, o.choice.trial.schedule)
        for o in outcomes
        if o.choice is not None and o.device is not None
    ]
    if not chosen:
        return
    path = resolved(path)
    with exclusive(path.parent, path.name) as staging:
        write_in_order([(path, existing(path).updated(chosen).render().encode())], staging)


def incumbents(lock: Lock, spec: Spec, rows: int) -> tuple[tuple[str, str], ...]:
    """(device, schedule) locked for a spec at a number of rows."""
    return tuple((e.device, e.schedule) for e in lock.entries if (e.spec, e.rows) == (str(spec), rows))


def frozen(lock: Lock, specs: Sequence[Spec], rows: Sequence[int], device: str | None) -> list[Locked]:
    """The choices for every spec and number of rows, on ``device`` (None: any); LockError if a spec is not locked.

    ``Lock.nearest`` chooses, as for ``compile(lock=)`` and ``lngen build --lock``: rows that are not locked get the
    choice for the nearest number of rows.
    """
    found = []
    for spec in specs:
        for m in rows:
            entry = lock.nearest(str(spec), m, device=device)
            if entry is None:
                where = f" on {device}" if device else ""
                raise LockError(
                    f"'{lock.path}' is frozen and holds no schedule for {spec}{where}; run 'lngen tune {spec} "
                    f"--rows {m}' without --frozen, and keep the lock file."
                )
            found.append(entry)
    return found
