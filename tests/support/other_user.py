"""A process that becomes a user without a name, a home folder or rights, as in a container with ``--user 12345``."""

import ctypes
import os
import pwd
import struct
from typing import NoReturn

UID = 12345
_KEEP_CAPABILITIES, _VERSION_3, _READ = 8, 0x20080522, 1 << 2  # PR_SET_KEEPCAPS; CAP_DAC_READ_SEARCH


def become_nobody() -> None:
    """Root becomes another user, who may read as before, since Python may be in root's home folder.

    Who is not root can become nobody else, but has no rights either; what is missing is to have no name.
    """
    if os.getuid() != 0:
        pwd.getpwuid = _unknown
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_KEEP_CAPABILITIES, 1)
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    libc.capset(struct.pack("=Ii", _VERSION_3, 0), struct.pack("=6I", _READ, _READ, 0, 0, 0, 0))


def _unknown(number: object) -> NoReturn:
    raise KeyError(number)
