"""`safe`: switch parts of a cluster's extension to what Dask does, and back."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.client import remote
from dask_gpurt.client.ask import ask, ask_scheduler, ask_workers
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.errors import GpurtError
from dask_gpurt.model import safe_mode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distributed import Client

    from dask_gpurt.client.ask import Asked


@dataclasses.dataclass(frozen=True)
class SafeMode:
    """What is in safe mode now, and who has acknowledged it."""

    #: part -> Unix time since which it is
    since: dict[str, float]
    #: addresses of workers that do so from now on
    acknowledged: list[str]
    #: of workers without the extension: they do as Dask does in any case
    stock: list[str]
    #: address -> why it is not known what that worker does
    silent: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        if self.since:
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(self.since.values())))
            lines = [f"safe mode: {', '.join(self.since)} as in stock Dask, since {began}"]
        else:
            lines = ["safe mode is off"]
        lines.append(f"the scheduler and {len(self.acknowledged)} workers have acknowledged it")
        if self.stock:
            lines.append(f"{len(self.stock)} workers run stock Dask in any case")
        lines += [f"no answer of {address}: {why}" for address, why in sorted(self.silent.items())]
        if self.silent:
            lines.append("Remedy: look at these workers, then say it again")
        return "\n".join(lines)


def safe(
    client: Asked = None, on: bool = True, *, parts: Iterable[str] | None = None, timeout: float = ANSWER_SECONDS
) -> SafeMode:
    """Have Dask do what parts of the extension did, at once, until it is switched off.

    Nothing is uninstalled. Shuffles that run go on, over Dask's comms; workers that join follow.

    Parameters
    ----------
    client
        Of a cluster with the extension; or the cluster, or its scheduler's address; None: the current client, or else
        the address in Dask's configuration. With an asynchronous client the result is to be awaited.
    on
        False ends it.
    parts
        Some of ``placement`` (Dask decides where tasks run, no stragglers run twice, no steps are fused), ``tiers``
        (nothing is read ahead), ``shuffle`` (new ones are Dask's; those that run send over Dask's comms, uncompressed).
        None: all.
    timeout
        Seconds that the scheduler has to answer, and as many for the workers.

    Returns
    -------
    SafeMode
        Who has acknowledged it, and who has not. Prints as text; ``.to_dict()`` for programs.

    Raises
    ------
    ValueError
        There is no such part.
    TypeError
        `on` is neither True nor False.
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    GpurtError
        The extension is not in that cluster.
    """
    if not isinstance(on, bool):  # bool("off") would be True
        raise TypeError(f"on is {on!r}, must be True or False")
    chosen = safe_mode.chosen(parts)
    answer: SafeMode = ask(client, _switch, list(chosen), on, timeout, timeout=timeout)
    return answer


async def _switch(client: Client, parts: list[str], on: bool, timeout: float) -> SafeMode:
    # The scheduler first: workers that join after its answer get it with their half, those before are asked below.
    since: dict[str, float] | None = await ask_scheduler(
        client, remote.switch_safe, timeout=timeout, parts=parts, on=on
    )
    if since is None:
        raise GpurtError(
            "the extension is not installed on this scheduler, so all of it is as in stock Dask. Remedy: none is needed"
        )
    answers = await ask_workers(client, remote.follow_safe, timeout=timeout, parts=list(since))
    silent = {a: f"{type(e).__name__}: {e}" for a, e in answers.items() if isinstance(e, OSError)}
    stock = [a for a, answer in answers.items() if answer is not True and a not in silent]
    return SafeMode(since, [a for a, answer in answers.items() if answer is True], stock, silent)
