"""What the machine code of a kernel does: its instructions by kind, in each of its loops and per element of a row.

The counts are of the text, not of an execution: an instruction counts once, also if its predicate is false, or if it is
in a loop inside another one. The code is that of a kernel set, or of a pack that any version of lngen has built.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from lngen.compiler.compile import KernelSet
from lngen.compiler.devices import device_for
from lngen.compiler.lower import Plan
from lngen.compiler.toolchain import Resources
from lngen.errors import LngenError
from lngen.lab.inspect.sass import Instruction, disassemble
from lngen.lab.inspect.traffic import resources, usage
from lngen.launch.pack import content
from lngen.packs.hub import pack_folder
from lngen.packs.manifest import Facts, read

# ---- kinds ----

# Kinds by the first part of an opcode, without the U of the uniform datapath. Instructions of memory are kinds of their
# own, with the bytes of a thread's access: "LDG 16". HFMA2 moves constants, HADD2 widens f16; bf16 is widened by
# integer instructions.
_OPCODES = {
    "FP32": "FADD FMUL FFMA FADD2 FMUL2 FFMA2 FHADD FHFMA",
    "FP64": "DADD DMUL DFMA",
    "MUFU": "MUFU",
    "compare": "FSETP FSEL FMNMX FMNMX3 FCHK DSETP DMNMX",
    "convert": "F2F F2FP F2I I2F I2FP HADD2 PRMT",
    "shuffle": "SHFL",
    "barrier": "BAR SYNCS CGABAR_ARV CGABAR_WAIT DEPBAR LDGDEPBAR MEMBAR FENCE WARPSYNC TMACMDFLUSH ACQBULK PREEXIT",
    "branch": "BRA BRX EXIT RET CALL BSSY BSYNC BREAK BMOV ENDCOLLECTIVE YIELD",
    "integer": "IADD IADD3 IMAD IMNMX ISETP LOP3 LEA SHF SEL PLOP3 P2R R2P MOV VIADD VIMNMX FLO POPC HFMA2 LDC LDCU S2R"
    " CS2R R2UR S2UR LEPC VOTE VOTEU ELECT",
}
_KIND = {opcode: kind for kind, opcodes in _OPCODES.items() for opcode in opcodes.split()}
_BULK = {"UBLKCP.S.G": "bulk load", "UBLKCP.G.S": "bulk store", "CCTL.E.PF2": "prefetch"}
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_MEMORY = ("LDG", "LDGSTS", "LDS", "LDL", "STG", "STAS", "STS", "STL", "ATOMG", "ATOMS", "RED")
_ACCESSES = (f"{opcode} {size}" for opcode in _MEMORY for size in (16, 8, 4, 2, 1))
_PLACE = {name: place for place, name in enumerate((*_BULK.values(), *_ACCESSES, *_OPCODES, "other"))}


def kind(one: Instruction) -> str:
    """The kind of an instruction; "other" for NOP and what is not listed."""
    base, *suffixes = one.opcode.split(".")
    if base in _MEMORY:
        return f"{base} {next((_BYTES[s] for s in suffixes if s in _BYTES), 4)}"
    return _BULK.get(one.opcode) or _KIND.get(base) or _KIND.get(base.removeprefix("U"), "other")


def mix(code: Iterable[Instruction]) -> dict[str, int]:
    """The number of instructions of each kind that there is: copies, loads, stores, then arithmetic."""
    counted = Counter(map(kind, code))
    return {name: counted[name] for name in sorted(counted, key=_PLACE.__getitem__)}


# ---- control flow: what the start of a kernel reaches, and its loops ----

# A compiler moves rare paths behind the code that they interrupt, so that a backward branch alone is no loop. It is one
# if every path from the start to the branch passes its target (natural loops; Aho, Lam, Sethi, Ullman: Compilers,
# section 9.6).

Flow = Mapping[int, set[int]]


def target(one: Instruction) -> int | None:
    """The address that an instruction of control flow names, such as a branch; None for all others."""
    names = one.opcode.startswith(("BRA", "BSSY", "WARPSYNC.COLLECTIVE"))
    found = re.search(r"\b0x[0-9a-f]+$", one.text) if names else None
    return int(found[0], 16) if found else None


def reached(code: Sequence[Instruction]) -> list[Instruction]:
    """The instructions that a kernel's start reaches: not the padding, nor the functions that it calls."""
    return [code[at] for at in sorted(_reached(0, _flow(code)[1]))]


def loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The natural loops of a kernel, the largest first: their instructions in order, with those of inner loops."""
    jumps, after = _flow(code)
    before: dict[int, set[int]] = {at: set() for at in after}
    for at, following in after.items():
        for to in following:
            before[to].add(at)
    known = _reached(0, after)
    bodies: dict[int, set[int]] = {}
    for at, head in jumps.items():
        if head <= at and at in known and at not in _reached(0, after, head):
            bodies.setdefault(head, {head}).update(_reached(at, before, head) & known)
    return sorted(([code[at] for at in sorted(body)] for body in bodies.values()), key=len, reverse=True)


def _flow(code: Sequence[Instruction]) -> tuple[dict[int, int], Flow]:
    """By number of an instruction: the one that it jumps to, and all that may follow it. A call returns."""
    numbers = {one.address: at for at, one in enumerate(code)}
    branches = [(at, target(one)) for at, one in enumerate(code) if one.opcode.startswith("BRA")]
    jumps = {at: numbers[to] for at, to in branches if to in numbers}
    last = len(code) - 1
    after = {at: {at + 1} if at < last and _goes_on(one) else set() for at, one in enumerate(code)}
    return jumps, {at: following | ({jumps[at]} if at in jumps else set()) for at, following in after.items()}


def _goes_on(one: Instruction) -> bool:
    """True unless it jumps without a condition, which is a predicate, an operand, or a suffix of the branch."""
    if one.opcode.partition(".")[0] not in ("BRA", "BRX", "EXIT", "RET"):
        return True
    return one.text.startswith("@") or (target(one) is not None and (one.opcode != "BRA" or "," in one.text))


def _reached(start: int, flow: Flow, without: int | None = None) -> set[int]:
    """What is reached from ``start``, itself included, on paths that avoid ``without``."""
    found, waiting = {start} - {without}, [start] if start != without else []
    while waiting:
        new = flow[waiting.pop()] - found - {without}
        found |= new
        waiting += new
    return found


# ---- a kernel ----


@dataclass(frozen=True)
class KernelCode:
    """The machine code of one kernel for one arch, and what it uses, as ``resources`` has it.

    ``elements``: elements of a row for each of its threads; 0 for kernels that do not hold whole rows.
    """

    name: str
    arch: str
    used: Mapping[str, Any]
    code: Sequence[Instruction]
    elements: float = 0

    @cached_property
    def labels(self) -> dict[int, str]:
        """The names of the addresses that the listing names, in their order."""
        targets = sorted({to for one in self.code if (to := target(one)) is not None})
        return {address: f".L{number}" for number, address in enumerate(targets)}

    @cached_property
    def computing(self) -> list[list[Instruction]]:
        """The loops that load and compute, inner ones too, the largest first."""
        return [body for body in loops(self.code) if _computes(body)]

    @cached_property
    def loops(self) -> dict[str, list[Instruction]]:
        """The outermost of them, in order, by the label of their first instruction."""
        inside = {one.address for body in self.computing for one in body[1:]}
        outer = [body for body in self.computing if body[0].address not in inside]
        return {self.labels[body[0].address]: body for body in sorted(outer, key=lambda body: body[0].address)}

    @cached_property
    def row(self) -> tuple[str, list[Instruction]]:
        """The largest loop, which is the row loop of a persistent kernel; else the kernel without what it calls."""
        return max(self.loops.items(), key=lambda loop: len(loop[1]), default=("kernel", reached(self.code)))

    @cached_property
    def per_element(self) -> dict[str, float]:
        """The mix of a row per element of it; empty if a row is no fixed number of elements, or has inner loops."""
        inside = {one.address for one in self.row[1][1:]}
        if not self.elements or any(body[0].address in inside for body in self.computing):
            return {}
        return {name: count / self.elements for name, count in mix(self.row[1]).items()}

    def text(self) -> str:
        """A header, the mix of each loop, and the listing, in which labels stand for addresses."""
        parts = self.loops or dict([self.row])
        counted = {one.address for body in parts.values() for one in body}
        mixes = [*map(mix, parts.values()), mix(one for one in self.code if one.address not in counted)]
        titles = {label: f"loop {label}" if self.loops else label for label in parts}
        used, share = self.used, self.per_element
        cells = [["", *titles.values(), "elsewhere", "per element" if share else ""]]
        for name in mix(self.code):
            each = f"{share[name]:.2f}" if name in share else ""
            cells.append([name, *(str(found.get(name, "")) for found in mixes), each])
        spilled = sum(used[key] for key in ("spill_stores", "spill_loads", "stack"))
        launch = used["launch_shared"]
        padded = f"; a launch requests {launch}, so that an SM takes no more blocks" * (launch > used["dynamic_shared"])
        lines = [
            f"kernel {self.name.rpartition('__')[2]}, {self.arch}: {len(self.code)} instructions, "
            f"{used['registers']} registers",
            f"  {used['threads']} threads, per SM {used['blocks_per_multiprocessor']} blocks and "
            f"{used['warps_per_multiprocessor']} warps",
            f"  bytes of shared memory: {used['shared']} static, {used['dynamic_shared']} dynamic{padded}",
            *([f"  It spills: {spilled} bytes a thread are in local memory, not in registers."] if spilled else []),
            *(f"  {name:<12}{''.join(f'{cell:>13}' for cell in rest)}".rstrip() for name, *rest in cells),
        ]
        if share:
            each = f"{titles[self.row[0]]}, in which a thread has {self.elements:g} elements of a row"
            lines.append(f"  per element: of {each}")
        return "\n".join([*lines, "", *self._listing(), ""])

    def _listing(self) -> Iterable[str]:
        for one in self.code:
            if one.address in self.labels:
                yield f"{self.labels[one.address]}:"
            to = target(one)
            yield f"    {one.text if to is None else one.text.replace(f'{to:#x}', self.labels[to])}"

    def data(self) -> dict[str, Any]:
        """The same for JSON, with the addresses."""
        return {
            "kernel": self.name,
            "arch": self.arch,
            "resources": dict(self.used),
            "instructions": len(self.code),
            "mix": mix(self.code),
            "loops": {label: {"first": body[0].address, "mix": mix(body)} for label, body in self.loops.items()},
            "row_loop": self.row[0] if self.loops else None,
            "elements_per_thread": self.elements or None,
            "per_element": self.per_element,
            "code": [{"address": one.address, "text": one.text} for one in self.code],
        }


def _computes(body: Sequence[Instruction]) -> bool:
    kinds = {kind(one) for one in body}
    return not kinds.isdisjoint({"FP32", "FP64", "compare"}) and any(k.startswith("LD") for k in kinds)


def machine_code(kernels: KernelSet, arch: str, *, lines: bool = False) -> tuple[KernelCode, ...]:
    """The machine code of each kernel, in launch order; errors of ``KernelSet.cubin`` and ``disassemble``."""
    plan, binary = kernels.plan, kernels.cubin(arch, lines=lines)
    code, used, s = disassemble(binary.image, lines=lines), resources(plan, binary.resources, arch), plan.schedule
    held = elements(plan.spec.d, s.form, s.threads, s.cluster)
    return tuple(KernelCode(k.name, arch, used[k.name], code[k.name], held if k.row else 0) for k in plan.kernels)


def elements(d: int, form: str, threads: int, cluster: int) -> float:
    """Elements of a row for each thread that works on it; 0 in form multipass, which loops over a row."""
    return 0 if form == "multipass" else d / (threads * cluster)


# ---- the code of a pack ----


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
