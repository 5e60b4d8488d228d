"""Norms of a pack: forward and backward on arrays of a GPU, with what forward saves. They never compile."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..errors import ArrayError, LngenError, short
from .array_call import ArrayCall
from .array_rules import given_eps
from .kernels import NO_VALUES, Described, Loaded, Tensor
from .shape import RULES


class KernelSource(Protocol):
    """Where the kernels of specs come from: a pack."""

    folder: str
    specs: tuple[str, ...]

    def described(self, spec: str) -> Described:
        """One kernel set of a spec: all of them have the same tensors."""

    def kernels(self, spec: str, device: int, rows: int) -> Loaded:
        """The kernels for so many rows on a device, loaded."""

    def prepare(self, device: int, rows: int | None, specs: Sequence[str]) -> None:
        """Load what calls need."""


class PackCall(ArrayCall):
    """Runs the kernels that a pack has of one spec."""

    def __init__(self, pack: KernelSource, text: str) -> None:
        self._pack, self.described = pack, pack.described(text)
        spec, tensors = self.described["spec"], self.described["tensors"]
        inputs = [Tensor.of(t) for t in tensors if t["role"] == "input"]
        outputs = [Tensor.of(t) for t in tensors if t["role"] == "output"]
        added = {t["name"]: t["added_to"] for t in tensors if t["added_to"]}
        places = range(len(inputs))
        leader = max(places, key=lambda n: ("M" in inputs[n].axes, inputs[n].wide, -n))
        super().__init__(text, inputs, outputs, spec["d"], spec["strides"], leader, added)
        values = (a for k in self.described["kernels"] for a in k["arguments"] if a["kind"] == "value")
        self.by_value = {a["number"]: a for a in values}

    def loaded(self, device: int, vec: int | None, rows: int) -> Loaded:
        """The kernels of the pack; LngenError if arrays do not suit them."""
        if vec is not None:
            asked = ", ".join(f"'{t['name']}' {t['alignment']}" for t in self.described["tensors"] if t["axes"])
            raise ArrayError(
                f"'{self.text}' of the pack is expected to get arrays whose addresses and row strides are multiples of "
                f"so many bytes: {asked}; copy the arrays, or build the pack with --schedule vec={vec}."
            )
        return self._pack.kernels(self.text, device, rows)

    def narrower(self, described: Described) -> int:
        """A pack has one width of accesses; the largest that would do is said in the error."""
        return int(described["schedule"]["vec"])

    def about(self, name: str) -> str:
        """A pack has no other kernels."""
        return ""

    def values(self, eps: object) -> Mapping[str, int]:
        """The bits of the numbers that follow from eps, by name; ArrayError if eps is missing, or not wanted."""
        if not self.by_value:
            if eps is None:
                return NO_VALUES
            raise ArrayError(f"'{self.text}' has eps={self.described['spec']['eps']} built in, got eps= in a call.")
        number = given_eps(self.text, eps)
        return {name: _bits(RULES[a["rule"]](number), a["dtype"]) for name, a in self.by_value.items()}


def _bits(value: float, dtype: str) -> int:
    """The bits of a number, rounded once to a dtype; a number beyond it is infinite."""
    if dtype == "f64":
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    try:
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F800000 if value > 0 else -0x800000


class PackSaved:
    """What backward needs of a forward run, by name."""

    def __init__(
        self, spec: str, arrays: dict[str, Any], eps: float | None = None, overwritten: tuple[str, ...] = ()
    ) -> None:
        self.spec, self.arrays, self.eps, self.overwritten = spec, arrays, eps, overwritten

    def __getitem__(self, name: str) -> Any:
        """The array of that name; ArrayError if there is none, or if it was overwritten."""
        if name not in self.arrays:
            raise ArrayError(f"forward saved {', '.join(self.arrays)}, and no '{name}'.")
        if name in self.overwritten:
            raise ArrayError(f"'{name}' is needed, but a result was written over it; pass another array to out=.")
        return self.arrays[name]


class PackNorm:
    """A forward of a pack, and its backward if the pack has one.

    spec     of forward; ``backward_spec``: of backward, None if the pack has none
    """

    def __init__(self, pack: KernelSource, forward: str, backward: str | None) -> None:
        self.spec, self.backward_spec = forward, backward
        self._pack, self._forward = pack, PackCall(pack, forward)
        self._backward = PackCall(pack, backward) if backward else None
        self._outputs = len(self._forward.described["spec"]["outputs"])

    def __repr__(self) -> str:
        """The specs and the pack's folder."""
        return f"<PackNorm {self.spec}, {self.backward_spec} of '{self._pack.folder}'>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as its pack and specs; a copy loads what it needs at its first use."""
        return PackNorm, (self._pack, self.spec, self.backward_spec)

    def prepare(self, device: int = 0, rows: int | None = None) -> PackNorm:
        """Load the kernels for calls of so many rows (None: any number), before a capture or the first request."""
        for spec in filter(None, (self.spec, self.backward_spec)):
            self._pack.prepare(device, rows, (spec,))
        return self

    def forward(self, *inputs: Any, out: Any = None, eps: float | None = None, **named: Any) -> tuple[Any, PackSaved]:
        """Results and what backward needs: ``y, saved = norm.forward(x, gamma, beta)``.

        Arrays of one GPU (torch, CuPy, anything with __cuda_array_interface__ or DLPack) with the dtypes, shapes and
        alignments of the pack's manifest. ``out``: y, or the tuple of all results, to be written. ``eps``: for specs
        with eps=run, and for these alone. Launches on the library's current stream and does not wait.
        """
        call = self._forward
        arrays = inputs if len(inputs) == len(call.inputs) and not named else call.arrange(inputs, named)
        results, taken = call(arrays, out, call.values(eps))
        names = [t.name for t in call.tensors]
        saved = PackSaved(self.spec, dict(zip(names, (*arrays, *results))), eps, taken)
        return (results[0] if self._outputs == 1 else results[: self._outputs]), saved

    def backward(self, dy: Any, saved: PackSaved, *, out: Any = None) -> tuple[Any, ...]:
        """Gradients in the order of the inputs: ``dx, dgamma, dbeta = norm.backward(dy, saved)``.

        ``dy``: a cotangent of y, or a tuple of them for several outputs. ``out``: arrays to write, one for each
        gradient; gradients with accumulate are added to theirs.
        """
        call = self._backward
        if call is None:
            raise LngenError(
                f"the pack '{self._pack.folder}' has no backward of {self.spec}; build it: lngen build "
                f"{self.spec.replace('.fwd:', '.bwd:')} --out DIR."
            )
        if not isinstance(saved, PackSaved) or saved.spec != self.spec:
            got = saved.spec if isinstance(saved, PackSaved) else type(saved).__name__
            raise ArrayError(f"saved is expected to be what forward of '{self.spec}' returned beside y, got {got}.")
        spec = call.described["spec"]
        cotangents = [f"d{name}" for name in spec["of"]]
        given = dy if isinstance(dy, (tuple, list)) else (dy,)
        if len(given) != len(cotangents) or any(a is None for a in given):
            raise ArrayError(
                f"'{call.text}' takes {len(cotangents)} cotangents ({', '.join(cotangents)}), got {len(given)}."
            )
        known = dict(zip(cotangents, given))
        known.update(_targets(call, out))
        arrays = [known[t.name] if t.name in known else saved[t.name] for t in call.inputs]
        stored, taken = call(arrays, _stored(call, out), call.values(saved.eps if call.by_value else None))
        saved.overwritten += tuple(n for n in taken if n in saved.arrays)
        found = {t.name: a for t, a in zip(call.outputs, stored)}
        same = call.described["same_tensor"]
        return tuple([found[same.get(name, name)] for name in _gradients(call)])


