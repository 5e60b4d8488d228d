"""A fake libcuda with an executor behind it: what is launched through its functions runs on NumPy, from PTX.

``FakeDriver`` stands in for the loaded library. Its functions have the names and arguments of the driver's, and take
what ctypes takes. A launch is executed by lngen.proof.ptx, which checks bounds, alignment, races and barriers.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from c_calls import INT_MAX, STATUS, Function, c_function, number, refuse_if, room, text_of, write
from fake_graphs import Graphs, Node
from fake_images import Image, content_at, made_up_cubin, pack_images
from fake_launches import Entries, Launched, Loaded, launch_of, occupancy, runner
from fake_memories import Memories
from lngen.compiler.devices import Device, capability, device_for
from lngen.compiler.toolchain import compile_ptx
from lngen.launch.array_call import LAUNCHED
from lngen.launch.early import kernel_sets
from lngen.proof.ptx.outcome import Finding

# CUdevice_attribute
MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR, SHARED_OPTIN = 16, 75, 76, 97

# CUfunction_attribute
MAX_THREADS, STATIC_SHARED, NUM_REGS, PTX_VERSION, BINARY_VERSION = 0, 1, 4, 5, 6
DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14

# CUjit_option
ERROR_LOG, ERROR_LOG_SIZE = 5, 6

# CUpointer_attribute
OF_CONTEXT, OF_MEMORY_TYPE, OF_DEVICE = 1, 2, 9

CONTEXTS = 1 << 20  # the handle of the first device's primary context


class FakeDriver(Graphs):
    """A driver and its GPUs, all of one kind.

    refuse      the status of functions that fail, by their names
    calls       the functions called so far, whatever they answered
    launched    what was launched, in order
    findings    what the executor found; ``raises``: a launch with findings is an AssertionError
    captures    the streams that are captured, and the numbers of their captures; ``replay`` runs what they hold
    attributes  CUdevice_attribute and value, for all devices
    registers   registers per thread, by kernel; those of an image come before them
    capacity    bytes that each GPU can allocate
    order       the seed of the order in which blocks run, 0 the order of their numbers
    """

    def __init__(
        self,
        capability: tuple[int, int] = (9, 0),
        multiprocessors: int = 132,
        name: str = "NVIDIA H100",
        version: int = 13000,
        devices: int = 1,
    ) -> None:
        super().__init__()
        for known in (LAUNCHED, kernel_sets):  # of another GPU, whose functions have the same addresses
            known.clear()
        self.capability, self.name, self.version, self.devices = capability, name, version, devices
        self.attributes = attributes_of(device_for("sm_{}{}".format(*capability)), capability, multiprocessors)
        self.refuse: dict[str, int] = {}
        self.calls: list[str] = []
        self.launched: list[Launched] = []
        self.findings: list[Finding] = []
        self.raises = True
        self.captures: dict[int, int] = {}
        self.events: dict[int, int] = {}  # the number of launches before each
        self.waits: list[tuple[int, int, int]] = []  # streams, those they wait for, and the number of launches before
        self._recorded: dict[int, int] = {}  # the stream of each event
        self.registers: dict[str, int] = {}
        self.order = 0
        self.lock = threading.RLock()
        self.initialised = False
        self.memories = Memories(devices, self.lock)
        self.retained = [0] * devices
        self._images: dict[str, Image] = {}
        self._handles = itertools.count(1 << 24, 16)
        self._modules: dict[int, Loaded] = {}
        self._functions = Entries()
        self._captured: dict[int, list[Callable[[], None]]] = {}
        self._destructors: dict[int, Callable[[], int]] = {}  # of user objects
        self._kept: dict[int, list[int]] = {}  # the user objects of each capture's graph
        self._texts: dict[int, tuple[Any, Any]] = {}  # of each status: its name and its description
        self._local = threading.local()
        for key in dir(type(self)):
            if getattr(getattr(type(self), key), "of_library", False):
                setattr(self, key, Function(key, getattr(self, key)))

    # ---- for the test ----

    @property
    def capacity(self) -> int:
        return self.memories.capacity

    @capacity.setter
    def capacity(self, size: int) -> None:
        self.memories.capacity = size

    @property
    def context(self) -> int:
        """The handle of this thread's context, 0 if it has none."""
        return int(getattr(self._local, "context", 0))

    @property
    def device(self) -> int:
        """The device of this thread's context."""
        return self.context - CONTEXTS

    @property
    def capturing(self) -> bool:
        """True while a stream is captured by whom this thread has to wait for."""
        return any(self.captures.values()) and not getattr(self._local, "mode", 0)

    def knows(
        self, cubin: bytes, ptx: str, arch: str, registers: Mapping[str, int] | None = None, source: str = ""
    ) -> bytes:
        """From now on ``cubin``, which is for ``arch``, stands for ``ptx``; ``source``: the CUDA text for findings."""
        self._images[hashlib.sha256(cubin).hexdigest()] = Image(ptx, arch, dict(registers or {}), source)
        return cubin

    def knows_pack(self, folder: Path, compiled: Callable[[str, str], str] | None = None) -> None:
        """Knows every cubin of a folder; see ``pack_images``."""
        for cubin, ptx, arch, source in pack_images(folder, compiled):
            self.knows(cubin, ptx, arch, source=source)

    def made_up(self, source: str, arch: str = "sm_90") -> bytes:
        """A made-up cubin of a CUDA text, which stands for NVRTC's PTX of it; no cubin is compiled."""
        ptx = compile_ptx(source, arch, lines=True)
        return self.knows(made_up_cubin(ptx, arch), ptx, arch, source=source)

    def maps(self, address: int, size: int, name: str, **how: Any) -> None:
        """Makes host memory usable as a device's; see ``Memories.maps``."""
        with self.lock:
            self.memories.maps(address, size, name, **how)

    def maps_array(self, array: Any, name: str, **how: Any) -> int:
        """Maps the memory of a NumPy array whose elements follow each other; its address."""
        address = int(array.__array_interface__["data"][0])
        assert array.flags.c_contiguous
        self.maps(address, array.nbytes, name, writes=array.flags.writeable, **how)
        return address

    def unmaps(self, address: int) -> None:
        """Ends what ``maps`` began; before the memory is freed."""
        with self.lock:
            self.memories.unmaps(address)

    @contextlib.contextmanager
    def behind(self, module: Any) -> Iterator[FakeDriver]:
        """Within it, the function ``library`` of ``module`` returns this driver."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "library", lambda: self)
            yield self

    def replay(self, capture: int) -> None:
        """Runs a captured graph once."""
        with self.lock:
            for work in self._captured[capture]:
                work()

    def destroy(self, capture: int) -> None:
        """The end of the graph of a capture, and of all that was instantiated from it."""
        self._captured.pop(capture, None)
        for kept in self._kept.pop(capture, []):
            self._destructors.pop(kept)()

    def _enqueue(self, stream: int, work: Callable[[], None], *launched: Any) -> None:
        """Do it now, or when the graph is replayed into which the stream is captured; of a kernel what is launched."""
        if capture := self.captures.get(stream, 0):
            self.append(capture, Node(*launched))
            self._captured.setdefault(capture, []).append(work)
        else:
            work()

    # ---- the driver, its devices and contexts ----

    @c_function(context=False, initialised=False)
    def cuInit(self, flags: Any) -> None:
        refuse_if(number(flags) != 0)
        refuse_if(self.devices == 0, "NO_DEVICE")
        self.initialised = True

    @c_function(context=False, initialised=False)
    def cuDriverGetVersion(self, version: Any) -> None:
        write(version, ctypes.c_int, self.version)

    @c_function(context=False)
    def cuDeviceGetCount(self, count: Any) -> None:
        write(count, ctypes.c_int, self.devices)

    @c_function(context=False)
    def cuDeviceGet(self, device: Any, ordinal: Any) -> None:
        write(device, ctypes.c_int, self._known(ordinal))

    @c_function(context=False)
    def cuDeviceGetName(self, text: Any, size: Any, device: Any) -> None:
        self._known(device)
        there = room(text)
        assert there is None or number(size) <= there, f"{number(size)} bytes for a name, and the caller gives {there}."
        refuse_if(number(size) < 1)
        cut = self.name.encode()[: number(size) - 1] + b"\0"
        ctypes.memmove(number(text), cut, len(cut))

    @c_function(context=False)
    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> None:
        self._known(device)
        refuse_if(number(attribute) not in self.attributes)
        write(value, ctypes.c_int, self.attributes[number(attribute)])

    @c_function(context=False)
    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        write(context, ctypes.c_void_p, CONTEXTS + self._known(device))
        self.retained[number(device)] += 1

    @c_function(context=False)
    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> None:
        refuse_if(not self.retained[self._known(device)], "INVALID_CONTEXT")
        self.retained[number(device)] -= 1

    @c_function(context=False)
    def cuCtxGetCurrent(self, context: Any) -> None:
        write(context, ctypes.c_void_p, self.context or None)

    @c_function(context=False)
    def cuCtxSetCurrent(self, context: Any) -> None:
        refuse_if(number(context) != 0 and not self._usable(context), "INVALID_CONTEXT")
        self._local.context = number(context)

    @c_function(context=False)
    def cuCtxPushCurrent_v2(self, context: Any) -> None:
        refuse_if(not self._usable(context), "INVALID_CONTEXT")
        self._local.below = [*getattr(self._local, "below", []), self.context]
        self._local.context = number(context)

    @c_function()
    def cuCtxPopCurrent_v2(self, context: Any) -> None:
        if number(context):
            write(context, ctypes.c_void_p, self.context)
        below = getattr(self._local, "below", [])
        self._local.context = below.pop() if below else 0

    @c_function()
    def cuCtxGetDevice(self, device: Any) -> None:
        write(device, ctypes.c_int, self.device)

    @c_function(capturable=False)
    def cuCtxSynchronize(self) -> None:
        pass

    def _usable(self, context: Any) -> bool:
        """Whether it is the primary context of a device, and retained."""
        place = number(context) - CONTEXTS
        return 0 <= place < self.devices and self.retained[place] > 0

    def _known(self, device: Any) -> int:
        refuse_if(not 0 <= number(device) < self.devices, "INVALID_DEVICE")
        return number(device)

    # ---- modules and functions ----

    @c_function(capturable=False)
    def cuModuleLoadData(self, module: Any, image: Any) -> None:
        self._load(module, image)

    @c_function(capturable=False)
    def cuModuleLoadDataEx(self, module: Any, image: Any, count: Any, options: Any, values: Any) -> None:
        many = number(count)
        refuse_if(many > 0 and not (number(options) and number(values)))
        keys = (ctypes.c_int * many).from_address(number(options)) if many else ()
        given = (ctypes.c_void_p * many).from_address(number(values)) if many else ()
        found = dict(zip(keys, given, strict=True))
        try:
            self._load(module, image)
        except Exception as error:
            if found.get(ERROR_LOG) and found.get(ERROR_LOG_SIZE):
                text = str(error.__cause__ or error).encode()[: found[ERROR_LOG_SIZE] - 1] + b"\0"
                ctypes.memmove(found[ERROR_LOG], text, len(text))
            raise

    def _load(self, module: Any, given: Any) -> None:
        image = self._image(given)
        image.check(self.capability, self.version)
        handle = next(self._handles)
        write(module, ctypes.c_void_p, handle)
        self._modules[handle] = Loaded(image, self.device, self.memories.of(self.device))

    def _image(self, given: Any) -> Image:
        """The image behind a pointer: one that is known, or else PTX."""
        refuse_if(not number(given))
        content = content_at(number(given), room(given))
        found = self._images.get(hashlib.sha256(content).hexdigest())
        if found is not None:
            return found
        refuse_if(b".entry" not in content or b".version" not in content, "INVALID_IMAGE")
        return Image(content.split(b"\0", 1)[0].decode())

    @c_function()
    def cuModuleUnload(self, module: Any) -> None:
        refuse_if(number(module) not in self._modules, "INVALID_HANDLE")
        self._modules.pop(number(module)).unload()
        self._functions.drop(number(module))

    @c_function()
    def cuModuleGetFunction(self, function: Any, module: Any, name: Any) -> None:
        refuse_if(number(module) not in self._modules, "INVALID_HANDLE")
        owner = self._modules[number(module)]
        entry = owner.image.entry(text_of(name).decode(errors="replace"))
        most = self.attributes[SHARED_OPTIN]
        handle = self._functions.handle(number(module), owner, entry, self.registers, most, self._handles)
        write(function, ctypes.c_void_p, handle)

    @c_function()
    def cuFuncGetAttribute(self, value: Any, attribute: Any, function: Any) -> None:
        f = self._functions.get(number(function))
        version = int("".join(c for c in f.owner.image.arch if c.isdigit()) or 0)
        known = {
            MAX_THREADS: f.most_threads, STATIC_SHARED: f.static, NUM_REGS: f.registers, BINARY_VERSION: version,
            PTX_VERSION: capability(f.owner.image.module.target), DYNAMIC_SHARED: f.allowed_shared,
            NON_PORTABLE_CLUSTER: int(f.any_cluster),
        }  # fmt: skip
        refuse_if(number(attribute) not in known)
        write(value, ctypes.c_int, known[number(attribute)])

    @c_function()
    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: Any) -> None:
        f, wanted = self._functions.get(number(function)), number(value)
        refuse_if(number(attribute) not in (DYNAMIC_SHARED, NON_PORTABLE_CLUSTER))
        if number(attribute) == DYNAMIC_SHARED:
            refuse_if(not 0 <= wanted <= f.most_shared - f.static)
            f.allowed_shared = wanted
        else:
            refuse_if(self.capability < (9, 0))
            f.any_cluster = bool(wanted)

    @c_function()
    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, count: Any, function: Any, block: Any, shared: Any) -> None:
        f = self._functions.get(number(function))
        write(count, ctypes.c_int, occupancy(f, number(block), number(shared), self.attributes))

    # ---- memory ----

    @c_function(capturable=False)
    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> None:
        write(pointer, ctypes.c_uint64, self.memories.allocate(self.device, number(size)))

    @c_function(capturable=False)
    def cuMemFree_v2(self, pointer: Any) -> None:
        self.memories.free(number(pointer))

    @c_function(capturable=False)
    def cuMemcpyHtoD_v2(self, to: Any, source: Any, size: Any) -> None:
        there = room(source)
        assert there is None or number(size) <= there, f"{number(size)} bytes are read, and the caller gives {there}."
        self.memories.put(number(to), ctypes.string_at(number(source), number(size)))

    @c_function(capturable=False)
    def cuMemcpyDtoH_v2(self, to: Any, source: Any, size: Any) -> None:
        there = room(to)
        assert there is None or number(size) <= there, f"{number(size)} bytes are written, the caller gives {there}."
        content = self.memories.content(number(source), number(size))
        ctypes.memmove(number(to), content, len(content))

    @c_function()
    def cuMemsetD8Async(self, to: Any, value: Any, size: Any, stream: Any) -> None:
        address, content = number(to), bytes([number(value) & 255]) * number(size)
        self.memories.content(address, len(content))  # is it there?
        self._enqueue(number(stream), lambda: self.memories.put(address, content))

    @c_function()
    def cuPointerGetAttribute(self, data: Any, attribute: Any, pointer: Any) -> None:
        device = self.memories.device_of(number(pointer))
        refuse_if(number(attribute) not in (OF_CONTEXT, OF_MEMORY_TYPE, OF_DEVICE))
        if number(attribute) == OF_CONTEXT:
            write(data, ctypes.c_void_p, CONTEXTS + device)
        else:
            write(data, ctypes.c_int, device if number(attribute) == OF_DEVICE else 2)

    # ---- streams and launches ----

    @c_function(context=False)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        before = getattr(self._local, "mode", 0)
        self._local.mode = ctypes.c_int.from_address(number(mode)).value
        write(mode, ctypes.c_int, before)

    @c_function()
    def cuStreamSynchronize(self, stream: Any) -> None:
        refuse_if(bool(self.captures.get(number(stream))), "STREAM_CAPTURE_UNSUPPORTED")

    @c_function()
    def cuStreamCreate(self, stream: Any, flags: Any) -> None:
        write(stream, ctypes.c_void_p, next(self._handles))

    @c_function()
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> None:
        refuse_if(number(event) not in self.events, "INVALID_HANDLE")
        self.waits.append((number(stream), self._recorded[number(event)], self.events[number(event)]))

    @c_function()
    def cuEventDestroy_v2(self, event: Any) -> None:
        refuse_if(number(event) not in self.events, "INVALID_HANDLE")
        del self.events[number(event)]

    @c_function()
    def cuEventCreate(self, event: Any, flags: Any) -> None:
        write(event, ctypes.c_void_p, next(self._handles))

    @c_function()
    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self.events[number(event)], self._recorded[number(event)] = len(self.launched), number(stream)

    @c_function()
    def cuEventSynchronize(self, event: Any) -> None:
        refuse_if(number(event) not in self.events, "INVALID_HANDLE")

    @c_function()
    def cuEventElapsedTime(self, milliseconds: Any, start: Any, end: Any) -> None:
        """A millisecond for each launch between two events."""
        refuse_if(not {number(start), number(end)} <= {*self.events}, "INVALID_HANDLE")
        write(milliseconds, ctypes.c_float, self.events[number(end)] - self.events[number(start)])

    @c_function()
    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: Any) -> None:
        assert not number(extra), "arguments are expected in the table of pointers, not in 'extra'."
        f = self._functions.get(number(function))
        refuse_if(f.owner.device != self.device, "INVALID_HANDLE")
        launched = launch_of(f, config, arguments, self.attributes, self.capability)
        if launched.cooperative:
            most = self.attributes[MULTIPROCESSORS] * occupancy(f, launched.threads, launched.shared, self.attributes)
            refuse_if(launched.blocks > most, "COOPERATIVE_LAUNCH_TOO_LARGE")
        refuse_if(not occupancy(f, launched.threads, launched.shared, self.attributes), "LAUNCH_OUT_OF_RESOURCES")
        self.launched.append(launched)
        run = runner(f, launched, self.memories.of(self.device), self.order)
        self._enqueue(launched.stream, lambda: self._check(run()), number(function), launched)

    def _check(self, found: tuple[Finding, ...]) -> None:
        self.findings += found
        assert not (found and self.raises), "\n".join(map(str, found))

    @c_function()
    def cuStreamGetCaptureInfo_v2(
        self, stream: Any, status: Any, capture: Any, graph: Any, dependencies: Any, count: Any
    ) -> None:
        found = self.captures.get(number(stream), 0)
        write(status, ctypes.c_int, int(found != 0))
        for to, kind, value in (
            (capture, ctypes.c_uint64, found), (graph, ctypes.c_void_p, found),
            (dependencies, ctypes.c_void_p, None), (count, ctypes.c_size_t, 0),
        ):  # fmt: skip
            if found and number(to):
                write(to, kind, value)

    @c_function(context=False)
    def cuUserObjectCreate(self, made: Any, value: Any, destroy: Any, count: Any, flags: Any) -> None:
        handle, held = next(self._handles), ctypes.c_void_p(number(value))
        refuse_if(number(flags) != 1 or not number(destroy) or number(count) < 1)
        write(made, ctypes.c_void_p, handle)
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(number(destroy))
        self._destructors[handle] = lambda: int(call(held))

    @c_function(context=False)
    def cuGraphRetainUserObject(self, graph: Any, kept: Any, count: Any, flags: Any) -> None:
        refuse_if(number(kept) not in self._destructors or not number(graph))
        self._kept.setdefault(number(graph), []).append(number(kept))

    # ---- errors ----

    @c_function(context=False, initialised=False)
    def cuGetErrorName(self, status: Any, text: Any) -> None:
        write(text, ctypes.c_void_p, self._described(number(status))[0])

    @c_function(context=False, initialised=False)
    def cuGetErrorString(self, status: Any, text: Any) -> None:
        write(text, ctypes.c_void_p, self._described(number(status))[1])

    def _described(self, status: int) -> tuple[int, int]:
        """Where the name and the description of a status are."""
        names = {n: name for name, n in STATUS.items()}
        refuse_if(status not in names)
        if status not in self._texts:
            words = names[status].removeprefix("CUDA_").removeprefix("ERROR_").replace("_", " ").lower()
            self._texts[status] = tuple(map(ctypes.create_string_buffer, (names[status].encode(), words.encode())))  # type: ignore[assignment]
        name, description = self._texts[status]
        return ctypes.addressof(name), ctypes.addressof(description)


def attributes_of(device: Device, capability: tuple[int, int], multiprocessors: int) -> dict[int, int]:
    """CUdevice_attribute and value."""
    return {
        1: 1024, 2: 1024, 3: 1024, 4: 64, 5: INT_MAX, 6: 65535, 7: 65535, 8: 48 << 10, 9: 64 << 10, 10: 32, 12: 65536,
        13: device.clock_mhz * 1000, 16: multiprocessors, 31: 1, 38: device.l2_mib << 20, 39: device.threads, 41: 1,
        75: capability[0], 76: capability[1], 81: device.shared_kib << 10, 82: device.registers, 95: 1,
        97: device.shared_block_kib << 10, 106: device.blocks, 111: device.shared_reserved_kib << 10,
        120: int(capability >= (9, 0)),
    }  # fmt: skip
