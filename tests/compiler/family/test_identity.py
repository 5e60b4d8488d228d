"""If these fail, two different graphs or specs have one name: of a text, a slug, a lock entry or a kernel."""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lngen.compiler.emit import emit
from lngen.compiler.graphs import GRAPHS, Definition, GraphBuilder
from lngen.compiler.graphs.norms import layernorm
from lngen.compiler.ir import D, M
from lngen.compiler.lower import lower
from lngen.compiler.problem import ANY, Schedule, parse_schedule
from lngen.compiler.problem import problem as facts_of
from lngen.compiler.schedule import ranked
from lngen.compiler.spec import LONGEST_SLUG, Spec, make_spec, parse_spec
from lngen.errors import LngenError, SpecError
from lngen.files import sha256
from lngen.launch.runtime.lock_file import Lock, Locked
from lngen.packs.build import build
from own_graphs import described


def negated(b: GraphBuilder) -> None:
    """-x + eps, or -x * gamma."""
    h, gamma = b.neg("h", b.input("x", M, D)), b.optional_input("gamma", D, default=False)
    b.output("y", b.add("raised", h, b.eps()) if gamma is None else b.mul("scaled", h, gamma))


doubled = described(lambda b, x: x + x)


def of(describe: Callable[[GraphBuilder], None], name: str = "norm", direction: str = "fwd", **keys: object) -> Spec:
    return make_spec(Definition(name, describe), direction, {"d": 64, **keys})


# ---- identity ----


def test_two_graphs_of_one_name_have_nothing_in_common() -> None:
    one, other = of(negated), of(doubled)
    assert re.fullmatch(r"norm@[0-9a-f]{8}\.fwd:d=64,dtype=f32", str(one))
    assert re.fullmatch(r"norm_[0-9a-f]{8}_fwd__f32_d64", one.slug)
    assert len({str(one), str(other)}) == len({one.slug, other.slug}) == 2
    lock = Lock((Locked("GPU", "sm_90", str(one), 8, "threads=64"),))
    assert lock.nearest(str(one), 8) is not None
    assert lock.nearest(str(other), 8) is None


def test_the_digest_is_of_the_description() -> None:
    """Not of D, the direction or the function that gives it; of the dtypes, as the graph is."""
    digest = of(negated).digest
    assert digest == of(negated, d=96).digest == of(negated, direction="bwd", wrt="x").digest
    assert digest == of(lambda b: negated(b)).digest
    assert digest != of(negated, gamma=True).digest
    assert digest != of(negated, dtype="bf16").digest


def test_an_output_is_not_a_statistic() -> None:
    """The forward graphs read alike; the backward takes a cotangent of one and the value of the other."""

    def both(b: GraphBuilder, output: bool) -> None:
        h = b.neg("h", b.input("x", M, D))
        b.output("y", h)
        z = b.cast("z", h, to=b.options.out)
        b.results.append(z) if output else b.statistic(z)

    one, other = (of(lambda b, o=o: both(b, o)) for o in (True, False))  # type: ignore[misc]
    assert one.forward() == other.forward()
    assert one.digest != other.digest


def test_a_graph_called_like_a_builtin_one_is_another() -> None:
    own, same = of(negated, "layernorm"), of(layernorm, "layernorm")
    assert not own.builtin
    assert str(own).startswith("layernorm@")
    assert own.slug.startswith(f"layernorm_{own.digest}_fwd__")
    assert same.builtin
    assert (str(same), same.slug) == ("layernorm.fwd:d=64,dtype=f32", "layernorm_fwd__f32_d64")
    assert not [name for name in GRAPHS if re.search("_[0-9a-f]{8}$", name)]  # no digest in a builtin name
    with pytest.raises(TypeError):
        GRAPHS["layernorm"] = own.definition  # type: ignore[index]


