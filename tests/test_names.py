"""The names of values, graphs, inputs and outputs: those that kernels use are reserved, and any other compiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lngen.data import data_dir
from lngen.emit import emit
from lngen.emit.emit import partials
from lngen.errors import SpecError, VerifyError
from lngen.graphs import Definition, GraphBuilder
from lngen.ir import F32, Builder, D, M, Value
from lngen.ir.names import fresh, is_name, is_reserved
from lngen.lower import Plan, lower
from lngen.schedule import problem, slots, space
from lngen.spec import Spec, make_spec
from lngen.toolchain import compile_ptx
from test_emit import TEMPLATES, plans_of_every_template


def source(template: str) -> str:
    """The text of a template."""
    return (data_dir("templates") / template).read_text(encoding="utf-8")


def words(code: str) -> set[str]:
    """The names in CUDA text that a value may have, but for members; notes, strings and directives are stripped."""
    code = re.sub(r'//.*|"(\\.|[^"\\])*"|^\s*#.*', "", code, flags=re.MULTILINE)
    return {name for name in re.findall(r"(?<![\w.:])[a-z]\w*", code) if is_name(name)}


def bodies(plan: Plan) -> Iterator[tuple[str, str]]:
    """What the names of the chunks of results end in, and the text, of each kernel."""
    text = emit(plan)
    for kernel in plan.kernels:
        yield kernel.out, text[text.index(f"\n{kernel.name}(") :].partition("\n}\n")[0]


def loops(code: str, variable: str) -> Iterator[str]:
    """Every loop over ``variable``, from its head to the end of its body."""
    for loop in re.finditer(rf"\bfor \(int {variable}\b", code):
        depth = 0
        for at in range(loop.start(), len(code)):
            depth += (code[at] in "({") - (code[at] in ")}")
            if depth == 0 and code[at] in ";}":
                yield code[loop.start() : at + 1]
                break


@cache
def plans() -> tuple[Plan, ...]:
    """Plans that take every template between them."""
    return tuple(plans_of_every_template())


# ---- what is reserved ----


def test_every_name_that_an_emitted_kernel_uses_is_reserved() -> None:
    """But for variables of loops that name no value, which may hide one."""
    hiding = set()
    for plan in plans():
        values = set(plan.graph.values())
        for out, code in bodies(plan):
            chunks = {f"{r.name}_{out}" for r in plan.outputs}  # lowering keeps them apart from the graph's names
            for name in {n for n in words(code) - values - chunks if not is_reserved(n)}:
                outside = code
                for loop in loops(code, name):
                    assert not words(loop) & values, (name, plan.name)
                    outside = outside.replace(loop, "")
                assert name not in words(outside), (name, plan.name)
                hiding.add(name)
    assert hiding == {"m", "n", "s"}


def test_every_name_in_the_text_of_a_kernel_template_is_reserved() -> None:
    """Also where no schedule lays that line out; ``{{ }}`` stands for a value, whose derived names are reserved."""
    helpers = {part for plan in plans() for part in partials(plan)}
    helpers |= {t for part in helpers for t in re.findall(r'"(\w+\.cuh\.jinja)" (?:import|with)', source(part))}
    for template in {*TEMPLATES} - helpers - {"module.cu.jinja"}:
        text = re.sub(r"\{%.*?%\}|\{#.*?#\}", "", source(template)).replace("_{{ kernel.out }}", "_ptr")
        for name in words(re.sub(r"\{\{.*?\}\}", "x", text)) - {"x", "b", "m", "n", "s"}:
            assert is_reserved(name), (name, template)


CPP = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
MACROS = "assert errno linux stderr stdin stdout typeof unix va_arg va_copy va_end va_start"


def test_words_of_cpp_and_macros_are_reserved() -> None:
    assert not [word for word in (CPP + MACROS).split() if not is_reserved(word)]


# ---- what is not reserved compiles ----

CUDA = """
abs acos atomic_add ceil clock cos double2 dim3 erf exp exp2 expf fabs float2 float4 floor fma fmax fmin free half int2
isnan log log1p longlong2 main malloc make_float2 max memcpy memset min norm nan pow printf round rsqrt rsqrtf size_t
sin std tan tanh trap uint2 uint4 ulonglong2 ushort2 warp_size
"""


@cache
def hostile() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is not reserved of the names in templates, C++ and CUDA, and of those derived of x and y."""
    text = "".join(source(t) for t in TEMPLATES)
    used = words(re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "x", text)) | {
        w for p in plans() for _, c in bodies(p) for w in words(c)
    }
    used = {w for w in used if not re.fullmatch(r"x|y|running|.*32", w)}
    near = {f"{a}_{b}" for a in ("x", "y") for b in used}
    used |= {*CPP.split(), *MACROS.split(), *CUDA.split()}
    free, derived = (tuple(sorted(n for n in names if not is_reserved(n))) for names in (used, near - used))
    return free, derived


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


