"""Spec: what a kernel is specialised on, and its one grammar, ``GRAPH.fwd|bwd:key=value,...``.

A graph of one's own is spelt with a digest, ``NAME@DIGEST.fwd|bwd:...``: specs that read alike are the same kernels.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

from lngen import passes
from lngen.errors import SpecError
from lngen.graphs import GRAPHS, Definition, Options
from lngen.ir import DType, Graph
from lngen.numbers import decimal, whole

MAX_D = 2**30
MAX_BLOCKS = 4096
DIRECTIONS = ("fwd", "bwd")
SAVES = ("stats", "none")
# The keys of specs, and what else compile takes by name.
KEYS = ("d", "dtype", "weight", "out", "eps", "save", "wrt", "of", "blocks", "graph", "schedule", "lock")
DIGEST = 8
LONGEST_SLUG = 128  # a file's name is that, a schedule's, an arch and an ending, in 255 bytes

# Words of slugs that are not names of inputs; 'no' and 'q' are what is before such a name.
_OTHER_WORDS = re.compile(r"(w|out)(f16|bf16|f32|f64)|(eps|save|blocks|no|q).*|wrt|of")


@dataclass(frozen=True)
class Spec:
    """A graph, its direction and everything its kernels are specialised on.

    ``inputs`` holds the optional inputs whose presence differs from the graph's default, ``wrt`` the inputs
    a backward differentiates by and ``of`` the outputs it has cotangents of (None: all of them), ``blocks`` how many
    blocks share the rows of its column sums (None: a number that is the same on every GPU).
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
        return f"{self.graph_name}.{self.direction}:{','.join(keys)}"

    @property
    def builtin(self) -> bool:
        """True for one of lngen's graphs; a graph of one's own that is called the same is another."""
        return GRAPHS.get(self.definition.name) == self.definition

    @cached_property
    def digest(self) -> str:
        """What tells graphs of one name apart: the first hex digits of the SHA-256 of the forward graph, over any D."""
        saved = ", ".join(self.definition.saved(self.options))
        return hashlib.sha256(f"{self.forward()}saved: {saved}\n".encode()).hexdigest()[:DIGEST]

    @property
    def graph_name(self) -> str:
        """``layernorm``; that of a graph of one's own has its digest: ``add_rmsnorm@1a2b3c4d``."""
        return self.definition.name if self.builtin else f"{self.definition.name}@{self.digest}"

    @property
    def slug(self) -> str:
        """The spec as a C identifier and a file's name: ``layernorm_fwd__bf16_d4096``.

        Lower case, ``LONGEST_SLUG`` characters at most, no two underscores in a row but those before the options.
        Specs that differ have slugs that differ; options that take too many characters are a hash.
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
        return self.definition.forward(self.options)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Names of the outputs that a backward has cotangents of."""
        return self.definition.outputs(self.options) if self.of is None else self.of

    def trace(self) -> passes.Trace:
        """The graph after every pass, by the pass' name; the last one fixes every bit."""
        trace: passes.Trace = {"build": self.forward()}
        graph = trace["build"]
        if self.direction == "bwd":
            wrt = tuple(p.name for p in graph.params) if self.wrt is None else self.wrt
            graph = passes.backward(graph, wrt, self.definition.saved(self.options), self.of, trace)
        passes.finish(graph, self.d, trace, self.blocks)
        return trace

    def graph(self) -> Graph:
        """The graph whose interpretation defines the kernel's results."""
        return list(self.trace().values())[-1]

    def with_direction(self, direction: str) -> Spec:
        """The same spec in the other direction."""
        if direction == "bwd":
            return replace(self, direction=direction)
        return replace(self, direction=direction, wrt=None, of=None, blocks=None)


def _word(name: str) -> str:
    """The name of an input as one word of a slug, which differs from the words that are not of inputs."""
    if "_" not in name and not _OTHER_WORDS.fullmatch(name):
        return name
    return "q" + name.replace("q", "qq").replace("_", "qu")


