"""A folder of kernels: its manifest and its files are changed so that they never contradict each other.

One build at a time changes a folder, and none deletes a file. Whenever the build is killed, each file that the manifest
lists exists with the hash in the list. A kernel set whose files change is not listed during the change; all others are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lngen.aot import manifest
from lngen.errors import LngenError
from lngen.files import exclusive, sha256, write_in_order

LOCK = "lngen"  # locks the folder as a whole


def put(
    folder: Path,
    entries: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, bytes],
    *,
    version: str,
    nvrtc: str | None,
) -> None:
    """Put kernel sets, by name, and their files into ``folder``, where they replace those of the same names.

    LngenError if the folder cannot be written to, its manifest is invalid, or a kernel set in it would lose a file;
    then nothing has changed.
    """
    target = folder / manifest.FILE_NAME
    with exclusive(folder, LOCK) as staging:
        old = replaceable(folder, entries, files)
        changing = {name for name in entries if name in old and _differ(manifest.hashes(old[name]), files)}
        before = {name: e for name, e in old.items() if name not in changing}
        steps = [(target, manifest.render(before, version, nvrtc))] if changing else []
        steps += [(folder / name, data) for name, data in files.items()]
        steps += [(target, manifest.render({**old, **entries}, version, nvrtc))]
        write_in_order(steps, staging)


def replaceable(folder: Path, names: Collection[str], files: Collection[str]) -> dict[str, dict[str, Any]]:
    """The entries in the manifest of ``folder``; LngenError if one that is replaced has other files than ``files``."""
    old = manifest.read(folder)
    for name in names:
        lost = [n.removeprefix(name) for n in old[name]["files"] if n not in files] if name in old else []
        if lost:
            raise LngenError(
                f"'{folder}' has kernel set '{name}' also as {', '.join(lost)}, which this build does not make and "
                "would take from it; name another folder, or build all archs and kinds at once."
            )
    return old


def _differ(listed: Mapping[str, str], files: Mapping[str, bytes]) -> bool:
    return any(sha256(files[name]) != digest for name, digest in listed.items())
