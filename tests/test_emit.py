"""Emitted CUDA is a product: the same text every time, tidy, without a trace of the machine; it compiles."""

from __future__ import annotations

import difflib
import getpass
import hashlib
import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError, meta

import lngen
from lngen.data import data_dir
from lngen.emit import emit, environment, make_environment, module
from lngen.emit.emit import Module, partials
from lngen.errors import EmitError
from lngen.graphs import Definition, GraphBuilder
from lngen.graphs.norms import layernorm
from lngen.ir import D, M, parse, print_graph
from lngen.lower import Plan, lower
from lngen.lower.parts import STREAMED
from lngen.runtime.choose import capability, compile_plan
from lngen.schedule import MINIMUM_ARCH, problem, ranked
from lngen.spec import Spec, make_spec, parse_spec
from lngen.toolchain import ARCHES
from test_lower import PLANS, gated, notes, own_spec, plan_of

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = sorted(p.name for p in data_dir("templates").glob("*.jinja"))


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PLANS[request.param])


def best(spec: Spec) -> Plan:
    return lower(spec, ranked(problem(spec.graph(), spec.d))[0])


# ---- the text ----


def test_the_text_is_tidy(plan: Plan) -> None:
    text = emit(plan)
    assert text.endswith("}\n")
    assert not text.endswith("\n\n")
    assert text.isascii()
    assert "\t" not in text
    assert not re.search(r"[ \r]$", text, re.MULTILINE)
    assert "\n\n\n" not in text
    assert "#include" not in text


def test_the_text_has_no_trace_of_machine_or_day(plan: Plan) -> None:
    text = emit(plan)
    assert not re.search(r"\b(19|20)\d\d-\d\d|\d\d:\d\d", text)
    for word in (getpass.getuser(), platform.node(), lngen.__name__ + "/", str(ROOT), os.environ.get("HOME", ROOT)):
        assert not re.search(rf"(?<![\w]){re.escape(str(word))}(?!\w)", text), word
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version
    assert not re.search(rf"(?<![\d.]){re.escape(version[1])}(?![\d.])", text)


def body_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines of function bodies with the depth of braces they should have, notes and what strings say stripped."""
    depth = 0
    for line in text.splitlines():
        code = re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//")[0].rstrip()
        if line.startswith("#"):
            continue  # the preprocessor's
        if depth and code:
            yield depth - code.lstrip().startswith("}"), code
        depth += code.count("{") - code.count("}")
    assert depth == 0


def test_indentation_follows_the_braces(plan: Plan) -> None:
    hanging = 0  # 'if (...)' and 'for (...)' without braces indent what they hold
    parentheses = 0  # and so does a parenthesis that is not closed in its line
    for depth, code in body_lines(emit(plan)):
        indent = len(code) - len(code.lstrip())
        assert indent == 4 * (depth + hanging + (parentheses > 0)), code
        parentheses += code.count("(") - code.count(")")
        unbraced = re.match(r"\s*((else )?(if|for)\b.*\)|else|do)$", code)
        hanging = hanging + 1 if unbraced else hanging * (parentheses > 0)


def test_every_equation_stands_beside_its_statement(plan: Plan) -> None:
    text = emit(plan)
    for kernel in plan.kernels:
        for note in notes(kernel):
            assert re.search(rf"^ +\S.*; +// {re.escape(note)}$", text, re.MULTILINE), note


def test_the_header_holds_the_graph_and_the_command(plan: Plan) -> None:
    text = emit(plan)
    header = [line.removeprefix("// ") for line in text.split("\n\n")[0].splitlines()]
    start = next(n for n, line in enumerate(header) if line.startswith("graph @"))
    assert parse("\n".join(header[start:])) == plan.graph
    assert header[0] == plan.name
    digest = hashlib.sha256(print_graph(plan.graph).encode()).hexdigest()[:12]
    assert f"  ir-sha256  : {digest}" in header
    command = f"lngen show {plan.spec} --stage cuda --schedule {plan.schedule}"
    assert f"  regenerate : {command}" in header


@pytest.mark.parametrize("keys", [{"d": 96}, {"d": 64, "dtype": "bf16", "eps": 1e-6, "gamma": "no", "wrt": "x"}])
def test_the_header_of_a_graph_of_ones_own_says_the_python_that_emits_it(keys: dict[str, Any]) -> None:
    own = Definition("own", layernorm)
    for direction in ("fwd", "bwd"):
        mine = {k: v for k, v in keys.items() if k != "wrt" or direction == "bwd"}
        spec = make_spec(own, direction, mine)
        text = emit(lower(spec, ranked(problem(spec.graph(), spec.d))[5]))
        command = next(line for line in text.splitlines() if "regenerate" in line).partition(": ")[2]
        assert eval(command, {"lngen": lngen, "g": own}) == text


def test_every_kernel_is_there_under_its_bounds(plan: Plan) -> None:
    text = emit(plan)
    for kernel in plan.kernels:
        bounds = f"__launch_bounds__({kernel.block}, {kernel.resident})"
        arguments = ",\n    ".join(a.declaration for a in kernel.arguments)
        assert f'extern "C" __global__ void {bounds}\n{kernel.name}(\n    {arguments}\n)\n{{' in text


def digest() -> str:
    """A hash over all plans' texts."""
    texts = [emit(plan_of(*args)) for args in PLANS.values()]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def test_the_text_does_not_depend_on_the_hash_seed() -> None:
    here = digest()
    script = "import test_emit; print(test_emit.digest())"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        found = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == here