FORMS = {"registers": 8, "async": 64, "bulk": 64, "ragged": 9, "stream": 9}
BATCH = 75


@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_is_not_reserved_compiles(form: str) -> None:
    """In every form of kernel, in one role or another; of the derived ones a part in each form."""
    pytest.importorskip("cupy")
    at, (free, derived) = [*FORMS].index(form), hostile()
    names = (*free, *derived[at :: len(FORMS)])
    for start in range(0, len(names), BATCH):
        spec = make_spec(graph_of(names[start : start + BATCH], at), "fwd", {"d": FORMS[form], "dtype": "f64"})
        facts = problem(spec.graph(), spec.d)
        schedule = min((s for s in space(facts) if s.form == form), key=lambda s: (slots(s, facts), s.threads * s.rows))
        compile_ptx(emit(lower(spec, schedule)), "sm_90", name=f"{form}.cu")


def one_of(name: str) -> Definition:
    """A graph with an input called ``name``."""
    return Definition("own", lambda b: b.output("y", b.mul("h", b.input("x", M, D), b.input(name, M))) and None)


@pytest.mark.parametrize("name", ["seen", "send", "barrier", "bits_of", "segment_sums", "linux", "concept", "x_ptr"])
def test_an_input_that_kernels_need_the_name_of_is_refused(name: str) -> None:
    with pytest.raises(VerifyError) as error:
        make_spec(one_of(name), "fwd", {"d": 64})
    said = f"an input is expected to be called '{name}', a name that C and the kernels need; choose another."
    assert str(error.value) == f"graph @own_fwd: {said}"


@pytest.mark.parametrize("name", ["o", "ouble", "efault"])
def test_a_cotangent_that_cannot_have_its_name_is_an_error(name: str) -> None:
    """That of an output called 'o' would be called 'do'."""
    definition = Definition("own", lambda b: b.output(name, b.neg("h", b.input("x", M, D))) and None)
    with pytest.raises(VerifyError, match=f"is expected to be called 'd{name}', a name that C and the kernels need"):
        make_spec(definition, "bwd", {"d": 64}).graph()


# ---- names on the way ----


@pytest.mark.parametrize("name", ["sums", "chunks", "maxima", "chunk_maxima", "sums_1", "row", "x_ptr"])
def test_a_value_on_the_way_gets_a_free_name(name: str) -> None:
    b = Builder("f")
    x = b.param("x", F32, M, D)
    made = [b.neg(name, x).name for _ in range(3)]
    assert len({*made}) == 3
    assert not [n for n in made if is_reserved(n) or not n.startswith(name)]
    b.build(b.neg("y", x))


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,3}(_[a-z0-9]{1,3}){0,2}", fullmatch=True) | st.sampled_from(
    ["sums", "chunks", "maxima", "chunk_maxima", "seen", "row", "x_ptr", "sums_1", "sums_value", "x_32"]
)


