"""Startup: from the start of a process to its first results, cold, warm and from a pack.

Every process is a new one, of this Python, and so is the cache folder of a cold one. What all pay, the import of
PyTorch and the context of the GPU, and what a cold one cannot avoid, NVRTC, are timed beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lngen.compiler.spec import Spec
from lngen.compiler.toolchain import compile_cubin
from lngen.errors import LngenError
from lngen.launch.runtime.launcher import device_arch
from lngen.launch.runtime.norm import Norm
from lngen.packs.build import build

RUNS = 5
FEW = 16  # rows of the other class

# Prints seconds from the start of the process, which its parent has noted, to each step; a step ends on the GPU.
PROGRAM = """
import json, sys, time
start, text, rows, few, folder = json.loads(sys.argv[1])
found = {}
def done(step):
    found[step] = time.monotonic() - start
import torch
done("import torch")
torch.zeros(1, device="cuda").add_(1)
torch.cuda.synchronize()
done("PyTorch's first kernel")
import lngen
from lngen.launch.arrays import Torch
from lngen.launch.runtime.norm import Norm
done("import lngen")
if folder:
    norm = lngen.load(folder).norm(text)
else:
    spec = lngen.parse_spec(text)
    norm = Norm(spec, spec.with_direction("bwd"), {})
def arrays(tensors, rows):
    return [Torch().maker(t.shape(rows, norm._forward.d), t.dtype, 0)().fill_(1) for t in tensors]
def forward(rows):
    result = norm.forward(*arrays(norm._forward.inputs, rows))
    torch.cuda.synchronize()
    return result
y, saved = forward(rows)
done("first result")
norm.backward(y, saved)
torch.cuda.synchronize()
done("first gradients")
before = time.monotonic()
forward(few)
found["another class of rows"] = time.monotonic() - before
print(json.dumps(found))
"""

Times = Mapping[str, float]  # seconds by step


class Startup(NamedTuple):
    """Median seconds by state of the machine and step, and those of a bare NVRTC compilation of the first kernel."""

    spec: str
    rows: int
    states: Mapping[str, Times]
    nvrtc: float

    def lines(self) -> list[tuple[str, str, float, float, float]]:
        """State, step, milliseconds, and these over ``import torch`` and over a bare compilation."""
        torch = self.states["warm"]["import torch"]
        found = [(s, step, t) for s, times in self.states.items() for step, t in times.items()]
        return [(s, step, round(1e3 * t, 1), round(t / torch, 2), round(t / self.nvrtc, 2)) for s, step, t in found]


def measure(spec: Spec, rows: int, progress: Callable[[str], object] = lambda text: None) -> Startup:
    """A forward spec on GPU 0, with its backward; LngenError for a process that fails."""
    with tempfile.TemporaryDirectory() as name:
        folder, both = Path(name), [spec, spec.with_direction("bwd")]
        progress("NVRTC")
        nvrtc = statistics.median(_bare(spec, rows) for _ in range(RUNS))
        progress("building a pack")
        build(both, folder / "pack", arch=device_arch(0), rows="all", emit="cubin")
        runs: dict[str, list[Times]] = {"cold": [], "warm": [], "pack": []}
        for turn in range(RUNS):
            for state, found in runs.items():
                progress(f"{state}, {turn + 1} of {RUNS}")
                pack = str(folder / "pack") if state == "pack" else ""
                found.append(_process(str(spec), rows, pack, folder / f"cache{turn}"))
    return Startup(str(spec), rows, {state: _medians(found) for state, found in runs.items()}, nvrtc)


def _bare(spec: Spec, rows: int) -> float:
    """Seconds of NVRTC for the text of the forward."""
    arch = device_arch(0)
    text = Norm(spec, spec.with_direction("bwd"), {}).kernels("fwd", arch, rows).text
    start = time.perf_counter()
    compile_cubin(text, arch, fresh=True)
    return time.perf_counter() - start


def _process(spec: str, rows: int, pack: str, cache: Path) -> Times:
    """The times of a new process; it is warm if an earlier one had the same cache."""
    env = {**os.environ, "LNGEN_CACHE_DIR": str(cache)}
    given = json.dumps([time.monotonic(), spec, rows, FEW, pack])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LngenError(f"a process of lngen bench --startup for '{spec}' ended with an error: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _medians(found: list[Times]) -> Times:
    return {step: statistics.median(times[step] for times in found) for step in found[0]}