def parse_spec(text: str, graphs: Mapping[str, Definition] | None = None) -> Spec:
    """The spec that ``text`` spells; SpecError says what is wrong and names the nearest right word.

    ``graphs``: those that a name may mean, by default lngen's. The digest of a graph of one's own may be left out.
    """
    graphs = GRAPHS if graphs is None else graphs
    head, _, tail = text.partition(":")
    graph_name, dot, direction = head.partition(".")
    name, at, _ = graph_name.partition("@")
    if at and name not in graphs:
        raise SpecError(
            f"spec '{text}': '{graph_name}' is a graph of one's own, which the program that defines it knows and lngen "
            "does not; use lngen.compile there."
        )
    if name not in graphs:
        _wrong(text, "graph", name, list(graphs))
    if not dot or direction not in DIRECTIONS:
        _wrong(text, "direction", direction, DIRECTIONS)
    options = {}
    for part in filter(None, tail.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SpecError(f"spec '{text}': expected 'key=value', got '{part}'.")
        if key in options:
            raise SpecError(f"spec '{text}': '{key}' is given twice.")
        options[key] = value
    spec = make_spec(graphs[name], direction, options, text)
    if at and graph_name != spec.graph_name:
        raise SpecError(f"spec '{text}': '{name}' is {spec.graph_name} here, not {graph_name}; use the graph it is of.")
    return spec


def make_spec(definition: Definition, direction: str, options: dict[str, Any], text: str = "") -> Spec:
    """A spec from a definition and the grammar's keys, whose values may be text or Python objects."""
    text = text or f"{definition.name}.{direction}:{','.join(f'{k}={_short(v)}' for k, v in options.items())}"
    optional = _optional_inputs(definition)
    known = ["d", "dtype", "weight", "out", "eps", "save", *optional] + (
        ["wrt", "of", "blocks"] if direction == "bwd" else []
    )
    for key in options:
        if key not in known:
            _wrong(text, "key", key, known)
    if "d" not in options:
        raise SpecError(f"spec '{text}': 'd', the number of features per row, is missing; add for example d=4096.")
    dtype = _dtype(text, "dtype", options.get("dtype", "f32"))
    weight = _dtype(text, "weight", options.get("weight", dtype))
    out = _dtype(text, "out", options.get("out", dtype))
    inputs = tuple(
        (name, on)
        for name, default in optional.items()
        if (on := _flag(text, name, options.get(name, default))) is not default
    )
    save = str(options.get("save", "stats"))
    if save not in SAVES:
        _wrong(text, "save", save, SAVES)
    eps = decimal(options.get("eps", 1e-5), 0, 1)
    if eps is None or eps == 1:
        raise SpecError(f"spec '{text}': 'eps' is expected to be a number from 0 to 1, got '{_short(options['eps'])}'.")
    d = _whole(text, "d", options["d"], MAX_D)
    blocks = options.get("blocks")
    if blocks is not None:
        blocks = _whole(text, "blocks", blocks, MAX_BLOCKS)
    spec = Spec(definition, direction, d, dtype, weight, out, eps, inputs, None, save, blocks)
    if direction == "fwd":
        return spec
    given, results = [p.name for p in spec.forward().params], list(definition.outputs(spec.options))
    wrt, of = _some(text, "wrt", options.get("wrt"), given), _some(text, "of", options.get("of"), results)
    return replace(spec, wrt=wrt, of=of)


def _optional_inputs(definition: Definition) -> dict[str, bool]:
    f32 = DType.F32
    optional = definition.builder(Options(f32, f32, f32)).optional
    for name in optional:
        if name in KEYS:
            raise SpecError(
                f"graph '{definition.name}' has an optional input called '{name}', which is expected to be none of "
                f"{', '.join(KEYS)}: these are options of every graph; choose another name."
            )
    return optional


def _some(text: str, key: str, value: Any, known: list[str]) -> tuple[str, ...] | None:
    """The names of ``known`` that ``value`` lists, in their order; None for all."""
    given = known if value is None else value.split("+") if isinstance(value, str) else value
    names = [*map(str, given if isinstance(given, Iterable) else [given])]
    if not names:
        raise SpecError(f"spec '{text}': '{key}' is expected to be one of {', '.join(known)} at least, got none.")
    for name in names:
        if name not in known:
            _wrong(text, key, name, known)
    ordered = tuple(n for n in known if n in names)
    return None if list(ordered) == known else ordered


def _dtype(text: str, key: str, value: Any) -> DType:
    """A dtype by its own name, or any library's: f32, "float32", np.float32, np.dtype("float32"), torch.float32."""
    if isinstance(value, DType):
        return value
    word = value if isinstance(value, str) else getattr(value, "__name__", None) or getattr(value, "name", value)
    word = str(word).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
    if word not in [t.value for t in DType]:
        _wrong(text, key, value, [t.value for t in DType])
    return DType(word)


def _flag(text: str, key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value is None:
        raise SpecError(f"spec '{text}': '{key}' is expected to be yes or no, got None; {key}=no leaves it out.")
    if not isinstance(value, str) or value not in ("yes", "no"):
        _wrong(text, key, value, ("yes", "no"))
    return value == "yes"


def _whole(text: str, key: str, value: object, most: int) -> int:
    number = whole(value, 1, most)
    if number is None:
        raise SpecError(
            f"spec '{text}': '{key}' is expected to be a whole number from 1 to {most}, got '{_short(value)}'."
        )
    return number


def _wrong(text: str, what: str, got: Any, known: list[str] | tuple[str, ...]) -> NoReturn:
    near = difflib.get_close_matches(str(got), known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise SpecError(f"spec '{text}': there is no {what} '{_short(got)}', expected one of {', '.join(known)}{hint}")


def _short(value: Any) -> str:
    """Its text, or the start of that."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
