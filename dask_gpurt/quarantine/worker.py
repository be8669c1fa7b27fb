"""`Health`: what a worker has seen of its disk, its peers and its cards, for the scheduler's `evidence.Evidence`.

It rides on heartbeats under the key ``health``, and only where there is something to say: counts so far, since
heartbeats get lost. Checksums and disks are counted by the engines. Errors of NVIDIA cards are read from the kernel's
log as they are written, where there is such a card.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends.system import System
from dask_gpurt.doctor.gpu import NVIDIA, pci_devices
from dask_gpurt.doctor.xid import OF_PROGRAMS, lines, opened, xid_of
from dask_gpurt.preflight import known_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("distributed.worker.gpurt")

#: key in the heartbeat
KEY = "health"
#: name of the worker's handler that does the known computation
OP = "gpurt_known_answer"
#: between two looks at the kernel's log
_LOOK_SECONDS = 5.0
#: of the log, in one look
_RECORDS = 1000
#: kinds of errors that a full disk, or a program, does not make
CHECKSUM = "checksum"
_OF_DISKS = frozenset({CHECKSUM, "EIO", "EROFS", "EUCLEAN", "EBADMSG", "ENXIO", "ENODEV", "EREMOTEIO", "ESTALE"})


class Health:
    """Of one worker.

    Parameters
    ----------
    corrupt
        Gives, for each peer, how many of its messages have failed their checksum.
    disk
        Gives how many reads and writes have failed, by the kind of error (`CHECKSUM`, or as in ``errno``).
    clocks
        Gives what has slowed the clocks of a card for a minute; empty: nothing.
    """

    def __init__(
        self,
        corrupt: Callable[[], Mapping[str, int]],
        disk: Callable[[], Mapping[str, int]],
        clocks: Callable[[], str] = str,
        system: System | None = None,
    ) -> None:
        self._corrupt = corrupt
        self._disk = disk
        self._clocks = clocks
        self._system = System() if system is None else system
        self._handlers: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        #: the newest error of a card that no program makes
        self._xid = ""

    def start(self, handlers: dict[str, Any]) -> None:
        """Answer calls, and follow the kernel's log where there is a card and it may be read.

        Parameters
        ----------
        handlers
            Of the worker.
        """
        self._handlers = handlers
        handlers[OP] = self.known_answer
        if pci_devices(self._system, NVIDIA):
            self._task = asyncio.create_task(self._follow(), name="gpurt-xid")

    def stop(self) -> None:
        """End that."""
        if self._handlers.get(OP) == self.known_answer:
            del self._handlers[OP]
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def heartbeat(self) -> dict[str, Any]:
        """``{}``, or what there is of ``corrupt`` (by peer), ``disk`` (a count), ``hardware``, ``clocks`` (texts)."""
        out: dict[str, Any] = {}
        if corrupt := {peer: count for peer, count in self._corrupt().items() if count}:
            out["corrupt"] = corrupt
        if disk := sum(count for kind, count in self._disk().items() if kind in _OF_DISKS):
            out["disk"] = disk
        if self._xid:
            out["hardware"] = self._xid
        if clocks := self._clocks():
            out["clocks"] = clocks
        return {KEY: out} if out else {}

    async def known_answer(self) -> float:
        """Seconds of the known computation on this worker, in a thread; infinite where the answer is wrong."""
        measured = await asyncio.to_thread(known_answer.measure, System())
        return measured.own_seconds if measured.digest == known_answer.ANSWER else math.inf

    async def _follow(self) -> None:
        try:
            log = opened(self._system)
        except OSError as e:
            logger.info("dask-gpurt: errors of cards are not watched, the kernel's log cannot be read: %s", e.strerror)
            return
        try:
            # What was there before this worker is not its: a card may have been reset since.
            with contextlib.suppress(OSError):
                os.lseek(log, 0, os.SEEK_END)
            while True:
                self._read(log)
                await asyncio.sleep(_LOOK_SECONDS)
        except OSError as e:
            logger.info("dask-gpurt: errors of cards are no longer watched: %s", e.strerror)
        finally:
            os.close(log)

    def _read(self, log: int) -> None:
        """Take in what was written since the last look. Does not block."""
        for line in lines(log, _RECORDS):
            xid = xid_of(line)
            if xid is not None and xid.number not in OF_PROGRAMS:
                self._xid = f"Xid {xid.number} of {xid.device}, {xid.seconds:.0f} s after the machine's start"
