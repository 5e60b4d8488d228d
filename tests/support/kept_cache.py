"""Where the tests keep what they compile, and for how long."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import platformdirs

NAMED = "LNGEN_TEST_CACHE"  # a folder that stays; empty: none
MOST = 500_000_000  # bytes
KEPT = ("kernels", "templates", "torch")  # folders whose entries hold in their names all that they depend on


def folder(environment: Mapping[str, str], run: Path) -> Path:
    """The folder of a run: the one that is named, else that of the user; ``run``, its own, in CI or without a home."""
    named = environment.get(NAMED)
    if named:
        return Path(named)
    if named is not None or environment.get("CI"):
        return run
    return of_user() or run


def of_user() -> Path | None:
    """The folder of the user, who may have none."""
    with contextlib.suppress(RuntimeError):  # there is no home folder, which other versions of platformdirs call "~"
        kept = platformdirs.user_cache_path("lngen-tests")
        return kept if kept.is_absolute() else None
    return None


def tidy(kept: Path, most: int = MOST) -> None:
    """Leaves the entries that were used last, ``most`` bytes of them; what is no entry goes."""
    found = []
    for path in kept.rglob("*"):
        with contextlib.suppress(OSError):  # another run tidies, too
            if path.is_file():
                facts = path.stat()
                is_entry = path.relative_to(kept).parts[0] in KEPT
                found.append((is_entry, max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    for is_entry, _, size, path in sorted(found, reverse=True):
        most -= size
        if not is_entry or most < 0:
            with contextlib.suppress(OSError):
                path.unlink()
