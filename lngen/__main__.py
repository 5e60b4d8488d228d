"""The command line, ``lngen`` or ``python -m lngen``: settings that precede all other imports."""

import os
import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """The ``lngen`` command; ends the process with its exit code.

    Nothing is imported from the current folder, neither here nor in child processes. Ctrl-C during imports ends the
    process at once, since there is nothing to clean up yet.
    """
    own = signal.getsignal(signal.SIGINT)
    if own is signal.default_int_handler:  # not where the parent process ignores it
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    sys.unraisablehook = _unraisable
    os.environ["PYTHONSAFEPATH"] = "1"
    from lngen.cli import main

    signal.signal(signal.SIGINT, own)
    main()


def _unraisable(found: "sys.UnraisableHookArgs") -> None:
    """Handles Ctrl-C where nothing can be raised: in a finaliser or a callback of the import system."""
    if found.exc_type is KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(found)


if __name__ == "__main__":
    if not sys.flags.safe_path:  # ``python -m`` puts the current folder first
        here = sys.path.pop(0)
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here:  # a checkout is used directly
            sys.path.append(here)
    main()
