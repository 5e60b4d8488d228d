"""A folder of kernels: its manifest and its files are changed so that they never contradict each other.

One build at a time changes a folder, and none deletes a file. Whenever the build is killed, each file that the manifest
lists exists with the hash in the list. A kernel set whose files change is not listed during the change; all others are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lngen.aot import manifest
from lngen.aot.manifest import Manifest
from lngen.errors import LngenError
from lngen.files import exclusive, sha256, write_in_order
from lngen.launch.pack import FILE_NAME, content

LOCK = "lngen"  # locks the folder as a whole

Step = tuple[Path, bytes]  # a file to write

# Files that follow from the manifest of the whole folder, and from the bytes of the files that it lists, by name.
Derived = Callable[[Manifest, Callable[[str], bytes]], Mapping[str, bytes]]


def put(folder: Path, new: Manifest, files: Mapping[str, bytes], derived: Derived | None = None) -> list[str]:
    """Add what is in ``new``, and its files, to ``folder``; what it replaces there, a sentence each.

    ``derived``: also what follows from the whole.

    LngenError if the folder cannot be written to, its manifest is invalid, or a kernel set in it would lose a file;
    then nothing has changed.
    """
    with exclusive(folder, LOCK) as staging:
        steps, _, replaced = changes(folder, new, files, derived)
        write_in_order(steps, staging)
    return replaced


def changes(
    folder: Path, new: Manifest, files: Mapping[str, bytes], derived: Derived | None = None
) -> tuple[list[Step], Manifest, list[str]]:
    """What ``put`` writes, in order, the manifest last, which is the second; and what that replaces.

    The caller holds the lock.
    """
    target = folder / FILE_NAME
    old = manifest.read(folder)
    manifest.check_lost(folder, old, new)
    after, replaced = manifest.merged(old, new)
    listed = old.files()
    if derived is not None:
        own = files
        more = derived(after, lambda name: own[name] if name in own else content(folder, name, listed[name]))
        after.others |= {name: {"bytes": len(data), "sha256": sha256(data)} for name, data in more.items()}
        files = {**files, **more}
    check_inside(folder, files)
    changed = {name for name, data in files.items() if name in listed and listed[name] != sha256(data)}
    replaced += [f"'{name}' has other bytes than before." for name in sorted(changed)]
    changing = {name for name, entry in old.kernel_sets.items() if not changed.isdisjoint(entry["files"])}
    before = old.without(changing)
    before.others = {name: facts for name, facts in old.others.items() if name not in changed}
    steps = [(target, before.render())] if changed else []
    steps += [(folder / name, data) for name, data in files.items()]
    return [*steps, (target, after.render())], after, replaced


def check_inside(folder: Path, files: Iterable[str]) -> None:
    """LngenError if a folder of the pack is a link to another place, where files would be written."""
    here = os.path.realpath(folder)
    for parent in {Path(name).parent for name in files}:
        if os.path.realpath(folder / parent) != os.path.normpath(os.path.join(here, parent)):
            raise LngenError(
                f"cannot write '{folder / parent}': it is a link that leaves the pack ({os.strerror(errno.EXDEV)}); "
                "remove the link."
            )
