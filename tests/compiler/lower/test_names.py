"""Names of values, graphs, inputs and outputs: if these fail, one meets a name of the kernel and does not compile."""

import re
from collections.abc import Callable
from functools import cache

import pytest

import sampling
from lngen.compiler.emit import emit
from lngen.compiler.graphs import Definition, GraphBuilder
from lngen.compiler.ir import D, M, Value, is_name
from lngen.compiler.lower import lower
from lngen.compiler.lower.cuda.fragments import TAKEN
from lngen.compiler.problem import problem
from lngen.compiler.problem.footprint import vectors_per_thread
from lngen.compiler.schedule.space import space
from lngen.compiler.spec import make_spec
from lngen.compiler.toolchain import compile_ptx
from lngen.config import data_dir
from lngen.errors import SpecError, VerifyError
from lngen.lab.explain.line_map import DERIVED
from plans import plans_of_every_template

# ---- kernels keep their own names apart ----


def test_what_a_template_declares_ends_in_an_underscore_and_is_no_derived_name() -> None:
    """A value has none at its end; what is derived of a value ends in one of a few words and an underscore."""
    for path in sorted(data_dir("templates").glob("*.jinja")):
        text = re.sub(r"\{[%#].*?[%#]\}|//.*", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"\w*\{\{.*?\}\}\w*", " ", text)
        declared = re.findall(
            r"\b(?:int|long|bool|float|real|auto|unsigned|char)[*&]* (?:const )?([a-zA-Z]\w*) *[=\[,:)]", text
        )
        assert not [name for name in declared if not name.endswith("_") and name != "long"], path.name
        assert not [n for n in declared if n.count("_") > 1 and n.split("_")[-2] in DERIVED], path.name


def value(b: GraphBuilder, kind: int, name: str, x: Value) -> Value:
    """An input, or a value on the way, called ``name``; its type differs from kind to kind."""
    if kind < 4:
        return b.input(name, *((M, D), (M,), (D,), ())[kind])
    return b.mul(name, x, x) if kind == 4 else b.reduce_sum(name, x, axis=D)


def graph_of(names: tuple[str, ...], first: int) -> Definition:
    """A graph with a value of each name; ``first`` is the kind of the first one."""

    def describe(b: GraphBuilder) -> None:
        total = b.input("x", M, D)
        for at, name in enumerate(names, first):
            total = b.add("running", total, value(b, at % 6, name, total))
        b.output("y", total)

    return Definition("hostile", describe)


@cache
def hostile() -> tuple[str, ...]:
    """The names of C++, of CUDA, of the device headers, and what the text of emitted kernels says."""
    texts = [emit(p) for p in plans_of_every_template()]
    used = {w for text in texts for w in re.findall(r"\w+", re.sub(r"//.*", "", text))} | TAKEN
    near = {f"{a}_{b}" for a in ("x", "y") for b in DERIVED}
    used |= near | {*CUDA.split(), *["first", "step", "rows", "at", "X", "seen", "Row", "D", "M", "N", "T"]}
    return tuple(sorted(n for n in used if is_name(n) and not re.fullmatch(r"x|y|running|.*32", n)))


CUDA = """
abs acos atomic_add ceil clock cos double2 dim3 erf exp exp2 expf fabs float2 float4 floor fma fmax fmin free half int2
isnan log log1p longlong2 main malloc make_float2 max memcpy memset min norm nan pow printf round rsqrt rsqrtf size_t
sin std tan tanh trap uint2 uint4 ulonglong2 ushort2 warp_size
"""

FORMS = {"registers": 8, "cp_async": 64, "tma": 64, "tma_unaligned": 9, "multipass": 9}
BATCH = 25  # the compiler takes more than twice as long for twice the names


