"""A folder of kernels: its manifest and its files are changed so that they never contradict each other.

One build at a time changes a folder. Whenever the build is killed, each file that the manifest lists exists with the
hash in the list. A kernel set whose files change is not listed during the change; all others are. Old files to be
removed are listed as superseded until they are gone, so that the next build removes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lngen.aot import manifest
from lngen.files import exclusive, read, sha256, write_in_order

LOCK = "lngen"  # locks the folder as a whole


def put(
    folder: Path,
    entries: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, bytes],
    *,
    version: str,
    nvrtc: str | None,
) -> list[str]:
    """Put kernel sets, by name, and their files into ``folder``, where they replace those of the same names.

    Returns a sentence for each superseded file that is kept because its hash is not the manifest's. LngenError if
    the folder cannot be written to or its manifest is invalid; then nothing has changed.
    """
    target = folder / manifest.FILE_NAME
    with exclusive(folder, LOCK) as staging:
        old, superseded = manifest.read(folder)
        replaced = {name: manifest.hashes(old[name]) for name in entries if name in old}
        for listed in replaced.values():
            superseded |= listed
        changing = {name for name, listed in replaced.items() if _differ(listed, files)}
        before = {name: e for name, e in old.items() if name not in changing}
        after = {**old, **entries}
        kept = {name for e in after.values() for name in e["files"]}
        gone = {name: digest for name, digest in superseded.items() if name not in kept}
        steps = [(target, manifest.render(before, version, nvrtc, superseded))] if changing else []
        steps += [(folder / name, data) for name, data in files.items()]
        steps += [(target, manifest.render(after, version, nvrtc, gone))]
        write_in_order(steps, staging)
        if not gone:
            return []
        notes = [note for name, digest in gone.items() for note in _remove(folder / name, digest)]
        write_in_order([(target, manifest.render(after, version, nvrtc))], staging)
        return notes


def _differ(listed: Mapping[str, str], files: Mapping[str, bytes]) -> bool:
    return any(name in files and sha256(files[name]) != digest for name, digest in listed.items())


def _remove(path: Path, digest: str) -> list[str]:
    """Remove a file with the hash that the manifest lists, or say why not."""
    try:
        if sha256(read(path, manifest.LARGEST)) == digest:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return []
        why = "it is not the file the manifest listed"
    except FileNotFoundError:
        return []
    except OSError as error:
        why = str(error.strerror)
    return [f"'{path}' belongs to no kernel any more and is left alone: {why}."]
