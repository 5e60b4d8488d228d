"""Packs that LNGEN_PACKS names: a norm that compiles looks into them first."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

from lngen import config
from lngen.compiler.compile import Compilation
from lngen.compiler.spec import Spec
from lngen.errors import LngenError, MissingError
from lngen.files import sha256
from lngen.launch.pack import Pack
from lngen.version import __version__


def packs_with(compilation: Compilation, overlap: bool) -> tuple[Pack, ...]:
    """The packs that this version of lngen built with a spec; LngenError for a folder that is no pack.

    The text of a spec says what lngen's own graphs are. A program's graph is derived, and compared as a whole.
    """
    text = str(compilation.spec)
    found = [pack for pack in [_opened(folder, overlap) for folder in config.pack_dirs()] if text in pack.specs]
    return tuple(pack for pack in found if _is_of(compilation, pack, text))


def _is_of(compilation: Compilation, pack: Pack, text: str) -> bool:
    described = pack.described(text)
    if described["lngen_version"] != __version__:
        return False
    return compilation.spec.builtin or described["graph_sha256"] == sha256(str(compilation.graph).encode())


@cache
def _opened(folder: Path, overlap: bool) -> Pack:
    try:
        return Pack(folder, overlap)
    except LngenError as error:
        raise LngenError(f"LNGEN_PACKS: {error}") from error


def lacking(spec: Spec, arch: str, vec: int | None, error: MissingError) -> MissingError:
    """What to say of a spec that is in none of them where nothing compiles; without LNGEN_PACKS the error itself.

    ``vec``: the widest access, in elements, that the arrays allow, if those of the packs are wider.
    """
    if not config.pack_dirs():
        return error
    text, narrow = str(spec), "" if vec is None else f" --schedule vec={vec}"
    if not spec.builtin and spec.definition.source:
        text = f"{spec.definition.source}.{text.partition('.')[2]}"
    what = "" if vec is None else f" with accesses of {vec} elements, which these arrays take"
    return MissingError(
        f"no pack of LNGEN_PACKS has kernels of '{spec}' for {arch}{what}, and nothing can be compiled here; build it: "
        f"lngen build {shlex.quote(text)} --arch {arch}{narrow} --out DIR."
    )
