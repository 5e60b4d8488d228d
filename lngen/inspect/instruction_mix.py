"""What the machine code of a kernel does: its instructions by kind, in each of its loops and per element of a row.

The counts are of the text, not of an execution: an instruction counts once, also if its predicate is false, or if it is
in a loop inside another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lngen.compile import KernelSet
from lngen.inspect.loops import loops, reached, target
from lngen.inspect.sass import Instruction, disassemble
from lngen.inspect.traffic import resources

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
        lines = [
            f"kernel {self.name.rpartition('__')[2]}, {self.arch}: {len(self.code)} instructions, "
            f"{used['registers']} registers",
            f"  {used['threads']} threads, per SM {used['blocks_per_multiprocessor']} blocks and "
            f"{used['warps_per_multiprocessor']} warps; bytes of shared memory: {used['shared']} static, "
            f"{used['dynamic_shared']} dynamic, {used['launch_shared']} requested",
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