def test_the_text_of_a_spec_is_parsed_with_its_graph_only() -> None:
    spec, graphs = of(negated, direction="bwd", gamma=True), {"norm": Definition("norm", negated)}
    assert parse_spec(str(spec), graphs) == spec
    assert parse_spec(str(spec).replace(f"@{spec.digest}", ""), graphs) == spec
    with pytest.raises(SpecError) as error:
        parse_spec(str(spec), {"norm": Definition("norm", doubled)} | {"gamma": spec.definition})
    assert "there is no key 'gamma'" in str(error.value)
    text = str(of(negated))
    with pytest.raises(SpecError) as error:
        parse_spec(text, {"norm": Definition("norm", doubled)})
    here = of(doubled).graph_name
    assert str(error.value) == (f"spec '{text}': 'norm' is {here} here, not {of(negated).graph_name}; use that graph.")
    with pytest.raises(SpecError) as error:
        parse_spec(text)
    assert str(error.value) == (
        f"spec '{text}': '{of(negated).graph_name}' is a graph that a program defines, which lngen does not know; use "
        "lngen.compile in that program."
    )


# ---- kernels ----


def test_two_graphs_of_one_name_are_built_side_by_side(tmp_path: Path) -> None:
    built = build([of(negated), of(doubled), of(negated)], tmp_path, emit="cu")
    plans = [lower(s, ranked(facts_of(s.graph(), s.d))[0]) for s in (of(negated), of(doubled))]
    assert {e["spec"]["text"]: e["graph_sha256"] for e in built.manifest.kernel_sets.values()} == {
        str(p.spec): sha256(str(p.graph).encode()) for p in plans
    }
    assert len([*tmp_path.glob("*.cu")]) == 2


def test_different_kernels_of_one_name_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spec, "digest", "12345678")
    schedule = "form=registers,threads=8,rows_per_block=4,vec=1"
    plans = [lower(s, parse_schedule(schedule, ANY)) for s in (of(negated), of(doubled))]
    assert plans[0].name == plans[1].name
    with pytest.raises(LngenError) as error:
        build([of(negated), of(doubled)], tmp_path / "out", emit="cu", schedule=schedule)
    assert str(error.value) == (
        f"two kernel sets that differ are called '{plans[0].name}'; give one of their graphs another name."
    )
    assert not (tmp_path / "out").exists()


# ---- slugs ----

# Like words of slugs, like numbers, and like each other behind a word or an underscore.
NASTY = [
    "now", "w", "no", "nox", "savenone", "savestats", "wrt_x", "of_y", "a", "a_b", "b", "ab", "q", "qa", "qu", "qua",
    "a_qb", "out_f16", "wf32", "outf32", "eps1em06", "blocks3", "d64", "f32", "nogamma", "gamma", "gamma_beta", "beta",
    "none", "no_a", "noa", "wbf16", "on", "x_gamma", "stats", "y2", "of2", "wrt2", "blocks_3", "x1", "m1p0", "savey",
    "A", "B", "Gamma", "qxa", "aB", "acc", "gradf32", "set", "saved", "X", "gamma2",
]  # fmt: skip
WORDS = ["acc", "gradf32", "f32", "set", "saved", "y", "x", "a", "a_b", "b", "scale", "m1p0", "q", "qx"]
NUMBERS = (1.0, -1.0, 10.0, 0.1, 1e10, 1e-10, 1.5)
VALUES = ((True, False), NUMBERS, WORDS, (True, False))


def choosing(names: list[str]) -> Definition:
    """A graph with an option of each name: by turns an input, a number, a word and a flag; results y, z and x_y."""

    def describe(b: GraphBuilder) -> None:
        total = x = b.input("x", M, D)
        for at, name in enumerate(names):
            if at % 4 == 0:
                more = b.optional_input(name, D, default=at % 8 == 0)
                total = total if more is None else b.add("total", total, more)
            else:
                option = (lambda n: b.option(n, 1.0), lambda n: b.option(n, "a", (*WORDS,)), lambda n: b.flag(n, False))
                option[at % 4 - 1](name)
        scaled = b.mul("scaled", b.add("raised", total, b.eps()), b.input("delta", D))
        b.output("y", scaled)
        b.output("x_y", b.mul("moved", scaled, b.input("last", D)), save=True)
        b.statistic(b.reduce_sum("stat", x, axis=D))
        b.statistic(b.reduce_sum("a_stat", scaled, axis=D))

    return Definition("own", describe)


