"""``--dask``: an existing Dask cluster as an executor."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from importlib import import_module

import click

from lngen.errors import LngenError, MissingError
from lngen.version import install_hint

TIMEOUT = "10s"

dask_option = click.option(
    "--dask", metavar="ADDRESS", help="Run on this Dask cluster, for example tcp://host:8786; lngen is installed there."
)


@contextmanager
def dask_executor(address: str | None) -> Iterator[Executor | None]:
    """An executor on the cluster whose scheduler has this address; None if the address is None.

    MissingError without the distributed package, LngenError if there is no scheduler.
    """
    if address is None:
        yield None
        return
    try:
        distributed = import_module("distributed")
    except ImportError as error:
        raise MissingError(f"--dask needs Dask; install it with: {install_hint('cluster')}.") from error
    try:
        client = distributed.Client(address, timeout=TIMEOUT)
    except (OSError, ValueError, TypeError) as error:  # TimeoutError is an OSError
        raise LngenError(
            f"--dask expects the address of a running Dask scheduler, for example tcp://host:8786, and there is none "
            f"at '{address}'; start one with 'dask scheduler'."
        ) from error
    with client:
        executor = client.get_executor()
        assert isinstance(executor, Executor)
        yield executor
