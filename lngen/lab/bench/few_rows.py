"""Few rows, as in inference: what one call adds behind a kernel that triggers no programmatic launch, or between GEMMs.

Chains of one norm say little about inference, where every norm stands between other kernels. So each call is launched
in the surroundings of its class, and the surroundings alone are timed beside them; their time of the same round is
subtracted. Nobody finds its memory in the cache: where the argument sets are too small for that, a reading of other
memory precedes each call. Only what the GEMM has just written is there, as in a model.
"""

from __future__ import annotations

from collections.abc import Callable

from lngen.compiler.ir import WIDE, DType
from lngen.dtypes import QUANTISED
from lngen.errors import LngenError
from lngen.lab.bench import timing
from lngen.lab.bench.argument_sets import Case, Prepared
from lngen.lab.bench.tasks import BETWEEN_GEMMS, IN_TURN, Task
from lngen.lab.bench.timing import Launch

ALONE = "the surroundings"  # among the candidates: nothing but what surrounds a call
WIDTH = 1024  # of the GEMMs: x is [M, WIDTH] by [WIDTH, D], behind the call [M, D] by [D, WIDTH]
LINES = 512  # that a reading adds up, in as many sums
NOISE = 0.2  # of a time; rounds that differ by more are noted

Around = Callable[[Prepared | None], Launch]
"""The launch of a prepared call in its surroundings, or of the surroundings alone."""


def surrounding_bytes(task: Task) -> int:
    """What the surroundings of a call add to a set: the weights of both GEMMs."""
    return 2 * WIDTH * task.d * task.dtype.size if task.kind == BETWEEN_GEMMS else 0


def surroundings(task: Task, case: Case, floor: int) -> Around:
    """The surroundings of a task's calls, each of which moves ``floor`` bytes; launched once, so that all is loaded."""
    around = behind_a_kernel(case, floor) if task.kind == IN_TURN else between_gemms(case)
    for index in range(len(case.sets)):
        around(None)(case.gpu.stream(), index)
    case.gpu.synchronize()
    return around


def behind_a_kernel(case: Case, floor: int) -> Around:
    """Behind a kernel of one element, and before that a reading of what the sets lack to exceed the L2 cache."""
    gpu, count = case.gpu, len(case.sets)
    rest = timing.cold_bytes(gpu.memory()[1]) // count - floor
    one, sums = gpu.empty((1,), DType.F32).zero_(), gpu.empty((LINES,), DType.F32)
    words = max(0, rest) // (4 * LINES)
    memory = gpu.empty((count, LINES, words), DType.F32).zero_()

    def around(call: Prepared | None) -> Launch:
        def launch(stream: int, index: int) -> None:
            if words:  # read, not written: lines to write back would be charged to the call
                gpu.torch.sum(memory[index], 1, out=sums)
            one.add_(1)
            if call:
                call.launch(stream, index)

        return launch

    return around


def between_gemms(case: Case) -> Around:
    """Behind a GEMM that writes x and before one that reads y, with weights of their own for each set."""
    gpu, main, d = case.gpu, case.graph.results[0], case.spec.d
    x = next((v for v in case.graph.tensors if v.type.axes == WIDE), None)
    if x is None or main.type.axes != WIDE:
        raise LngenError(f"a call between GEMMs is expected to read and write an [M, D] array, which {case.spec} lacks")
    if main.type.dtype in QUANTISED:
        raise LngenError(f"a call between GEMMs is expected to write floats of 16 bits or more, got {main.type}")
    first = (gpu.normal((case.rows, WIDTH), x.type.dtype, 0.0, 0), gpu.normal((d, WIDTH), x.type.dtype, 0.0, 1))
    second = (gpu.empty((case.rows, WIDTH), main.type.dtype), gpu.normal((WIDTH, d), main.type.dtype, 0.0, 2))
    held = [(*(a.clone() for a in first), *(a.clone() for a in second)) for _ in case.sets]
    # Without the call the second GEMM reads what the first wrote.
    same = x if x.type.dtype is main.type.dtype else main
    plain = [(t[x.name], t[same.name]) for t in case.sets]

    def around(call: Prepared | None) -> Launch:
        def launch(stream: int, index: int) -> None:
            a, weight, out, other = held[index]
            read, written = call.ends(index) if call and call.ends else plain[index]
            gpu.torch.matmul(a, weight.t(), out=read)
            if call:
                call.launch(stream, index)
                written = written if call.ends else call.results(index)[main.name].detach()
            gpu.torch.matmul(written, other.t(), out=out)

        return launch

    return around