FORWARD = {
    "save": ("none", "stats", "y", "x_y", "y+x_y", "stat", "a_stat", "x_y+stat", "y+a_stat"),
    "weight": ("f16", "f32"), "out": ("f16", "f32"), "eps": (1e-6, 1e-5),
}  # fmt: skip
BACKWARD = {
    "wrt": ("x", "delta", "delta+last", "x+last"), "of": ("y", "x_y", "y+stat", "stat", "a_stat"),
    "grad": ("f32", "f64", "bf16"), "accumulate": ("x", "delta", "x+delta"), "blocks": (1, 3, 32),
}  # fmt: skip


@settings(max_examples=25)
@given(st.lists(st.sampled_from(NASTY), unique=True, min_size=1, max_size=6), st.data())
def test_specs_that_differ_have_slugs_that_differ(names: list[str], data: st.DataObject) -> None:
    """The C identifiers and the names of files, without the digest, which would tell most of them apart."""
    definition, specs = choosing(names), list[Spec]()

    def some(table: Mapping[str, Collection[object]]) -> dict[str, object]:
        chosen = data.draw(st.sets(st.sampled_from(sorted(table)), max_size=3))
        return {key: data.draw(st.sampled_from([*table[key]])) for key in sorted(chosen)}

    for _ in range(8):
        keys = {"d": 64, **some({n: VALUES[at % 4] for at, n in enumerate(names)}), **some(FORWARD)}
        with suppress(SpecError):  # a gradient that is not wanted cannot be added; a number not saved has none
            specs.append(make_spec(definition, "fwd", keys))
            specs.append(make_spec(definition, "bwd", {**keys, **some(BACKWARD)}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Spec, "digest", "12345678")
        assert len({str(spec) for spec in specs}) == len({*specs})
        for slugs, allowed in (({s.slug for s in specs}, "[a-z0-9_]*"), ({s.file_slug for s in specs}, "[a-z0-9_-]*")):
            assert len({s.casefold() for s in slugs}) == len(slugs) == len({*specs})
            assert all(re.fullmatch(allowed, s) and len(s) <= LONGEST_SLUG and s.count("__") == 1 for s in slugs)
            assert all(s[0].isalpha() for s in slugs)
        for spec in specs:
            assert parse_spec(str(spec), {"own": definition}) == spec


@pytest.mark.parametrize(("text", "identifier", "file"), [
    ("add_rmsnorm.fwd:d=64,round_sum=no", "noqroundqusum", "noround-sum"),
    ("gated_rmsnorm.fwd:d=64,act=gelu_tanh", "set_act_qgeluqutanh", "set_act_gelu-tanh"),
    ("rmsnorm.fwd:d=64,gamma=no", "nogamma", "nogamma"),
])  # fmt: skip
def test_a_file_s_name_has_the_option_s_own(text: str, identifier: str, file: str) -> None:
    plan = lower(parse_spec(text), Schedule("registers", 32, 1, 4))
    assert f"_{identifier}_" in f"{parse_spec(text).slug}_", "a kernel's name stays what it was"
    assert plan.kernels[0].name.startswith(f"{parse_spec(text).slug}__")
    assert f"namespace lngen {{ namespace {plan.stem} {{" in emit(plan)
    assert plan.name == f"{parse_spec(text).slug.replace(identifier, file)}__t32_r1_v4_b1"


def test_slugs_are_bounded() -> None:
    names = [f"{letter * 40}" for letter in "abcdefgh"]
    given = [*zip(names, (True, 1.5, "b", True) * 2, strict=True)]
    keys = {"d": 2**30, "wrt": names[0]}
    specs = [make_spec(choosing(names), "bwd", {**keys, **dict(given[: n + 1])}) for n in range(8)]
    assert len({s.slug for s in specs}) == 8
    assert all(len(s.slug) <= LONGEST_SLUG for s in specs)
    longest = make_spec(Definition("n" * 48, negated), "bwd", {"d": 64, "gamma": True, "wrt": "x", "eps": 1.1e-300})
    assert len(longest.slug) <= LONGEST_SLUG
    widest = "layernorm.bwd:d=1073741824,dtype=bf16,weight=f32,out=f32,gamma=no,beta=no,eps=1.2345678901234567e-300,"
    assert parse_spec(f"{widest}save=none,blocks=4096").slug.endswith("_savenone_blocks4096")
