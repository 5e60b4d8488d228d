"""Spec: what a kernel is specialised on, and its text.

A graph that a program defines is written with a digest, ``NAME@DIGEST.fwd|bwd:...``: equal specs are equal kernels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from lngen.compiler import passes
from lngen.compiler.graphs import GRAPHS, Chosen, Definition, Options
from lngen.compiler.ir import DEFAULT_EPS, FUNCTIONS, ORDERS, RUN, DType, Graph, M, Run, compute_dtype, is_of_set
from lngen.errors import DerivativeError, SpecError

# Words that are not names of inputs; 'no' and 'q' are prefixes of such names.
_OTHER_WORDS = re.compile(
    r"(w|out|grad)(f16|bf16|f32|f64)|(eps|save|blocks|stretch|order|functionsv|no|q(?!uant(ised)?$)).*|wrt|of|acc|set|strides2"
    r"|dx(e4m3|e5m2)|byblock"
)


def c_word(name: str) -> str:
    """The name of an input as one lower-case word of a C identifier, distinct from the words that are not inputs."""
    return name if "_" not in name and _plain(name) else _escaped(name).replace("_", "qu")


def file_word(name: str) -> str:
    """The same as a word of a file's name: ``round-sum`` for round_sum."""
    return (name if _plain(name) else _escaped(name)).replace("_", "-")


def _plain(name: str) -> bool:
    return name.islower() and not _OTHER_WORDS.fullmatch(name)


def _escaped(name: str) -> str:
    return "q" + re.sub("([A-Z])", r"qx\1", name.replace("q", "qq")).lower()


