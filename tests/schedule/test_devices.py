"""The described GPUs: complete, within the limits of their capability, and found by name, arch and what is live."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from importlib.resources import files

from lngen.devices import Device, capability, default_device, described, device_for, device_names, live_device, named

WANTED = {"h200", "h100", "a100", "l40s", "rtx4090", "b200", "t4"}


def test_every_device_is_described() -> None:
    assert {*device_names()} >= WANTED
    for name in device_names():
        device = named(name)
        assert device.clusters[0] == device.multiprocessors, name
        assert device.shared_block_kib + device.shared_reserved_kib <= device.shared_kib, name
        assert 100 < device.bandwidth_gb_s < 20_000, name
        assert 300 < device.latency_ns < 3000, name
        # What Little's law asks of a multiprocessor fits its shared memory.
        assert device.bandwidth_gb_s * device.latency_ns / device.multiprocessors < device.shared_kib * 1024, name


def test_clusters_of_more_blocks_are_fewer_and_fit_the_multiprocessors() -> None:
    for name, device in described().items():
        assert len(device.clusters) == device.largest_cluster.bit_length(), name
        assert all(n << k <= device.multiprocessors for k, n in enumerate(device.clusters)), name
        assert [*device.clusters] == sorted(device.clusters, reverse=True), name
        assert device.resident_clusters(1) == device.multiprocessors
        assert device.resident_clusters(2 * device.largest_cluster) == 0, name


def test_every_figure_of_a_device_has_a_source() -> None:
    for name in device_names():
        text = files("lngen.devices").joinpath(f"{name}.toml").read_text(encoding="utf-8")
        figures = text[text.index("multiprocessors") :].splitlines()
        for number, line in enumerate(figures):
            if "=" in line and not line.startswith("#"):
                assert "#" in line or figures[number - 1].startswith("#"), f"{name}: {line}"
        assert set(tomllib.loads(text)) <= {f.name for f in fields(Device)} | {"stands_for"}, name


def test_an_arch_has_one_device_that_stands_for_it_and_the_limits_of_its_own() -> None:
    assert default_device() == named("h200") == device_for("sm_90")
    assert device_for("sm_90a").multiprocessors == 132
    assert device_for("sm_86").shared_kib == 100
    assert device_for("sm_86").blocks == 16
    assert device_for("sm_87").shared_kib == 164
    assert device_for("sm_87").name == named("a100").name
    assert device_for("sm_120").barriers == 24
    assert device_for("sm_120").clusters == (170, 85, 40, 20)
    assert device_for("sm_103").barriers == 32
    assert device_for("sm_75").tma is False
    assert device_for("sm_75").clusters == (40,)
    for arch in ("sm_50", "compute_90", ""):
        assert device_for(arch) == device_for("sm_75"), "whatever the compiler will say to it"
    assert device_for("sm_999").arch == "sm_999"
    assert capability("sm_100a") == 100
    assert capability("sm_9") == 0


def test_a_name_is_found_in_any_case() -> None:
    assert named("H200") == named("h200")


def test_a_live_device_completes_its_description() -> None:
    reported = {
        "name": b"NVIDIA H200", "multiProcessorCount": 66, "l2CacheSize": 30 * 2**20, "sharedMemPerBlockOptin": 0,
        "regsPerMultiprocessor": 65536, "unknown": 3,
    }  # fmt: skip
    half = live_device("sm_90", reported)
    assert (half.multiprocessors, half.l2_mib, half.shared_block_kib) == (66, 30, 227)
    assert half.clusters == (66, 33, 15, 7, 3), "of half the multiprocessors"
    assert half.bandwidth_gb_s == 4800
    other = live_device("sm_90", {"name": "Some GPU", "multiProcessorCount": 114})
    assert (other.name, other.multiprocessors, other.arch) == ("Some GPU", 114, "sm_90")
    assert live_device("sm_89", {"name": b"NVIDIA GeForce RTX 4090"}) == named("rtx4090")