@sampling.rotating("form", FORMS)
def test_every_name_compiles(form: str) -> None:
    """In every form of kernel, in one role or another."""
    pytest.importorskip("cupy")
    at, names = [*FORMS].index(form), hostile()
    for start in range(0, len(names), BATCH):
        spec = make_spec(graph_of(names[start : start + BATCH], at), "fwd", {"d": FORMS[form], "dtype": "f64"})
        facts = problem(spec.graph(), spec.d)
        schedule = min(
            (s for s in space(facts) if s.form == form),
            key=lambda s: (vectors_per_thread(s, facts), s.threads * s.rows_per_block),
        )
        compile_ptx(emit(lower(spec, schedule)), "sm_90", name=f"{form}.cu")


# ---- names on the way ----


def test_a_value_whose_name_ends_in_32_is_differentiated() -> None:
    """The passes leave out the 32 of x32 where they make a name of it; that of 'h_32' leaves no underscore behind."""

    def own(b: GraphBuilder) -> None:
        h = b.mul("h_32", b.input("x", M, D), b.input("z_32", M, D))
        b.output("y", b.mul("p", h, b.reduce_mean("mean_32", h, axis=D)))

    names = make_spec(Definition("own", own), "bwd", {"d": 8}).graph().values()
    assert not [n for n in names if not is_name(n)]


def rmsnorm_relu(b: GraphBuilder) -> None:
    x = b.input("a1", M, D)
    b.output("y", x * (b.mean(x * x) + b.eps()).rsqrt() * x.relu())


def seednorm(b: GraphBuilder) -> None:
    x, g, al, be = b.input("x", M, D), b.input("g", D), b.input("al", D), b.input("be", D)
    b.output("y", (b.sum(x * be).tanh() * al + g) * (x * (b.mean(x**2) + b.eps()).rsqrt()))


def polynorm(b: GraphBuilder) -> None:
    def norm(v: Value) -> Value:
        return v * (b.mean(v * v) + b.eps()).rsqrt()

    x = b.input("x", M, D)
    b.output("y", 0.3 * norm(x**3) + b.input("w", D) * norm(x**2) + b.where_gt("leaky", x, 0.0, x, 0.3 * x).abs())


def softmax_entropy(b: GraphBuilder) -> None:
    x = b.input("x", M, D)
    z = x - b.reduce_max("top", x, axis=D)
    e = z.exp()
    b.output("h", b.sum(e).log() - b.sum(e * z) / b.sum(e))


MUTE = re.compile(r"(ct|add|sub|mul|div|count|factor|terms|scaled_term|part)(_\d+)*|.*(_part_part|\d32).*|ct_.*")


@pytest.mark.parametrize("describe", [rmsnorm_relu, seednorm, polynorm, softmax_entropy])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_no_name_is_mute(describe: Callable[[GraphBuilder], None], direction: str) -> None:
    """After any pass a name says what the value is computed from, or what it is a part of."""
    for stage, graph in make_spec(Definition("own", describe), direction, {"d": 8, "dtype": "bf16"}).trace().items():
        assert not [n for n in graph.values() if MUTE.fullmatch(n)], stage


# ---- names are checked where a graph is built ----

BAD = ["", "a-b", "../..", "x\n}\nint evil", "a__b", "_a", "a_", "1a", "\u00b2", "x\ud800", "%x", "a b", 3, None]


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_name_is_refused(name: object) -> None:
    """Of a value; ``tests/messages/operators.txt`` has inputs, outputs and options. And of a graph."""
    with pytest.raises(VerifyError, match="is expected to be called by words"):
        make_spec(Definition("own", lambda b: b.neg(name, b.input("x", M, D))), "fwd", {"d": 8})  # type: ignore[arg-type, func-returns-value]
    with pytest.raises(SpecError):
        Definition(name, lambda b: None)  # type: ignore[arg-type]


def test_an_input_that_is_off_keeps_its_name() -> None:
    """Whether it is there or not, nothing else is called so."""

    def own(b: GraphBuilder) -> None:
        x, gamma = b.input("x", M, D), b.optional_input("gamma", D)
        h = b.neg("gamma", x)
        b.output("y", h if gamma is None else b.mul("scaled", h, gamma))

    for keys in ({}, {"gamma": "no"}):
        graph = make_spec(Definition("own", own), "fwd", {"d": 8, **keys}).forward()
        assert "gamma_1" in graph.values()
