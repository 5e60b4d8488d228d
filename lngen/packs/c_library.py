"""The C library of a pack: its manifest as tables of C, which templates/c interprets, and the C++ header over it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from lngen.compiler.emit import environment, fitted
from lngen.dtypes import READ, DType
from lngen.errors import LngenError
from lngen.files import sha256
from lngen.launch.signature import length
from lngen.packs.manifest import Facts, Manifest
from lngen.rules import RULES
from lngen.version import __version__

HEADER, SOURCE, HPP = (f"c/lngen_kernels.{end}" for end in ("h", "c", "hpp"))
CMAKE = ("c/CMakeLists.txt", "c/lngen-pack-config.cmake", "c/lngen-pack.pc.in")
OF_EPS = tuple(rule.text for rule in RULES.values())
MOST_ROWS, MOST_BYTES = 2**40, 2**62  # so that the launcher's sums and products have 64 bits
MOST_TENSORS = 64  # a bit each


@dataclass(frozen=True)
class Wanted:
    """A C library to be written: with its CMake package or not, with the kernels inside or not."""

    cmake: bool = False
    embed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The files, by their paths in the pack."""
        return (HEADER, SOURCE, HPP, *(CMAKE if self.cmake else ()))

    def __call__(self, pack: Manifest, image: Callable[[str], bytes]) -> dict[str, bytes]:
        """The bytes of the files, for a whole pack; ``image``: the bytes of a file of it."""
        library = _Library(pack, image if self.embed else None)
        given = {"version": __version__, "groups": library.groups, "rules": OF_EPS, "embedded": self.embed}
        given |= {"dtypes": READ, "dl_types": [_dl_type(t) for t in READ]}
        given |= {"tables": library.tables, **_cpp(library.groups)}
        texts = {name: environment().get_template(f"{name}.jinja").render(**given) for name in self.names}
        texts[HPP] = "\n".join(part for line in texts[HPP].splitlines() for part in fitted(line))
        return {name: (text.rstrip() + "\n").encode() for name, text in texts.items()}


def _dl_type(dtype: DType) -> str:
    """Code, bits and name of a dtype as DLPack has it."""
    return f'{{{DLPACK[dtype.library.rstrip("0123456789")]}, {dtype.bits}, "{dtype}"}}'


def check_kinds(kinds: Sequence[str], embed: bool, hub: bool, there: Manifest) -> None:
    """LngenError if a library cannot be had this way; ``hub``: in a hub package; ``there``: in the folder already."""
    if hub and "c" in kinds:
        raise LngenError("a hub package has no C library; emit c with --layout pack.")
    if "c" not in kinds and (embed or "cmake" in kinds):
        raise LngenError(f"{'embed' if embed else 'cmake'} is of a C library, which is not emitted; emit c as well.")
    if "c" not in kinds and SOURCE in there.others:
        raise LngenError("the folder has a C library, which would lack what this build adds; emit c as well.")


# ---- groups: specs that differ in D and dtype alone share a function and a struct of arguments ----

DTYPES = [t.value for t in READ]  # as in lngen_dtype
DLPACK = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}  # DLDataTypeCode, by the name without its bits
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
        self.names = {t: _unique(t, used) for t in {t["name"]: None for s in self.members for t in s.tensors}}
        ends = {t: ("_stride", "_outer_stride")[: 1 + self.two] for t in self.names if self._wide(t)}
        self.strides = {t: [_unique(self.names[t] + end, used) for end in of] for t, of in ends.items()}

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
            shape = ", ".join({"M": "rows", "D": "d"}.get(n, n.lower()) for n in facts[0]["shape"])
            dtypes = " or ".join(sorted({t["dtype"] for t in facts}, key=DTYPES.index))
            const = "const " if facts[0]["role"] == "input" else ""
            yield f"{const}void *{name}; /* [{shape}], {dtypes}{self._same(tensor)} */"
            yield from (f"int64_t {stride};" for stride in self.strides.get(tensor, ()))
        yield from ("void *workspace; /* a multiple of 256 */", "size_t workspace_bytes;")

    def _same(self, tensor: str) -> str:
        """Results of the same value, which are not stored again."""
        same = {n: None for s in self.members for n, first in s.sets[0]["same_tensor"].items() if first == tensor}
        return f"; also {', '.join(same)}" if same else ""


def _unique(name: str, used: set[str]) -> str:
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


# ---- the C++ header ----

TYPES = {t: t.ctype for t in READ if t.ctype != t}  # beside T; there is no type for 16-bit elements

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


def _cpp(groups: Sequence[Group]) -> dict[str, Any]:
    """What the template of the header needs: the classes, and those of Normalize_Layer."""
    used: set[str] = set()
    classes = [_Class(g, used) for g in groups]
    by_key = {c.key: c for c in classes}
    return {"classes": classes, "norms": {name: by_key.get(key) for name, key in NORMS.items()}, "keys": NORMS}


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


