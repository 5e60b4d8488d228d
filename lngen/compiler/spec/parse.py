"""The one grammar of specs, ``GRAPH.fwd|bwd:key=value,...``: from text, or from values of keys, to a Spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from lngen.compiler.graphs import (
    GRAPHS,
    Chosen,
    Definition,
    GraphBuilder,
    Option,
    Options,
    definition_from,
    split_source,
)
from lngen.compiler.ir import DEFAULT_EPS, RUN, VERSIONS, DType, Run
from lngen.compiler.spec.spec import Spec
from lngen.dtypes import FLOATS, FLOATS_OF_8_BITS
from lngen.errors import SpecError, one_of, short
from lngen.user_input import decimal, whole


def some_of(text: str, key: str, value: Any, known: list[str]) -> tuple[str, ...] | None:
    """The names in ``known`` that ``value`` lists, in their order; None for all."""
    if value is None:
        return None
    given = value.split("+") if isinstance(value, str) else value
    one = isinstance(given, bytes) or getattr(given, "shape", None) == ()  # an array without axes
    names = [*map(short, given if isinstance(given, Iterable) and not one else [given])]
    if not names:
        raise SpecError(f"spec '{text}': '{key}' is expected to be one of {', '.join(known)} at least, got none.")
    for name in names:
        if name not in known:
            wrong(text, key, name, known)
    ordered = tuple(n for n in known if n in names)
    return None if list(ordered) == known else ordered


def dtype_of(text: str, key: str, value: Any) -> DType:
    """One of ``FLOATS`` by any name that ``DType.of`` takes."""
    with suppress(ValueError):
        if (found := DType.of(value)) in FLOATS:
            return found
    wrong(text, key, value, [t.value for t in FLOATS])


def option_value(text: str, key: str, option: Option, value: Any) -> Chosen:
    """The value of an option of the graph: True for yes and False for no, a number, or a word."""
    found = option.read(value)
    if found is not None:
        return found
    if value is None:
        hint = f"; {key}=no leaves it out" if isinstance(option.default, bool) else ""
        raise SpecError(f"spec '{text}': '{key}' is expected to be {option.values}, got None{hint}.")
    if isinstance(option.default, bool) or option.choices:
        wrong(text, key, value, option.choices or ("yes", "no"))
    raise SpecError(f"spec '{text}': '{key}' is expected to be {option.values}, got '{short(value)}'.")


def whole_number(text: str, key: str, value: object, most: int) -> int:
    """A whole number from 1 to ``most``."""
    number = whole(value, 1, most)
    if number is None:
        raise SpecError(
            f"spec '{text}': '{key}' is expected to be a whole number from 1 to {most}, got '{short(value)}'."
        )
    return number


def wrong(text: str, what: str, got: Any, known: list[str] | tuple[str, ...]) -> NoReturn:
    """SpecError: there is no ``what`` called ``got``."""
    expected = one_of(got, known) if known else "and the graph has none."
    raise SpecError(f"spec '{text}': there is no {what} '{short(got)}', {expected}")


MAX_D = 2**30
MAX_BLOCKS = 4096
MAX_STRETCH = 2**16
MAX_STRIDES = 2
DIRECTIONS = ("fwd", "bwd")
SAVES = ("stats", "none")  # or names of results
# The keys of specs, and further arguments of compile.
KEYS = (
    "d", "dtype", "weight", "out", "eps", "save", "wrt", "of", "grad", "accumulate", "blocks", "stretch", "order",
    "functions", "strides", "graph", "schedule", "lock", "overlap", "dx_quant", "dx_scales",
)  # fmt: skip
BACKWARD_KEYS = ("wrt", "of", "grad", "accumulate", "dx_quant", "dx_scales", "blocks", "stretch")
FORMATS = tuple(map(str, FLOATS_OF_8_BITS))  # of dx
DX_SCALES = ("tensor", "block")


def parse_spec(text: str, graphs: Mapping[str, Definition] | None = None) -> Spec:
    """The spec in ``text``; SpecError says what is wrong and names the nearest right word.

    ``graphs``: those that a name may mean, by default lngen's. The digest of a program's graph may be omitted. A graph
    may be in a file, ``my.graph.fwd:d=4096``, or in a module, ``module:function.fwd:d=4096``.
    """
    if source := split_source(text):
        graph_name, direction, tail = source
        definition = definition_from(graph_name)
    else:
        head, _, tail = text.partition(":")
        graph_name, _, direction = head.partition(".")
        definition = _definition(short(text), graph_name, GRAPHS if graphs is None else graphs)
    text = short(text)
    if direction not in DIRECTIONS:
        wrong(text, "direction", direction, DIRECTIONS)
    options = {}
    for part in filter(None, tail.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SpecError(f"spec '{text}': expected 'key=value', got '{short(part)}'.")
        if key in options:
            raise SpecError(f"spec '{text}': '{short(key)}' is given twice.")
        options[key] = value
    spec = make_spec(definition, direction, options, text)
    if not source and "@" in graph_name and graph_name != spec.graph_name:
        name = definition.name
        raise SpecError(f"spec '{text}': '{name}' is {spec.graph_name} here, not {short(graph_name)}; use that graph.")
    return spec


def _definition(text: str, graph_name: str, graphs: Mapping[str, Definition]) -> Definition:
    """The definition of a name, with or without a digest."""
    name, at, _ = graph_name.partition("@")
    if at and name not in graphs:
        raise SpecError(
            f"spec '{text}': '{short(graph_name)}' is a graph that a program defines, which lngen does not know; use "
            "lngen.compile in that program."
        )
    if name not in graphs:
        wrong(text, "graph", name, list(graphs))
    return graphs[name]


def make_spec(definition: Definition, direction: str, options: dict[str, Any], text: str = "") -> Spec:
    """A spec from a definition and the grammar's keys, with values as text or Python objects."""
    text = text or short(f"{definition.name}.{direction}:{','.join(f'{k}={short(v)}' for k, v in options.items())}")
    definition = replace(definition)  # which describes its graph once for this spec, and anew for the next
    by_default = definition.builder(Options(*definition.declared or (DType.F32,) * 3))
    declared = _declared_options(by_default, definition.name)
    takes_eps = by_default.takes_eps or definition.declared is not None
    known = ["d", "dtype", "weight", "out", *["eps"] * takes_eps, "save", *VERSIONS, "strides", *declared]
    _check_keys(text, options, [*known, *(BACKWARD_KEYS if direction == "bwd" else ())])
    dtype, weight, out = _dtypes(definition, options, text)
    chosen = tuple(
        (name, value)
        for name, option in declared.items()
        if (value := option_value(text, name, option, options.get(name, option.default))) != option.default
        and not (direction == "bwd" and option.of_forward)
    )
    order, functions = (_version(text, key, options) for key in VERSIONS)
    eps = _eps(text, definition, options)
    d = whole_number(text, "d", options["d"], MAX_D)
    blocks = options.get("blocks")
    if blocks is not None:
        blocks = whole_number(text, "blocks", blocks, MAX_BLOCKS)
    stretch = options.get("stretch")
    if stretch is not None:
        stretch = whole_number(text, "stretch", stretch, MAX_STRETCH)
    strides = whole_number(text, "strides", options.get("strides", 1), MAX_STRIDES)
    spec = Spec(
        definition, direction, d, dtype, weight, out, eps, chosen,
        blocks=blocks, order=order, strides=strides, functions=functions, stretch=stretch,
    )  # fmt: skip
    if spec.by_sets and options.get("strides") is None:
        spec = replace(spec, strides=2)
    elif spec.by_sets and strides == 1:
        raise SpecError(f"spec '{text}': a graph with sets of rows takes rows at two distances; leave strides=1 away.")
    if eps == RUN and not definition.by_value(spec.options):
        raise SpecError(f"spec '{text}': the graph uses no eps with these options; leave eps=run away.")
    spec = replace(spec, save=_save(text, options.get("save", "stats"), spec))
    return _backward_keys(text, spec, options) if direction == "bwd" else spec


