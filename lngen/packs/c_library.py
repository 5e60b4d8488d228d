"""The C library of a pack: its manifest as tables of C, which templates/c interprets, and the C++ header over it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lngen.compiler.emit import environment, fitted
from lngen.dtypes import READ, DType
from lngen.errors import LngenError
from lngen.files import sha256
from lngen.launch.signature import Length
from lngen.packs.manifest import Facts, Manifest
from lngen.rules import ALIGNMENT, MOST_BLOCKS, ROW_KINDS, RULES, SETS, TABLE, Stretch
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
        given |= {"alignment": ALIGNMENT, "most_blocks": MOST_BLOCKS, "row_kinds": ROW_KINDS}
        given |= {"dtypes": READ, "dl_types": [_dl_type(t) for t in READ]}
        given |= {"structs": STRUCTS, "tables": TABLES, "library": library, **_cpp(library.groups)}
        texts = {name: environment().get_template(f"{name}.jinja").render(**given) for name in self.names}
        texts[HPP] = "\n".join(part for line in texts[HPP].splitlines() for part in fitted(line))
        return {name: (text.rstrip() + "\n").encode() for name, text in texts.items()}


def _dl_type(dtype: DType) -> str:
    """Code, bits and name of a dtype as DLPack has it."""
    return f'{{{DLPACK.get(dtype.library) or DLPACK[dtype.library.rstrip("0123456789")]}, {dtype.bits}, "{dtype}"}}'


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
DLPACK = {  # DLDataTypeCode, by the name without its bits
    "int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6, "float8_e4m3fn": 10, "float8_e5m2": 12,
}  # fmt: skip
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}

# Words that are no names of fields: of C11, of C++17, and what compilers define without being asked.
LENGTHS = {"M": "rows", "D": "d", SETS: "rows / inner"}
STEPS = ("stride", "outer_stride")
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
        self.by_sets = any(map(_is_of_sets, specs[0].tensors))
        self.eps = any(e["call"]["numbers"] for s in specs for e in s.sets)
        self.title = f"the {self.direction} of {self.graph}"
        used = {"d", "dtype", "rows", "eps", "inner", "workspace", "workspace_bytes"}
        self.names = {t: _unique(t, used) for t in {t["name"]: None for s in self.members for t in s.tensors}}
        kinds = {t: self._of(t)[0] for t in self.names}
        steps = {t: _steps(of, self.two) for t, of in kinds.items()}
        self.strides = {t: {step: _unique(f"{self.names[t]}_{step}", used) for step in of} for t, of in steps.items()}
        tables = {t: of["axes"][0] for t, of in kinds.items() if of["shape"][:1] == [TABLE]}
        fields = {axis: _unique("table_rows", used) for axis in dict.fromkeys(tables.values())}
        self.table_rows = {t: fields[axis] for t, axis in tables.items()}

    def offset(self, field: str) -> str:
        """Of a field of the struct, in C."""
        return f"offsetof({self.name}_args, {field})"

    @property
    def leader(self) -> int:
        """The place of the first [M, D] tensor that has the dtype of the spec, or of the first with rows."""
        own, dtype = self.members[0].tensors, self.members[0].of["dtype"]
        fitting = (n for n, t in enumerate(own) if _is_wide(t) and t["dtype"] == dtype)
        with_rows = (n for n, t in enumerate(own) if t["axes"][:1] == ["M"])
        return next(fitting, next(with_rows, len(own) - 1))

    def _of(self, tensor: str) -> list[Facts]:
        return [t for s in self.members for t in s.tensors if t["name"] == tensor]

    @property
    def fields(self) -> Iterator[str]:
        """The members of the struct, with what they hold."""
        yield from ("int64_t d;", "lngen_dtype dtype;", "int64_t rows;", *["double eps;"] * self.eps)
        if self.two:
            yield "int64_t inner; /* row r begins at (r / inner) * outer_stride + (r % inner) * stride */"
        for field in dict.fromkeys(self.table_rows.values()):
            tables = [self.names[t] for t, own in self.table_rows.items() if own == field]
            yield f"int64_t {field}; /* of {' and '.join(tables)}; every position is below it, which nothing checks */"
        for tensor, name in self.names.items():
            facts = self._of(tensor)
            lengths = {**LENGTHS, TABLE: self.table_rows.get(tensor, "")}
            shape = ", ".join(lengths.get(n, n.lower()) for n in facts[0]["shape"])
            dtypes = " or ".join(sorted({t["dtype"] for t in facts}, key=DTYPES.index))
            const = "const " if facts[0]["role"] == "input" else ""
            yield f"{const}void *{name}; /* [{shape}], {dtypes}{self._same(tensor)} */"
            yield from (f"int64_t {stride};" for stride in self.strides[tensor].values())
        yield from ("void *workspace; /* a multiple of 256 */", "size_t workspace_bytes;")

    def _same(self, tensor: str) -> str:
        """Results of the same value, which are not stored again."""
        same = {n: None for s in self.members for n, first in s.sets[0]["same_tensor"].items() if first == tensor}
        return f"; also {', '.join(same)}" if same else ""


def _is_wide(tensor: Facts) -> bool:
    return bool(tensor["axes"] == ["M", "D"])


def _is_by_columns(tensor: Facts) -> bool:
    return bool(tensor["axes"][1:] == ["M"])


def _is_of_sets(tensor: Facts) -> bool:
    return bool(tensor["shape"][:1] == [SETS])


def _is_of_table(tensor: Facts) -> bool:
    return bool(tensor["strides"][:1] == ["table_stride"])


def _steps(tensor: Facts, two: bool) -> tuple[str, ...]:
    """The distances of a tensor that a caller may choose; ``two``: of rows, if they are wide."""
    if _is_wide(tensor):
        return STEPS[: 1 + two]
    return STEPS[1:] if _is_of_sets(tensor) else STEPS[: _is_by_columns(tensor) or _is_of_table(tensor)]


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
        self.by_sets = group.by_sets
        self.group, self.eps, self.key = group.name, group.eps, group.members[0].key
        self.workspace = any(e["workspace"]["buffers"] for s in group.members for e in s.sets)
        self.table_rows = [*dict.fromkeys(group.table_rows.values())]
        taken = {"T", "rows", "workspace", "workspace_bytes", "stream", "call", *self.table_rows}
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

# The structs of C, line by line. A member holds the field of the description that has its name; null is 0. A range, or
# an entry, is of the table of its name.
STRUCTS = {
    "extent": ("int64_t fixed, per, limit, times, least;",),
    "length": ("int64_t number, per, add;",),  # a per of -1: the rows of a set
    "stretch": ("int64_t rows, least, longest, groups;",),
    "argument": ("kind kind;", "int of; /* its tensor, buffer or number */"),
    "number": ("lngen_dtype dtype;", "int rule;"),
    "buffer": ("int64_t fixed, per_row, per_stretch, element_bytes;", "stretch stretch;", "int zeroed;"),
    "kernel": (
        "const char *name;", "range arguments;", "extent x, y;", "unsigned block, cluster, dynamic_shared_bytes;",
        "int cooperative, launch_for_no_rows;",
    ),
    "tensor": (
        "const char *name;", "kind role;", "lngen_dtype dtype;", "int axes;", "length shape[2];",
        "int64_t element_bytes, alignment, stride_multiple;", "int contiguous; /* no stride is the caller's choice */",
        "int by_columns; /* rows are its last axis */", "int of_sets; /* its rows are those of sets */",
        "int of_table; /* it has a row for each one of the call, or as many as table_rows says */",
        "uint64_t in_place; /* a bit for each tensor whose place it may take */",
        "size_t pointer, stride, outer_stride, table_rows; /* offsets in the arguments; 0: no such field */",
    ),
    "kernel_set": (
        "const char *name;", "range tensors, kernels, buffers, numbers;",
        "int dependent_arch; /* the oldest whose kernels wait for the one before them */",
    ),
    "file": (
        "const char *name, *sha256;", "size_t bytes;", "int driver; /* the oldest version that takes it */",
        "const void *data; /* embedded, or null */",
    ),
    "resource": ("unsigned shared, launch_shared_bytes;",),
    "choice": ("entry kernel_set, file;", "int arch;", "range resources; /* of each kernel; none: unknown */"),
    "row_class": ("int64_t most_bytes;", "range choices; /* what to take, and otherwise */"),
    "image": ("int arch;", "char suffix;", "int ptx;", "range row_classes;"),
    "spec": (
        "const char *text;", "lngen_dtype dtype;", "int64_t d, row_bytes, most_rows;", "range images;",
        "range tensors; /* of one of its kernel sets */",
    ),
    "group": (
        "const char *name, *graph;", "range specs; /* sorted by dtype and d */",
        "int leader; /* the tensor that has the rows of a call, and d and dtype unless it has one axis */",
        "int by_sets; /* inner is the number of rows of a set */",
        "size_t eps, inner, workspace, workspace_bytes; /* offsets in the arguments; 0: no such field */",
    ),
}  # fmt: skip
TABLES = {struct + ("es" if struct.endswith("s") else "s"): struct for struct in [*STRUCTS][3:]}


def _fields(struct: str) -> Iterator[tuple[str, str]]:
    """Type and name of each member."""
    for line in STRUCTS[struct]:
        ctype, names = re.findall(r"((?:const )?\w+) (.*?);", line)[0]
        yield from ((ctype, name) for name in re.findall(r"(\w+)(?:\[2\])?", names))


FIELDS = {struct: [*_fields(struct)] for struct in STRUCTS}


class _Tables:
    """Rows of static arrays in C, by struct; equal ones are there once. ``most``: the longest range of each."""

    def __init__(self) -> None:
        self.rows: dict[str, list[str]] = {struct: [] for struct in TABLES.values()}
        self.most = dict.fromkeys(STRUCTS, 1)
        self._places: dict[tuple[str, ...], int] = {}

    def add(self, struct: str, described: Sequence[Facts]) -> tuple[int, int]:
        """The place of the first of these rows, and their number."""
        rows, known = [self._row(struct, facts) for facts in described], self.rows[struct]
        place = self._places.setdefault((struct, *rows), len(known))
        known += rows if place == len(known) else []
        self.most[struct] = max(self.most[struct], len(rows))
        return place, len(rows)

    def _row(self, struct: str, facts: Facts) -> str:
        return ", ".join([self._coded(ctype, name, facts[name]) for ctype, name in FIELDS[struct]])

    def _coded(self, ctype: str, name: str, value: Any) -> str:
        """A value in C, of a member of that type and name."""
        if ctype == "range":
            return "{{{}, {}}}".format(*self.add(TABLES[name], value))
        if ctype == "entry":
            return str(self.add(name, [value])[0])
        if ctype in STRUCTS and isinstance(value, list):
            return f"{{{', '.join(self._coded(ctype, name, one) for one in value)}}}"
        if ctype in STRUCTS:
            return f"{{{self._row(ctype, value)}}}"
        if ctype in ("kind", "lngen_dtype"):
            return f"{'LNGEN_' if ctype == 'lngen_dtype' else ''}{value.upper()}"
        if ctype == "const char":
            return json.dumps(value)
        return value if isinstance(value, str) else str(int(value or 0))


class _Library:
    """A manifest as C: descriptions with what only C has, such as offsets of members and places of names."""

    def __init__(self, pack: Manifest, image: Callable[[str], bytes] | None) -> None:
        self.pack, self.image, self.groups, self.tables = pack, image, groups_of(pack), _Tables()
        self.embedded: dict[str, tuple[str, str]] = {}  # name and text of an array of bytes, by file
        self.tables.add("group", [self._group(g) for g in self.groups])

    def _group(self, group: Group) -> Facts:
        fields = {"eps": group.eps, "inner": group.two, "workspace": True, "workspace_bytes": True}
        offsets = {name: group.offset(name) if there else 0 for name, there in fields.items()}
        specs = [self._spec(member, group) for member in group.members]
        found = {"name": group.name, "graph": group.graph, "leader": group.leader, "by_sets": group.by_sets}
        return {**found, "specs": specs, **offsets}

    def _spec(self, spec: Member, group: Group) -> Facts:
        if len(spec.tensors) > MOST_TENSORS:
            count = len(spec.tensors)
            raise LngenError(f"'{spec.text}' has {count} tensors, and a C library takes at most {MOST_TENSORS}.")
        found = [b for e in spec.sets for b in e["workspace"]["buffers"]]  # a set has no more stretches than rows
        buffers = [(b["per_row"] + b.get("per_stretch", 0)) * b["element_bytes"] for b in found]
        most = min(MOST_ROWS, MOST_BYTES // max(spec.row_bytes, 8 * spec.of["d"], *buffers))
        images = [self._image(image, group) for image in spec.images]
        parts = {"images": images, "tensors": _kernel_set(spec.sets[0], group)["tensors"]}
        return {**spec.of, **parts, "text": spec.text, "row_bytes": spec.row_bytes, "most_rows": most}

    def _image(self, image: Facts, group: Group) -> Facts:
        arch, classes = image["arch"][3:], []
        for c in image["classes"]:
            choices = [self._choice(one, image["arch"], group) for one in (c, c["otherwise"]) if one]
            classes.append({"most_bytes": min(c["most_bytes"], 2**46), "choices": choices})
        suffix = f"'{arch[-1]}'" if arch[-1] in "af" else 0
        return {"arch": arch.rstrip("af"), "suffix": suffix, "ptx": image["kind"] == "ptx", "row_classes": classes}

    def _choice(self, choice: Facts, arch: str, group: Group) -> Facts:
        """A kernel set, a file and an arch."""
        entry, name = self.pack.kernel_sets[choice["kernel_set"]], choice["file"]
        used = entry["resources"].get(arch)
        return {
            "kernel_set": _kernel_set(entry, group),
            "file": {**entry["files"][name], "name": name, "data": self._data(name)},
            "arch": arch[3:].rstrip("af"),
            "resources": [used[k["name"]] for k in entry["kernels"]] if used else [],
        }

    def _data(self, file: str) -> str:
        """The array with the bytes of a file, if the library has them inside."""
        if self.image is None:
            return "NULL"
        if file not in self.embedded:
            name = f"image_{len(self.embedded)}"
            self.embedded[file] = name, _embedded(name, self.image(file))
        return self.embedded[file][0]


def _kernel_set(entry: Facts, group: Group) -> Facts:
    """A kernel set whose arguments and results name others by their places."""
    tensors, numbers, buffers = entry["tensors"], entry["call"]["numbers"], entry["workspace"]["buffers"]
    names = {kind: [v["name"] for v in of] for kind, of in (("value", numbers), ("workspace", buffers), ("", tensors))}

    def place(a: Facts) -> int:
        name = a.get("number") or a["tensor"]
        return names.get(a["kind"], names[""]).index(name) if name else 0

    return {
        "name": entry["name"],
        "tensors": [_tensor(t, entry, names[""], group) for t in tensors],
        "kernels": [
            {**k, **k["grid"], "arguments": [{**a, "of": place(a)} for a in k["arguments"]]} for k in entry["kernels"]
        ],
        "buffers": [{"per_stretch": 0, **b, "stretch": _stretch(b)} for b in buffers],
        "numbers": [{**n, "rule": OF_EPS.index(n["rule"])} for n in numbers],
        "dependent_arch": entry["programmatic_stream_serialization"]["minimum_arch"][3:],
    }


def _stretch(buffer: Facts) -> Facts:
    """How sets of rows are cut, with a name for ``long`` that C takes; zeros without sets."""
    found = Stretch(**buffer.get("stretch", dict.fromkeys(Stretch._fields, 0)))
    return {**found._asdict(), "longest": found.long}


def _tensor(tensor: Facts, entry: Facts, names: Sequence[str], group: Group) -> Facts:
    """A tensor with the offsets of its fields, and the bits of those whose place it may take."""
    name, shape = tensor["name"], [Length.of(text, entry["spec"]["d"])._asdict() for text in tensor["shape"]]
    fields = {"pointer": group.names[name], "table_rows": group.table_rows.get(name), **group.strides[name]}
    return {
        **dict.fromkeys(("stride_multiple", *STEPS), 0),
        **tensor,
        **{member: group.offset(field) if field else 0 for member, field in fields.items()},
        "of_sets": _is_of_sets(tensor),
        "of_table": _is_of_table(tensor),
        "axes": len(shape),
        "shape": [*shape, *[Length(1)._asdict()] * (2 - len(shape))],
        "by_columns": _is_by_columns(tensor),
        "contiguous": not {"stride", "outer_stride"} & {*tensor["strides"]},
        "in_place": f"{sum(1 << names.index(other) for other in entry['in_place']['outputs'].get(name, ()))}u",
    }


def _embedded(name: str, data: bytes) -> str:
    """The bytes of an image, 8 to a number in the order of their addresses, with a NUL behind them."""
    padded = data + bytes(8 - len(data) % 8)
    numbers = [f"0x{int.from_bytes(padded[n : n + 8], 'little'):x}" for n in range(0, len(padded), 8)]
    lines = (", ".join(numbers[n : n + 8]) for n in range(0, len(numbers), 8))
    return "\n".join([f"static const uint64_t {name}[] = {{", *(f"    {line}," for line in lines), "};"])
