"""`runs`, `compare` and the report of one run: what a cluster keeps of the runs that are over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.client import remote
from dask_gpurt.client.ask import ask, ask_scheduler, ask_workers, unanswered
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.errors import GpurtError, UnknownRun
from dask_gpurt.observe.answers.compare import Comparison
from dask_gpurt.observe.answers.runs import RunReport, Runs

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpurt.client.ask import Asked


def runs(client: Asked = None, *, timeout: float = ANSWER_SECONDS) -> Runs:
    """The newest runs of a cluster: when, for how long, and what they waited for.

    A run is what one client asks for at once: a ``compute``, a ``persist`` with what follows before it is done, a batch
    of futures. The scheduler keeps the newest 100, in 4 MiB at most.

    Parameters
    ----------
    client
        Of a cluster with the extension; or the cluster, or its scheduler's address; None: the current client, or else
        the address in Dask's configuration. With an asynchronous client the result is to be awaited.
    timeout
        Seconds that the scheduler has to answer.

    Returns
    -------
    Runs
        Prints as a table, shows as HTML in a notebook; ``.to_dict()`` for programs. Times in seconds.

    Raises
    ------
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    GpurtError
        The extension is not in that cluster, or its observation is off.
    """
    answer: Runs = ask(client, _runs, timeout, timeout=timeout)
    return answer


async def _runs(client: Client, timeout: float) -> Runs:
    answer: dict[str, Any] = await ask_scheduler(client, remote.listed, timeout=timeout)
    _require_on(answer)
    return Runs(answer["runs"], answer["unfollowed"])


def compare(client: Asked = None, first: int = -2, second: int = -1, *, timeout: float = ANSWER_SECONDS) -> Comparison:
    """Two runs side by side: how much longer the second took, and which causes of idleness changed, in seconds.

    Parameters
    ----------
    client
        As for `runs`.
    first, second
        Numbers of runs as `runs` shows them; or -1 for the newest, -2 for the one before.
    timeout
        Seconds that the scheduler has to answer; as many for the workers, for a run that is still going on.

    Returns
    -------
    Comparison
        Prints as text, shows as HTML in a notebook; ``.to_dict()`` for programs.

    Raises
    ------
    UnknownRun
        There is no such run, or it is not kept any more.
    TypeError
        A number that is none.
    NoAnswer, GpurtError
        As for `runs`.
    """
    numbers = [whole(first), whole(second)]
    answer: Comparison = ask(client, _compare, numbers, timeout, timeout=timeout)
    return answer


async def _compare(client: Client, numbers: list[int], timeout: float) -> Comparison:
    first, second = await records(client, numbers, timeout)
    return Comparison(first, second)


async def report_of(client: Client, number: int, timeout: float) -> RunReport:
    """The report of one run."""
    (record,) = await records(client, [number], timeout)
    return RunReport(record)


async def records(client: Client, numbers: list[int], timeout: float) -> list[dict[str, Any]]:
    """Records of runs.

    The scheduler has all of a run that is over. For one that goes on, or has just ended, workers are asked too: what
    they have sent may be some seconds old. Those that do not answer are named in ``silent``.
    """
    answer: dict[str, Any] = await ask_scheduler(client, remote.recorded, timeout=timeout, numbers=numbers)
    found = _found(answer)
    if not any(record["open"] for record in found):
        return found
    replies = await ask_workers(client, remote.figures, timeout=timeout)
    figures = {a: reply["figures"] for a, reply in replies.items() if isinstance(reply, dict) and reply}
    # By number: another run may have begun meanwhile.
    numbers = [record["number"] for record in found]
    found = _found(await ask_scheduler(client, remote.recorded, timeout=timeout, numbers=numbers, figures=figures))
    silent = unanswered(replies)
    return [record | {"silent": silent} if record["open"] else record for record in found]


def _found(answer: dict[str, Any]) -> list[dict[str, Any]]:
    _require_on(answer)
    if "missing" in answer:
        raise UnknownRun(_unknown(answer["missing"], answer["known"], answer["runs"]))
    records: list[dict[str, Any]] = answer["records"]
    return records


def _require_on(answer: dict[str, Any]) -> None:
    if answer.get("off"):
        raise GpurtError(
            f"there are no runs: {answer['off']}. Remedy: dask_gpurt.attach(client), or "
            "`dask scheduler --preload dask_gpurt.preload`, with gpurt.observe.enabled: true"
        )


def _unknown(number: int, known: list[int], so_far: int) -> str:
    if not known:
        return f"there is no run {number}: nothing has run yet since the extension was installed. Remedy: run something"
    kept = f"{known[0]} to {known[-1]}" if len(known) > 1 else f"{known[0]} alone"
    why = "it is not kept any more" if 0 < number <= so_far else f"there were {so_far:,} so far"
    return (
        f"there is no run {number}: {why}. Remedy: one of those that are kept, {kept}; or -1 for the newest to "
        f"-{len(known)} for the oldest. dask_gpurt.runs(client) lists them"
    )


def whole(number: object) -> int:
    """The number of a run as it was given.

    Raises
    ------
    TypeError
        It is no whole number.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(
            f"the run is {number!r} ({type(number).__name__}), must be a whole number: -1 is the newest run, -2 the "
            "one before; positive numbers are those that dask_gpurt.runs(client) shows"
        )
    return number
