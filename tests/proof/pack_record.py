"""What packs take: size and time of a build, load to first launch, host time of a launch. Needs gcc and no GPU.

    python tests/proof/pack_record.py [--widths 256,512] [--out generated/bench/packs.txt]
    python tests/proof/pack_record.py --gpu --out generated/bench/h200-packs.txt

Launches go to a driver that answers at once: a C library in place of libcuda, compiled here. With ``--gpu`` they go to
a GPU, and host times of calls stand beside those of a compiled norm and of PyTorch.
"""

import argparse
import importlib.util
import io
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lngen
from lngen.compiler.toolchain import nvrtc_version

WIDTHS = (256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # flash-attn's list
DTYPES = ("bf16", "f16", "f32")
ARCHES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
RUNS = 25

STUB = """
#include <stdint.h>
#include <string.h>
static __thread void *here;
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13090; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDeviceGetName(char *t, int n, int d) { strcpy(t, "NVIDIA H100"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 38 ? 50 << 20 : a == 39 ? 2048 : a == 81 ? 233472
       : a == 82 ? 65536 : a == 106 ? 32 : a == 111 ? 1024 : 232448;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)77; return 0; }
int cuCtxGetCurrent(void **c) { *c = here; return 0; }
int cuCtxSetCurrent(void *c) { here = c; return 0; }
int cuModuleLoadDataEx(void **m, const void *i, unsigned n, void *o, void *v) { *m = (void *)5; return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = (void *)9; return 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = 32; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
int cuMemsetD8Async(uint64_t p, unsigned char v, size_t n, void *s) { return 0; }
int cuLaunchKernelEx(const void *c, void *f, void **p, void **e) { return 0; }
int cuGetErrorName(int s, const char **t) { *t = "ERROR"; return 0; }
int cuStreamGetCaptureInfo_v2(void *s, int *c, uint64_t *n, void *g, void *d, void *k) { *c = 0; *n = 0; return 0; }
"""

# What a program does that launches by address: the times of it, warm and per launch, in microseconds.
LAUNCH = """
import sys, time
import lngen
def launch():
    pack = lngen.load(sys.argv[1])
    loaded = pack.kernels(sys.argv[2], 0, 4096)
    names = loaded.tensors
    bound = loaded.bind(4096, dict.fromkeys(names, loaded.described["spec"]["d"]))
    bound([1 << 30] * len(names), 1 << 31, 0)
    return bound, [1 << 30] * len(names)
launch()
if len(sys.argv) > 3:
    times = []
    for _ in range(50):
        start = time.perf_counter(); bound, pointers = launch(); times.append(time.perf_counter() - start)
    each = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000): bound(pointers, 1 << 31, 0)
        each.append((time.perf_counter() - start) / 1000)
    print(1e6 * sorted(times)[25], 1e6 * min(each))
"""


def build_lines(widths: list[int], folder: Path) -> Iterator[str]:
    """Size and time of packs of LayerNorm, forward and backward."""
    for name, dtypes in (("bf16", DTYPES[:1]), ("bf16, f16, f32", DTYPES)):
        out = folder / name.replace(", ", "-")
        specs = [f"layernorm.{w}:d={d},dtype={t}" for t in dtypes for d in widths for w in ("fwd", "bwd")]
        os.environ["LNGEN_CACHE_DIR"] = str(folder / f"cache-{len(dtypes)}")
        start, busy = time.perf_counter(), _processor_time()
        lngen.build(specs, out, arch=ARCHES, emit="cubin")
        wall, used = time.perf_counter() - start, _processor_time() - busy
        cubins = [*out.glob("*.cubin")]
        size, manifest = sum(p.stat().st_size for p in cubins), (out / "manifest.json").stat().st_size
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:xz") as archive:
            archive.add(out, "pack")
        yield (
            f"{len(specs)} specs ({name}) x {len(ARCHES)} archs: {len(cubins)} cubins of {size / 1e6:.2f} MB, manifest "
            f"{manifest / 1e6:.2f} MB, all as tar.xz {len(packed.getvalue()) / 1e6:.2f} MB; {wall:.0f} s on "
            f"{os.cpu_count()} cores ({used:.0f} s of processor time), empty cache"
        )


def _processor_time() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def launch_lines(pack: Path, stub: Path) -> Iterator[str]:
    """Load to first launch of a process, beside one that does nothing; the same again; a launch."""
    spec = "layernorm.fwd:d=4096,dtype=bf16"
    nothing = _medians([sys.executable, "-c", "pass"], stub)
    first = _medians([sys.executable, "-c", LAUNCH, str(pack), spec], stub)
    done = _run([sys.executable, "-c", LAUNCH, str(pack), spec, "more"], stub)
    warm, each = map(float, done.stdout.split())
    size = (pack / "manifest.json").stat().st_size / 1e6
    yield (
        f"{pack.name}, manifest {size:.2f} MB: process start to the end of the first launch, beyond an interpreter "
        f"that does nothing: {first[0] - nothing[0]:.1f} ms (processor {first[1] - nothing[1]:.1f}); an interpreter "
        f"{nothing[0]:.1f}; load, choose, bind and launch again {warm / 1e3:.2f} ms; a launch {each:.2f} us"
    )


def _medians(command: list[str], stub: Path) -> tuple[float, float]:
    """Milliseconds of a process: elapsed, and of processors."""
    elapsed, used = [], []
    for _ in range(RUNS):
        start, busy = time.perf_counter(), _processor_time()
        _run(command, stub)
        elapsed.append(1e3 * (time.perf_counter() - start))
        used.append(1e3 * (_processor_time() - busy))
    return statistics.median(elapsed), statistics.median(used)


def _run(command: list[str], stub: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub), "PYTHONPATH": str(Path(lngen.__file__).parents[1])}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


