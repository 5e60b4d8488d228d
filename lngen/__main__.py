"""The command line, ``lngen`` or ``python -m lngen``: what has to be settled before anything else is imported."""

import os
import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """The ``lngen`` command; ends the process with its exit code.

    Nothing is imported from the current folder, neither here nor in a process started from here. Ctrl-C while modules
    are imported ends the process at once; there is nothing yet to put in order.
    """
    own = signal.getsignal(signal.SIGINT)
    if own is signal.default_int_handler:  # not where the parent said to ignore it
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    sys.unraisablehook = _unraisable
    os.environ["PYTHONSAFEPATH"] = "1"
    from lngen.cli import main

    signal.signal(signal.SIGINT, own)
    main()


def _unraisable(found: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C where nothing can be raised, in a finaliser or a callback of the import system, is not lost."""
    if found.exc_type is KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(found)


if __name__ == "__main__":
    if not sys.flags.safe_path:  # ``python -m`` has put the current folder first
        here = sys.path.pop(0)
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here:  # a checkout, used as it is
            sys.path.append(here)
    main()
