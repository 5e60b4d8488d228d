"""``lngen warm``: kernels compiled before a program asks for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import click

from lngen.cli.output import AnyPath, Output, output_options, table
from lngen.cli.shared_options import Whole, progress_bar
from lngen.compiler.spec import parse_spec
from lngen.errors import MissingError, short
from lngen.launch.runtime.direction import Call
from lngen.launch.runtime.launcher import device_count
from lngen.launch.runtime.lock_file import read_lock
from lngen.launch.runtime.warming import THREADS, begun


@click.command("warm", epilog="Example: lngen warm layernorm.fwd:d=4096,dtype=bf16 layernorm.bwd:d=4096,dtype=bf16")
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True)
@click.option("--lock", "lock_file", type=AnyPath(), metavar="FILE", help="A lock file with tuned schedules.")
@click.option("--rows", type=Whole(1), metavar="M", help="Of x, about; by default any number.")
@output_options
def warm(specs: tuple[str, ...], lock_file: Path | None, rows: int | None, output: Output) -> None:
    """Compile each SPEC for GPU 0, and remember what was chosen: later programs of this user load it at once.

    It is for what ``lngen.compile`` makes with the same spec and lock file, and for PyTorch, whose functions take specs
    with eps=run. Kernels for other machines are built: lngen build.
    """
    parsed = [*dict.fromkeys(map(parse_spec, specs))]
    lock = None if lock_file is None else read_lock(lock_file)
    if not device_count():
        raise MissingError(
            "lngen warm compiles for the GPU of this machine, and finds none that it can use (lngen doctor); for "
            f"another machine build a pack: lngen build {short(specs[0])} --arch sm_90 --out DIR."
        )
    with progress_bar("compiling") as progress, ThreadPoolExecutor(THREADS) as pool:
        loading = begun(pool, [partial(Call, spec, "", lock) for spec in parsed], 0, rows)
        for done, future in enumerate(as_completed(loading), 1):
            future.result()
            if progress is not None:
                progress(done, len(loading))
    described = [future.result().described for future in loading]
    chosen = dict.fromkeys((d["spec"]["text"], d["schedule"]["text"]) for d in described)
    columns = "spec", "schedule"
    output.table({"warm": [dict(zip(columns, one, strict=True)) for one in chosen]}, table(columns, chosen))
