"""`diagnose`: ask a cluster what the five steps of a `Diagnosis` need."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dask_gpurt.client import remote
from dask_gpurt.client.ask import ask, ask_scheduler, checked_seconds
from dask_gpurt.client.checkup import checkup_of
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.client.diagnosis import COLD_SECONDS, STALL_SECONDS, Diagnosis, Evidence
from dask_gpurt.client.diagnosis import diagnose as go_through
from dask_gpurt.client.reports import snapshot_of
from dask_gpurt.client.runs import report_of
from dask_gpurt.client.state import look
from dask_gpurt.errors import GpurtError, NoAnswer, UnknownRun
from dask_gpurt.observe.report.facts import from_snapshots
from dask_gpurt.observe.report.findings import advise

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpurt.client.ask import Asked
    from dask_gpurt.observe.report.facts import Run


def diagnose(
    client: Asked = None,
    *,
    every: bool = False,
    stall_seconds: float = STALL_SECONDS,
    timeout: float = ANSWER_SECONDS,
) -> Diagnosis:
    """Say why a cluster is slow or stuck: five questions in order, up to the first that finds a cause.

    Parameters
    ----------
    client
        A client, a cluster, or the address of a scheduler. None: the current client, or else the address in Dask's
        configuration. With an asynchronous client or cluster the result is to be awaited.
    every
        Go on after the first cause.
    stall_seconds
        Seconds without the end of a task, while some run, that are a stall.
    timeout
        Seconds that the scheduler has to answer, and the workers, for each of three questions.

    Returns
    -------
    Diagnosis
        Prints as text; ``.to_dict()`` for programs.

    Raises
    ------
    ValueError
        `timeout` or `stall_seconds` is no number above 0.
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    """
    checked_seconds(stall_seconds, "stall_seconds")
    answer: Diagnosis = ask(client, _diagnose, every, stall_seconds, timeout, timeout=timeout)
    return answer


async def _diagnose(client: Client, every: bool, stall_seconds: float, timeout: float) -> Diagnosis:
    # First: a question to one that is stopped lasts until the timeout.
    progress: dict[str, Any] = await _progress(client, timeout)
    status, checks, run = await asyncio.gather(
        look(client, timeout), checkup_of(client, timeout), _newest(client, timeout)
    )
    advice = () if run is None else tuple(advise(run))
    return go_through(Evidence(status, tuple(checks), run, advice, progress, stall_seconds), every=every)


async def _progress(client: Client, timeout: float) -> dict[str, Any]:
    try:
        told: dict[str, Any] = await ask_scheduler(client, remote.progress, timeout=timeout)
    except NoAnswer:
        raise
    except GpurtError:  # the extension is not there, which the status says
        return {}
    return told


async def _newest(client: Client, timeout: float) -> Run | None:
    """The newest run, if it was long enough to judge by; else all so far; None: nothing is observed."""
    try:
        run = (await report_of(client, -1, timeout)).run
        if run.wanted_seconds >= COLD_SECONDS:
            return run
    except UnknownRun:
        pass
    except NoAnswer:
        raise
    except GpurtError:
        return None
    return from_snapshots(None, await snapshot_of(client, timeout))
