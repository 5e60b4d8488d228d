"""Time and machine of a run, which may differ between the runs whose records one file holds."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

SECONDS = 10  # for a program that should answer at once

# Names of nvidia-smi, and the names in a record.
GPU = {
    "driver_version": "driver",
    "clocks.sm": "SM clock, MHz",
    "clocks.max.sm": "SM clock at most, MHz",
    "clocks.mem": "memory clock, MHz",
    "clocks.max.mem": "memory clock at most, MHz",
    "power.draw": "power, W",
    "power.limit": "power at most, W",
    "temperature.gpu": "temperature, C",
}


def circumstances(device: int, commit: str = "") -> dict[str, str]:
    """Date (UTC), commit, the GPU's identity, its driver, and its clocks, power and temperature now, by name.

    ``commit`` names the commit of a copy without its repository; otherwise git gives it. An unknown value is left
    out. Directly after a task was timed, clocks and power are those under load.
    """
    uuid = _uuid(device)
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "commit": commit or _commit(Path(__file__).resolve().parents[2]),
        "device id": uuid,
        **(_reported(uuid) if uuid else {}),
    }
    return {name: text for name, text in found.items() if text}


def _uuid(device: int) -> str:
    """The GPU's identity as nvidia-smi writes it; empty without a GPU."""
    try:
        import cupy

        return f"GPU-{UUID(bytes=bytes(cupy.cuda.runtime.getDeviceProperties(device)['uuid']))}"
    except Exception:  # no CuPy, no driver or no GPU
        return ""


def _reported(uuid: str) -> dict[str, str]:
    """The values that nvidia-smi reports for a GPU."""
    query = f"--query-gpu={','.join(GPU)}"
    values = _output(["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={uuid}"]).split(", ")
    return dict(zip(GPU.values(), values, strict=True)) if len(values) == len(GPU) else {}


def _commit(checkout: Path) -> str:
    """The commit that is checked out, with a mark if files differ from it; empty outside a repository."""
    if not (checkout / ".git").exists():
        return ""
    head = _output(["git", "-C", str(checkout), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"])
    return f"{head} with changes" if head and changed else head


def _output(command: list[str]) -> str:
    """The output of a program; empty if there is no such program, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
