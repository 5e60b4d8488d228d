"""The errors that lngen raises on purpose: one class per stage, one clear sentence per message.

A message says what was expected, what came and what to do. ``exit_code`` is the exit code of the command
line: 1 a check failed, 2 the request was wrong, 3 the machine lacks something, 70 an error in lngen.
"""

import difflib
from collections.abc import Collection

LONGEST = 200  # characters of a user's line or value in a message


def short(value: object) -> str:
    """The text of a value from a user, for a message; the start of it if it is longer than a message may have it."""
    try:
        text = str(value)
    except Exception:  # a number of thousands of digits, or an object of the user that has no text
        text = f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def one_of(word: object, known: Collection[str], expected: str = "expected one of") -> str:
    """The end of a sentence on a word that is not known: the known ones, and the nearest of them, if one is near."""
    near = difflib.get_close_matches(short(word), known, n=1)
    return f"{expected} {', '.join(known)}{f'; did you mean {near[0]!r}?' if near else '.'}"


class LngenError(Exception):
    """Base of all errors raised by lngen."""

    exit_code = 2


class ParseError(LngenError):
    """A text that is not a graph."""


class VerifyError(LngenError):
    """A graph that breaks a rule of the IR, or a function that raises while it describes one."""


class DerivativeError(LngenError):
    """A requested derivative that does not exist."""


class ValidationError(LngenError):
    """A derived backward that is not the derivative of its forward: an error in lngen, not in a request."""

    exit_code = 70


class SpecError(LngenError):
    """A spec that names an unknown graph, key or value."""


class ScheduleError(LngenError):
    """A schedule that is illegal for its spec; names the rule and the number that breaks it."""


class DeviceError(LngenError):
    """A name that no described GPU has."""


class LowerError(LngenError):
    """A graph that does not fit any kernel structure."""


class EmitError(LngenError):
    """A plan that could not be laid out as CUDA text."""


class CompileError(LngenError):
    """CUDA text that NVRTC refused; shows the numbered source lines its log points at."""

    exit_code = 70


class ArrayError(LngenError):
    """An array with the wrong dtype, shape, strides or device."""


class CheckError(LngenError):
    """Bits that differ, or an error beyond its bound."""

    exit_code = 1


class LockError(LngenError):
    """A schedule that a lock file should contain but does not."""

    exit_code = 1


class MissingError(LngenError):
    """A missing GPU, library or compiler."""

    exit_code = 3


class PtxError(LngenError):
    """PTX that the executor cannot run; names the instruction and its line."""

    exit_code = 1