@given(NAMES, st.sets(NAMES | NAMES.map(lambda n: f"{n}_1"), max_size=6))
def test_a_fresh_name_is_free(name: str, taken: set[str]) -> None:
    found = fresh(name, taken)
    assert found not in taken
    assert is_name(found)
    assert not is_reserved(found)
    assert found == name or name in taken or is_reserved(name)


def test_a_value_whose_name_ends_in_32_is_differentiated() -> None:
    """The passes leave out the 32 of x32 where they make a name of it; that of 'h_32' leaves no underscore behind."""

    def own(b: GraphBuilder) -> None:
        h = b.mul("h_32", b.input("x", M, D), b.input("z_32", M, D))
        b.output("y", b.mul("p", h, b.reduce_mean("mean_32", h, axis=D)))

    names = make_spec(Definition("own", own), "bwd", {"d": 8}).graph().values()
    assert not [n for n in names if not is_name(n) or is_reserved(n)]


# ---- names are checked where a graph is built ----

WORDS = "lower-case words of letters and digits, one underscore between two"
BAD = ["", "X", "a-b", "../..", "x\n}\nint evil", "a__b", "_a", "a_", "1a", "\u00b2", "x\ud800", "%x", "a b", 3, None]


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_name_is_refused(name: object) -> None:
    """The names of inputs, also of those that are switched off, of outputs and of values on the way."""

    def describe(b: GraphBuilder, what: str) -> None:
        x = b.input("x", M, D)
        if what == "an input":
            b.input(name, D)  # type: ignore[arg-type]
        if what == "off":
            b.optional_input(name, D, default=False)  # type: ignore[arg-type]
        if what == "an output":
            b.output(name, x)  # type: ignore[arg-type]
        b.output("y", b.neg(name if what == "a value" else "h", x))  # type: ignore[arg-type]

    for what in ("an input", "off", "an output", "a value"):
        with pytest.raises(VerifyError) as error:
            make_spec(Definition("own", lambda b, what=what: describe(b, what)), "fwd", {"d": 8})  # type: ignore[misc]
        said = "an input" if what == "off" else what
        assert str(error.value) == f"graph @own_fwd: {said} is expected to be called by {WORDS}, got {name!r}."
    with pytest.raises(SpecError) as refused:
        Definition(name, lambda b: None)  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"a graph is expected to be called by {WORDS}, 48 characters at most, got ")


def test_an_input_that_is_off_keeps_its_name() -> None:
    """Whether it is there or not, nothing else is called so."""

    def own(b: GraphBuilder) -> None:
        x, gamma = b.input("x", M, D), b.optional_input("gamma", D)
        h = b.neg("gamma", x)
        b.output("y", h if gamma is None else b.mul("scaled", h, gamma))

    for keys in ({}, {"gamma": "no"}):
        graph = make_spec(Definition("own", own), "fwd", {"d": 8, **keys}).forward()
        assert "gamma_1" in graph.values()
    twice = Definition("own", lambda b: [b.optional_input("z", D, default=False) for _ in range(2)] and None)
    with pytest.raises(VerifyError, match="an input is expected to be called 'z', but another value is"):
        make_spec(twice, "fwd", {"d": 8})


def test_a_name_too_long_is_refused() -> None:
    Definition("a" * 48, lambda b: None)
    with pytest.raises(SpecError, match="48 characters at most, got 'aaa"):
        Definition("a" * 49, lambda b: None)


def test_an_option_that_is_no_input_is_refused() -> None:
    """Also in a Spec that was made by hand: its options are in names of files."""
    spec = make_spec(one_of("z"), "fwd", {"d": 8})
    by_hand = Spec(spec.definition, "fwd", 8, spec.dtype, spec.weight, spec.out, inputs=(("../../evil", False),))
    with pytest.raises(SpecError) as error:
        by_hand.graph()
    assert str(error.value) == "graph 'own' has no optional input '../../evil'; its optional inputs are none."