def _gradients(call: PackCall) -> list[str]:
    """The names of the gradients that a backward returns."""
    return [f"d{name}" for name in call.described["spec"]["wrt"]]


def _given(call: PackCall, out: Any) -> dict[str, Any]:
    """The arrays for the gradients, by name."""
    names = _gradients(call)
    given = (None,) * len(names) if out is None else out if isinstance(out, (tuple, list)) else (out,)
    given = (*given, *((None,) * (len(names) - 1))) if len(given) == 1 else given
    if len(given) != len(names):
        raise ArrayError(f"out= is expected to be one array or {len(names)} ({', '.join(names)}), got {len(given)}.")
    return dict(zip(names, given))


def _targets(call: PackCall, out: Any) -> dict[str, Any]:
    """The arrays that gradients are added to, by the name of the input; ArrayError if one is missing."""
    given = _given(call, out) if call.added else {}
    for name in call.added:
        if given[name] is None:
            raise ArrayError(
                f"'{call.text}' adds '{name}' to an array, which is missing; pass it in out=, with one entry each for "
                f"{', '.join(given)}."
            )
    return {target: given[name] for name, target in call.added.items()}


def _stored(call: PackCall, out: Any) -> tuple[Any, ...] | None:
    """The arrays for what the kernels store: equal gradients are stored once."""
    if out is None:
        return None
    given, same = _given(call, out), call.described["same_tensor"]
    for name, first in same.items():
        if given[name] is not None and given[name] is not given[first]:
            raise ArrayError(
                f"'{name}' is the same value as '{first}' and is stored once; pass None for '{name}' in out=, or the "
                f"array of '{first}'."
            )
    return tuple([given[t.name] for t in call.outputs])


