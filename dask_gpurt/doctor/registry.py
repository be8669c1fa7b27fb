"""All checks, in the order in which they are shown; and `here`, this machine for them to look at."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import dask.config

from dask_gpurt.backends.system import System
from dask_gpurt.config import Settings
from dask_gpurt.doctor import audit, compat, container, cpu, devices, disk, gpu, host, network, nic, numa, starved, xid
from dask_gpurt.doctor.check import Check, Node, run
from dask_gpurt.doctor.gpus import Driver, Gpu, Recorded, write

if TYPE_CHECKING:
    from dask_gpurt.doctor.finding import Finding

_NUMBERED = (
    *gpu.CHECKS,
    *devices.CHECKS,
    *(module.CHECK for module in (starved, numa, cpu, container, audit, nic, disk, network, xid)),
)
CHECKS: tuple[Check, ...] = (*sorted(_NUMBERED, key=lambda check: int(check.id[1:])), *host.CHECKS, compat.CHECK)


def here(gpu: Gpu | None = None) -> Node:
    """This machine, as a worker that is started in this shell finds it.

    Raises
    ------
    ConfigError
        The settings are wrong.
    """
    tiers = Settings.load().tiers
    whose = ("scheduler", "worker", "client")
    certificates = [dask.config.get(f"distributed.comm.tls.{name}.cert", None) for name in whose]
    authority = dask.config.get("distributed.comm.tls.ca-file", None)
    scratch = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    return Node(
        System(),
        Driver() if gpu is None else gpu,
        os.environ,
        folders=tiers.folders or (str(scratch),),
        reserve_bytes=tiers.disk_reserve,
        certificates=tuple(dict.fromkeys(str(path) for path in certificates if path)),
        authorities=(str(authority),) if authority else (),
    )


def look_here(*, record: str | None = None, recorded: str | None = None) -> list[Finding]:
    """All checks on this machine.

    Parameters
    ----------
    record
        A file to write what the GPU driver says into.
    recorded
        Such a file, instead of the driver.

    Raises
    ------
    OSError
        A file cannot be read or written.
    GpurtError
        The file is no recording, or the settings are wrong.
    """
    gpu: Gpu = Driver() if recorded is None else Recorded(recorded)
    if record is not None:
        write(gpu, record)
    return run(CHECKS, here(gpu))