# ---- tables ----


class _Table:
    """Rows of a static array in C; equal ones are one."""

    def __init__(self, ctype: str, name: str) -> None:
        self.ctype, self.name, self.rows, self._places = ctype, name, list[str](), dict[Any, int]()

    def add(self, rows: Sequence[str], key: Any = None) -> int:
        """The number of the first of these rows, which are added unless the key is known."""
        place = len(self.rows) if key is None else self._places.setdefault(key, len(self.rows))
        if place == len(self.rows):
            self.rows += rows
        return place

    def range(self, rows: Sequence[str]) -> str:
        """The same as a range in C."""
        return f"{{{self.add(rows)}, {len(rows)}}}"

    def __str__(self) -> str:
        rows = self.rows or ["0"]  # C has no arrays without elements
        return "\n".join([f"static const {self.ctype} {self.name}[] = {{", *(f"    {{{r}}}," for r in rows), "};"])


def _row(*parts: Any) -> str:
    return ", ".join(str(int(p) if isinstance(p, bool) else p) for p in parts)


class _Library:
    """A manifest as C."""

    def __init__(self, pack: Manifest, image: Callable[[str], bytes] | None) -> None:
        self.pack, self.image, self.groups = pack, image, groups_of(pack)
        names = ("argument", "buffer", "kernel", "demand", "kernel_set", "file", "shared", "choice", "row_class")
        plural = {"shared": "shares", "row_class": "classes", "kernel_set": "sets"}
        self.table = {n: _Table(n, plural.get(n, f"{n}s")) for n in (*names, "image", "tensor", "spec", "group")}
        self.most = dict.fromkeys(("TENSORS", "KERNELS", "ARGUMENTS", "BUFFERS"), 1)
        self._embedded: list[str] = []
        for group in self.groups:
            self._group(group)

    @cached_property
    def tables(self) -> str:
        """The text of all tables, with their sizes."""
        sizes = {"SPECS": "spec", "CLASSES": "row_class", "FILES": "file", "CHOICES": "choice", "GROUPS": "group"}
        counts = {name: len(self.table[of].rows) for name, of in sizes.items()}
        counts |= {f"MOST_{name}": most for name, most in self.most.items()}
        listed = ", ".join(f"{name} = {count}" for name, count in counts.items())
        return "\n\n".join([f"enum {{ {listed} }};", *self._embedded, *map(str, self.table.values())])

    def _group(self, group: Group) -> None:
        struct = f"{group.name}_args"
        specs = self.table["spec"].range([self._spec(s, group) for s in group.members])
        fields = ("eps" if group.eps else "", "inner" if group.two else "", "workspace", "workspace_bytes")
        offsets = (f"offsetof({struct}, {f})" if f else 0 for f in fields)
        self.table["group"].add([_row(_text(group.name), _text(group.graph), specs, *offsets)])

    def _spec(self, spec: Member, group: Group) -> str:
        tensors, of = [], spec.of
        for t in spec.tensors:
            strides = group.strides.get(t["name"], ())
            fields = [f"offsetof({group.name}_args, {f})" for f in (group.names[t["name"]], *strides)]
            dtype, axes = f"LNGEN_{t['dtype'].upper()}", t["axes"]
            sizes = [length(text, 0, of["d"]) for text in t["shape"] if text != "M"]
            facts = (dtype, t["element_bytes"], "M" in axes, bool(sizes), t["role"] == "output", math.prod(sizes))
            tensors.append(_row(_text(t["name"]), *fields, *["0"] * (3 - len(fields)), *facts))
        images = self.table["image"].range([self._image(i) for i in spec.images])
        buffers = [b["per_row"] * b["element_bytes"] for e in spec.sets for b in e["workspace"]["buffers"]]
        most = min(MOST_ROWS, MOST_BYTES // max(spec.row_bytes, 8 * of["d"], *buffers))
        if self._largest("TENSORS", tensors) > MOST_TENSORS:
            raise LngenError(f"'{spec.text}' has {len(tensors)} tensors, and a C library takes at most {MOST_TENSORS}.")
        dtype = f"LNGEN_{of['dtype'].upper()}"
        return _row(_text(spec.text), dtype, of["d"], spec.row_bytes, most, images, self.table["tensor"].range(tensors))

    def _image(self, image: Facts) -> str:
        arch = re.fullmatch(r"sm_(\d+)([af]?)", image["arch"])
        assert arch
        classes = []
        for c in image["classes"]:
            other = self._choice(c["otherwise"], image["arch"]) if c["otherwise"] else -1
            classes.append(_row(min(c["most_bytes"], 2**46), self._choice(c, image["arch"]), other))
        suffix = f"'{arch[2]}'" if arch[2] else 0
        return _row(arch[1], suffix, image["kind"] == "ptx", self.table["row_class"].range(classes))

    def _choice(self, choice: Facts, arch: str) -> int:
        """The number of a kernel set, a file and an arch."""
        entry = self.pack.kernel_sets[choice["kernel_set"]]
        used = entry["resources"].get(arch)
        shares = [(used[k["name"]]["shared"], used[k["name"]]["launch_shared_bytes"]) for k in entry["kernels"] if used]
        key = choice["kernel_set"], choice["file"], arch
        first = self.table["shared"].add([_row(*both) for both in shares], key) if used else -1
        row = _row(self._set(entry), self._file(entry, choice["file"]), arch[3:].rstrip("af"), first)
        return self.table["choice"].add([row], key)

    def _file(self, entry: Facts, name: str) -> int:
        facts, data, known = entry["files"][name], "NULL", self.table["file"]
        if self.image is not None and name not in known._places:
            data = f"image_{len(known.rows)}"
            self._embedded.append(_embedded(data, self.image(name)))
        row = _row(_text(name), _text(facts["sha256"]), facts["bytes"], facts["driver"] or 0, data)
        return known.add([row], name)

    def _set(self, entry: Facts) -> int:
        name = entry["name"]
        if name in self.table["kernel_set"]._places:
            return self.table["kernel_set"]._places[name]
        tensors = [t["name"] for t in entry["tensors"]]
        buffers = entry["workspace"]["buffers"]
        numbers = {n["name"]: n for n in entry["call"]["numbers"]}
        kernels = [self._kernel(k, tensors, [b["name"] for b in buffers], numbers) for k in entry["kernels"]]
        rows = [_row(b["fixed"], b["per_row"], b["element_bytes"], b["zeroed"]) for b in buffers]
        demands = self.table["demand"].add([self._demand(t, entry, tensors) for t in entry["tensors"]])
        self._largest("KERNELS", kernels)
        self._largest("BUFFERS", rows)
        arch = entry["programmatic_stream_serialization"]["minimum_arch"][3:]
        places = self.table["kernel"].range(kernels), self.table["buffer"].range(rows)
        return self.table["kernel_set"].add([_row(_text(name), *places, demands, arch)], name)

    def _demand(self, tensor: Facts, entry: Facts, tensors: Sequence[str]) -> str:
        may = entry["in_place"]["outputs"].get(tensor["name"], [])
        contiguous = tensor["strides"][:1] == ["D"]
        alignment = tensor["alignment"] if "D" in tensor["axes"] else tensor["element_bytes"]
        bits = sum(1 << tensors.index(name) for name in may)
        return _row(alignment, tensor.get("stride_multiple", 1), contiguous, f"{bits}u")

    def _kernel(
        self, kernel: Facts, tensors: Sequence[str], buffers: Sequence[str], numbers: Mapping[str, Facts]
    ) -> str:
        rows = []
        for a in kernel["arguments"]:
            of = numbers.get(a.get("number"), {})
            kind = {"input": "TENSOR", "output": "TENSOR", "value": f"VALUE_{of.get('dtype', '').upper()}"}
            index = 0
            if a["kind"] == "value":
                index = _rule(of["rule"])
            elif a["tensor"]:
                index = (buffers if a["kind"] == "workspace" else tensors).index(a["tensor"])
            rows.append(_row(kind.get(a["kind"], a["kind"].upper()), index))
        self._largest("ARGUMENTS", rows)
        grid = (_extent(kernel["grid"][axis]) for axis in "xy")
        size = kernel["block"], kernel["cluster"], kernel["dynamic_shared_bytes"]
        how = kernel["cooperative"], kernel["launch_for_no_rows"]
        return _row(_text(kernel["name"]), self.table["argument"].range(rows), *grid, *size, *how)

    def _largest(self, what: str, rows: Sequence[str]) -> int:
        self.most[what] = max(self.most[what], len(rows))
        return self.most[what]


def _extent(rule: Facts) -> str:
    fixed = -1 if rule["fixed"] is None else rule["fixed"]
    return f"{{{_row(fixed, rule['per'] or 1, rule['limit'] or 0, rule['times'], rule['least'])}}}"


def _rule(text: str) -> int:
    if text not in OF_EPS:
        raise LngenError(f"this version of lngen has no rule '{text}' for a C library; build the pack again.")
    return OF_EPS.index(text)


def _text(text: str) -> str:
    """A string in C."""
    return json.dumps(text)


def _embedded(name: str, data: bytes) -> str:
    """The bytes of an image, 8 to a number in the order of their addresses, with a NUL behind them."""
    padded = data + bytes(8 - len(data) % 8)
    numbers = [f"0x{int.from_bytes(padded[n : n + 8], 'little'):x}" for n in range(0, len(padded), 8)]
    lines = (", ".join(numbers[n : n + 8]) for n in range(0, len(numbers), 8))
    return "\n".join([f"static const uint64_t {name}[] = {{", *(f"    {line}," for line in lines), "};"])