# ---- which norm ----


def norm_of(pack: KernelSource, graph: str, keys: Mapping[str, Any]) -> PackNorm:
    """The norm of a graph whose spec has these keys, or of a whole spec; LngenError if there is none, or several."""
    forwards = [text for text in pack.specs if text.partition(":")[0].endswith(".fwd")]
    found = [graph] if graph in forwards and not keys else _with_keys(pack, forwards, graph, keys)
    if len(found) != 1:
        wanted = f"{graph}({', '.join(f'{k}={short(v)}' for k, v in keys.items())})" if keys else short(graph)
        which = f"{len(found)} of them: {', '.join(found)}" if found else ", ".join(forwards) or "no forward at all"
        hint = "; name more keys" if found else "; build it"
        raise LngenError(f"the pack '{pack.folder}' is expected to have one norm {wanted}, but has {which}{hint}.")
    turned = [text for text in pack.specs if text.partition(":")[0] == found[0].partition(":")[0][:-3] + "bwd"]
    whole = found[0].replace(".fwd:", ".bwd:", 1)
    others = (text for text in turned if pack.described(text)["spec"]["forward"] == found[0])
    return PackNorm(pack, found[0], whole if whole in turned else next(others, None))


def _with_keys(pack: KernelSource, forwards: Sequence[str], graph: str, keys: Mapping[str, Any]) -> list[str]:
    """The forward specs of a graph that have these keys; of one D, those with the fewest other keys."""
    own = [text for text in forwards if text.partition(":")[0].partition("@")[0] in (graph, f"{graph}.fwd")]
    if isinstance(keys.get("d"), int):
        own = [text for text in own if text.partition(":")[2].partition(",")[0] == f"d={keys['d']}"]
    found = [text for text in own if _has(pack.described(text)["spec"], keys)]
    if len({pack.described(text)["spec"]["d"] for text in found}) > 1:
        return found
    # A text has the keys that differ from their defaults, so the shortest has no other than those given.
    return [t for t in found if t.count(",") == min(other.count(",") for other in found)]


def _has(spec: Described, keys: Mapping[str, Any]) -> bool:
    """True if a spec has each key with that value; a dtype may be a library's."""
    known = {**{k: v for k, v in spec.items() if not isinstance(v, (dict, list))}, **spec["options"]}
    return all(k in known and _same(known[k], v) for k, v in keys.items())


def _same(own: Any, given: Any) -> bool:
    if isinstance(own, str) and not isinstance(given, str):
        given = str(getattr(given, "__name__", given)).rpartition(".")[2]
    if isinstance(own, str):
        return own == str(given).replace("bfloat", "bf").replace("float", "f")
    if isinstance(given, str):
        given = {"yes": True, "no": False}.get(given, given)
    return bool(own == given)
