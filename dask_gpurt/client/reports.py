"""`report`: what a run of a cluster did and what it waited for, as one HTML file.

The functions that run on the scheduler or a worker return plain values. For each snapshot the workers are asked, so
that what the scheduler knows of them is of now.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from distributed import default_client
from distributed.comm import get_address_host
from distributed.utils import get_ip

from dask_gpurt.client.ask import ask, ask_workers
from dask_gpurt.errors import GpurtError
from dask_gpurt.extension import NAME, GpurtScheduler, on_worker
from dask_gpurt.observe.figures.node_class import of_worker
from dask_gpurt.observe.report.facts import Run, from_snapshots
from dask_gpurt.observe.report.page import write

if TYPE_CHECKING:
    from types import TracebackType

    from distributed import Client, Scheduler, Worker


class report:
    """Write a report about what happens inside of the ``with`` block.

    Parameters
    ----------
    path
        Where the HTML file goes. It needs nothing besides itself, and is written also when the block raises.
    client
        Of a cluster with the extension; default: the current one.

    Raises
    ------
    GpurtError
        The extension is not in that cluster, or its observation is off.

    Examples
    --------
    >>> with dask_gpurt.report("run.html"):  # doctest: +SKIP
    ...     ddf.groupby("x").y.mean().compute()
    """

    def __init__(self, path: str, client: Client | None = None) -> None:
        self.path = path
        self._client = client
        self._before: dict[str, Any] | None = None
        #: what the report is about; None until the end of the block
        self.run: Run | None = None

    def __enter__(self) -> report:
        if self._client is None:
            self._client = default_client()
        self._before = snapshot(self._client)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._client is not None
        self.run = from_snapshots(self._before, snapshot(self._client))
        write(self.run, self.path)


def report_now(path: str, client: Client) -> Run:
    """Write a report about all since the start of the cluster; of tasks, the newest 10,000.

    Raises
    ------
    GpurtError
        As for `report`.
    """
    run = from_snapshots(None, snapshot(client))
    write(run, path)
    return run


def snapshot(client: Client) -> dict[str, Any]:
    """All that is counted on a cluster, as plain values; see `dask_gpurt.observe.report.facts`.

    Raises
    ------
    GpurtError
        As for `report`.
    TypeError
        The client is asynchronous.
    """
    if getattr(client, "asynchronous", False):
        raise TypeError(
            "the client is asynchronous, and a report is a `with` block that waits. Remedy: a second client, "
            "Client(client.scheduler.address), in a thread (asyncio.to_thread)"
        )
    answer: dict[str, Any] = ask(client, _snapshot)
    return answer


async def _snapshot(client: Client) -> dict[str, Any]:
    answers = await ask_workers(client, _now)
    answers = {address: answer for address, answer in answers.items() if isinstance(answer, dict) and answer}
    figures = {address: answer["figures"] for address, answer in answers.items()}
    told: dict[str, Any] = await client.run_on_scheduler(_told, figures=figures)
    if told.get("off"):
        raise GpurtError(
            f"there is nothing to report: {told['off']}. Remedy: dask_gpurt.attach(client), or "
            "`dask scheduler --preload dask_gpurt.preload`, with gpurt.observe.enabled: true"
        )
    for address, facts in told["workers"].items():
        facts["status"] = answers.get(address, {}).get("status", {})
    return told


def _now(dask_worker: Worker) -> dict[str, Any]:
    """Runs on a worker.

    The figures are those of a heartbeat. One of Dask's is not made for this: it would close the worker if it overlapped
    with another one.
    """
    parts = on_worker(dask_worker)
    return {} if parts is None else {"status": parts.statistics(), "figures": parts.heartbeat()}


def _told(dask_scheduler: Scheduler, figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs on the scheduler."""
    plugin = dask_scheduler.plugins.get(NAME)
    if not isinstance(plugin, GpurtScheduler):
        return {"off": "the extension is not installed on this scheduler"}
    if plugin.ledger is None or plugin.ledger.ledger is None:
        return {"off": "observation is off in this cluster"}
    ledger = plugin.ledger.ledger
    for address, now in figures.items():
        ws = dask_scheduler.workers.get(address)
        if ws is not None:
            ledger.guarded(ledger.heartbeat, ws, now)
    return {
        "time": time.time(),
        "started": ledger.started,
        "scheduler": plugin.statistics(),
        "details": ledger.details(),
        "prices": plugin.settings.observe.cost_per_hour,
        "workers": {
            ws.address: {
                "name": str(ws.name),
                "host": _host(ws.address),
                "node_class": of_worker(ws, ws.metrics.get(NAME)),
                "threads": ws.nthreads,
                "memory_bytes": ws.memory_limit,
            }
            for ws in dask_scheduler.workers.values()
        },
    }


def _host(address: str) -> str:
    return get_ip() if address.startswith("inproc://") else get_address_host(address)
