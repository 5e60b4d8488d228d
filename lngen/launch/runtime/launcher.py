"""A plan on a GPU, and what a GPU is for the schedule model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from lngen.compiler.contract import described
from lngen.compiler.devices import Device, live_device
from lngen.compiler.lower import Plan, requested_shared
from lngen.launch import driver
from lngen.launch.kernels import Loaded


def device_count() -> int:
    """GPUs that lngen can compile for and use: 0 if there is no CuPy or no driver."""
    return driver.device_count() if find_spec("cupy") else 0


def device_arch(device: int) -> str:
    """The arch of a device, ``sm_90``; MissingError if there is no such GPU."""
    return driver.gpu(device).arch


def device_name(device: int) -> str:
    """The name of a device, ``NVIDIA H200``; MissingError if there is no such GPU."""
    return driver.gpu(device).name


def live_gpu(device: int) -> Device:
    """A device for the schedule model: its description, completed by the properties that it reports.

    MissingError if there is no such GPU.
    """
    found = driver.gpu(device)
    return live_device(found.arch, {"name": found.name, **found.properties})


class Launcher(Loaded):
    """The kernels of a plan, loaded on one device; ``image``: a cubin for its arch. ``overlap`` as in ``Loaded``."""

    def __init__(self, plan: Plan, image: bytes, device: int, overlap: bool = False) -> None:
        self.plan = plan
        here = live_gpu(device)

        def requested(registers: Sequence[int]) -> list[int]:
            used = {k.name: n for k, n in zip(plan.kernels, registers, strict=True)}
            return [*requested_shared(plan, used, here).values()]

        super().__init__(described(plan), image, device, overlap, requested)