# ---- templates and their context ----


def test_the_context_is_what_the_templates_use() -> None:
    env = environment()
    used: set[str] = set()
    for name in TEMPLATES:
        source, _, _ = env.loader.get_source(env, name)  # type: ignore[union-attr]
        used |= meta.find_undeclared_variables(env.parse(source))
    # Loop variables, and what is set, that reach an included template.
    assert used - {"kernel", "phase", "fold", "finish", "ask"} == {f.name for f in fields(Module)}


def by_largest(b: GraphBuilder) -> None:
    """Each row over its largest element."""
    x = b.input("x", M, D)
    b.output("y", b.div("scaled", x, b.reduce_max("largest", x, axis=D)))


def weights_alone(b: GraphBuilder) -> None:
    """What has no rows."""
    b.output("y", b.neg("minus", b.input("gamma", D)))


def plans_of_every_template() -> list[Plan]:
    """Plans that take every template between them."""
    specs = ["layernorm.fwd:d=8,dtype=f64,weight=f16", "layernorm.fwd:d=8,dtype=f64,weight=bf16"]
    plans = [*(plan_of(*args) for args in PLANS.values()), *(best(parse_spec(s)) for s in specs)]
    plans.append(best(make_spec(Definition("by_largest", by_largest), "fwd", {"d": 64})))
    plans.append(best(make_spec(Definition("weights_alone", weights_alone), "fwd", {"d": 64})))
    ragged = "form=ragged,threads=32,rows=8,vec=1,stages=2,bulk_store=yes,keep=yes"
    plans.append(plan_of("layernorm.bwd:d=1001,dtype=bf16", ragged))
    plans.append(plan_of("layernorm.fwd:d=1001,dtype=bf16", f"{ragged},owners=3,hold=yes,claim=yes"))
    claimed = "threads=256,rows=1,vec=8,resident=2,stages=2,owners=264,keep=yes,hold=yes,claim=yes"
    plans.append(plan_of("layernorm.fwd:d=12288,dtype=bf16", f"form=bulk,{claimed}"))
    plans.append(plan_of("layernorm.fwd:d=12288,dtype=bf16", f"form=bulk,{claimed},soon=yes"))
    told = "form=bulk,threads=64,rows=3,stages=2,cluster=8,owners=15,keep=yes,hold=yes,soon=yes,claim=yes"
    plans.append(plan_of("layernorm.fwd:d=32768,dtype=f32", told))
    plans.append(plan_of("layernorm.bwd:d=4096,dtype=bf16", "form=bulk,threads=128,rows=2,stages=2,hold=yes,soon=yes"))
    plans.append(plan_of("layernorm.bwd:d=768,dtype=f16", "form=registers,threads=32,rows=16,vec=8"))
    plans.append(plan_of("layernorm.bwd:d=1024,dtype=f16", "form=bulk,threads=64,rows=8,vec=8,stages=2,keep=yes"))
    return plans


def test_every_template_is_used() -> None:
    env = environment()
    included: set[str] = {"module.cu.jinja"}
    for name in TEMPLATES:
        source, _, _ = env.loader.get_source(env, name)  # type: ignore[union-attr]
        included |= {n for n in meta.find_referenced_templates(env.parse(source)) if n}
    plans = plans_of_every_template()
    kernels = [k for p in plans for k in p.kernels]
    included |= {t for p in plans for t in partials(p)} | {k.template for k in kernels}
    included |= {t for k in kernels for t in k.sections}
    folds = [f for k in kernels for phase in k.phases for f in phase.folds]
    streamed = [f.streamed for f in folds if f.part in STREAMED]
    included |= {f.part for f in folds} | {t for s in streamed for t in (s.before, s.segment, *s.after)}
    assert included == set(TEMPLATES)


