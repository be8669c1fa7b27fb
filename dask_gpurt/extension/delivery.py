"""How the worker's half travels: as bytes that any worker can unpickle, also one without this package.

`pack` makes the bytes, `send` gives them to all workers, `take_back` removes what they became: a `Delivered`.

Theory of operation. distributed unpickles a worker plugin while the worker registers. An exception there ends the start
of that worker, and the scheduler keeps it in its list. An exception of ``setup`` is logged, and the worker runs stock.
So the bytes hold the source text of this module, which needs distributed alone. The plugin lies in them as bytes of its
own, which are unpickled in ``setup``, once the package is known to be there in the same version.

A worker that refuses says why in its heartbeats: ``WorkerState.metrics[REFUSED]`` is the text. It also logs an event of
that topic, which `GpurtScheduler` writes to the scheduler's log.

Rejected: the class by value with cloudpickle. That is bytecode, which crashes a worker of another Python; source text
and a pickle are understood by all.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import sys
from typing import TYPE_CHECKING, Any

from distributed import WorkerPlugin
from distributed.core import Status
from distributed.protocol.pickle import dumps

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

logger = logging.getLogger("distributed.worker.gpurt")
_scheduler_logger = logging.getLogger("distributed.scheduler.gpurt")

#: the metric, and the topic of an event, of a worker that runs stock although the scheduler sent it a part
REFUSED = "gpurt-refused"

#: what a worker evaluates
_UNPACK = "(exec(source, module), module['Delivered'](*arguments))[1]"


class Delivered(WorkerPlugin):
    """The plugin of the same name, not unpickled before `setup`.

    Parameters
    ----------
    name
        Of the plugin.
    version
        Of the package on the scheduler. The worker must have the same one.
    payload
        The plugin, pickled.
    """

    #: as `model.no_hook.ignored`, which may not be there
    transition: Any = "".format

    def __init__(self, name: str, version: str, payload: bytes) -> None:
        self.name = name
        self.version = version
        self.payload = payload
        self.plugin: Any = None
        self._busy = asyncio.Lock()

    async def setup(self, worker: Worker) -> None:
        """Unpickle the plugin and set it up. distributed logs what this raises, and the worker runs stock."""
        async with self._busy:
            await self._setup(worker)

    async def _setup(self, worker: Worker) -> None:
        try:
            from dask_gpurt._version import __version__

            if __version__ != self.version:
                raise RuntimeError(
                    f"this worker has dask-gpurt {__version__}, the scheduler {self.version}. "
                    "Remedy: install one version everywhere"
                )
            plugin = pickle.loads(self.payload)
            await plugin.setup(worker)
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
            # A new dict: a heartbeat may be waiting half-way through the old one.
            worker.metrics = {**worker.metrics, REFUSED: lambda worker: why}
            logger.warning("dask-gpurt: this worker runs stock. %s", why)
            # For the scheduler's log: a start where all workers run stock is what its user looks at.
            absent = isinstance(e, ModuleNotFoundError) and (e.name or "").partition(".")[0] == "dask_gpurt"
            worker.log_event(REFUSED, {"worker": worker.contact_address, "why": why, "absent": absent})
            raise
        self.plugin = plugin

    async def teardown(self, worker: Worker) -> None:
        """Tear down what was set up."""
        # A detach, or the same plugin once more, may come while a worker that joins still sets up. There is nothing to
        # tear down yet then, and what is set up after it would stay. A worker that closes has nothing to give back.
        if worker.status not in (Status.closing, Status.closed):
            async with self._busy:
                pass
        worker.metrics = {k: v for k, v in worker.metrics.items() if k != REFUSED}
        if self.plugin is not None:
            await self.plugin.teardown(worker)


class _SourceText:
    """Pickles as the source text of this module and the arguments of a `Delivered`."""

    def __init__(self, source: str, arguments: tuple[Any, ...]) -> None:
        self.names = {"source": source, "module": {"__name__": f"{__name__}.unpacked"}, "arguments": arguments}

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (_UNPACK, self.names)


def pack(plugin: Any, version: str) -> bytes:
    """Pickle a worker plugin so that a worker without this package, or with another version, runs stock."""
    try:
        source = inspect.getsource(sys.modules[__name__])
    except OSError:  # an installation without sources: by reference, which needs the package on each worker
        return dumps(plugin)
    return dumps(_SourceText(source, (plugin.name, version, dumps(plugin))))


async def send(scheduler: Scheduler, name: str, packed: bytes) -> None:
    """Have all workers, those that come later as well, set up a packed plugin. One that cannot runs stock.

    As ``Scheduler.register_worker_plugin``. That one raises when a single worker leaves meanwhile, and by then the
    others have the plugin.
    """
    scheduler.worker_plugins[name] = packed
    for address, why in (await _ask_all(scheduler, op="plugin-add", plugin=packed, name=name)).items():
        _scheduler_logger.warning("dask-gpurt: worker %s runs stock. %r", address, why)


async def take_back(scheduler: Scheduler, name: str) -> None:
    """Have all workers tear the plugin down; nothing if they have none. Those that did not are named in the log."""
    if scheduler.worker_plugins.pop(name, None) is None:
        return
    left = await _ask_all(scheduler, op="plugin-remove", name=name)
    if left:
        _scheduler_logger.warning(
            "dask-gpurt: these workers were not given back to stock Dask, and go on with the extension: %s. "
            "Remedy: restart them",
            "; ".join(f"{address} ({why!r})" for address, why in left.items()),
        )


async def _ask_all(scheduler: Scheduler, **msg: Any) -> dict[str, Any]:
    """Ask all workers; address -> why, of those that could not. Not raised: one odd worker must not end the others."""
    replies = await scheduler.broadcast(msg=msg, on_error="return")
    failed = {}
    for address, reply in replies.items():
        error = reply.get("exception") if isinstance(reply, dict) and reply.get("status") == "error" else reply
        if address in scheduler.workers and not isinstance(error, dict):
            failed[address] = error
    return failed
