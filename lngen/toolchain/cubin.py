"""Repair of cubins from CuPy: CuPy 14.2 drops the last byte of the ELF, which it takes for a string's NUL."""

import struct

from lngen.errors import CompileError

# A program header ends in p_align and a section header in sh_entsize, 64-bit little-endian numbers
# below 2**32: their last four bytes are zero, so up to four missing bytes are known.
_KNOWN_ZEROS = 4

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")


def repaired(image: bytes) -> bytes:
    """The complete ``image``; CompileError if it is not a cubin or lacks more bytes than are known."""
    missing = elf_length(image) - len(image)
    if missing > _KNOWN_ZEROS:
        raise CompileError(
            f"NVRTC returned a truncated image: {len(image)} bytes, and {missing} more belong to it. "
            "Reinstall CuPy and NVRTC, or report it."
        )
    return image + bytes(max(missing, 0))


def elf_length(image: bytes) -> int:
    """Bytes up to the end of the later of the two header tables, where a cubin ends."""
    if len(image) < _HEADER.size or image[:5] != b"\x7fELF\x02":
        raise CompileError(f"NVRTC returned a truncated image: {len(image)} bytes, not a whole ELF64 header.")
    fields = _HEADER.unpack_from(image)
    program, section, _, _, program_size, programs, section_size, sections = fields[5:13]
    return int(max(program + program_size * programs, section + section_size * sections))
