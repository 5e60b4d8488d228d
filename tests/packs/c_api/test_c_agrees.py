"""If these fail, the two interpreters of a description, in Python and in C, take different calls or launch otherwise.

Descriptions, rows, distances, addresses and eps are drawn anew. The driver does nothing, and no array has memory. C
gets a call twice: as it is, for its status, and for the launch with the distances that Python goes by.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from c_driver import cc, no_op
from c_library import CLibrary
from fake_arrays import FakeArrays
from lngen.errors import LngenError
from lngen.launch import array_call, driver
from lngen.launch.array_call import Recipe
from lngen.launch.arrays import Layout
from lngen.launch.driver import _Attribute, _Config
from lngen.launch.pack import Pack
from lngen.launch.pack_norms import PackCall
from lngen.packs.c_library import Group, groups_of
from lngen.rules import aligned
from random_packs import random_pack
from sampling import rotating

CALLS = 2000
APART, WORKSPACE = 1 << 44, 1 << 60  # bytes from one array to the next; where the workspace lies

# What Python's refusals say, each with what C answers then.
LAYOUT = ("BAD_STRIDE", "MISALIGNED")
REFUSALS = {
    "its rows overlap": LAYOUT,
    "row strides are multiples of": LAYOUT,
    "in elements, A a multiple of": LAYOUT,
    "multiple of its element size": LAYOUT,
    "share memory": ("OVERLAP",),
    "shares memory": ("OVERLAP",),
    "takes the place": ("OVERLAP",),
    "eps to be a finite number": ("BAD_EPS",),
    "blocks, but": ("BAD_ROWS",),
    "does not have; build it for this GPU": ("NO_ROOM",),
}
EPS = (1e-6, 0.0, -0.0, 1e300, 1e-40, 1e-30, -2.5, math.nan, math.inf)


class Addresses(FakeArrays):
    """Arrays that are addresses, for the engine in Python."""

    def describe(self, given: Sequence[Any]) -> tuple[list[int], list[Layout]]:
        return [*given], []

    def maker(self, shape: Sequence[int], dtype: str, device: int, strides: Sequence[int] = ()) -> Any:
        return lambda: WORKSPACE


LIBRARY = Addresses(lambda size: WORKSPACE)


class Seen:
    """What a driver that does nothing is asked for: launches with the bits of their arguments, and memory to clear."""

    def __init__(self, cuda: Any, sizes: dict[int, list[int]]) -> None:
        """``sizes``: the bytes of each argument, by the hash of a kernel's name."""
        self.launched: list[tuple[Any, ...]] = []
        self.cleared: list[tuple[int, int]] = []
        self._sizes = sizes
        pointer = ctypes.c_void_p
        self._hooks = [
            ctypes.CFUNCTYPE(None, ctypes.POINTER(_Config), ctypes.c_uint64, ctypes.POINTER(pointer))(self._launch),
            ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_size_t)(self._clear),
        ]
        for name, hook in zip(("fake_launch", "fake_memset"), self._hooks, strict=True):
            pointer.in_dll(cuda, name).value = ctypes.cast(hook, pointer).value

    def _launch(self, config: Any, function: int, arguments: Any) -> None:
        c = config.contents
        attributes = (_Attribute * c.count).from_address(c.attributes) if c.count else ()
        given = [ctypes.string_at(arguments[n], size) for n, size in enumerate(self._sizes[function])]
        self.launched.append((function, *c.grid, *c.block, c.shared, {a.id: a.value[0] for a in attributes}, given))

    def _clear(self, to: int, size: int) -> None:
        self.cleared += [(to, aligned(size))] if size else []  # C clears the padding behind a buffer, too

    def taken(self) -> tuple[list[tuple[Any, ...]], list[tuple[int, int]]]:
        """What was seen since the last time."""
        found = [*self.launched], [*self.cleared]
        self.launched.clear()
        self.cleared.clear()
        return found


def hashed(name: str) -> int:
    """FNV-1a, as the driver does it."""
    found = 0xCBF29CE484222325
    for byte in name.encode():
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return found


@dataclass
class Arrays:
    """The arrays of a call: leading dimensions, and by name shapes, strides in elements and addresses; and eps."""

    lead: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    strides: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    eps: float


