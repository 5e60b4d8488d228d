"""Everything in lngen that launches a call. Each takes the calls of calls.py, and says what it refuses."""

from __future__ import annotations

import ctypes
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import lngen
from bits import spec_of
from c_library import CLibrary, copy_of
from calls import ANY_LAYOUT, SCHEDULES, Call, Memory, signature
from fake_driver import FakeDriver
from lngen.compiler.ir.numerics import Array
from lngen.dtypes import DType
from lngen.errors import ArrayError
from lngen.launch.pack import Pack
from lngen.launch.signature import contiguous
from lngen.packs import manifest
from lngen.packs.c_library import groups_of
from lngen.proof.check.inputs import POISON, forward_inputs

COLUMNS = r"is expected to have strides \(A, (3, )?1\) in elements, A a multiple of 4 from \d on"

# Why a call is refused: what Python says, the C library's status, and what TVM FFI raises; "" where there is no way to
# make such a call in C, or its caller is expected to know better.
REFUSED = {
    "overlap": ("is written to, but shares memory with", "OVERLAP", "shares memory with"),
    "results": ("are both written to, but share memory", "OVERLAP", "shares memory with"),
    "own rows": ("is written to, but its (rows|elements) (overlap|share|interleave)", "BAD_STRIDE", "overlap"),
    "cut": ("rows at two distances that change at the same", "", "rows at two distances at most, which change at one"),
    "eps": ("expects eps to be a finite number, got", "BAD_EPS", "eps is expected to be finite"),
    "no number": ("expects eps to be a finite number, got", "", "eps is expected to be a number"),
    "eps is missing": ("expects eps in every call, which is missing", "", r"workspace=None, eps\), got"),
    "eps is built in": ("built in, got eps=", "", "workspace is expected to be a tensor"),
    "missing": ("which is missing", "NULL_POINTER", "is expected to be a tensor, got None"),
    "dtype": ("is expected to be (f16|bf16|f32|f64), got", "", "is expected to be|no kernels for"),
    "shape": ("is expected to have shape", "", "is expected to (be|have)"),
    "D": ("the spec's D last, got", "", "no kernels for x of|is expected to be"),
    "row": ("is expected to have contiguous rows", "", "is expected to have contiguous rows"),
    "columns": (COLUMNS, "BAD_STRIDE", "its stride is expected to be a multiple of 4"),
    "columns over columns": (f"{COLUMNS}|its elements share", "BAD_STRIDE", "its stride is|columns that are apart"),
    "within columns": (COLUMNS, "", "is expected to have contiguous columns"),
    "vector": ("is expected to (be contiguous|have contiguous rows)", "", "is expected to be contiguous"),
    "distance": ("is expected to have rows at one distance", "", "is expected to have rows at one distance"),
    "narrow": ("multiples of so many bytes", "MISALIGNED|BAD_STRIDE", "multiples? of"),
}


class Refusal(Exception):
    """What a launcher says of a call that it refuses."""


class Host:
    """The memories of a call at aligned addresses of the host, which are memory of a fake GPU meanwhile."""

    def __init__(self, gpu: FakeDriver, memory: Memory, device: int = 0) -> None:
        self.gpu, self.memory, self.device = gpu, memory, device
        self._bytes = {name: _aligned(content) for name, content in memory.before.items()}
        for name, content in self._bytes.items():
            gpu.maps_array(content, name, device=device)

    def close(self) -> None:
        for content in self._bytes.values():
            self.gpu.unmaps(content.ctypes.data)

    def restore(self) -> None:
        """Every memory is as it was before the call."""
        for name, content in self._bytes.items():
            content[:] = self.memory.before[name]

    def address(self, name: str) -> int:
        """Of element 0 of an array."""
        memory, at = self.memory.place(name)
        return int(self._bytes[memory].ctypes.data) + at

    def view(self, name: str) -> Array:
        """An array in the memory of the host."""
        return self.memory.view(name, self.after(self.memory.laid[name].memory))

    def after(self, memory: str) -> Array:
        """The bytes of a memory now."""
        return self._bytes[memory]

    def tensor(self, name: str) -> Any:
        """An array as a tensor of PyTorch in the same memory."""
        import torch

        return tensor_at(self.memory, name, torch.from_numpy(self.after(self.memory.laid[name].memory)))

    def room(self, size: int) -> int:
        """The address of new memory that is not zero."""
        address = self.gpu.memories.allocate(self.device, size)
        self.gpu.memories.put(address, bytes([POISON]) * size)
        return address


