"""`report`: what a run of a cluster did and what it waited for, as one HTML file, or in words.

Of a block it is the difference of two snapshots. For each snapshot the workers are asked, so that
what the scheduler knows of them is of now. Of a run that is over the scheduler has the record.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, overload

from dask_gpurt.client import remote
from dask_gpurt.client.ask import (
    after_block,
    ask,
    ask_scheduler,
    ask_workers,
    checked_seconds,
    found,
    is_asynchronous,
    unanswered,
)
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.client.runs import report_of, whole
from dask_gpurt.errors import GpurtError
from dask_gpurt.observe.output_file import replaceable
from dask_gpurt.observe.report.facts import Run, from_snapshots
from dask_gpurt.observe.report.page import write

if TYPE_CHECKING:
    from types import TracebackType

    from distributed import Client

    from dask_gpurt.client.ask import Asked
    from dask_gpurt.observe.answers.runs import RunReport

#: text that is an address, not a path
_ADDRESS = re.compile(r"[a-z]+://|[\w.-]+:\d+$")

_UNWRITTEN = "the report of a block that raised was not written"


@overload
def report(path: str | os.PathLike[str], client: Asked = None, *, timeout: float = ANSWER_SECONDS) -> ReportBlock: ...


@overload
def report(
    path: Asked | os.PathLike[str] = None, client: Asked = None, *, run: int, timeout: float = ANSWER_SECONDS
) -> RunReport: ...


def report(
    path: Asked | os.PathLike[str] = None,
    client: Asked = None,
    *,
    run: int | None = None,
    timeout: float = ANSWER_SECONDS,
) -> ReportBlock | RunReport:
    """Report what a run did and what it waited for: of a ``with`` block, or of a run that is over.

    Parameters
    ----------
    path
        Where the HTML file goes. It needs nothing besides itself, and is written also when the block raises; if that
        fails, it is a warning, and the block's own exception goes on. With `run` it may be left out, and the client
        given in its place.
    client
        Of a cluster with the extension; or the cluster, or its scheduler's address. None: the current client, or else
        the address in Dask's configuration. With an asynchronous client use ``async with``; the report of a
        run is to be awaited.
    run
        Without a block: which run. -1 is the newest, -2 the one before; or a number that `dask_gpurt.runs` shows.
    timeout
        Seconds that the workers have to answer, and then the scheduler, at both ends of the block. The report names the
        workers that did not answer. A run that is over needs the scheduler alone.

    Returns
    -------
    ReportBlock or RunReport
        A context manager; with `run` the report, which prints as text, shows as HTML in a notebook, and has
        ``.write(path)`` and ``.to_dict()``.

    Raises
    ------
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    UnknownRun
        There is no such run, or it is not kept any more.
    GpurtError
        The extension is not in that cluster, or its observation is off.
    TypeError, ValueError, IsADirectoryError, FileExistsError
        `path` is not that of a file, or `timeout` is no number above 0.

    Examples
    --------
    >>> with dask_gpurt.report("run.html"):  # doctest: +SKIP
    ...     ddf.groupby("x").y.mean().compute()
    >>> dask_gpurt.report(client, run=-1)  # doctest: +SKIP
    """
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if run is not None:
        return _report_of(path, client, whole(run), timeout)
    if not isinstance(path, str) or _ADDRESS.match(path):
        raise TypeError(
            f"the path is {path!r} ({type(path).__name__}), must be where the HTML file goes. Remedy: "
            '`with dask_gpurt.report("run.html", client)`, or report(client, run=-1) for the newest run'
        )
    return ReportBlock(path, client, timeout=timeout)


def _report_of(path: Asked, client: Asked, run: int, timeout: float) -> RunReport:
    file = path if isinstance(path, str) and not (client is None and _ADDRESS.match(path)) else None
    if file is None and client is None:
        client = path
    elif file is None and path is not None:
        raise TypeError(f"the path is {path!r} ({type(path).__name__}), must be where the HTML file goes")
    answer: RunReport = ask(client, _write_report, file, run, timeout, timeout=timeout)
    return answer


async def _write_report(client: Client, file: str | None, run: int, timeout: float) -> RunReport:
    made = await report_of(client, run, timeout)
    if file is not None:
        made.write(file)
    return made


class ReportBlock:
    """What `report` returns for a ``with`` block; ``run`` has the facts afterwards."""

    def __init__(self, path: str, client: Asked = None, *, timeout: float = ANSWER_SECONDS) -> None:
        # Before the work, not after it.
        checked_seconds(timeout)
        replaceable(path)
        self.path = path
        self._client: Asked = client
        self._timeout = timeout
        self._before: dict[str, Any] | None = None
        #: what the report is about; None until the end of the block
        self.run: Run | None = None

    def __enter__(self) -> ReportBlock:
        self._client = found(self._client)
        if is_asynchronous(self._client):
            raise TypeError("the client is asynchronous. Remedy: `async with dask_gpurt.report(path, client)`")
        self._before = snapshot(self._client, timeout=self._timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with after_block(value, _UNWRITTEN):
            self._finish(snapshot(self._client, timeout=self._timeout))

    async def __aenter__(self) -> ReportBlock:
        self._client = found(self._client)
        if not is_asynchronous(self._client):
            raise TypeError("the client is not asynchronous. Remedy: `with dask_gpurt.report(path, client)`")
        self._before = await ask(self._client, snapshot_of, self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with after_block(value, _UNWRITTEN):
            self._finish(await ask(self._client, snapshot_of, self._timeout))

    def _finish(self, after: dict[str, Any]) -> None:
        self.run = from_snapshots(self._before, after)
        write(self.run, self.path)


def report_now(path: str, client: Asked, *, timeout: float = ANSWER_SECONDS) -> Run:
    """Write a report about all since the start of the cluster; of tasks, the newest 10,000.

    Raises
    ------
    NoAnswer, GpurtError
        As for `report`.
    """
    run = from_snapshots(None, snapshot(client, timeout=timeout))
    write(run, path)
    return run


def snapshot(client: Asked, *, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
    """All that is counted on a cluster, as plain values; see `dask_gpurt.observe.report.facts`.

    With an asynchronous client the result is to be awaited.

    Raises
    ------
    NoAnswer, GpurtError
        As for `report`.
    """
    answer: dict[str, Any] = ask(client, snapshot_of, timeout, timeout=timeout)
    return answer


async def snapshot_of(client: Client, timeout: float) -> dict[str, Any]:
    """`snapshot` with an asynchronous client."""
    replies = await ask_workers(client, remote.figures, timeout=timeout)
    answers = {address: reply for address, reply in replies.items() if isinstance(reply, dict) and reply}
    figures = {address: answer["figures"] for address, answer in answers.items()}
    counts: dict[str, Any] = await ask_scheduler(client, remote.counted, timeout=timeout, figures=figures)
    if counts.get("off"):
        raise GpurtError(
            f"there is nothing to report: {counts['off']}. Remedy: dask_gpurt.attach(client), or "
            "`dask scheduler --preload dask_gpurt.preload`, with gpurt.observe.enabled: true"
        )
    for address, facts in counts["workers"].items():
        facts["status"] = answers.get(address, {}).get("status", {})
    counts["silent"] = unanswered(replies)
    counts["without"] = [address for address in replies if address not in answers and address not in counts["silent"]]
    return counts