class Both:
    """A pack behind both interpreters."""

    def __init__(self, folder: Path, seed: int) -> None:
        made, where = random_pack(folder, seed), no_op(folder)
        flags = f'-DLNGEN_PACK_DIR="{folder}"', f'-DLNGEN_CUDA_LIBRARY="{where}"'
        built = cc(folder / "kernels.so", [folder / "c/lngen_kernels.c"], "-O0", "-shared", *flags)
        self.cuda, self.c, self.pack = ctypes.CDLL(str(where)), CLibrary(built, folder), Pack(folder).check()
        assert self.c.call("load", 0) == "OK", self.c.error()
        self.specs = [(group, PackCall(self.pack, text)) for group in groups_of(made) for text in group.specs]
        self.seen = Seen(
            self.cuda, {hashed(k["name"]): _sizes(k, s) for s in made.kernel_sets.values() for k in s["kernels"]}
        )

    def by_python(self, call: PackCall, given: Arrays) -> tuple[tuple[str, ...], Recipe | None]:
        """What C has to answer, and for a call that is taken what Python goes by."""
        layouts = [(t.dtype, given.shapes[t.name], given.strides[t.name], 0) for t in call.tensors]
        inputs, addresses = len(call.inputs), [given.addresses[t.name] for t in call.tensors]
        try:
            rows = math.prod(given.lead)
            self.pack.kernels(call.text, 0, rows).bind(rows, {})  # which C looks at first
            values = call.values(given.eps if call.signature.numbers else None)
            recipe = call.recipe(LIBRARY, layouts[:inputs], layouts[inputs:])
            call.launch(LIBRARY, recipe, addresses, values.bits)
        except LngenError as error:
            (status,) = [status for text, status in REFUSALS.items() if text in str(error)]
            return status, None
        bound = recipe.last[1]
        self.seen.cleared.clear()  # as the workspace was larger or smaller before
        bound.prepare(WORKSPACE, 0)
        return ("OK",), recipe

    def by_c(self, group: Group, call: PackCall, given: Arrays, recipe: Recipe | None) -> list[str]:
        """The statuses of the calls, with distances as they are given, or as Python goes by them."""
        inner = recipe.inner if recipe else given.lead[-1]
        fields: dict[str, Any] = {group.names[name]: address or None for name, address in given.addresses.items()}
        for t in (t for t in call.tensors if t.wide or t.of_table):
            steps = given.strides[t.name][:-1]
            if recipe:
                found = recipe.strides[t.name]
                steps = found if isinstance(found, tuple) else (inner * found, found)
            fields |= dict(zip(group.strides[t.name].values(), steps[::-1], strict=False))
        fields |= {group.strides[t.name]["stride"]: given.strides[t.name][0] for t in call.tensors if t.by_columns}
        fields |= {field: given.shapes[name][0] for name, field in group.table_rows.items()}
        fields |= {"inner": inner} if group.two else {}
        fields |= {"eps": given.eps} if group.eps else {}
        size = recipe.last[1].workspace_bytes if recipe else 1 << 50
        fields |= {"workspace": WORKSPACE if size else None, "workspace_bytes": size}
        name, dtype = group.name.removeprefix("lngen_"), self.pack.described(call.text)["spec"]["dtype"]
        ends = ("", "_init_workspace") if recipe else ("",)
        arguments = self.c.structs[name](d=call.d, dtype=self.c.dtypes[dtype], rows=math.prod(given.lead), **fields)
        return [self.c.call(name + end, arguments, 0, None) for end in ends]


def _sizes(kernel: Any, described: Any) -> list[int]:
    """The bytes of each argument of a kernel."""
    small = {n["name"] for n in described["call"]["numbers"] if n["dtype"] == "f32"}
    return [4 if a.get("number") in small else 8 for a in kernel["arguments"]]


# ---- calls ----


