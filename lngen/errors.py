"""Every error lngen raises on purpose: one class per stage, one clear sentence per message.

A message says what was expected, what came and what to do. ``exit_code`` is what the command line
returns for it: 1 a check failed, 2 the request was wrong, 3 something the machine lacks, 70 lngen is wrong.
"""


class LngenError(Exception):
    """Base of all errors raised by lngen."""

    exit_code = 2


class ParseError(LngenError):
    """Text that is not a graph."""


class VerifyError(LngenError):
    """A graph that breaks a rule of the IR."""


class DerivativeError(LngenError):
    """A derivative that was asked for and does not exist."""


class SpecError(LngenError):
    """A spec that names an unknown graph, key or value."""


class ScheduleError(LngenError):
    """A schedule that is illegal for its spec; names the rule and the number that breaks it."""


class LowerError(LngenError):
    """A graph that no kernel structure can carry."""


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
    """A schedule that a lock file should hold, and does not."""

    exit_code = 1


class MissingError(LngenError):
    """A GPU, a library or a compiler that is not there."""

    exit_code = 3


class PtxError(LngenError):
    """PTX that the executor cannot run; names the instruction and its line."""

    exit_code = 1
