"""If these fail, some argument ends in another error than an LngenError, or after something was written."""

import copy
import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import lngen.launch.runtime as runtime
from fuzz import fuzzed
from lngen.compiler.graphs import GRAPHS, Definition
from lngen.errors import LngenError
from own_graphs import gated

WIDTH = 4
NORM = runtime.compile("layernorm", d=WIDTH)

NUMBERS = [10**400, -(10**400), decimal.Decimal("NaN"), decimal.Decimal("Infinity")]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=9),
    st.binary(max_size=9), st.decimals(), st.sampled_from([*NUMBERS, object(), Ellipsis, NotImplemented]),
)  # fmt: skip
TYPES = st.sampled_from([np.float32, np.dtype(">f4"), np.dtype("O"), np.dtype("f4,f8"), float, int, type, np.ndarray])
WORDS = st.sampled_from(["yes", "no", "f32", "float16", "stats", "none", "x", "x+gamma", "4", "²", "1e-5", "-1", "fwd"])
OBJECTS = st.recursive(
    SCALARS | TYPES | WORDS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner), st.dictionaries(WORDS, inner, max_size=2),
        st.sampled_from([np.zeros(3), np.zeros((2, 2)), np.array(5), np.float32(4), np.int64(4), np.True_, {1, 2}]),
    ),
    max_leaves=4,
)  # fmt: skip
DESCRIBED = st.sampled_from([*GRAPHS, *GRAPHS.values(), gated, Definition("own", gated), NORM.spec().graph()])
GRAPH = DESCRIBED | OBJECTS.filter(lambda graph: not callable(graph))  # what a function raises is not lngen's
KEYS = st.sampled_from(
    ["dtype", "weight", "out", "eps", "save", "wrt", "blocks", "gamma", "beta", "schedule", "lock", "k"]
)
ONE_WRONG = st.tuples(st.just("layernorm"), st.just(4), st.dictionaries(KEYS, OBJECTS, max_size=1))
ANY_WRONG = st.tuples(GRAPH, OBJECTS, st.dictionaries(KEYS, OBJECTS, max_size=3))


@fuzzed
@given(ONE_WRONG | ANY_WRONG, st.just("sm_90") | OBJECTS, OBJECTS)
def test_compile(given: tuple[Any, Any, dict[str, Any]], arch: Any, rows: Any) -> None:
    graph, d, options = given

    def work() -> None:
        norm = runtime.compile(graph, d=d, **options)
        assert str(norm.spec("bwd"))
        norm.spec(arch)
        norm.plan("fwd", arch, rows)

    refused = attempt(work)[1]
    assert refused is None or 0 < len(refused) < 2000


def attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What ``call`` returns, or the sentence it is refused with; any other error passes."""
    try:
        return call(), None
    except LngenError as error:
        return None, str(error)


DTYPES = st.sampled_from(["f4"] * 12 + ["f2", "f8", "i4", "?", ">f4", "O", "S3", "f4,f4", "M8[s]", "c8"])
SHAPES = st.sampled_from([(2, WIDTH), (WIDTH,), (2,), (3, 2, WIDTH), (0, WIDTH), (), (2, 3), (1, 1), (WIDTH, 2)])


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """An array of any dtype, shape and layout; three of them may share memory."""
    dtype, shape = np.dtype(draw(DTYPES)), draw(SHAPES)
    if dtype == np.float32 and draw(st.booleans()):
        start = draw(st.integers(0, 9))
        a = POOL[start : start + int(np.prod(shape))].reshape(shape)
    else:
        a = np.zeros(shape, dtype)
    return draw(layouts(a))


def layouts(a: Any) -> st.SearchStrategy[Any]:
    """The array, mostly, or its memory in another layout."""
    others = [np.broadcast_to(a, a.shape), np.ma.masked_array(a), a.T]
    if a.ndim:
        others += [a[::-1], np.lib.stride_tricks.as_strided(a, a.shape, (0,) * a.ndim)]
    return st.sampled_from([a] * 5 + [other for other in others if other.shape == a.shape])


@st.composite
def right(draw: st.DrawFn, *shape: int) -> Any:
    """An array that fits, in memory that others may share."""
    start = draw(st.integers(0, 40))
    a = POOL[start : start + int(np.prod(shape))].reshape(shape)
    return draw(layouts(a if draw(st.booleans()) else a.copy()))


POOL = np.zeros(64, np.float32)
GIVEN = arrays() | OBJECTS


def snapshot(given: Any) -> list[Any]:
    """Bytes of every array in what was given."""
    found = given if isinstance(given, tuple | list) else [given]
    return [POOL.tobytes(), *(a.tobytes() for a in found if isinstance(a, np.ndarray) and a.dtype != object)]


def result_of(call: Callable[[], Any], *given: Any) -> Any:
    """What ``call`` returns; None where it is refused, which leaves everything as it was."""
    before = [snapshot(g) for g in given]
    result, refused = attempt(call)
    assert refused is None or (refused and [snapshot(g) for g in given] == before)
    return result


RIGHT = {"x": right(2, WIDTH), "gamma": right(WIDTH), "beta": right(WIDTH)}
INPUTS = st.fixed_dictionaries(RIGHT)
NAMED = st.dictionaries(st.sampled_from([*RIGHT, "y"]), GIVEN, max_size=2)
RESULTS = st.none() | right(2, WIDTH) | st.tuples(right(2, WIDTH), right(2) | st.none(), right(2) | st.none())
GRADIENTS = st.none() | st.tuples(right(2, WIDTH), right(WIDTH) | st.none(), right(WIDTH) | st.none())


@fuzzed
@given(
    st.tuples(st.just([]), INPUTS) | st.tuples(st.lists(GIVEN, max_size=4), NAMED),
    RESULTS | GIVEN | st.tuples(GIVEN, GIVEN, GIVEN),
    right(2, WIDTH) | GIVEN,
    GRADIENTS | GIVEN | st.tuples(GIVEN, GIVEN, GIVEN),
)
def test_forward_and_backward(given: tuple[list[Any], dict[str, Any]], out: Any, dy: Any, grads: Any) -> None:
    inputs, named = given
    POOL[:] = np.arange(POOL.size) % 7
    apart = copy.deepcopy((inputs, named))  # whatever shares memory, results are those of arrays of their own
    done = result_of(lambda: NORM.forward(*inputs, out=out, **named), inputs, out, list(named.values()))
    if done is None:
        return
    y, saved = done
    want, kept = NORM.forward(*apart[0], **apart[1])
    assert all((a == b).all() for a, b in ((y, want), (saved["mean"], kept["mean"]), (saved["rstd"], kept["rstd"])))
    result_of(lambda: NORM.backward(dy, saved), dy)
    result_of(lambda: NORM.backward(y, dy), dy)
    result_of(lambda: saved[dy] if isinstance(dy, str) else None)
    found = result_of(lambda: NORM.backward(want, saved, out=grads), grads)
    if found is not None:
        assert all((a == b).all() for a, b in zip(found, NORM.backward(want, kept), strict=True))
