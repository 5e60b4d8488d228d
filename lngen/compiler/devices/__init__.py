"""GPUs as data: limits of the multiprocessors, memory, and features, one TOML file for each GPU.

``capabilities.toml`` has the limits of every compute capability; ``tables`` has measured schedules.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lngen.errors import DeviceError, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Device:
    """A GPU.

    name                  as the driver reports it
    arch                  the target its kernels are compiled for, such as sm_90
    multiprocessors       their number
    clock_mhz             boost clock of the multiprocessors
    registers, threads, blocks, barriers  limits of a multiprocessor; 32 bits a register, barriers 0 if not limited
    shared_kib            shared memory of a multiprocessor in KiB; ``shared_block_kib`` of a block, at most
    shared_reserved_kib   KiB that the system reserves per block; ``shared_unit``: bytes of an allocation
    bandwidth_gb_s        memory bandwidth, 1e9 bytes per second
    l2_mib                size of the L2 cache
    latency_ns            from a load to its data, under load
    clusters              number of clusters of 1, 2, 4, ... blocks that run at a time, one block per multiprocessor
    largest_cluster       blocks
    cp_async, tma, pdl    asynchronous copies, bulk copies, programmatic dependent launch
    """

    name: str
    arch: str
    multiprocessors: int
    clock_mhz: int
    registers: int
    threads: int
    blocks: int
    barriers: int
    shared_kib: int
    shared_block_kib: int
    shared_reserved_kib: int
    shared_unit: int
    bandwidth_gb_s: float
    l2_mib: int
    latency_ns: int
    clusters: tuple[int, ...]
    largest_cluster: int
    cp_async: bool
    tma: bool
    pdl: bool

    @property
    def capability(self) -> int:
        """The compute capability, 90 for sm_90."""
        return capability(self.arch)

    def resident_clusters(self, cluster: int) -> int:
        """Clusters of ``cluster`` blocks that run at a time, one block per multiprocessor; 0 if there are none."""
        place = cluster.bit_length() - 1
        return self.clusters[place] if place < len(self.clusters) else 0

    def completed(self, properties: Mapping[str, object]) -> Device:
        """This description with the properties that a live GPU reports, by the names of cudaDeviceProp.

        Values that are not reported, or not positive, do not change. Fewer multiprocessors run fewer clusters.
        """
        found = {field: properties.get(key) for field, (key, _) in _REPORTED.items()}
        units = {field: unit for field, (_, unit) in _REPORTED.items()}
        known = {f: n // units[f] for f, n in found.items() if isinstance(n, int) and n // units[f] > 0}
        name = properties.get("name", self.name)
        count = known.get("multiprocessors", self.multiprocessors)
        clusters = (count, *(max(1, n * count // self.multiprocessors) for n in self.clusters[1:]))
        changed = known | {"name": name.decode() if isinstance(name, bytes) else name, "clusters": clusters}
        return replace(self, **changed)  # type: ignore[arg-type]


# A field, its name in cudaDeviceProp, and a divisor.
_REPORTED = {
    "multiprocessors": ("multiProcessorCount", 1),
    "registers": ("regsPerMultiprocessor", 1),
    "threads": ("maxThreadsPerMultiProcessor", 1),
    "blocks": ("maxBlocksPerMultiProcessor", 1),
    "shared_kib": ("sharedMemPerMultiprocessor", 1024),
    "shared_block_kib": ("sharedMemPerBlockOptin", 1024),
    "shared_reserved_kib": ("reservedSharedMemPerBlock", 1024),
    "l2_mib": ("l2CacheSize", 2**20),
}


@cache
def capability(arch: str) -> int:
    """The compute capability of an arch: 90 for sm_90 and sm_90a; 0 if the text names none."""
    found = re.fullmatch(r"sm_([0-9]{2,3})[a-z]?", arch)
    return int(found[1]) if found else 0


def oldest_first(arches: Iterable[str]) -> tuple[str, ...]:
    """The archs by their compute capabilities, each once."""
    return tuple(sorted(dict.fromkeys(arches), key=lambda arch: (capability(arch), arch)))


DEFAULT = "h200"  # the default where no GPU or arch is named
LIMITS = "capabilities.toml"
_FOLDER = Path(__file__).parent


@cache
def described() -> dict[str, Device]:
    """Every described GPU by the name of its file."""
    return {stem: _device(data, _limits(data["arch"])) for stem, data in _data().items()}


def device_names() -> tuple[str, ...]:
    """What ``named`` takes."""
    return tuple(described())


def named(name: str) -> Device:
    """The described GPU of that name; DeviceError lists the names."""
    if name.lower() not in described():
        raise DeviceError(f"There is no device '{name}', {one_of(name.lower(), device_names())}")
    return described()[name.lower()]


def default_device() -> Device:
    """The GPU for which schedules are chosen by default."""
    return named(DEFAULT)


@cache
def device_for(arch: str) -> Device:
    """The described GPU that represents ``arch``, with that arch's limits; for an unknown arch the nearest older one.

    A text that names no arch gets the oldest.
    """
    here = max((n for n in _capabilities() if n <= capability(arch)), default=min(_capabilities()))
    by_arch = {capability(a): stem for stem, data in _data().items() for a in data["stands_for"]}
    stem = by_arch[max((n for n in by_arch if n <= here), default=min(by_arch))]
    known = arch if capability(arch) >= here else f"sm_{here}"
    device = _device(_data()[stem] | {"arch": known}, _capabilities()[here])
    return replace(device, clusters=device.clusters[: device.largest_cluster.bit_length()])


def weakest(device: Device, *, newer: bool) -> Device:
    """``device`` with the least limits of all GPUs that run its machine code; with ``newer``, also of newer GPUs."""
    here = device.capability
    others = [of for n, of in _capabilities().items() if n >= here and (newer or n // 10 == here // 10)]
    largest = min([device.largest_cluster, *(of["largest_cluster"] for of in others)])
    shared = min([device.shared_kib, *(of["shared_kib"] for of in others)])
    block = min([device.shared_block_kib, *(of["shared_block_kib"] for of in others)])
    clusters = device.clusters[: largest.bit_length()]
    return replace(device, largest_cluster=largest, clusters=clusters, shared_kib=shared, shared_block_kib=block)


def live_device(arch: str, properties: Mapping[str, object]) -> Device:
    """The GPU of ``arch`` that reports ``properties``, by the names of cudaDeviceProp.

    Other values come from its description, or from that of the GPU that represents its arch.
    """
    name = properties.get("name")
    text = name.decode() if isinstance(name, bytes) else name
    base = next((d for d in described().values() if d.name == text), device_for(arch))
    return base.completed(properties)


def _device(data: Mapping[str, Any], limits: Mapping[str, Any]) -> Device:
    known = {**limits, **data, "clusters": tuple(data["clusters"])}
    return Device(**{f.name: known[f.name] for f in fields(Device)})


def _limits(arch: str) -> Mapping[str, Any]:
    return _capabilities()[capability(arch)]


@cache
def _data() -> dict[str, dict[str, Any]]:
    found = (file for file in sorted(_FOLDER.glob("*.toml")) if file.name != LIMITS)
    return {file.stem: tomllib.loads(file.read_text(encoding="utf-8")) for file in found}


@cache
def _capabilities() -> dict[int, dict[str, Any]]:
    text = (_FOLDER / LIMITS).read_text(encoding="utf-8")
    return {int(key): limits for key, limits in tomllib.loads(text).items()}


DEFAULT_ARCH = default_device().arch  # the arch for which kernels are generated by default
