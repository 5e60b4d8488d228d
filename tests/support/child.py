"""Python code in a process of its own, which imports what the tests import."""

import os
import subprocess
import sys
import textwrap

from paths import SEARCH


def start(code: str, *args: str, **variables: str) -> subprocess.Popen[str]:
    """The process, started."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        env={**os.environ, "PYTHONPATH": SEARCH, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    """The standard output of a process that has to succeed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out
