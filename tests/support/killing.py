"""A process that is killed between any two changes of files, without a process."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    """The end of the process: nothing that changes a file runs after it."""


CHANGES = [(os, "replace"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"), (os, "write"), (Path, "write_bytes")]
WRITES = ("write", "write_bytes")


@contextmanager
def killed_at(point: int) -> Iterator[list[str]]:
    """From the change number ``point`` on every change of a file raises Killed; the list names those before."""
    done: list[str] = []

    def guard(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            if len(done) >= point:
                if name in WRITES and len(done) == point:
                    real(args[0], args[1][: len(args[1]) // 2])
                    done.append(f"half a {name}")
                raise Killed
            done.append(name)
            return real(*args, **kwargs)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CHANGES:
            patch.setattr(owner, name, guard(name, getattr(owner, name)))
        yield done


def points(work: Callable[[], object]) -> int:
    """How many changes of files ``work`` makes."""
    with killed_at(10**9) as done:
        work()
    return len(done)
