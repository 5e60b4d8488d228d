"""Norms of a pack: forward and backward on arrays of a GPU, with what forward saves. They never compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..errors import ArrayError, LngenError, short
from .array_call import ArrayCall
from .array_norm import ArrayNorm, Gradients
from .kernels import Described, Loaded
from .signature import Signature


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
        super().__init__(Signature.of(self.described))

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


class PackNorm(ArrayNorm[PackCall]):
    """A forward of a pack, and its backward if the pack has one.

    spec     of forward; ``backward_spec``: of backward, None if the pack has none
    """

    def __init__(self, pack: KernelSource, forward: str, backward: str | None) -> None:
        self.spec, self.backward_spec, self._pack = forward, backward, pack
        self._set_up(PackCall(pack, forward))
        if backward:
            call = PackCall(pack, backward)
            self._cotangents = call.signature.cotangents
            self._gradients = Gradients(backward, call.signature.returned, tuple(call.added))
            self._backwards[self._cotangents] = call
        else:
            self._no_backward = (
                f"the pack '{pack.folder}' has no backward of {forward}; build it: lngen build "
                f"{forward.replace('.fwd:', '.bwd:')} --out DIR."
            )

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

    def _backward_of(self, cotangents: tuple[str, ...]) -> PackCall:
        """ArrayError: a pack has the backward for all cotangents."""
        raise ArrayError(
            f"'{self.backward_spec}' of the pack takes {', '.join(self._cotangents)}, got {', '.join(cotangents)} "
            "alone; pass zeros for the others, or build a pack of the spec with of=."
        )


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