def _eps(text: str, definition: Definition, options: Mapping[str, Any]) -> float | Run:
    """The number, or ``run``; a graph that is given as it stands has it in its parameters or in its constants."""
    given = options.get("eps", DEFAULT_EPS)
    if definition.declared:
        return RUN if definition.by_value(Options(*definition.declared)) else DEFAULT_EPS
    if isinstance(given, str) and given == RUN:
        return RUN
    eps = decimal(given, 0, 1)
    if eps is None or eps == 1:
        raise SpecError(f"spec '{text}': 'eps' is expected to be a number from 0 to 1, or run, got '{short(given)}'.")
    return eps


def _version(text: str, key: str, options: Mapping[str, Any]) -> str:
    """The version that a key names, or the default."""
    found = short(options.get(key, VERSIONS[key][0]))
    if found not in VERSIONS[key]:
        wrong(text, key, found, VERSIONS[key])
    return found


def _check_keys(text: str, options: dict[str, Any], known: list[str]) -> None:
    """SpecError for a key that is not among the known ones, and without the one that has no default."""
    for key in options:
        if key not in known:
            wrong(text, "key", key, known)
    if "d" not in options:
        raise SpecError(f"spec '{text}': 'd', the number of features per row, is missing; add for example d=4096.")


def _save(text: str, value: object, spec: Spec) -> str:
    """What forward saves: ``stats``, ``none``, or names of results in their order."""
    value = value if isinstance(value, str) else short(value)
    if value in SAVES:
        return value
    outputs, statistics = spec.definition.outputs(spec.options), spec.definition.statistics(spec.options)
    known = [*outputs, *statistics]
    named = value.split("+")
    for name in named:
        if name not in known:
            wrong(text, "save", name, [*SAVES, *known])
    found = "+".join(name for name in known if name in named)
    by_default = spec.definition.saved(spec.options)
    return "stats" if spec.definition.saved(replace(spec.options, save=found)) == by_default else found


