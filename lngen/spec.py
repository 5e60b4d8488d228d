"""Spec: what a kernel is specialised on, and its one grammar, ``GRAPH.fwd|bwd:key=value,...``.

A graph that a program defines is written with a digest, ``NAME@DIGEST.fwd|bwd:...``: equal specs are equal kernels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lngen import passes
from lngen.errors import SpecError
from lngen.graphs import GRAPHS, Definition, Options
from lngen.graphs.source import definition_from, split
from lngen.ir import ORDERS, DType, Graph
from lngen.numbers import decimal
from lngen.spec_keys import dtype_of, flag, short, some_of, whole_number, wrong

MAX_D = 2**30
MAX_BLOCKS = 4096
DIRECTIONS = ("fwd", "bwd")
SAVES = ("stats", "none")
# The keys of specs, and further arguments of compile.
KEYS = ("d", "dtype", "weight", "out", "eps", "save", "wrt", "of", "blocks", "order", "graph", "schedule", "lock")
DIGEST = 8
LONGEST_SLUG = 128  # a file name is a spec's slug, a schedule's, an arch and an ending, in 255 bytes

# Words of slugs that are not names of inputs; 'no' and 'q' are prefixes of such names.
_OTHER_WORDS = re.compile(r"(w|out)(f16|bf16|f32|f64)|(eps|save|blocks|order|no|q).*|wrt|of")


@dataclass(frozen=True)
class Spec:
    """A graph, its direction and all that its kernels are specialised on.

    ``inputs`` holds the optional inputs whose presence differs from the graph's default, ``wrt`` the inputs
    by which a backward differentiates, ``of`` the outputs it has cotangents of (None: all of them), ``blocks`` the
    number of blocks that share the rows of its column sums (None: a number that is the same on every GPU). ``order``
    is the version of the rule that orders the sums.
    """

    definition: Definition
    direction: str
    d: int
    dtype: DType
    weight: DType
    out: DType
    eps: float = 1e-5
    inputs: tuple[tuple[str, bool], ...] = ()
    wrt: tuple[str, ...] | None = None
    save: str = "stats"
    blocks: int | None = None
    of: tuple[str, ...] | None = None
    order: str = ORDERS[0]

    def __str__(self) -> str:
        keys = [f"d={self.d}", f"dtype={self.dtype}"]
        keys += [f"weight={self.weight}"] if self.weight is not self.dtype else []
        keys += [f"out={self.out}"] if self.out is not self.dtype else []
        keys += [f"{name}={'yes' if on else 'no'}" for name, on in self.inputs]
        keys += [f"eps={self.eps!r}"] if self.eps != 1e-5 else []
        keys += [f"save={self.save}"] if self.save != "stats" else []
        keys += [f"wrt={'+'.join(self.wrt)}"] if self.wrt is not None else []
        keys += [f"of={'+'.join(self.of)}"] if self.of is not None else []
        keys += [f"blocks={self.blocks}"] if self.blocks is not None else []
        keys += [f"order={self.order}"] if self.order != ORDERS[0] else []
        return f"{self.graph_name}.{self.direction}:{','.join(keys)}"

    @property
    def builtin(self) -> bool:
        """True for one of lngen's graphs; another graph of the same name is not one."""
        return GRAPHS.get(self.definition.name) == self.definition

    @cached_property
    def digest(self) -> str:
        """Distinguishes graphs of one name: the first hex digits of the SHA-256 of the forward graph, over any D."""
        saved = ", ".join(self.definition.saved(self.options))
        return hashlib.sha256(f"{self.forward()}saved: {saved}\n".encode()).hexdigest()[:DIGEST]

    @property
    def graph_name(self) -> str:
        """``layernorm``; the name of a graph that a program defines has its digest: ``add_rmsnorm@1a2b3c4d``."""
        return self.definition.name if self.builtin else f"{self.definition.name}@{self.digest}"

    @property
    def slug(self) -> str:
        """The spec as a C identifier and a file's name: ``layernorm_fwd__bf16_d4096``.

        Lower case, ``LONGEST_SLUG`` characters at most, no two underscores in a row but those before the options.
        Specs that differ have different slugs; options that take too many characters are replaced by a hash.
        """
        words = [str(self.dtype), f"d{self.d}"]
        words += [f"w{self.weight}"] if self.weight is not self.dtype else []
        words += [f"out{self.out}"] if self.out is not self.dtype else []
        words += [f"{'' if on else 'no'}{_word(name)}" for name, on in self.inputs]
        words += [f"eps{self.eps!r}".replace("-", "m").replace(".", "p")] if self.eps != 1e-5 else []
        words += [f"save{self.save}"] if self.save != "stats" else []
        words += ["wrt", *map(_word, self.wrt)] if self.wrt is not None else []
        words += ["of", *map(_word, self.of)] if self.of is not None else []
        words += [f"blocks{self.blocks}"] if self.blocks is not None else []
        words += [f"order{self.order}"] if self.order != ORDERS[0] else []
        head, options = f"{self.graph_name.replace('@', '_')}_{self.direction}", "_".join(words)
        if len(f"{head}__{options}") > LONGEST_SLUG:
            options = hashlib.sha256(options.encode()).hexdigest()[:32]
        return f"{head}__{options}"

    @property
    def options(self) -> Options:
        """The options of the graph's description."""
        return Options(self.dtype, self.weight, self.out, self.eps, self.inputs, self.save)

    def forward(self) -> Graph:
        """The forward graph, over any D."""
        return self._forward

    @cached_property
    def _forward(self) -> Graph:
        return self.definition.forward(self.options)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Names of the outputs of which a backward has cotangents."""
        return self.definition.outputs(self.options) if self.of is None else self.of

    def trace(self) -> Mapping[str, Graph]:
        """The graph after every pass, by the name of the pass; the last one fixes every bit."""
        return self._trace

    @cached_property
    def _trace(self) -> passes.Trace:
        trace: passes.Trace = {"build": self.forward()}
        graph = trace["build"]
        if self.direction == "bwd":
            wrt = tuple(p.name for p in graph.params) if self.wrt is None else self.wrt
            graph = passes.backward(graph, wrt, self.definition.saved(self.options), self.of, trace)
        passes.finish(graph, self.d, trace, self.blocks, self.order)
        return trace

    def graph(self) -> Graph:
        """The graph whose interpretation defines the kernel's results."""
        return list(self.trace().values())[-1]

    def with_direction(self, direction: str) -> Spec:
        """The same spec in that direction."""
        return self if direction == self.direction else self._turned

    @cached_property
    def _turned(self) -> Spec:
        turned = replace(self, wrt=None, of=None, blocks=None)  # which are of backward alone
        return replace(turned, direction="bwd" if self.direction == "fwd" else "fwd")


