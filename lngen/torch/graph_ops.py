"""Registered operators: a forward and a backward for each graph, for PyTorch's dispatcher.

    torch.ops.lngen.layernorm_fwd(x, gamma, beta, eps=1e-5, keys="")  -> [y, mean, rstd]
    torch.ops.lngen.layernorm_bwd(dy, x, gamma, beta, mean, rstd, eps=1e-5, spec=...)  -> [dx, dgamma, dbeta]

D is static, the number of rows is not. Each operator has a kernel for the CPU (the interpreter) and for CUDA, shapes
for tensors without content, and a derivative. That of a backward is composed of PyTorch's own operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from lngen.compiler.graphs import GRAPHS, Definition, Options
from lngen.compiler.ir import RUN, WIDE, ByValue, DType, M, Value, is_of_set
from lngen.compiler.ir.places import downstream, upstream
from lngen.compiler.ir.type_rules import INDICES
from lngen.compiler.spec import Spec, make_spec
from lngen.dtypes import FLOATS, QUANTISED
from lngen.errors import ArrayError, SpecError, VerifyError
from lngen.launch.array_rules import arranged
from lngen.launch.direct import TO_TORCH
from lngen.launch.runtime.direction import about_input
from lngen.proof.torch_graph import evaluate
from lngen.torch.bridge import FROM_TORCH, Side, TorchError, TorchMissing, like, run, shown, side, text_of

Given = Sequence[torch.Tensor | None]
Chosen = tuple[tuple[str, bool | float | str], ...]  # options and their values

# Options under which a graph has all the numbers that its results may depend on.
RULES: tuple[Chosen, ...] = (
    (("quant", "e4m3"), ("scales", "tensor")),
    (("amax_max", True), ("quant", "e4m3")),
    (("amax", True), ("quant", "e4m3")),
    (("x_grad", True),),
    (("k_heads", 1),),
)

LIBRARY = torch.library.Library("lngen", "DEF")  # the operators live as long as this

Dtypes = tuple[torch.dtype | None, ...]


class GraphOps:
    """The operators of a graph.

    axes      of the tensors that forward may take, by name, in order; ``optional``: those that may be None; ``lead``:
              the one that gives D, the dtype and the device; ``whole``: the dtypes of those with whole numbers;
              ``numbers``: those that some options ask for, weights too; they are last and may be left out
    defaults  of the options; ``base``: those that all calls have
    taken     names of the tensors that backward may take: cotangents, inputs, and what forward saved
    """

    def __init__(
        self, definition: Definition, name: str, options: Options, *, whole: bool = False, more: Chosen = ()
    ) -> None:
        """The operators for these options alone, or as a ``whole`` for all others, of which ``more`` ask for most."""
        self.definition, self.name, self.base, self.of_all = definition, name, dict(options.chosen), whole
        options = replace(options, chosen=(*options.chosen, *more))
        plain = full = definition.builder(options)
        self.defaults = {name: option.default for name, option in plain.declared.items()}
        if whole:
            switches = [(name, True) for name, o in plain.declared.items() if o.default is False and not o.of_forward]
            added = [(n, on) for n, on in switches if n in {p.name for p in _asked(definition, options, (n, on))}]
            options = replace(options, chosen=(*options.chosen, *added))
            full = definition.builder(options)
        self.takes_eps = plain.takes_eps
        types = {p.name: p.type for p in full.params if not isinstance(p, ByValue)}
        rules = [rule for rule in RULES if whole and {key for key, _ in rule} <= {*self.defaults}]
        asked = [p for rule in rules for p in _asked(definition, options, *rule)]
        self.numbers = {p.name: p.type.axes for p in asked if p.name not in types and not isinstance(p, ByValue)}
        self.axes = {**{name: t.axes for name, t in types.items()}, **self.numbers}
        self.inputs = [*self.axes]
        self.whole = {name: t.dtype for name, t in types.items() if t.dtype not in FLOATS}
        self.lead = next((name for name, axes in self.axes.items() if axes == WIDE and name not in self.whole), "")
        if not self.lead:
            raise TorchError(
                f"'{self.name}' is expected to have an [M, D] input, of which an operator takes D and dtype, got "
                f"{', '.join(self.inputs) or 'none'}; call lngen.compile({definition.name!r}, d=...).forward."
            )
        self.optional = {name for name in types if whole and isinstance(self.defaults.get(name), bool)}
        self.outputs = tuple([v.name for v in full.results])
        weights = [name for name, axes in self.numbers.items() if axes]
        self.taken = [*(f"d{name}" for name in self.outputs), *types, *weights, *definition.saved(options)]
        eps = ", float eps" if self.takes_eps else ""
        tensors = ", ".join(
            [f"Tensor? {n}" if n in self.optional else f"Tensor {n}" for n in types]
            + [f"Tensor? {n}=None" for n in self.numbers]
        )
        self.fwd = _define(f'{self.name}_fwd({tensors}, *{eps}, str keys="") -> Tensor[]', self._forward)
        tensors = ", ".join(f"Tensor? {n}" for n in self.taken)
        self.bwd = _define(f"{self.name}_bwd({tensors}, *{eps}, str spec) -> Tensor[]", self._backward)
        torch.library.register_autograd(self.fwd, self._first, setup_context=self._save, lib=LIBRARY)
        torch.library.register_autograd(self.bwd, self._second, setup_context=self._keep, lib=LIBRARY)

    # ---- the operators ----

    def side(self, tensors: Given, keys: str) -> Side:
        """The forward for these tensors, in the order of ``inputs``; TorchError for a dtype that lngen has not.

        The dispatcher drops the last ones that are None by default.
        """
        x: Any = tensors[self.inputs.index(self.lead)]
        if not x.dim():
            raise TorchError(f"'{self.lead}' is expected to have shape (..., D), got ().")
        dtypes = tuple([t if t is None else t.dtype for t in tensors])
        return side(self._text(int(x.shape[-1]), dtypes, keys, x.device.type == "cpu"))

    @cache  # noqa: B019  there is one object for each graph
    def _text(self, d: int, dtypes: Dtypes, keys: str, on_cpu: bool) -> str:
        """The text of the forward spec; errors in PyTorch's words, which depend on the device."""
        given = {**dict.fromkeys(self.numbers), **dict(zip(self.inputs, dtypes, strict=False))}
        for name, dtype in given.items():
            known = [TO_TORCH[t] for t in self._known(name)]
            if dtype is not None and dtype not in known:
                raise TorchMissing(
                    f"\"{self.name}\" not implemented for '{shown(dtype)}': '{name}' is expected to be one of "
                    f"{', '.join(map(str, known))}; cast it."
                )
        dtype = FROM_TORCH[given[self.lead]]
        base = self.base if self.of_all or not keys else {}  # other options may spell the same graph
        options: dict[str, Any] = {"d": d, "dtype": dtype, **base}
        options |= {n: given[n] is not None for n in (*self.optional, *self.numbers) if n in self.defaults}
        present = {n: FROM_TORCH[t] for n, t in given.items() if t is not None}
        own = {n: f"{n}_dtype" for n in present if f"{n}_dtype" in self.defaults}
        options |= {key: present[n] for n, key in own.items() if present[n] is not dtype}
        options |= {"eps": RUN} if self.takes_eps else {}
        tables = [n for n, axes in self.axes.items() if n in present and len(axes) == 2 and axes[1].period]
        options |= {"table_dtype": present[tables[0]]} if tables and "table_dtype" in self.defaults else {}
        apart = (*self.whole, *self.numbers, *tables)
        weights = [n for n in present if M not in self.axes[n] and n not in apart]
        weights.sort(key=lambda n: len(self.axes[n]) > 1)  # those of sets may have a dtype of their own
        options |= {"weight": present[weights[0]]} if weights else {}
        options |= dict(part.split("=") for part in filter(None, keys.split(",")))
        try:
            spec = make_spec(self.definition, "fwd", options)
            takes = spec.forward().tensors
        except VerifyError as error:  # functions are in float32 only
            raise TorchMissing(f"\"{self.name}\" not implemented for 'Double': {error} Cast the input.") from error
        bound(self.name, spec, (), present)  # the keys may exclude a tensor, or ask for one
        for p in takes:
            if present[p.name] != p.type.dtype:
                wanted, found = shown(TO_TORCH[p.type.dtype]), shown(given[p.name])
                words = f"expected scalar type {wanted} but found {found}"
                if on_cpu:
                    words = f"mixed dtype (CPU): expect parameter to have scalar type of {wanted}"
                raise TorchError(
                    f"{words}. '{p.name}' is {found}; cast it: all inputs with rows have one dtype, and so have all "
                    "weights."
                )
        return text_of(spec)

    def _known(self, name: str) -> Sequence[DType]:
        """The dtypes of a tensor."""
        if name not in self.whole:
            return FLOATS
        return INDICES if f"{name}_dtype" in self.defaults else (self.whole[name],)

    def _forward(self, one: Callable[..., Any], *tensors: Any, keys: str = "", eps: float = 0.0) -> list[torch.Tensor]:
        found = self.side(tensors, keys)
        return _called(one, found, dict(zip(self.inputs, tensors, strict=False)), eps)

    def _backward(self, one: Callable[..., Any], *tensors: Any, spec: str, eps: float = 0.0) -> list[torch.Tensor]:
        return _called(one, side(spec), dict(zip(self.taken, tensors, strict=True)), eps)

    # ---- derivatives: compiled autograd calls them where Dynamo traces, which is to see nothing of the compiler ----

    def _save(self, ctx: Any, inputs: Given, keyword_only_inputs: Mapping[str, Any], output: Any) -> None:
        """Keep what the backward takes for the gradients that are needed."""
        forward = self.side(inputs, keyword_only_inputs["keys"])
        passing = passing_of(forward.spec)
        ctx.mark_non_differentiable(*[t for r, t in zip(forward.results, output, strict=True) if r.name not in passing])
        ctx.set_materialize_grads(False)
        wrt = tuple([name for name, needed in zip(self.inputs, ctx.needs_input_grad, strict=False) if needed])
        wrt = reached(forward.spec, wrt, passing)
        ctx.lngen = forward, keyword_only_inputs.get("eps", 0.0), wrt
        whole = side(backward_text(forward.spec, wrt, passing))
        known = {
            **dict(zip(self.inputs, inputs, strict=True)),
            **dict(zip((r.name for r in forward.results), output, strict=True)),
        }
        of_sets = [t.name for t in forward.call.inputs if t.of_sets]  # one may say how many there are
        ctx.shapes = {name: known[name].shape for name in of_sets}
        ctx.names = [name for name in dict.fromkeys((*whole.names, *of_sets)) if name in known]
        ctx.save_for_backward(*[known[name] for name in ctx.names])

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _first(self, ctx: Any, cotangents: Given) -> tuple[torch.Tensor | None, ...]:
        (forward, eps, wrt) = ctx.lngen
        found = self.gradients(forward, wrt, eps, cotangents, dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
        found = tuple(
            g if g is None or name not in ctx.shapes else g.view(ctx.shapes[name])  # [B, D] and [B, 1, D] may be mixed
            for name, g in zip(self.inputs, found, strict=True)
        )
        return found[: len(ctx.needs_input_grad)]  # of those that the call gave

    def gradients(
        self, forward: Side, wrt: tuple[str, ...], eps: float, cotangents: Given, saved: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs, None for those that are not in ``wrt``; a cotangent that is None is zero."""
        outputs = forward.spec.differentiated
        given = {f"d{n}": ct for n, ct in zip(outputs, cotangents[: len(outputs)], strict=True) if ct is not None}
        if not given:
            return (None,) * len(self.inputs)
        of = tuple([name for name in outputs if f"d{name}" in given])
        wrt = reached(forward.spec, wrt, of)
        if not wrt:
            return (None,) * len(self.inputs)
        one = side(backward_text(forward.spec, wrt, of))
        known = {**given, **saved}
        if any(torch._C._functorch.is_legacy_batchedtensor(ct) for ct in given.values()):  # is_grads_batched
            results: Sequence[Any] = composed(one.spec, known, [r.name for r in one.results], eps)
        else:
            tensors = [known[name] if name in one.names else None for name in self.taken]
            results = self.bwd(*tensors, spec=str(one.spec), **({"eps": eps} if self.takes_eps else {}))
        found = dict(zip(wrt, (results[n] for n in one.returns), strict=True))
        return tuple(found.get(name) for name in self.inputs)

    def _keep(self, ctx: Any, inputs: Given, keyword_only_inputs: Mapping[str, Any], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.lngen = keyword_only_inputs["spec"], keyword_only_inputs.get("eps", 0.0)
        ctx.present = [name for name, t in zip(self.taken, inputs, strict=True) if t is not None]
        ctx.save_for_backward(*[t for t in inputs if t is not None])

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _second(self, ctx: Any, gradients: Given) -> tuple[torch.Tensor | None, ...]:
        """The derivative of a backward, by PyTorch's autograd of the same graph in PyTorch's operators."""
        spec, eps = ctx.lngen
        needed = [name for name, wanted in zip(self.taken, ctx.needs_input_grad, strict=True) if wanted]
        with torch.enable_grad():
            given = {n: t.view_as(t) for n, t in zip(ctx.present, ctx.saved_tensors, strict=True)}
            results = composed(side(spec).spec, given, [r.name for r in side(spec).results], eps)
            pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None and r.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(needed)
        if pairs:
            found = torch.autograd.grad(
                [r for r, _ in pairs],
                [given[name] for name in needed],
                [g for _, g in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        return tuple(dict(zip(needed, found, strict=True)).get(name) for name in self.taken)


def _asked(definition: Definition, options: Options, *more: tuple[str, Any]) -> list[Value]:
    """The inputs under further options; none if the options do not fit together."""
    options = replace(options, chosen=(*options.chosen, *more))
    return definition.builder(options).params if definition.fits(options) else []


def bound(name: str, spec: Spec, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Positional and named inputs of a forward in order; TorchError if one is missing or too many."""
    names = [p.name for p in spec.forward().tensors]
    try:
        return arranged(name, names, inputs, named, partial(about_input, spec))
    except ArrayError as error:
        raise TorchError(str(error)) from error


def quantises(spec: Spec) -> bool:
    """True if a result of the forward has 8 bits, and no gradient."""
    return any(r.type.dtype in QUANTISED for r in spec.forward().results)


@cache
def passing_of(spec: Spec) -> tuple[str, ...]:
    """The outputs that have a gradient: all, or of a graph with options of forward those that pass one to an input.

    TorchError if there is none.
    """
    graph = spec.forward()
    if not quantises(spec) and spec.definition.of_backward(spec.options) == spec.chosen:
        return spec.differentiated
    differentiable = spec.definition.differentiable(spec.options)
    inputs = [p for p in graph.tensors if p.name in differentiable]
    reached = downstream([e for e in graph.eqns if e.op != "stop_gradient"], inputs)
    reached -= {r for r in graph.results if r.type.dtype in QUANTISED}
    found = tuple(r.name for r in graph.results if r in reached and r.name in spec.differentiated)
    if not found:
        raise TorchError(
            f"an input requires grad, but no result of the graph '{spec.graph_name}' has a gradient; make the value "
            "that is quantised a result, too (y=True of a norm), or pass the inputs detached."
        )
    return found


@cache
def reached(forward: Spec, wrt: tuple[str, ...], of: tuple[str, ...]) -> tuple[str, ...]:
    """The inputs to differentiate by; of a graph with sets of rows without those that no cotangent reaches.

    Their gradients would be zeros for each set, and no input may say how many there are.
    """
    if not forward.by_sets:
        return wrt
    graph = forward.forward()
    found = {v.name for v in upstream(graph.eqns, [r for r in graph.results if r.name in of])}
    return tuple([name for name in wrt if name in found])


@cache
def backward_text(forward: Spec, wrt: tuple[str, ...], of: tuple[str, ...]) -> str:
    """The spec of the backward that has gradients of ``wrt`` for cotangents of ``of``.

    TorchError for an input that has no gradient.
    """
    definition, options = forward.definition, forward.options
    if lost := [name for name in wrt if name not in definition.differentiable(options)]:
        raise TorchError(
            f"'{lost[0]}' requires grad, but the graph '{forward.graph_name}' has no gradient for it; pass it detached."
        )
    every = definition.outputs(options)
    return text_of(replace(forward, direction="bwd", wrt=wrt, of=None if of == every else of))


def composed(
    spec: Spec, tensors: Mapping[str, torch.Tensor], wanted: Sequence[str], eps: float
) -> tuple[torch.Tensor, ...]:
    """Results of a spec, by name, in PyTorch's operators: within roundings the same numbers, for autograd and vmap.

    A backward computes statistics from the other tensors, so that a derivative sees that they depend on the row.
    TorchMissing if that takes a tensor that backward does not.
    """
    try:
        graph = spec.forward() if spec.direction == "fwd" else spec.without_statistics
    except SpecError as error:
        raise TorchMissing(f"'{spec}' has no derivative: {error}") from error
    if lacking := [p.name for p in graph.tensors if p.name not in tensors]:
        raise TorchMissing(
            f"'{spec}' has no derivative: its statistics are computed from {', '.join(lacking)}, which it does not "
            "take; save no statistics, by save=none."
        )
    rows = [(p.type.axes, tensors[p.name].shape) for p in graph.tensors if M in p.type.axes]
    lead, d = next(tuple(shape[: len(shape) - len(axes) + 1]) for axes, shape in rows), spec.d
    sets = next((tuple(tensors[p.name].shape[:-1]) for p in graph.tensors if is_of_set(p)), ())
    given: dict[Value, torch.Tensor] = {}
    for p in graph.tensors:
        count = len(p.type.axes)
        shape = (-1, tensors[p.name].shape[-1]) if count == 2 else (-1,) * count
        given[p] = tensors[p.name].reshape(shape)
    results = [r for name in wanted for r in graph.results if r.name == name]
    found = evaluate(graph, given, results, eps)
    shapes = ((*sets, d) if is_of_set(r) else r.type.shape(lead, d) for r in results)
    return tuple(t.reshape(shape) for t, shape in zip(found, shapes, strict=True))


def _define(schema: str, kernel: Callable[..., list[torch.Tensor]]) -> Any:
    """Register an operator: ``kernel`` gets ``run`` or, for tensors without content, ``like``, then its arguments."""
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, partial(kernel, run), key)
    torch.library.register_fake(f"lngen::{name}", partial(kernel, like), lib=LIBRARY)
    return getattr(torch.ops.lngen, name).default


def _dual(tensors: Sequence[torch.Tensor]) -> bool:
    """True if a tensor has a tangent, which a kernel would drop; while PyTorch traces, also if one may have it."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(t, FakeTensor) or forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _called(one: Callable[..., Any], found: Side, tensors: Mapping[str, Any], eps: float) -> list[torch.Tensor]:
    missing = [name for name in found.names if tensors.get(name) is None]
    if missing:
        raise TorchError(f"'{found.spec}' expects {', '.join(missing)}, got None.")
    devices = {name: tensors[name].device for name in found.names}
    first = next(iter(devices))
    for name, device in devices.items():
        if device != devices[first]:
            raise TorchError(
                f"Expected all tensors to be on the same device, but found at least two devices, {devices[first]} and "
                f"{device}! '{name}' is not where '{first}' is; move it there."
            )
    if _dual([tensors[name] for name in found.names]):
        raise TorchMissing(
            f"Trying to use forward AD with '{found.spec}' that does not support it; call the function of lngen.torch "
            "instead, outside torch.compile."
        )
    result: list[torch.Tensor] = one(found, [tensors[name] for name in found.names], eps)
    return result


PLAIN = Options(DType.F32, DType.F32, DType.F32)
OPS = {name: GraphOps(definition, name, PLAIN, whole=True) for name, definition in GRAPHS.items()}
INDEX = GraphOps(
    GRAPHS["cross_entropy"],
    "cross_entropy_index",
    replace(PLAIN, chosen=(("target", "index"),)),
    whole=True,
    more=(("reduction", "mean"), ("lse", True)),
)
OPS[INDEX.name] = INDEX


def decompositions() -> dict[Any, Callable[..., list[torch.Tensor]]]:
    """Each operator of lngen's, and its graph in PyTorch's operators, for back ends that have no lngen.

    A table for ``ExportedProgram.run_decompositions``, ``make_fx`` and the like, also with the operators of the
    program's own graphs so far. The results are the same within roundings. Nothing uses it unasked.
    """
    table: dict[Any, Callable[..., list[torch.Tensor]]] = {}
    for ops in OPS.values():
        table |= {ops.fwd: partial(ops._forward, _in_torch), ops.bwd: partial(ops._backward, _in_torch)}
    return table


def _in_torch(one: Side, tensors: Sequence[torch.Tensor], eps: float) -> list[torch.Tensor]:
    """As ``run``, in PyTorch's operators."""
    given = dict(zip(one.names, tensors, strict=True))
    return list(composed(one.spec, given, [r.name for r in one.results], eps))