def gpu_lines(folder: Path) -> Iterator[str]:
    """Host microseconds of a call on tensors, the least mean of 7 rounds of 2,000 calls, in turns."""
    import torch

    specs = [f"layernorm.{way}:d=4096,dtype=bf16" for way in ("fwd", "bwd")]
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    lngen.build(specs, folder / "gpu", arch=f"sm_{capability}", rows="1,64,many", emit="cubin")
    norms = {
        "a compiled norm": lngen.compile("layernorm", d=4096, dtype="bf16"),
        "the pack": lngen.load(folder / "gpu").norm("layernorm", d=4096, dtype="bf16").prepare(),
    }
    x, weight = torch.randn(8, 4096, device="cuda").bfloat16(), torch.randn(4096, device="cuda").bfloat16()
    out = torch.empty_like(x), torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
    gradients = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    calls: dict[str, Callable[[], object]] = {
        "F.layer_norm": lambda: torch.nn.functional.layer_norm(x, (4096,), weight, weight)
    }
    for name, norm in norms.items():
        _, saved = norm.forward(x, weight, weight)
        calls[f"forward of {name}"] = partial(norm.forward, x, weight, weight)
        calls[f"forward of {name} with out="] = partial(norm.forward, x, weight, weight, out=out)
        calls[f"backward of {name} with out="] = partial(norm.backward, x, saved, out=gradients)
    loaded = lngen.load(folder / "gpu").kernels(specs[0], 0, 8)
    bound = loaded.bind(8, dict.fromkeys(loaded.tensors, 4096))
    pointers = [t.data_ptr() for t in (x, weight, weight, *out)]
    calls["a bound launch of the pack's forward, by address"] = partial(bound, pointers, 0, 0)
    least = dict.fromkeys(calls, math.inf)
    for _ in range(7):
        for name, call in calls.items():
            least[name] = min(least[name], _host_time(call, torch.cuda.synchronize))
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16, 8 rows of 4096, host us a call"
    yield from (f"{name}: {us:.1f}" for name, us in least.items())
    yield from hub_lines(folder / "hub", capability)


def hub_lines(folder: Path, capability: str) -> Iterator[str]:
    """The layer of a hub package beside PyTorch's, alone and compiled: microseconds of forward and backward."""
    import torch

    specs = [f"layernorm.{way}:d=1024,dtype=bf16" for way in ("fwd", "bwd")]
    lngen.build(specs, folder, arch=f"sm_{capability}", rows="1,64,many", emit="cubin", layout="hf-kernel")
    found = importlib.util.spec_from_file_location("lngen_norms_record", folder / "build/torch-cuda/__init__.py")
    assert found is not None
    assert found.loader is not None
    sys.modules["lngen_norms_record"] = package = importlib.util.module_from_spec(found)
    found.loader.exec_module(package)
    norms = {"nn.LayerNorm": torch.nn.LayerNorm(1024), "the hub layer": torch.nn.LayerNorm(1024)}
    norms["the hub layer"].forward = package.layers.LayerNorm.forward.__get__(norms["the hub layer"])
    x, dy = (torch.randn(64, 1024, device="cuda").bfloat16() for _ in range(2))
    x.requires_grad_()

    def step(norm: Any) -> Any:
        return torch.autograd.grad(norm(x), (x, *norm.parameters()), dy)

    every = {name: norm.to("cuda", torch.bfloat16) for name, norm in norms.items()}
    every |= {f"{name}, compiled": torch.compile(norm) for name, norm in every.items()}
    least = dict.fromkeys(every, math.inf)
    for _ in range(7):
        for name, norm in every.items():
            least[name] = min(least[name], _host_time(partial(step, norm), torch.cuda.synchronize))
    yield "bf16, 64 rows of 1024, forward and backward, host us"
    yield from (f"{name}: {us:.1f}" for name, us in least.items())


def _host_time(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Microseconds of a call of 2,000."""
    for _ in range(100):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(2000):
        call()
    elapsed = time.perf_counter() - start
    synchronize()
    return elapsed / 2000 * 1e6


def main() -> None:
    """Print the record, and write it to a file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    options.add_argument("--gpu", action="store_true")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    nvrtc = ".".join(map(str, nvrtc_version()))
    lines = [f"Python {platform.python_version()}, NVRTC {nvrtc}, {os.cpu_count()} cores"]
    lines.append(f"LayerNorm, forward and backward, widths {given.widths}, {', '.join(ARCHES)}, many rows, cubins")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        widths = [*map(int, given.widths.split(","))]
        lines = [lines[0], *gpu_lines(folder)] if given.gpu else [*lines, *build_lines(widths, folder)]
        lines += [] if given.gpu else _launches(folder)
        print(*lines, sep="\n")
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")


def _launches(folder: Path) -> Iterator[str]:
    """Launches from the packs that were built, to a driver that is compiled here."""
    (folder / "stub").mkdir()
    (folder / "stub.c").write_text(STUB)
    library = folder / "stub" / "libcuda.so.1"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, folder / "stub.c"], check=True)
    for pack in (folder / "bf16", folder / "bf16-f16-f32"):
        yield from launch_lines(pack, folder / "stub")


if __name__ == "__main__":
    main()
