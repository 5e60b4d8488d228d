"""Schedules of each form, in one line: the sizes, then the flags, called as in the name of a kernel."""

from lngen.compiler.problem import Schedule

FLAGS = {
    "prefetch": "prefetch", "store": "tma_store", "cached": "cached_weights", "single": "single_launch",
    "regs": "row_in_registers", "early": "early_release", "dynamic": "dynamic", "acquire": "acquire_shared",
}  # fmt: skip


def _made(form: str, threads: int, rows: int, vec: int, flags: str, sizes: dict[str, int]) -> Schedule:
    return Schedule(form, threads, rows, vec, **sizes, **{FLAGS[word]: True for word in flags.split()})  # type: ignore[arg-type]


def registers(threads: int, rows: int, vec: int, flags: str = "", **sizes: int) -> Schedule:
    """A schedule of rows in registers."""
    return _made("registers", threads, rows, vec, flags, sizes)


def tma(threads: int, rows: int, vec: int, stages: int, flags: str = "", **sizes: int) -> Schedule:
    """A schedule of rows that come by TMA."""
    return _made("tma", threads, rows, vec, flags, {"stages": stages, **sizes})


def unaligned(threads: int, rows: int, vec: int, stages: int, flags: str = "", **sizes: int) -> Schedule:
    """A schedule of rows that come by TMA and begin anywhere; results leave by TMA."""
    return _made("tma_unaligned", threads, rows, vec, f"store {flags}", {"stages": stages, **sizes})


def without_store(threads: int, rows: int, vec: int, stages: int, flags: str = "", **sizes: int) -> Schedule:
    """A schedule of rows that come by TMA and begin anywhere; results leave another way."""
    return _made("tma_unaligned", threads, rows, vec, flags, {"stages": stages, **sizes})


def cp_async(threads: int, rows: int, vec: int, stages: int, flags: str = "", **sizes: int) -> Schedule:
    """A schedule of rows that come by asynchronous copies."""
    return _made("cp_async", threads, rows, vec, flags, {"stages": stages, **sizes})


def multipass(threads: int, vec: int, **sizes: int) -> Schedule:
    """A schedule of rows that are read again in every phase."""
    return _made("multipass", threads, 1, vec, "", sizes)