def test_only_the_helpers_a_kernel_needs() -> None:
    def helpers(spec: str, schedule: str) -> list[str]:
        return [name.removesuffix(".cuh.jinja") for name in partials(plan_of(spec, schedule))]

    row = ["_launch", "_prefetch", "_memory", "_column", "_fold", "_row_barrier", "_row_fold"]
    in_registers, staged = "form=registers,threads=8,rows=4", "form=bulk,threads=8,rows=4,stages=2,owners=1"
    assert helpers("rmsnorm.fwd:d=64,dtype=f32", in_registers) == row
    assert helpers("rmsnorm.fwd:d=64,dtype=bf16", in_registers) == [*row[:2], "_bf16", *row[2:]]
    assert helpers("rmsnorm.fwd:d=64,dtype=f32", staged) == [*row[:3], "_mbarrier", "_bulk", *row[3:]]
    sums = ["_launch", "_prefetch", "_stay", "_memory", "_column", "_fold", "_partial", "_strand"]
    of_beta, threads = "layernorm.bwd:d=64,wrt=beta,dtype=f32", "threads=8,rows=64"
    assert helpers(of_beta, f"form=registers,{threads}") == sums
    assert helpers(of_beta, f"form=registers,{threads},one_launch=yes") == [*sums, "_grid_barrier"]
    assert helpers(of_beta, f"form=async,{threads},stages=2") == [
        *sums[:4],
        "_async",
        *sums[4:6],
        "_row_barrier",
        *sums[6:],
    ]
    cluster = {"_cluster", "_exchange"}
    wide, single = "form=bulk,threads=256,rows=1,stages=3,cluster=2", "form=bulk,threads=256,rows=1,stages=3"
    assert cluster & {*helpers("layernorm.bwd:d=16384,dtype=bf16", wide)} == cluster
    assert not cluster & {*helpers("layernorm.bwd:d=8192,dtype=bf16", single)}
    few = helpers("layernorm.fwd:d=16384,dtype=bf16", "form=registers,threads=256,rows=1,cluster=2")
    assert {*few} >= {*cluster, "_mbarrier"}
    assert "_bulk" not in few
    wide = "form=bulk,threads=64,rows=1,stages=3,owners=3"
    claims = [helpers("layernorm.fwd:d=1000,dtype=bf16", wide + claim) for claim in ("", ",claim=yes")]
    assert [name for name in claims[1] if name not in claims[0]] == ["_counter"]
    wide = "form=bulk,threads=128,rows=1,stages=3,owners=3,cluster=2"
    claims = [helpers("layernorm.fwd:d=16384,dtype=bf16", wide + claim) for claim in ("", ",claim=yes")]
    assert [name for name in claims[1] if name not in claims[0]] == ["_counter", "_expect_more"]


def test_every_constant_is_used(plan: Plan) -> None:
    """A kernel declares what its text names, and nothing else; the declarations stand in columns."""
    text = emit(plan)
    for kernel in plan.kernels:
        body = text[text.index(f"\n{kernel.name}(") :].partition("\n}\n")[0]
        assert [c.name for c in kernel.constants if len(re.findall(rf"\b{c.name}\b", body)) < 2] == []
        assert len({(line.index("="), line.index("//")) for line in kernel.declarations}) == 1


