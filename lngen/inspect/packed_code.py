"""The kernels of a pack that were built for a spec, by this or another version of lngen, to compare with."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from lngen.aot.hub import pack_folder
from lngen.aot.manifest import Facts, read
from lngen.devices import device_for
from lngen.errors import LngenError
from lngen.inspect.instruction_mix import KernelCode, elements
from lngen.inspect.sass import disassemble
from lngen.inspect.traffic import usage
from lngen.launch.pack import content
from lngen.lower import Plan
from lngen.toolchain import Resources


@dataclass(frozen=True)
class Packed:
    """A file of a pack, and what the manifest says of its kernel set."""

    file: str
    data: bytes
    entry: Facts

    def machine_code(self, arch: str) -> tuple[KernelCode, ...]:
        """The machine code of each kernel, in launch order; the file is a cubin."""
        code, s, found = disassemble(self.data), self.entry["schedule"], []
        held = elements(self.entry["spec"]["d"], s["form"], s["threads"], s["cluster"])
        for kernel in self.entry["kernels"]:
            numbers = self.entry["resources"][arch][name := kernel["name"]]
            compiled = Resources(**{f.name: numbers[f.name] for f in fields(Resources)})
            shared = kernel["dynamic_shared_bytes"], numbers["launch_shared_bytes"]
            used = usage(compiled, kernel["block"], *shared, device_for(arch))
            found.append(KernelCode(name, arch, used, code[name], held if name.endswith("__rows") else 0))
        return tuple(found)


def packed(folder: Path, plan: Plan, arch: str, kind: str) -> Packed:
    """The file of that kind (cu, ptx, cubin) for a plan's spec in a pack; LngenError if there is none.

    It is of the plan's schedule, else of the one that a launcher takes for the most rows on ``arch``.
    """
    folder, spec = pack_folder(folder), str(plan.spec)
    manifest = read(folder)
    images = manifest.specs.get(spec, {"images": []})["images"]
    taken = [c["kernel_set"] for i in images if i["arch"] == arch for c in reversed(i["classes"])]
    for entry in (manifest.kernel_sets[name] for name in (plan.name, *taken) if name in manifest.kernel_sets):
        for file, facts in entry["files"].items():
            if facts["kind"] == kind and facts["arch"] in (arch, None):
                return Packed(file, content(folder, file, facts["sha256"]), entry)
    target, lacks = "" if kind == "cu" else f" for {arch}", "has none" if manifest.specs else "is no pack"
    raise LngenError(
        f"'{folder}' is expected to be a pack with a {kind} file of '{spec}'{target}, and {lacks}; "
        f"build it: lngen build {spec} --arch {arch} --emit {kind} --out DIR."
    )