def drawn(call: PackCall, chance: random.Random) -> Arrays:
    """Arrays of their own without gaps, of which then some have another layout or place."""
    d, names = call.d, [t.name for t in call.tensors if t.wide]
    lead: tuple[int, ...] = (chance.choice((0, 1, 2, 3, 5, 40)),)
    if call.strides == 2:
        lead = (chance.choice((0, 1, 2, 3)), chance.choice((1, 2, 3, 4)))
    elif chance.random() < 0.05:
        lead = (chance.choice((1, 3, 64)) * 2**31 + chance.randint(-1, 1),)
    steps = {name: _gaps(lead, d + 8 * chance.choice((0, 0, 1, 5)), 8 * chance.choice((0, 0, 2))) for name in names}
    shapes = {t.name: t.shape(lead, d) for t in call.tensors}
    positions = chance.choice((1, 2, 20)) * (0 not in lead)
    shapes |= {t.name: (positions, shapes[t.name][1]) for t in call.tensors if t.by_position}
    strides = {t.name: (*steps[t.name], 1) if t.wide else t.strides(lead, d) for t in call.tensors}
    strides |= {t.name: _columns(strides[t.name], chance) for t in call.tensors if t.by_columns}
    strides |= {t.name: (shapes[t.name][1] + 4 * chance.choice((0, 1, 8)), 1) for t in call.tensors if t.of_table}
    given = Arrays(lead, shapes, strides, {name: n * APART for n, name in enumerate(shapes, 1)}, 1e-6)
    changes = [_other_steps, _other_address, _near, _near, _exactly] if max(lead) < 1000 else []
    changes = chance.sample(changes, min(len(changes), chance.randint(0, 2)))
    for change in changes:
        change(call, given, chance)
    if chance.random() < (0.1 if changes else 0.6):
        given.eps = chance.choice([eps for eps in EPS if math.isfinite(eps) or not changes])
    given.addresses |= {name: 0 for name, shape in shapes.items() if 0 in shape}
    return given


def _columns(strides: tuple[int, ...], chance: random.Random) -> tuple[int, ...]:
    """The strides of columns, mostly at another distance."""
    return (max(1, strides[0] + chance.choice((0, 0, 4, 8, 100, -4, 2, 1))), *strides[1:])


def _gaps(lead: tuple[int, ...], step: int, gap: int) -> tuple[int, ...]:
    """The distances of rows, at one distance or two."""
    return (step,) if len(lead) == 1 else (lead[-1] * step + gap, step)


def _other_steps(call: PackCall, given: Arrays, chance: random.Random) -> None:
    """Of one array, in any direction and of any size."""
    name = chance.choice([t.name for t in call.tensors if t.wide or t.of_table])
    unit = chance.choice((1, 8, call.d))
    steps = [unit * (chance.randint(1, 3 * call.d // unit) * chance.choice((1, -1))) for _ in given.lead]
    given.strides[name] = (*steps, 1)


def _other_address(call: PackCall, given: Arrays, chance: random.Random) -> None:
    given.addresses[chance.choice(call.names)] += chance.choice((1, 2, 4, 8, 16))


def _near(call: PackCall, given: Arrays, chance: random.Random) -> None:
    """A result in the middle of another array, or beside it."""
    result, other = chance.choice(call.outputs).name, chance.choice(call.names)
    far = chance.choice((40, 3 * call.d))
    given.addresses[result] = given.addresses[other] + 8 * chance.randint(-far, far)


def _exactly(call: PackCall, given: Arrays, chance: random.Random) -> None:
    """A result in the place of another array, mostly with its distances."""
    result, other = chance.choice(call.outputs), chance.choice(call.tensors)
    given.addresses[result.name] = given.addresses[other.name]
    if result.wide and other.wide and chance.random() < 0.7:
        given.strides[result.name] = given.strides[other.name]


@rotating("seed", range(10))
def test_both_take_and_refuse_the_same_and_launch_the_same(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, chance, found = Both(tmp_path, seed), random.Random(seed), Counter[str]()
    monkeypatch.setattr(driver, "library", lambda: both.cuda)
    monkeypatch.setattr(array_call, "LAUNCHED", set())  # which nothing runs after the test
    for _ in range(CALLS):
        group, call = chance.choice(both.specs)
        given = drawn(call, chance)
        wanted, recipe = both.by_python(call, given)
        seen = both.seen.taken()
        (got,) = both.by_c(group, call, given, None)
        both.seen.taken()
        assert got in wanted, (call.text, given, both.c.error())
        if recipe:
            assert both.by_c(group, call, given, recipe) == ["OK", "OK"], (call.text, given, both.c.error())
            assert both.seen.taken() == seen, (call.text, given)
        found[got] += 1
    assert min(found[status] for status in ("OK", "OVERLAP", "NO_ROOM", *LAYOUT)) > CALLS // 100
    assert min(found[status] for status in ("BAD_EPS", "BAD_ROWS")) > 0
