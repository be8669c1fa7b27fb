"""`Preflight`: on a worker, tell the class of its node, run the checks, and report to the scheduler.

It is a task that begins after ``setup``. While a worker plugin's ``setup`` awaits, distributed answers no call to that
worker, so two workers that probed each other there would wait for each other.

The messages are calls of the scheduler's handler `OP`, in this order: the class of the node; the report; and again a
report for as long as the answer asks for it. Only a plugin that a scheduler with that handler has sent makes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import nvml
from dask_gpurt.backends.system import System, node_class, stack
from dask_gpurt.preflight import checks
from dask_gpurt.preflight.checks import Finding, Plan, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distributed import Worker

    from dask_gpurt.model.node_class import NodeClass
    from dask_gpurt.preflight.known_answer import Measured

logger = logging.getLogger("distributed.worker.gpurt")

#: name of the scheduler's handler
OP = "gpurt_preflight"
#: bytes sent to a peer and back
PROBE_BYTES = 1 << 20
#: for one peer; distributed's own time to connect is 30 s
PROBE_SECONDS = 5.0
#: for an answer of the scheduler
ANSWER_SECONDS = 30.0
#: before each further attempt
AGAIN_SECONDS = (1.0, 5.0, 20.0, 60.0)
#: where nothing waits for the checks: without tasks for so long first, and so long at most until they begin
QUIET_SECONDS = 3.0
PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.5


class Preflight:
    """The task of one worker.

    Parameters
    ----------
    worker
        It has been set up, and answers calls.
    folders
        Where it spills to.
    device
        As in `checks.Plan`.
    """

    def __init__(self, worker: Worker, folders: Sequence[str], device: Callable[[bytes], bytes] | None = None) -> None:
        self._worker = worker
        self._folders = tuple(folders)
        self._device = device
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; what it finds is the scheduler's to say."""
        self._task = asyncio.create_task(self._prove(), name="gpurt-preflight")

    def stop(self) -> None:
        """Stop. What a thread has begun ends by itself, within a second."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _prove(self) -> None:
        try:
            answer = await self._introduce(await asyncio.to_thread(self._node_class))
            if answer.get("check"):
                await self._check(answer)
        except OSError as e:  # also that of an answer that does not come: the scheduler closes, or is busy
            logger.info("dask-gpurt: the scheduler was not told of this node: %r", e)
        except Exception as e:
            logger.warning("dask-gpurt: the checks of this worker have ended", exc_info=True)
            broken = Finding("preflight", State.WARN, f"{type(e).__name__}: {e}", "checks that run to their end")
            with contextlib.suppress(OSError):
                await self._tell(report=_report([broken], None, {}))

    async def _introduce(self, node: NodeClass) -> dict[str, Any]:
        """Tell the class. Again where no answer comes, as of a scheduler that takes in a large graph: tasks that ask
        for this class would wait for it for ever."""
        for seconds in AGAIN_SECONDS:
            try:
                return await self._tell(node=node.to_dict())
            except OSError as e:
                logger.info("dask-gpurt: the scheduler did not hear of this node; it is asked again: %r", e)
                await asyncio.sleep(seconds)
        return await self._tell(node=node.to_dict())

    def _node_class(self) -> NodeClass:
        gpus, driver = nvml.gpus()
        folder = self._folders[0] if self._folders else self._worker.local_directory
        # Often a link: /scratch to a disk of its own, say.
        return node_class(System(), os.path.realpath(folder), gpus, stack(driver))

    async def _check(self, wanted: dict[str, Any]) -> None:
        """Run the checks and report until the scheduler has heard enough."""
        urgent = bool(wanted["held"])
        plan = Plan(
            imports=(*checks.OURS, *wanted["imports"]),
            load=urgent,
            folders=self._folders,
            memory_limit_bytes=int(self._worker.memory_manager.memory_limit or 0),
            compute=urgent or await self._quiet(),
            device=self._device,
        )
        probes = asyncio.create_task(self._probe_all(wanted["peers"]))
        try:
            findings, measured = await asyncio.to_thread(checks.run, plan)
            answer = await self._tell(report=_report(findings, measured, await probes))
        finally:
            probes.cancel()
        while answer.get("again"):
            finding, measured = await asyncio.to_thread(checks.partition, plan)
            answer = await self._tell(report=_report([finding], measured, {}))

    async def _tell(self, **what: Any) -> dict[str, Any]:
        call = getattr(self._worker.scheduler, OP)(worker=self._worker.contact_address, **what)
        answer: dict[str, Any] = await asyncio.wait_for(call, ANSWER_SECONDS)
        return answer

    async def _quiet(self) -> bool:
        """Wait until this worker has had no task for a while: nothing waits for the checks, and tasks go before them.

        False: it never was without.
        """
        still = waited = 0.0
        while still < QUIET_SECONDS and waited < PATIENCE_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
            still = 0.0 if self._worker.state.executing else still + _LOOK_SECONDS
        return still >= QUIET_SECONDS

    async def _probe_all(self, peers: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = await asyncio.gather(*(self._probe(peer) for peer in peers))
        return dict(zip(peers, found, strict=True))

    async def _probe(self, peer: str) -> dict[str, Any]:
        """``{"seconds", "bytes_per_second"}`` of a small and a large message there and back, or ``{"error"}``."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                remote = self._worker.rpc(peer)
                await remote.echo(data=b"")  # connects
                start = time.perf_counter()
                await remote.echo(data=b"")
                middle = time.perf_counter()
                echoed = await remote.echo(data=bytes(PROBE_BYTES))
                end = time.perf_counter()
        except TimeoutError:
            return {"error": f"no answer within {PROBE_SECONDS:g} s"}
        except Exception as e:  # of the network, or what the peer has raised
            return {"error": f"{type(e).__name__}: {e}"}
        if len(echoed) != PROBE_BYTES:
            return {"error": f"{len(echoed):,} of {PROBE_BYTES:,} bytes came back"}
        return {"seconds": middle - start, "bytes_per_second": 2 * PROBE_BYTES / (end - middle)}


def _report(findings: Sequence[Finding], measured: Measured | None, peers: dict[str, Any]) -> dict[str, Any]:
    return {
        "findings": [finding.to_dict() for finding in findings],
        "own_seconds": None if measured is None else measured.own_seconds,
        "peers": peers,
    }
