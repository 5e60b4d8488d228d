"""The C library of a pack: its manifest as tables of C, which templates/c interprets, and the C++ header over it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lngen.aot.c_groups import Group, Member, groups_of, unique
from lngen.aot.manifest import Facts, Manifest
from lngen.emit import environment, fitted
from lngen.errors import LngenError
from lngen.ir import RULES as VALUE_RULES
from lngen.version import __version__

HEADER, SOURCE, HPP = (f"c/lngen_kernels.{end}" for end in ("h", "c", "hpp"))
CMAKE = ("c/CMakeLists.txt", "c/lngen-pack-config.cmake", "c/lngen-pack.pc.in")
RULES = tuple(rule.text for rule in VALUE_RULES.values())
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
        given = {"version": __version__, "groups": library.groups, "rules": RULES, "embedded": self.embed}
        given |= {"tables": library.tables, **_cpp(library.groups)}
        texts = {name: environment().get_template(f"{name}.jinja").render(**given) for name in self.names}
        texts[HPP] = "\n".join(part for line in texts[HPP].splitlines() for part in fitted(line))
        return {name: (text.rstrip() + "\n").encode() for name, text in texts.items()}


def check(kinds: Sequence[str], embed: bool, hub: bool, there: Manifest) -> None:
    """LngenError if a library cannot be had this way; ``hub``: in a hub package; ``there``: in the folder already."""
    if hub and "c" in kinds:
        raise LngenError("a hub package has no C library; emit c with --layout pack.")
    if "c" not in kinds and (embed or "cmake" in kinds):
        raise LngenError(f"{'embed' if embed else 'cmake'} is of a C library, which is not emitted; emit c as well.")
    if "c" not in kinds and SOURCE in there.others:
        raise LngenError("the folder has a C library, which would lack what this build adds; emit c as well.")


# ---- the C++ header ----

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
        self.name = unique("".join(word[:1].upper() + word[1:] for word in words), used)
        self.group, self.eps, self.key = group.name, group.eps, group.members[0].key
        self.workspace = any(e["workspace"]["buffers"] for s in group.members for e in s.sets)
        taken = {"T", "rows", "workspace", "workspace_bytes", "stream", "call"}
        self.tensors = {t: (_type(group, t), unique(name, taken), name) for t, name in group.names.items()}


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
            facts = (dtype, t["element_bytes"], "M" in axes, "D" in axes, t["role"] == "output")
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
        kernels = [self._kernel(k, tensors, [b["name"] for b in buffers]) for k in entry["kernels"]]
        rows = [_row(b["fixed"], b["per_row"], b["element_bytes"], b["zeroed"]) for b in buffers]
        demands = self.table["demand"].add([self._demand(t, entry, tensors) for t in entry["tensors"]])
        self._largest("KERNELS", kernels)
        self._largest("BUFFERS", rows)
        arch = entry["programmatic_stream_serialization"]["minimum_arch"][3:]
        places = self.table["kernel"].range(kernels), self.table["buffer"].range(rows)
        return self.table["kernel_set"].add([_row(_text(name), *places, demands, arch)], name)

    def _demand(self, tensor: Facts, entry: Facts, tensors: Sequence[str]) -> str:
        may = entry["in_place"]["outputs"].get(tensor["name"], [])
        contiguous = tensor["layout"].startswith("contiguous:")
        alignment = tensor["alignment"] if "D" in tensor["axes"] else tensor["element_bytes"]
        bits = sum(1 << tensors.index(name) for name in may)
        return _row(alignment, tensor.get("row_stride_multiple", 1), contiguous, f"{bits}u")

    def _kernel(self, kernel: Facts, tensors: Sequence[str], buffers: Sequence[str]) -> str:
        rows = []
        for a in kernel["arguments"]:
            kind = {"input": "TENSOR", "output": "TENSOR", "value": f"VALUE_{a.get('dtype', '').upper()}"}
            index = 0
            if a["kind"] == "value":
                index = _rule(a["rule"])
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
    if text not in RULES:
        raise LngenError(f"this version of lngen has no rule '{text}' for a C library; build the pack again.")
    return RULES.index(text)


def _text(text: str) -> str:
    """A string in C."""
    return json.dumps(text)


def _embedded(name: str, data: bytes) -> str:
    """The bytes of an image, 8 to a number in the order of their addresses, with a NUL behind them."""
    padded = data + bytes(8 - len(data) % 8)
    numbers = [f"0x{int.from_bytes(padded[n : n + 8], 'little'):x}" for n in range(0, len(padded), 8)]
    lines = (", ".join(numbers[n : n + 8]) for n in range(0, len(numbers), 8))
    return "\n".join([f"static const uint64_t {name}[] = {{", *(f"    {line}," for line in lines), "};"])