def text_of(value: Chosen) -> str:
    """The value of an option as a spec has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, int | float) else value


def number_word(value: float) -> str:
    """A number as a word of either."""
    return repr(value).replace("-", "m").replace(".", "p").replace("+", "")


def value_word(value: float | str, word: Callable[[str], str]) -> str:
    """The value of an option as one word."""
    return number_word(value) if isinstance(value, int | float) else word(value)


DIGEST = 8
LONGEST_SLUG = 128  # a file name is a spec's slug, a schedule's, an arch and an ending, in 255 bytes


@dataclass(frozen=True)
class Spec:
    """A graph, its direction and all that its kernels are specialised on.

    eps         a number, or ``run``: every call passes it by value
    chosen      the graph's options whose value differs from the default
    wrt         the inputs by which a backward differentiates
    of          the results of which a backward has cotangents; None: all outputs
    grad        the dtype of the gradients of inputs without rows; None: each input's own
    accumulate  the inputs whose gradient is added to an array
    dx_quant    the dtype of 8 bits of dx; None: x's
    dx_scales   ``tensor``: dx_scale is an input; ``block``: a result, of blocks of 128 features
    blocks      blocks that share the rows of column sums; None: a number that is the same on every GPU
    stretch     rows of a set that a partial sum has; None: the order's own number
    order       the version of the rule that orders the sums
    functions   the version of the equations of functions
    strides     distances between rows that each [M, D] tensor has, 1 or 2; they change no bit. 2 for a graph with sets
                of rows, which are the inner rows
    """

    definition: Definition
    direction: str
    d: int
    dtype: DType
    weight: DType
    out: DType
    eps: float | Run = DEFAULT_EPS
    chosen: tuple[tuple[str, Chosen], ...] = ()
    wrt: tuple[str, ...] | None = None
    save: str = "stats"
    blocks: int | None = None
    of: tuple[str, ...] | None = None
    order: str = ORDERS[0]
    grad: DType | None = None
    accumulate: tuple[str, ...] = ()
    strides: int = 1
    dx_quant: DType | None = None
    dx_scales: str = "tensor"
    functions: str = FUNCTIONS[0]
    stretch: int | None = None

    def __str__(self) -> str:
        keys = [f"d={self.d}", f"dtype={self.dtype}"]
        keys += [f"weight={self.weight}"] if self.weight is not self.dtype else []
        keys += [f"out={self.out}"] if self.out is not self.dtype else []
        keys += [f"{name}={text_of(value)}" for name, value in self.chosen]
        keys += [f"eps={text_of(self.eps)}"] if self.eps != DEFAULT_EPS else []
        keys += [f"save={self.save}"] if self.save != "stats" else []
        keys += [f"wrt={'+'.join(self.wrt)}"] if self.wrt is not None else []
        keys += [f"of={'+'.join(self.of)}"] if self.of is not None else []
        keys += [f"grad={self.grad}"] if self.grad is not None else []
        keys += [f"accumulate={'+'.join(self.accumulate)}"] if self.accumulate else []
        keys += [f"dx_quant={self.dx_quant}"] if self.dx_quant is not None else []
        keys += [f"dx_scales={self.dx_scales}"] if self.dx_scales != "tensor" else []
        keys += [f"blocks={self.blocks}"] if self.blocks is not None else []
        keys += [f"stretch={self.stretch}"] if self.stretch is not None else []
        keys += [f"order={self.order}"] if self.order != ORDERS[0] else []
        keys += [f"functions={self.functions}"] if self.functions != FUNCTIONS[0] else []
        keys += [f"strides={self.strides}"] if self.strides != 1 and not self.by_sets else []
        return f"{self.graph_name}.{self.direction}:{','.join(keys)}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with the name of its graph, or with the text of one that a program defines: no function is needed."""
        keys = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "definition"}
        graph = self.definition.name if self.builtin else self.definition.recorded(self.options)
        return _unpickled, (graph, keys, self.digest)

    @property
    def eps_or_default(self) -> float:
        """The eps that checks and benchmarks pass: the spec's own, or the default where every call gives one."""
        return DEFAULT_EPS if self.eps == RUN else self.eps

    @property
    def baked(self) -> Spec:
        """The same spec with that eps built in."""
        return replace(self, eps=self.eps_or_default)

    @property
    def builtin(self) -> bool:
        """True for one of lngen's graphs; another graph of the same name is not one."""
        return GRAPHS.get(self.definition.name) == self.definition

    @cached_property
    def digest(self) -> str:
        """Distinguishes graphs of one name: the first hex digits of the SHA-256 of the forward graph, over any D."""
        saved = ", ".join(self.definition.saved(self.options))
        return hashlib.sha256(f"{self.forward()}saved: {saved}\n".encode()).hexdigest()[:DIGEST]

    @cached_property
    def fingerprint(self) -> str:
        """All that tells this spec from any other, before anything is derived: equal ones have equal kernels.

        That is the text; of a graph that a program defines also its description, of which the text has a short digest.
        """
        return str(self) if self.builtin else f"{self}\n{self.definition.described(self.options)}"

    @property
    def graph_name(self) -> str:
        """``layernorm``; the name of a graph that a program defines has its digest: ``add_rmsnorm@1a2b3c4d``."""
        return self.definition.name if self.builtin else f"{self.definition.name}@{self.digest}"

    @property
    def slug(self) -> str:
        """The spec as a C identifier: ``layernorm_fwd__bf16_d4096``.

        Lower case, ``LONGEST_SLUG`` characters at most, no two underscores in a row but those before the options.
        Specs that differ have different slugs; options that take too many characters are replaced by a hash.
        """
        return self._slug(c_word)

    @property
    def file_slug(self) -> str:
        """The same as a file's name, in which an option keeps its own: ``rmsnorm_bwd__f32_d64_round-sum``."""
        return self._slug(file_word)

    def _slug(self, word: Callable[[str], str]) -> str:
        head, options = f"{self.graph_name.replace('@', '_')}_{self.direction}", "_".join(self._slug_words(word))
        if len(f"{head}__{options}") > LONGEST_SLUG:
            options = hashlib.sha256(options.encode()).hexdigest()[:32]
        return f"{head}__{options}"

    def _slug_words(self, word: Callable[[str], str]) -> list[str]:
        words = [str(self.dtype), f"d{self.d}"]
        words += [f"w{self.weight}"] if self.weight is not self.dtype else []
        words += [f"out{self.out}"] if self.out is not self.dtype else []
        words += [f"{'' if on else 'no'}{word(name)}" for name, on in self.chosen if isinstance(on, bool)]
        words += [f"eps{value_word(self.eps, str)}"] if self.eps != DEFAULT_EPS else []
        if self.save == "none":
            words += ["savenone"]
        elif self.save != "stats":
            words += ["saved", *map(word, self.save.split("+"))]
        words += ["wrt", *map(word, self.wrt)] if self.wrt is not None else []
        words += ["of", *map(word, self.of)] if self.of is not None else []
        words += [f"grad{self.grad}"] if self.grad is not None else []
        words += ["acc", *map(word, self.accumulate)] if self.accumulate else []
        words += [f"dx{self.dx_quant}"] if self.dx_quant is not None else []
        words += [f"by{self.dx_scales}"] if self.dx_scales != "tensor" else []
        words += [f"blocks{self.blocks}"] if self.blocks is not None else []
        words += [f"stretch{self.stretch}"] if self.stretch is not None else []
        words += [f"order{self.order}"] if self.order != ORDERS[0] else []
        words += [f"functions{self.functions}"] if self.functions != FUNCTIONS[0] else []
        words += [f"strides{self.strides}"] if self.strides != 1 and not self.by_sets else []
        others = [(name, value) for name, value in self.chosen if not isinstance(value, bool)]
        words += ["set"] if others else []
        words += [w for name, value in others for w in (word(name), value_word(value, word))]
        return words

    @property
    def options(self) -> Options:
        """The options of the graph's description."""
        return Options(self.dtype, self.weight, self.out, self.eps, self.chosen, self.save)

    @cached_property
    def by_sets(self) -> bool:
        """True for a graph that has inputs of sets of rows, such as samples."""
        return any(map(is_of_set, self.definition.builder(self.options).params))

    def forward(self) -> Graph:
        """The forward graph, over any D."""
        return self._forward

    @cached_property
    def _forward(self) -> Graph:
        return self.definition.forward(self.options)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Names of the results of which a backward has cotangents."""
        return self.definition.outputs(self.options) if self.of is None else self.of

    @property
    def differentiates(self) -> tuple[str, ...]:
        """Names of the inputs whose gradients a backward returns, in the graph's order."""
        return self.definition.differentiable(self.options) if self.wrt is None else self.wrt

    @property
    def _declared_positive(self) -> set[str]:
        return self.definition.positive(self.options)

    @cached_property
    def positive_numbers(self) -> frozenset[str]:
        """Names of inputs of one number that are declared positive: scales that divide, and bounds."""
        declared = {p.name for p in self.forward().tensors if not p.type.axes and p.name in self._declared_positive}
        return frozenset(declared | ({"dx_scale"} if self.dx_quant is not None else set()))

    @cached_property
    def classes(self) -> dict[str, int]:
        """Names of the inputs that are declared to be classes, each with the number of those that are ignored."""
        return self.definition.classes(self.options)

    def positive_inputs(self) -> tuple[str, ...]:
        """Names of inputs that have to be positive: of the forward, found or declared, in order; the scale of dx."""
        scale = ("dx_scale",) if self.dx_quant is not None else ()
        return (*passes.positive_inputs(self.forward(), self._declared_positive), *scale)

    def trace(self) -> passes.Trace:
        """The graph after every pass, by the name of the pass; the last one fixes every bit."""
        return self._trace

    @cached_property
    def _trace(self) -> passes.Trace:
        trace = passes.Trace(build=self.forward())
        self.definition.check_row(self.options, self.d)
        if self.direction == "fwd":
            self._check_saved()
            passes.finish(trace["build"], self.d, trace, self.blocks, self.order, self.functions, stretch=self.stretch)
            return trace
        graph = self._derive(trace)
        if self.accumulate:
            trace["accumulate"] = graph = passes.accumulate(graph, tuple(f"d{name}" for name in self.accumulate))
        dx = None if self.dx_quant is None else (self.dx_quant, self.dx_scales)
        graph = passes.finish(graph, self.d, trace, self.blocks, self.order, self.functions, dx, self.stretch)
        self._validate(trace)
        trace["share"] = passes.share_results(graph)
        return trace

    def _validate(self, trace: passes.Trace) -> None:
        """ValidationError if a derived backward is not the derivative of the forward."""
        passes.validate(self.forward(), trace.raw, trace, self.eps_or_default, self._declared_positive)

    @cached_property
    def without_statistics(self) -> Graph:
        """The graph of a backward over any D that computes the statistics of forward again.

        SpecError if it cannot, because a saved output stands for the row.
        """
        trace = passes.Trace()
        trace["cse"] = graph = self._derive(trace, self.definition.outputs(self.options))
        self._validate(trace)
        return graph

    def _derive(self, trace: passes.Trace | None = None, taken: Collection[str] | None = None) -> Graph:
        """The graph of a backward over any D; of what forward saves it may take only what is among ``taken``."""
        saved, demanded = self.definition.saved(self.options), self.definition.demanded(self.options)
        saved = tuple(name for name in saved if taken is None or name in taken)
        stored, of = self._gradient_dtypes(), self.differentiated
        numbers = self.eps_or_default, self._declared_positive
        return passes.backward(self.forward(), self.differentiates, saved, of, trace, stored, demanded, *numbers)

    def _check_saved(self) -> None:
        """The error of the whole backward, for a forward that saves outputs which no backward can take.

        A backward of one input and one output needs least: where the whole one is refused, one of these may be right.
        """
        demanded = self.definition.demanded(self.options)
        if not demanded:
            return
        whole = self.with_direction("bwd")

        def takes(wrt: str, of: str) -> bool:
            try:
                params = replace(whole, wrt=(wrt,), of=(of,))._derive().params
            except (DerivativeError, SpecError):
                return False
            return not demanded.isdisjoint(p.name for p in params)

        try:
            whole._derive()
        except (DerivativeError, SpecError):
            if not any(takes(wrt, of) for wrt in whole.differentiates for of in whole.differentiated):
                raise

    def _gradient_dtypes(self) -> dict[str, DType]:
        """The dtypes of gradients that differ from those of their inputs."""
        stored = self.definition.gradients(self.options)
        for p in self.forward().params:
            if p.name in self.accumulate:
                stored[p.name] = compute_dtype(p.type.dtype)
            elif self.grad is not None and M not in p.type.axes:
                stored.setdefault(p.name, self.grad)
        return stored

    def graph(self) -> Graph:
        """The graph whose interpretation defines the kernel's results."""
        return list(self.trace().values())[-1]

    def with_direction(self, direction: str) -> Spec:
        """The same spec in that direction."""
        return self if direction == self.direction else self._turned

    @cached_property
    def _turned(self) -> Spec:
        turned = replace(self, wrt=None, of=None, blocks=None, grad=None, accumulate=())  # which are of backward alone
        turned = replace(turned, stretch=None, dx_quant=None, dx_scales="tensor")
        if self.direction == "bwd":
            return replace(turned, direction="fwd")
        return replace(turned, direction="bwd", chosen=self.definition.of_backward(self.options))


def _unpickled(graph: str | Definition, keys: dict[str, Any], digest: str) -> Spec:
    """The spec that was pickled; SpecError if its graph is another one in this version of lngen."""
    definition = graph if isinstance(graph, Definition) else GRAPHS.get(graph)
    spec = definition and Spec(replace(definition), **keys)
    if spec and spec.digest == digest:
        return spec
    name = graph if isinstance(graph, str) else graph.name
    here = f"is {name}@{spec.digest}" if spec else "does not exist"
    raise SpecError(
        f"a spec of the graph {name}@{digest} was pickled, but in this version of lngen '{name}' {here}; compile the "
        "norm again."
    )
