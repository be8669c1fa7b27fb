"""`hold` and `release`: take workers out, see which are, and let them in again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dask_gpurt.client import remote
from dask_gpurt.client.ask import ask, ask_scheduler
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpurt.client.ask import Asked


@dataclasses.dataclass(frozen=True)
class Quarantined:
    """Which workers are out, and what is held against others."""

    #: "alarm" or "on", see the setting ``gpurt.quarantine``
    mode: str
    #: address -> ``cause``, ``found``, ``remedy``, ``since`` (Unix time), ``only_here`` (values that only it holds)
    held: dict[str, dict[str, Any]]
    #: ``worker``, ``peer`` (of a link; else empty), ``cause``, ``found`` and ``remedy`` of those that work on
    suspects: list[dict[str, Any]]
    #: that were to be taken out, and run no tasks anyway or are the only one that does
    not_held: list[str]
    #: addresses that were let in just now
    released: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        lines = [f"{len(self.held)} workers get no tasks (gpurt.quarantine is {self.mode})"]
        for worker, why in self.held.items():
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(why["since"]))
            left = f"; {why['only_here']:,} values are still only there" if why["only_here"] else ""
            lines.append(f"{worker}, since {since}: {why['cause']}: {why['found']}{left}. Remedy: {why['remedy']}")
        for one in self.suspects:
            where = f"{one['worker']} -> {one['peer']}" if one["peer"] else one["worker"]
            lines.append(f"{where} works on: {one['cause']}: {one['found']}. Remedy: {one['remedy']}")
        lines += [f"{worker} is not held: it runs no tasks anyway, or no other worker does" for worker in self.not_held]
        lines += [f"{worker} gets tasks again" for worker in self.released]
        return "\n".join(lines)


def hold(
    client: Asked = None, workers: Iterable[str | int] = (), *, why: str = "as asked", timeout: float = ANSWER_SECONDS
) -> Quarantined:
    """Give workers no more tasks and move their data away; they stay in the cluster. Or say which are out.

    Parameters
    ----------
    client
        Of a cluster with the extension; or the cluster, or its scheduler's address; None: the current client, or else
        the address in Dask's configuration. With an asynchronous client the result is to be awaited.
    workers
        Addresses or names. None of them: nothing changes.
    why
        What `status` shows.
    timeout
        Seconds that the scheduler has to answer.

    Returns
    -------
    Quarantined
        Who is out now, and who is suspected. Prints as text; ``.to_dict()`` for programs.

    Raises
    ------
    ValueError
        There is no such worker.
    TypeError
        `workers` is no list.
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    GpurtError
        The extension is not in that cluster, or ``gpurt.quarantine`` is ``off``.
    """
    answer: Quarantined = ask(client, _change, _words(workers), [], why, timeout, timeout=timeout)
    return answer


def release(client: Asked, workers: Iterable[str | int], *, timeout: float = ANSWER_SECONDS) -> Quarantined:
    """Let workers have tasks again. Arguments, answer and errors are those of `hold`."""
    answer: Quarantined = ask(client, _change, [], _words(workers), "", timeout, timeout=timeout)
    return answer


def _words(workers: Iterable[str | int]) -> list[str]:
    """Addresses and names as text: names of a `LocalCluster` are numbers."""
    if isinstance(workers, str) or not isinstance(workers, Iterable):
        raise TypeError(f"workers is {workers!r}, must be a list of addresses or names. The client comes first")
    return [str(worker) for worker in workers]


async def _change(client: Client, out: list[str], back: list[str], why: str, timeout: float) -> Quarantined:
    told: dict[str, Any] | None = await ask_scheduler(
        client, remote.quarantined, timeout=timeout, hold=out, release=back, why=why
    )
    if told is None:
        raise GpurtError(
            "this scheduler has no quarantine. Remedy: install the extension there, with gpurt.quarantine: alarm or on"
        )
    if "unknown" in told:
        known = ", ".join(told["known"][:5]) or "none"
        raise ValueError(f"no worker {', '.join(told['unknown'])}. Must be an address or a name of one of: {known}")
    return Quarantined(told["mode"], told["held"], told["suspects"], told["not_held"], told["released"])
