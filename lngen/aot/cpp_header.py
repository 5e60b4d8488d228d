"""The C++ header of a pack: what templates/c/lngen_kernels.hpp.jinja needs to know of the groups of its C library."""

from __future__ import annotations

from collections.abc import Sequence

from lngen.aot.c_groups import Group
from lngen.emit import environment, fitted
from lngen.version import __version__

HPP = "c/lngen_kernels.hpp"
TYPES = {"f32": "float", "f64": "double"}  # beside T; there is no type for 16-bit elements

# What Normalize_Layer calls: specs without d and dtype.
NORMS = {
    "Forward": "layernorm.fwd:eps=run",
    "ForwardY": "layernorm.fwd:eps=run,save=y+rstd",
    "Infer": "layernorm.fwd:eps=run,save=none",
    "Backward": "layernorm.bwd:eps=run",
    "BackwardY": "layernorm.bwd:eps=run,save=y+rstd",
    "FusedAdd": "add_layernorm.bwd:eps=run",
    "FusedAddY": "add_layernorm.bwd:eps=run,save=y+rstd",
}


def text(groups: Sequence[Group]) -> str:
    """The header."""
    used: set[str] = set()
    classes = [_Class(g, used) for g in groups]
    by_key = {c.key: c for c in classes}
    norms = {name: by_key.get(key) for name, key in NORMS.items()}
    given = {"version": __version__, "classes": classes, "norms": norms, "keys": NORMS}
    lines = environment().get_template(f"{HPP}.jinja").render(**given).splitlines()
    return "\n".join(part for line in lines for part in fitted(line))


class _Class:
    """The class of a group: ``LayernormForward`` of ``lngen_layernorm_forward``; its tensors with types and names."""

    def __init__(self, group: Group, used: set[str]) -> None:
        words = group.name.removeprefix("lngen_").split("_")
        self.name = _unique("".join(word[:1].upper() + word[1:] for word in words), used)
        self.group, self.eps, self.key = group.name, group.eps, group.members[0].key
        self.workspace = any(e["workspace"]["buffers"] for s in group.members for e in s.sets)
        taken = {"T", "rows", "workspace", "workspace_bytes", "stream", "call"}
        self.tensors = {t: (_type(group, t), _unique(name, taken), name) for t, name in group.names.items()}


def _type(group: Group, tensor: str) -> str:
    """The type of a tensor's pointer, in which T is that of the elements."""
    found = [(s.of["dtype"], t) for s in group.members for t in s.tensors if t["name"] == tensor]
    const, dtypes = "const " * (found[0][1]["role"] == "input"), {t["dtype"] for _, t in found}
    spec = group.members[0].of
    named = {*spec["inputs"], *spec["outputs"]}
    if tensor not in named | {f"d{name}" for name in named}:
        return f"{const}statistic<T> *"
    if all(t["dtype"] == own for own, t in found):
        return f"{const}T *"
    return f"{const}{TYPES.get(dtypes.pop(), 'void') if len(dtypes) == 1 else 'void'} *"


def _unique(name: str, used: set[str]) -> str:
    while name in used:
        name += "_"
    used.add(name)
    return name
