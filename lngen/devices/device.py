"""A GPU for the schedule model: limits of its multiprocessors, its memory, and the features of its architecture."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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
