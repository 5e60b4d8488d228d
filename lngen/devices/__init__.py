"""GPUs as data: one TOML file for each, and the limits of every compute capability."""

from lngen.devices.device import (
    DEFAULT_ARCH,
    Device,
    capability,
    default_device,
    described,
    device_for,
    device_names,
    live_device,
    named,
    oldest_first,
    weakest,
)

__all__ = [
    "DEFAULT_ARCH", "Device", "capability", "default_device", "described", "device_for", "device_names", "live_device",
    "named", "oldest_first", "weakest",
]  # fmt: skip
