"""Ask workers whether they can make our runs: they need this package in the same version, and the same distributed.

`probe_workers` is for the scheduler, `probe` is what runs on a worker.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dask_gpurt._version import __version__
from dask_gpurt.errors import SeamMismatch
from dask_gpurt.model.compression import Chooser
from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distributed.scheduler import Scheduler

#: how the reason of a worker begins that did not answer
NO_ANSWER = "no answer"
#: how it begins when the connection ended: in most cases the process has, too
LOST_CONNECTION = f"{NO_ANSWER}, the connection ended"


def probe(version: str, codec: str = "none") -> None:
    """Run on a worker: can it make the runs of this version, with this setting of the codec? Raises when not.

    Raises
    ------
    SeamMismatch
        Another version of this package or of distributed there.
    ConfigError
        The codec is not installed there.
    """
    if version != __version__:
        raise SeamMismatch(
            f"this worker has dask-gpurt {__version__}, the scheduler {version}. Remedy: install one version everywhere"
        )
    seam.check()
    Chooser(codec, "gpurt.shuffle.codec")


async def probe_workers(
    scheduler: Scheduler, workers: Iterable[str], codec: str = "none", timeout_seconds: float = 10.0
) -> dict[str, str]:
    """Ask workers whether they can run our spec.

    Returns
    -------
    dict
        Address to ``""`` when it can, else to the reason why not (package missing, other version). The reason begins
        with `NO_ANSWER` if the worker did not answer: it may, when it is asked again.
    """
    from distributed.protocol.pickle import dumps

    msg = {"function": dumps(probe), "args": dumps((__version__, codec)), "wait": True}

    async def one(address: str) -> str:
        # Not `Scheduler.broadcast`: it logs an error for a worker whose process ends meanwhile.
        try:
            answer = await asyncio.wait_for(scheduler.rpc(address).run(**msg, close=True), timeout_seconds)
        except TimeoutError:
            return f"{NO_ANSWER} within {timeout_seconds:g} s"
        except OSError as e:
            return f"{LOST_CONNECTION}: {e!r}"
        except Exception as e:
            return repr(e)
        if isinstance(answer, dict) and answer.get("status") == "OK":
            return ""
        if isinstance(answer, dict):
            return str(answer.get("exception_text") or answer.get("text") or answer.get("status"))
        return repr(answer)

    workers = list(workers)
    return dict(zip(workers, await asyncio.gather(*map(one, workers)), strict=True))