def _word(name: str) -> str:
    """The name of an input as one word of a slug, distinct from the words that are not inputs."""
    if "_" not in name and not _OTHER_WORDS.fullmatch(name):
        return name
    return "q" + name.replace("q", "qq").replace("_", "qu")


def parse_spec(text: str, graphs: Mapping[str, Definition] | None = None) -> Spec:
    """The spec in ``text``; SpecError says what is wrong and names the nearest right word.

    ``graphs``: those that a name may mean, by default lngen's. The digest of a program's graph may be omitted. A graph
    may be in a file, ``my.graph.fwd:d=4096``, or in a module, ``module:function.fwd:d=4096``.
    """
    if source := split(text):
        graph_name, direction, tail = source
        definition = definition_from(graph_name)
    else:
        head, _, tail = text.partition(":")
        graph_name, _, direction = head.partition(".")
        definition = _definition(text, graph_name, GRAPHS if graphs is None else graphs)
    if direction not in DIRECTIONS:
        wrong(text, "direction", direction, DIRECTIONS)
    options = {}
    for part in filter(None, tail.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SpecError(f"spec '{text}': expected 'key=value', got '{part}'.")
        if key in options:
            raise SpecError(f"spec '{text}': '{key}' is given twice.")
        options[key] = value
    spec = make_spec(definition, direction, options, text)
    if not source and "@" in graph_name and graph_name != spec.graph_name:
        name = definition.name
        raise SpecError(f"spec '{text}': '{name}' is {spec.graph_name} here, not {graph_name}; use that graph.")
    return spec


def _definition(text: str, graph_name: str, graphs: Mapping[str, Definition]) -> Definition:
    """The definition of a name, with or without a digest."""
    name, at, _ = graph_name.partition("@")
    if at and name not in graphs:
        raise SpecError(
            f"spec '{text}': '{graph_name}' is a graph that a program defines, which lngen does not know; use "
            "lngen.compile in that program."
        )
    if name not in graphs:
        wrong(text, "graph", name, list(graphs))
    return graphs[name]


def make_spec(definition: Definition, direction: str, options: dict[str, Any], text: str = "") -> Spec:
    """A spec from a definition and the grammar's keys, with values as text or Python objects."""
    text = text or f"{definition.name}.{direction}:{','.join(f'{k}={short(v)}' for k, v in options.items())}"
    optional = _optional_inputs(definition)
    known = ["d", "dtype", "weight", "out", "eps", "save", "order", *optional] + (
        ["wrt", "of", "blocks"] if direction == "bwd" else []
    )
    for key in options:
        if key not in known:
            wrong(text, "key", key, known)
    if "d" not in options:
        raise SpecError(f"spec '{text}': 'd', the number of features per row, is missing; add for example d=4096.")
    dtype, weight, out = _dtypes(definition, options, text)
    inputs = tuple(
        (name, on)
        for name, default in optional.items()
        if (on := flag(text, name, options.get(name, default))) is not default
    )
    save = str(options.get("save", "stats"))
    if save not in SAVES:
        wrong(text, "save", save, SAVES)
    order = str(options.get("order", ORDERS[0]))
    if order not in ORDERS:
        wrong(text, "order", order, ORDERS)
    eps = decimal(options.get("eps", 1e-5), 0, 1)
    if eps is None or eps == 1:
        raise SpecError(f"spec '{text}': 'eps' is expected to be a number from 0 to 1, got '{short(options['eps'])}'.")
    d = whole_number(text, "d", options["d"], MAX_D)
    blocks = options.get("blocks")
    if blocks is not None:
        blocks = whole_number(text, "blocks", blocks, MAX_BLOCKS)
    spec = Spec(definition, direction, d, dtype, weight, out, eps, inputs, None, save, blocks, order=order)
    if direction == "fwd":
        return spec
    given, results = [p.name for p in spec.forward().params], list(definition.outputs(spec.options))
    wrt, of = some_of(text, "wrt", options.get("wrt"), given), some_of(text, "of", options.get("of"), results)
    return replace(spec, wrt=wrt, of=of)


def _dtypes(definition: Definition, options: dict[str, Any], text: str) -> tuple[DType, DType, DType]:
    """dtype, weight and out: those of the keys, or those that the graph declares."""
    declared = definition.declared
    dtype = dtype_of(text, "dtype", options.get("dtype", declared[0] if declared else "f32"))
    weight = dtype_of(text, "weight", options.get("weight", declared[1] if declared else dtype))
    out = dtype_of(text, "out", options.get("out", declared[2] if declared else dtype))
    if declared and (declared != (dtype, weight, out) or "eps" in options):
        keys = ", ".join(f"{key}={value}" for key, value in zip(("dtype", "weight", "out"), declared, strict=True))
        raise SpecError(
            f"spec '{text}': graph '{definition.name}' is given with its dtypes and constants ({keys}); leave the keys "
            "dtype, weight, out and eps away, or change the graph."
        )
    return dtype, weight, out


def _optional_inputs(definition: Definition) -> dict[str, bool]:
    optional = definition.builder(Options(*definition.declared or (DType.F32,) * 3)).optional
    for name in optional:
        if name in KEYS:
            raise SpecError(
                f"graph '{definition.name}' has an optional input called '{name}', which is expected to be none of "
                f"{', '.join(KEYS)}: these are options of every graph; choose another name."
            )
    return optional
