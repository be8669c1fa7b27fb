"""`examine`: the checks on a worker, beside its event loop; and what only a comparison with others can judge."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends.system import System, versions
from dask_gpurt.doctor.check import Node, run
from dask_gpurt.doctor.gpus import Driver
from dask_gpurt.doctor.network import interfaces
from dask_gpurt.doctor.registry import CHECKS

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.config import TierSettings

#: A worker that does not answer soon is asked a second time, which must not start the checks once more.
_running: weakref.WeakKeyDictionary[Worker, asyncio.Task[dict[str, Any]]] = weakref.WeakKeyDictionary()


async def examine(
    worker: Worker, settings: TierSettings, *, leads: bool, seconds: float, **known: Any
) -> dict[str, Any]:
    """Plain values: ``findings``, as dicts; ``facts``; ``of_host``, ids of checks that are made once per host.

    Parameters
    ----------
    leads
        Make those checks too that are the same for all workers of a host.
    seconds
        For all checks together.
    known
        More fields of `Node`.
    """
    task = _running.get(worker)
    if task is None or task.done():
        task = _running[worker] = asyncio.create_task(_examine(node_of(worker, settings, **known), leads, seconds))
    return await asyncio.shield(task)


async def _examine(node: Node, leads: bool, seconds: float) -> dict[str, Any]:
    of_host = [check.id for check in CHECKS if check.once_per_host]
    checks = [check for check in CHECKS if leads or not check.once_per_host]
    findings, told = await asyncio.gather(
        asyncio.to_thread(run, checks, node, total_seconds=seconds), asyncio.to_thread(facts)
    )
    return {"findings": [dataclasses.asdict(f) for f in findings], "facts": told, "of_host": of_host}


def node_of(worker: Worker, settings: TierSettings, **known: Any) -> Node:
    """A worker, for checks to look at; `known`: more fields."""
    security = worker.security
    return Node(
        System(),
        Driver(),
        dict(os.environ),
        folders=settings.folders or (worker.local_directory,),
        reserve_bytes=settings.disk_reserve,
        threads=worker.state.nthreads,
        memory_limit_bytes=worker.memory_manager.memory_limit,
        clock_seconds=worker.scheduler_delay,
        certificates=(str(security.tls_worker_cert),) if security.tls_worker_cert else (),
        authorities=(str(security.tls_ca_file),) if security.tls_ca_file else (),
        **known,
    )


def facts() -> dict[str, Any]:
    """What is compared between workers."""
    return {
        "host": socket.gethostname(),
        "interfaces": [dataclasses.asdict(i) for i in interfaces()],
        "stack": versions(),
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0],
    }