def _backward_keys(text: str, spec: Spec, options: dict[str, Any]) -> Spec:
    """The spec with the keys of a backward."""
    given, outputs = (list(of(spec.options)) for of in (spec.definition.differentiable, spec.definition.outputs))
    results = [r.name for r in spec.forward().results]
    wrt = some_of(text, "wrt", options.get("wrt"), given)
    of = some_of(text, "of", outputs if options.get("of") is None else options["of"], results)
    of = None if list(of or results) == outputs else of or tuple(results)
    grad = dtype_of(text, "grad", options["grad"]) if options.get("grad") is not None else None
    accumulate: tuple[str, ...] = ()
    if options.get("accumulate") is not None:
        differentiated = list(wrt or given)
        accumulate = some_of(text, "accumulate", options["accumulate"], differentiated) or tuple(differentiated)
    return replace(
        spec, wrt=wrt, of=of, grad=grad, accumulate=accumulate, **_dx_keys(text, options, wrt or given, accumulate)
    )


def _dx_keys(text: str, options: Mapping[str, Any], wrt: Sequence[str], accumulate: Sequence[str]) -> dict[str, Any]:
    """``dx_quant`` and ``dx_scales``; SpecError for others, and without a dx that is stored anew."""
    dtype, scales = short(options.get("dx_quant", "no")), short(options.get("dx_scales", "tensor"))
    if dtype not in ("no", *FORMATS):
        wrong(text, "dx_quant", dtype, FORMATS)
    if scales not in DX_SCALES:
        wrong(text, "dx_scales", scales, DX_SCALES)
    if dtype == "no":
        if scales != DX_SCALES[0]:
            raise SpecError(f"spec '{text}': 'dx_scales' needs 'dx_quant', one of {', '.join(FORMATS)}; add it.")
        return {}
    if "x" not in wrt or "x" in accumulate:
        raise SpecError(f"spec '{text}': 'dx_quant' needs a dx that is no sum with an array; leave one of them out.")
    return {"dx_quant": DType(dtype), "dx_scales": scales}


def _dtypes(definition: Definition, options: dict[str, Any], text: str) -> tuple[DType, DType, DType]:
    """dtype, weight and out: those of the keys, or those that the graph declares."""
    declared = definition.declared
    dtype = dtype_of(text, "dtype", options.get("dtype", declared[0] if declared else "f32"))
    weight = dtype_of(text, "weight", options.get("weight", declared[1] if declared else dtype))
    out = dtype_of(text, "out", options.get("out", declared[2] if declared else dtype))
    takes_eps = declared and definition.by_value(Options(*declared)) and short(options.get("eps")) == RUN
    if declared and (declared != (dtype, weight, out) or ("eps" in options and not takes_eps)):
        keys = ", ".join(f"{key}={value}" for key, value in zip(("dtype", "weight", "out"), declared, strict=True))
        raise SpecError(
            f"spec '{text}': graph '{definition.name}' is given with its dtypes and constants ({keys}); leave the keys "
            "dtype, weight, out and eps away, or change the graph."
        )
    return dtype, weight, out


def _declared_options(b: GraphBuilder, graph: str) -> dict[str, Option]:
    """The keys that a description declares; SpecError for one that every graph has."""
    for name in b.declared:
        if name in KEYS:
            raise SpecError(
                f"graph '{graph}' has an option called '{name}', which is expected to be none of "
                f"{', '.join(KEYS)}: these are options of every graph; choose another name."
            )
    return b.declared