def test_undefined_names_are_errors(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ missing }}", encoding="utf-8")
    with pytest.raises(UndefinedError, match="'missing' is undefined"):
        make_environment(tmp_path).get_template("t.jinja").render(given=1)


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ({"module.cu.jinja": "a\n\n{{ nam }}\n"}, "module.cu.jinja:3: 'nam' is undefined."),
        ({"module.cu.jinja": "a\n{% for %}\n"}, "module.cu.jinja:2: Expected "),
        (
            {"module.cu.jinja": "{% include 'p.cuh.jinja' %}", "p.cuh.jinja": "b\n{{ kernels[0].nam }}"},
            "p.cuh.jinja:2: 'lngen.lower.plan.Kernel object' has no attribute 'nam'.",
        ),
        ({"module.cu.jinja": "\n{% include 'gone.jinja' %}"}, "module.cu.jinja:2: 'gone.jinja' not found"),
    ],
)
def test_a_broken_template_is_named_with_its_line(
    files: dict[str, str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    emitter = importlib.import_module("lngen.emit.emit")
    monkeypatch.setattr(emitter, "environment", lambda: make_environment(tmp_path))
    plan = plan_of(*PLANS["row"])
    with pytest.raises(EmitError) as error:
        emit(plan)
    assert str(error.value).startswith(f"'{plan.name}' could not be laid out: {where}")


# ---- other graphs through the same templates ----


def mean_added(b: GraphBuilder) -> None:
    """LayerNorm but for one op: the mean is added."""
    x32, gamma32, beta32 = b.input("x", M, D), b.input("gamma", D), b.input("beta", D)
    mean = b.reduce_mean("mean", x32, axis=D)
    xc = b.add("xc", x32, mean)
    var = b.reduce_mean("var", b.mul("xc2", xc, xc), axis=D)
    rstd = b.rsqrt("rstd", b.add("veps", var, b.eps()))
    b.output("y", b.add("y32", b.mul("scaled", b.mul("xhat", xc, rstd), gamma32), beta32))
    b.statistic(mean)
    b.statistic(rstd)


def text_of(describe: Callable[[GraphBuilder], None]) -> tuple[Plan, str]:
    """The forward under LayerNorm's name."""
    spec = parse_spec("layernorm.fwd:d=96,dtype=bf16", {"layernorm": Definition("layernorm", describe)})
    plan = best(spec)
    return plan, emit(plan)


def names(plan: Plan) -> tuple[str, str]:
    """What a spec's graph is called, in text and in C."""
    return plan.spec.graph_name, plan.spec.slug


def test_one_flipped_op_changes_its_own_lines_alone() -> None:
    (plan, text), (mutant_plan, mutant) = text_of(layernorm), text_of(mean_added)
    assert [k.template for k in plan.kernels] == [k.template for k in mutant_plan.kernels]
    for own, name in zip(names(mutant_plan), names(plan), strict=True):  # another graph has another name
        mutant = mutant.replace(own, name)
    changed = [line[2:].strip() for line in difflib.ndiff(text.splitlines(), mutant.splitlines()) if line[0] == "+"]
    assert changed
    for line in changed:
        assert re.match(r"//   (ir-sha256|regenerate) |//   %xc |const float xc = x32 \+ mean;", line), line


def test_graphs_of_one_s_own_compile() -> None:
    pytest.importorskip("cupy")
    _, mutant = text_of(mean_added)
    assert "const float xc = x32 + mean;" in mutant
    compile_plan(text_of(mean_added)[0], "sm_90")
    for way in ("fwd", "bwd"):
        compile_plan(
            best(own_spec(gated, way, dtype="bf16", weight="f32", **{"wrt": "x+z"} if way == "bwd" else {})), "sm_90"
        )


def test_a_context_is_frozen(plan: Plan) -> None:
    context = module(plan)
    assert context == module(plan)
    with pytest.raises(AttributeError):
        context.name = "other"  # type: ignore[misc]


# ---- the compiler ----

# Spec and form; the schedule is the first of that form in the model's ranking.
STRUCTURES = {
    "row": ("layernorm.fwd:d=1024", "registers"),
    "row_columns": ("layernorm.bwd:d=1024", "registers"),
    "row_columns, narrow": ("rmsnorm.bwd:d=63", "registers"),
    "row_staged": ("layernorm.bwd:d=1024", "async"),
    "row_staged, forward": ("rmsnorm.fwd:d=512", "bulk"),
    "row_claimed": ("rmsnorm.fwd:d=20480", "bulk"),
    "row_staged, backward": ("layernorm.bwd:d=4096", "bulk"),
    "row_stream": ("rmsnorm.fwd:d=100003", "stream"),
    "columns": ("layernorm.bwd:d=70000,save=none", "stream"),
}
CASES = [(s, t) for s in STRUCTURES for t in ("f16", "bf16", "f32", "f64")]


@pytest.mark.parametrize(("structure", "dtype"), CASES)
def test_every_structure_compiles_without_spills(structure: str, dtype: str) -> None:
    """Two arches for each structure and dtype; every arch meets every structure that exists there."""
    pytest.importorskip("cupy")
    text, form = STRUCTURES[structure]
    spec = parse_spec(f"{text},dtype={dtype}")
    at = CASES.index((structure, dtype))
    for arch in {ARCHES[2 * at % 7], ARCHES[(2 * at + 1) % 7], "sm_90"}:
        if capability(arch) < MINIMUM_ARCH[form]:
            continue
        schedules = ranked(problem(spec.graph(), spec.d), capability(arch))
        fitting = [s for s in schedules if s.form == form]
        if not fitting and arch != "sm_90":
            continue  # its shared memory is too small
        plan = lower(spec, fitting[0])
        assert structure.split(",")[0] in {k.template.removesuffix(".cu.jinja") for k in plan.kernels}
        used = compile_plan(plan, arch).resources
        assert list(used) == [k.name for k in plan.kernels]
        assert not [(name, r) for name, r in used.items() if r.spills], (arch, str(plan.schedule))
