"""Groups of a pack's C library: specs that differ in D and dtype alone share a function and a struct of arguments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from lngen.aot.manifest import Facts, Manifest
from lngen.files import sha256

DTYPES = ("f16", "bf16", "f32", "f64")  # as in lngen_dtype
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}

# Words that are no names of fields: of C11, of C++17, and what compilers define without being asked.
KEYWORDS = """
    auto break case char const continue default do double else enum extern float for goto if inline int long register
    restrict return short signed sizeof static struct switch typedef union unsigned void volatile while alignas alignof
    and and_eq asm bitand bitor bool catch char8_t char16_t char32_t class compl concept const_cast consteval constexpr
    constinit co_await co_return co_yield decltype delete dynamic_cast explicit export false friend mutable namespace
    new noexcept not not_eq nullptr operator or or_eq private protected public reinterpret_cast requires static_assert
    static_cast template this thread_local throw true try typeid typename typeof using virtual wchar_t xor xor_eq linux
    unix NULL"""


class Group:
    """The specs of a struct and its functions, sorted by dtype and D; their tensors by name in order."""

    def __init__(self, name: str, specs: Sequence[Member]) -> None:
        self.name, self.members = name, sorted(specs, key=lambda s: (DTYPES.index(s.of["dtype"]), s.of["d"]))
        self.specs = [s.text for s in self.members]
        self.graph, self.direction = specs[0].of["graph"], DIRECTIONS[specs[0].of["direction"]]
        self.two = specs[0].of["strides"] == 2
        self.eps = any(
            a["kind"] == "value" for s in specs for e in s.sets for k in e["kernels"] for a in k["arguments"]
        )
        self.title = f"the {self.direction} of {self.graph}"
        used = {"d", "dtype", "rows", "eps", "inner", "workspace", "workspace_bytes"}
        self.names = {t: unique(t, used) for t in {t["name"]: None for s in self.members for t in s.tensors}}
        ends = {t: ("_stride", "_outer_stride")[: 1 + self.two] for t in self.names if self._wide(t)}
        self.strides = {t: [unique(self.names[t] + end, used) for end in of] for t, of in ends.items()}

    def _of(self, tensor: str) -> list[Facts]:
        return [t for s in self.members for t in s.tensors if t["name"] == tensor]

    def _wide(self, tensor: str) -> bool:
        return any(t["axes"] == ["M", "D"] for t in self._of(tensor))

    @property
    def fields(self) -> Iterator[str]:
        """The members of the struct, with what they hold."""
        yield from ("int64_t d;", "lngen_dtype dtype;", "int64_t rows;", *["double eps;"] * self.eps)
        if self.two:
            yield "int64_t inner; /* row r begins at (r / inner) * outer_stride + (r % inner) * stride */"
        for tensor, name in self.names.items():
            facts = self._of(tensor)
            shape = ", ".join({"M": "rows", "D": "d"}[a] for a in facts[0]["axes"])
            dtypes = " or ".join(sorted({t["dtype"] for t in facts}, key=DTYPES.index))
            const = "const " if facts[0]["role"] == "input" else ""
            yield f"{const}void *{name}; /* [{shape}], {dtypes}{self._same(tensor)} */"
            yield from (f"int64_t {stride};" for stride in self.strides.get(tensor, ()))
        yield from ("void *workspace; /* a multiple of 256 */", "size_t workspace_bytes;")

    def _same(self, tensor: str) -> str:
        """Results of the same value, which are not stored again."""
        same = {n: None for s in self.members for n, first in s.sets[0]["same_tensor"].items() if first == tensor}
        return f"; also {', '.join(same)}" if same else ""


def unique(name: str, used: set[str]) -> str:
    """A name that no other field of the struct has, and that is no keyword."""
    while name in used or name in KEYWORDS.split():
        name += "_"
    used.add(name)
    return name


ENDS = ("", "_args", "_workspace_bytes", "_init_workspace")  # of what a group declares


def group_names(keys: Sequence[str]) -> dict[str, str]:
    """The C names of groups by their texts, specs without d and dtype; those that would coincide have a hash."""
    plain = {key: _group_name(key) for key in keys}
    declared = Counter(name + end for name in plain.values() for end in ENDS)
    clash = {key for key, name in plain.items() if any(declared[name + end] > 1 for end in ENDS)}
    return {key: name + f"_{sha256(key.encode())[:8]}" * (key in clash) for key, name in plain.items()}


def _group_name(key: str) -> str:
    """``rmsnorm.bwd:wrt=x,gamma=no`` as ``lngen_rmsnorm_backward_wrt_x_no_gamma``."""
    head, _, options = key.partition(":")
    graph, _, direction = head.rpartition(".")
    words = [graph.replace("@", "_"), DIRECTIONS[direction]]
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        words.append({"yes": name, "no": f"no_{name}"}.get(value) or re.sub("[^A-Za-z0-9_]+", "_", f"{name}_{value}"))
    return "_".join(("lngen", *words))


class Member:
    """A spec of the manifest that has kernels for a driver; all its kernel sets have the same tensors."""

    def __init__(self, text: str, facts: Facts, sets: Mapping[str, Facts]) -> None:
        head, _, keys = text.partition(":")
        self.text, self.row_bytes, self.images = text, facts["row_bytes"], _for_drivers(facts)
        self.key = f"{head}:{','.join(keys.split(',')[2:])}"  # without d and dtype, which every spec has first
        choices = [c for i in self.images for e in i["classes"] for c in (e, e["otherwise"]) if c]
        self.sets = [sets[c["kernel_set"]] for c in choices]
        self.of: Facts = self.sets[0]["spec"]
        self.tensors: list[Facts] = self.sets[0]["tensors"]


def _for_drivers(facts: Facts) -> list[Facts]:
    """The images of a spec without those for a compiler."""
    return [i for i in facts["images"] if i["kind"] != "source"]


def groups_of(pack: Manifest) -> list[Group]:
    """The groups of a pack, sorted by name."""
    found = (Member(t, f, pack.kernel_sets) for t, f in pack.specs.items() if _for_drivers(f))
    by_key = {key: [*of] for key, of in groupby(sorted(found, key=lambda s: s.key), key=lambda s: s.key)}
    names = group_names([*by_key])
    return sorted((Group(names[key], of) for key, of in by_key.items()), key=lambda g: g.name)