def tensor_at(memory: Memory, name: str, bytes_: Any) -> Any:
    """An array of a call in the bytes of its memory, a tensor."""
    import torch

    laid, dtype = memory.laid[name], getattr(torch, DType(memory.laid[name].dtype).library)
    return bytes_.view(dtype).as_strided(laid.shape, laid.strides, memory.place(name)[1] // laid.size)


def _aligned(content: Array) -> Array:
    whole = np.empty(content.size + 512, np.uint8)
    found = whole[-whole.ctypes.data % 256 :][: content.size]
    found[:] = content
    return found


class Launcher(ABC):
    """Launches calls.

    narrow     takes arrays that suit no kernel of a pack
    column     of REFUSED
    launches   kernels; otherwise the interpreter runs
    """

    narrow, column, launches = True, 0, True

    @classmethod
    def takes(cls, call: Call) -> bool:
        """Whether there is a way to make such a call."""
        return not call.refused or bool(REFUSED[call.refused][cls.column])

    @classmethod
    def expected(cls, call: Call) -> str:
        """The words that refuse a call, a regular expression; "" for one that gives results."""
        why = "narrow" if call.narrow and not cls.narrow else call.refused
        return REFUSED[why][cls.column] if why else ""

    def returns(self, memory: Memory) -> Collection[str]:
        """The results that a caller gets."""
        return [t.name for t in memory.signature.outputs]

    @abstractmethod
    def launch(self, memory: Memory, host: Host) -> Mapping[str, Array]:
        """The results by name; Refusal."""


def wrong(launcher: Launcher, memory: Memory, host: Any) -> list[str]:
    """What is not as expected of a call: its results, what lies beside them, or whether and why it is refused."""
    expected = launcher.expected(memory.call)
    try:
        results = launcher.launch(memory, host)
    except Refusal as refused:
        told = expected and re.search(expected, str(refused))
        return [*memory.wrong({}, host.after), *[f"it is refused: {refused}"] * (not told)]
    if expected:
        return [f"it is not refused: {expected}"]
    missing = {*launcher.returns(memory)} - {*results}
    return [*memory.wrong(results, host.after), *(f"{name} is missing" for name in missing)]


# ---- Python: NumPy arrays, kernels that are compiled, and those of a pack ----


class Python(Launcher):
    """``forward`` and ``backward`` of a norm."""

    def __init__(self) -> None:
        self._norms: dict[str, Any] = {}

    @abstractmethod
    def made(self, text: str) -> Any:
        """A norm of a spec, or of a backward with its forward."""

    @abstractmethod
    def array(self, name: str, host: Host) -> Any:
        """An array of the call."""

    @abstractmethod
    def other(self, content: Array) -> Any:
        """An array with that content, in memory of its own."""

    @abstractmethod
    def read(self, array: Any) -> Array:
        """The content of a new array."""

    def launch(self, memory: Memory, host: Host) -> Mapping[str, Array]:
        text = memory.call.spec
        norm = self._norms.get(text) or self._norms.setdefault(text, self.made(text))
        arrays = {n: None if n in memory.call.absent else self.array(n, host) for n in memory.laid}
        run = self._backward if memory.spec.direction == "bwd" else self._forward
        try:
            found = run(norm, memory, arrays)
        except ArrayError as error:
            raise Refusal(str(error)) from error
        placed = {name: host.view(name) for name in found if arrays.get(name) is found[name]}
        assert {*placed} >= {*memory.given}
        return placed | {n: self.read(array) for n, array in found.items() if n not in placed}

    def _forward(self, norm: Any, memory: Memory, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        s, call = memory.signature, memory.call
        out = tuple([arrays[t.name] if t.name in memory.given else None for t in s.outputs])
        y, saved = norm.forward(*[arrays[t.name] for t in s.inputs], out=out if memory.given else None, eps=call.eps)
        assert saved.overwritten == call.lost
        found = dict(zip(s.returned, y if isinstance(y, tuple) else (y,), strict=True))
        return found | {t.name: saved[t.name] for t in s.outputs if t.name in saved.names}

    def _backward(self, norm: Any, memory: Memory, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Forward saves the arrays of the call, and others of the same numbers where it takes more."""
        s, call = memory.signature, memory.call
        given = [arrays[n] if n in arrays else self.other(a) for n, a in inputs_of_forward(memory).items()]
        _, saved = norm.forward(*given, eps=call.eps)
        out = tuple([arrays[n] if n in memory.given else None for n in s.returned])
        cotangents, given = tuple([arrays[n] for n in s.cotangents]), {t.name for t in s.inputs}
        scale = arrays["dx_scale"] if "dx_scale" in given else None
        found = norm.backward(cotangents, saved, out=out if memory.given else None, dx_scale=scale)
        assert saved.overwritten == tuple([n for n in call.lost if n in saved.names])
        return dict(zip(s.returned, found, strict=True))


def inputs_of_forward(memory: Memory) -> dict[str, Array]:
    """The numbers of the inputs of a backward's forward."""
    call, d = memory.call, memory.spec.d
    drawn = forward_inputs(memory.spec, call.rows, memory.seed, eps=call.eps)
    tensors = signature(memory.spec.with_direction("fwd")).inputs
    return {t.name: drawn[t.name].reshape(t.shape(call.lead, d)) for t in tensors}


def compiled(text: str) -> Any:
    """A norm that compiles."""
    options: dict[str, Any] = dict(part.split("=") for part in text.partition(":")[2].split(","))
    if text in SCHEDULES:
        options["schedule"] = {spec_of(text).direction: SCHEDULES[text]}
    return lngen.compile(spec_of(text).definition, d=int(options.pop("d")), **options)


class NumPy(Python):
    """NumPy arrays of any layout run the interpreter."""

    launches = False

    @classmethod
    def expected(cls, call: Call) -> str:
        return "" if call.refused in ANY_LAYOUT else super().expected(call)

    def made(self, text: str) -> Any:
        return compiled(text)

    def array(self, name: str, host: Host) -> Any:
        return host.view(name)

    def other(self, content: Array) -> Any:
        return content

    def read(self, array: Any) -> Array:
        return np.asarray(array)


class Compiled(Python):
    """Arrays of a GPU, and kernels that are compiled at the first call. ``arrays``: a library of such arrays."""

    def __init__(self, arrays: Any) -> None:
        super().__init__()
        self.arrays = arrays

    def made(self, text: str) -> Any:
        return compiled(text)

    def array(self, name: str, host: Host) -> Any:
        return self.arrays.of_call(host, name)

    def other(self, content: Array) -> Any:
        return self.arrays.put(content)

    def read(self, array: Any) -> Array:
        return self.arrays.read(array)


class Packed(Compiled):
    """Kernels of a pack."""

    narrow = False

    def __init__(self, arrays: Any, folder: Path) -> None:
        super().__init__(arrays)
        self.pack = Pack(folder)

    def made(self, text: str) -> Any:
        return self.pack.norm(str(spec_of(text).with_direction("fwd")))


# ---- C, and TVM FFI ----


class CCall:
    """A call of the C library of a pack, of which every result is given.

    group    its function, without lngen_
    fields   of the function's structure
    """

    def __init__(self, library: CLibrary, group: str, memory: Memory, host: Any, device: int = 0) -> None:
        self.library, self.group, self.memory, self.host, self.device = library, group, memory, host, device
        call, d = memory.call, memory.spec.d
        fields: dict[str, Any] = {"d": d, "dtype": library.dtypes[str(memory.spec.dtype)], "rows": call.rows}
        fields |= {} if call.eps is None else {"eps": float(call.eps)}
        for name, laid in memory.laid.items():
            fields[name] = None if name in call.absent else host.address(name)
            if laid.shape[-1:] == (d,) and len(laid.shape) > 1:
                fields |= self._distances(name, laid.strides)
            if f"{name}_stride" not in fields and len(laid.shape) > 1:  # of columns
                fields[f"{name}_stride"] = laid.strides[0]
        self.fields = {name: fields.get(name, 0) for name, _ in library.structs[group]._fields_}

    def _distances(self, name: str, strides: tuple[int, ...]) -> dict[str, int]:
        """Rows at one distance, or at two, of which the last dimension has the inner."""
        if "strides=2" not in self.memory.call.spec:
            return {f"{name}_stride": strides[-2]}
        inner = self.memory.call.lead[-1]
        return {"inner": inner, f"{name}_outer_stride": strides[0], f"{name}_stride": strides[-2]}

    def prepare(self, stream: int = 0) -> None:
        """Gives the call a workspace, if it needs one."""
        size = ctypes.c_size_t()
        arguments = self.library.structs[self.group](**self.fields)
        _ok(self.library.call(f"{self.group}_workspace_bytes", arguments, self.device, ctypes.byref(size)))
        if size.value:
            self.fields |= {"workspace": self.host.room(size.value), "workspace_bytes": size.value}
        _ok(self.status("_init_workspace", stream))

    def launch(self, stream: int = 0) -> None:
        """The call, which has to succeed."""
        _ok(self.status(stream=stream))

    def status(self, function: str = "", stream: int = 0, device: int | None = None, **changes: Any) -> str:
        """That of the call, or another function of the group, on a device and with some fields changed."""
        arguments = self.library.structs[self.group](**{**self.fields, **changes})
        where = self.device if device is None else device
        return self.library.call(f"{self.group}{function}", arguments, where, ctypes.c_void_p(stream))

    def results(self) -> dict[str, Array]:
        """What the call has written."""
        return {t.name: self.host.view(t.name) for t in self.memory.signature.outputs}

    def wrong(self) -> list[str]:
        """Results with other bits than the interpreter's, and what was written beside them."""
        return self.memory.wrong(self.results(), self.host.after)


def _ok(status: str) -> None:
    if status != "OK":
        raise Refusal(status)


class C(Launcher):
    """The C library of a pack."""

    narrow, column = False, 1

    def __init__(self, folder: Path, library: Path) -> None:
        self.library, self.groups = CLibrary(library, folder), groups(folder)
        assert self.library.call("load", 0) == "OK", self.library.error()

    @classmethod
    def takes(cls, call: Call) -> bool:
        """A stride of 0 says that rows follow each other; leading dimensions are none or two."""
        return super().takes(call) and len(call.lead) < 3 and not spread(call)

    def launch(self, memory: Memory, host: Host) -> Mapping[str, Array]:
        made = CCall(self.library, self.groups[str(memory.spec)], memory, host)
        made.prepare()
        made.launch()
        return made.results()


def groups(folder: Path) -> dict[str, str]:
    """The functions of a pack's C library, without lngen_, by the specs that they take."""
    found = groups_of(manifest.read(folder))
    return {text: g.name.removeprefix("lngen_") for g in found for text in g.specs}


def spread(call: Call) -> bool:
    """True if rows of an array lie in one place."""
    return any(0 in place.strides for place in call.at.values())


class TvmFfi(Launcher):
    """The same library called through apache-tvm-ffi, which loads the kernels and makes no arrays."""

    narrow, column = False, 2

    def __init__(self, folder: Path, library: Path) -> None:
        import tvm_ffi

        self.of = tvm_ffi.load_module(str(copy_of(library)))
        self.groups = groups(folder)

    @classmethod
    def takes(cls, call: Call) -> bool:
        return super().takes(call) and not spread(call)

    def given(self, memory: Memory, host: Host, device: int = 0) -> dict[str, Any]:
        """The tensors of a call by name, with strides where it has some; and a workspace if it needs one."""
        from gpu_dlpack import tensor

        call, given = memory.call, dict[str, Any]()
        for name, laid in memory.laid.items():
            strides = () if laid.strides == contiguous(laid.shape) else laid.strides
            made = tensor(host.address(name), laid.shape, laid.dtype, strides, device=device)
            given[name] = None if name in call.absent else made
        size_of = getattr(self.of, f"{self.groups[str(memory.spec)]}_workspace_bytes")
        size = size_of(given[memory.signature.inputs[memory.signature.leader].name])
        return given | ({"workspace": tensor(host.room(size), (size,), "u8")} if size else {})

    def launch(self, memory: Memory, host: Host) -> Mapping[str, Array]:
        eps = [] if memory.call.eps is None else [memory.call.eps]
        try:
            getattr(self.of, self.groups[str(memory.spec)])(*self.given(memory, host).values(), *eps)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refusal(str(error)) from error
        return {t.name: host.view(t.name) for t in memory.signature.outputs}


# ---- PyTorch ----


class Torch(Launcher):
    """Functions of tensors that have derivatives: those of lngen.torch, as operators.

    graphs   that there are functions of
    direct   past the dispatcher
    """

    graphs: Collection[str] = ("layernorm", "add_rmsnorm", "softmax")
    launches = direct = False

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    @classmethod
    def takes(cls, call: Call) -> bool:
        """New results, or y, of default keys. Tensors have no strides below 0. Operators copy what they computed."""
        found = re.fullmatch(r"(\w+)\.(fwd|bwd):d=64,dtype=f32", call.spec)
        given = {"y"} if call.spec in cls.with_out() else set[str]()
        results = {"y", "mean", "rstd", "h", "dx", "dgamma", "dbeta"}.intersection(call.at)
        steps = [step for place in call.at.values() for step in place.strides]
        why = ("", "overlap") if cls.direct else ("",)
        suits = found is not None and found[1] in cls.graphs and min(steps, default=0) >= 0
        return suits and call.refused in why and results <= given and call.eps is None

    @classmethod
    def with_out(cls) -> Collection[str]:
        """The specs whose functions take out=."""
        return ("layernorm.fwd:d=64,dtype=f32",)

    def returns(self, memory: Memory) -> Collection[str]:
        """Functions of PyTorch keep statistics to themselves."""
        return memory.signature.returned

    def function(self, graph: str) -> Callable[..., Any]:
        """Of the inputs of a graph in order."""
        import lngen.torch as L

        of: dict[str, Callable[..., Any]] = {
            "layernorm": lambda x, w, b, **out: L.layer_norm(x, x.shape[-1:], w, b, **out),
            "add_rmsnorm": lambda x, r, w: L.add_rms_norm(x, r, x.shape[-1:], w, 1e-5),
            "softmax": lambda x: L.softmax(x, -1),
        }
        return of[graph]

    def launch(self, memory: Memory, host: Host) -> Mapping[str, Array]:
        import torch

        s, function = memory.signature, self.function(memory.spec.definition.name)
        known = {name: host.tensor(name) for name in memory.laid}
        if memory.spec.direction == "bwd":
            numbers, x = inputs_of_forward(memory), known[s.inputs[0].name]
            given = [
                (known[n] if n in known else torch.from_numpy(a).to(x.device)).requires_grad_()
                for n, a in numbers.items()
            ]
            gradients = torch.autograd.grad(function(*given), given, [known[n] for n in s.cotangents])
            return {name: t.cpu().numpy() for name, t in zip(s.returned, gradients, strict=True)}
        out = {name: known[name] for name in memory.given}
        try:
            found = function(*[known[t.name] for t in s.inputs], **({"out": out["y"]} if out else {}))
        except ArrayError as error:
            raise Refusal(str(error)) from error
        assert not out or found is out["y"]
        results = found if isinstance(found, tuple) else (found,)
        return {name: t.cpu().numpy() for name, t in zip(s.returned, results, strict=True)}


class Direct(Torch):
    """Past the dispatcher."""

    launches = direct = True


class Hub(Torch):
    """Functions of a hub package, as operators."""

    graphs, launches = ("layernorm",), True

    @classmethod
    def with_out(cls) -> Collection[str]:
        return ()

    def function(self, graph: str) -> Callable[..., Any]:
        from lngen.launch.hub_package import functional

        return lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b)


class HubDirect(Hub):
    """Past the dispatcher."""

    direct = True


LAUNCHERS: dict[str, type[Launcher]] = {
    "numpy": NumPy, "compiled": Compiled, "pack": Packed, "c": C, "tvm": TvmFfi, "torch": Torch,
    "torch, direct": Direct, "hub": Hub, "hub, direct": HubDirect,
}  # fmt: skip
