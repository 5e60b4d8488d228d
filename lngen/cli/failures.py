"""The end of a command that fails: one sentence on standard error, and the exit code."""

import contextlib
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator

import click

from lngen import config
from lngen.errors import LngenError, MissingError, short

UNHANDLED, INTERRUPTED, UNREAD = 70, 130, 141  # EX_SOFTWARE of sysexits.h; 128 and the number of the signal


class OutputError(LngenError):
    """Standard output cannot be written to; if its reader is gone, nothing is printed."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written to: {error.strerror}; redirect it to another place.")
        self.exit_code = UNREAD if error.errno == errno.EPIPE else LngenError.exit_code


def failed(error: Exception) -> int:
    """Print the error that ended a command, with a traceback at LNGEN_DEBUG=5; the exit code."""
    text, code = _judged(error)
    text = brief(text)
    with contextlib.suppress(OSError):
        if _traceback_wanted():
            click.echo("".join(traceback.format_exception(error)), nl=False, err=True)
        if code != UNREAD:
            click.echo(f"error: {text}", err=True)
    return code


_ECHO = re.compile(r"(?<!\w)'[^'\n]*'|\S+")  # a quotation, or a word, that a message may repeat


def brief(text: str) -> str:
    """A message with every quotation and word shortened to what a message may repeat."""
    return _ECHO.sub(lambda echo: short(echo[0]), text)


@contextlib.contextmanager
def brief_usage() -> Iterator[None]:
    """Shorten the errors of click, which repeat whole arguments."""
    try:
        yield
    except click.ClickException as error:
        text, bracket, arguments = error.message.partition(" (")
        vars(error)["message"] = f"{brief(text)}{bracket}{short(arguments)}"
        raise


def _judged(error: Exception) -> tuple[str, int]:
    """The sentence and the exit code of an error."""
    if isinstance(error, LngenError):
        return "\n".join([str(error), *getattr(error, "__notes__", [])]), error.exit_code
    if isinstance(error, MemoryError):
        return f"there is not enough memory ({_brief(error)}); use fewer rows.", MissingError.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        return f"'{os.fsdecode(error.filename)}' cannot be used: {error.strerror}.", LngenError.exit_code
    what = f"{type(error).__name__}: {_brief(error)}"
    return f"internal error of lngen ({what}); please report it with the output of LNGEN_DEBUG=5.", UNHANDLED


def _brief(error: Exception) -> str:
    """The error's message on one line."""
    text = " ".join(str(error).split())[:300]
    return text or ("none is left" if isinstance(error, MemoryError) else "it has no message")


def _traceback_wanted() -> bool:
    try:
        return config.debug_level() >= 5
    except LngenError:  # the value of LNGEN_DEBUG may itself be the error
        return False


def open_streams() -> None:
    """Replace closed standard streams, so that no file gets their number.

    Then reading ends at once, messages are lost, and output fails, as it should.
    """
    for stream, name, mode in ((sys.stdin, "stdin", "r"), (sys.stdout, "stdout", "w"), (sys.stderr, "stderr", "w")):
        if stream is None:
            flags = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")


def close_streams(code: int) -> int:
    """Flush the standard streams; the exit code, which is not 0 if that fails.

    A stream that fails is redirected to nowhere, or Python would report the failure again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout and not code:
                code = failed(OutputError(error))
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code
