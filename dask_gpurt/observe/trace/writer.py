"""`Writer`: writes blocks from a thread of its own, so that the event loop waits for neither disk nor compression.

The queue is bounded in blocks. When the disk is slower than the run for so long that it fills, blocks are dropped
and counted, but for the names of workers and prefixes in them: a recorder must neither slow down what it records nor
take the scheduler's memory. The first error, such as a full disk, ends the recording and is kept as text. So does a
file of `MAX_BYTES`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.trace.format import Kind, pack, write_header

if TYPE_CHECKING:
    from collections.abc import Callable

#: blocks waiting to be written
MAX_WAITING = 64
#: bytes of a file, after which a recording ends: one that a setting began goes on for as long as the scheduler
MAX_BYTES = 4 * 2**30
#: the remedy for what should not be
FAULT = "report this, it is a fault of dask-gpurt"
#: records that give others their names
_NAMES = (int(Kind.WORKER), int(Kind.PREFIX))

#: names that are tried for a file until there must be room for no more
MAX_FILES = 10_000


def _make(path: str) -> tuple[str, int]:
    """Make a file under a name that is free; returns its path and descriptor."""
    root, suffix = os.path.splitext(path)
    for number in range(1, MAX_FILES + 1):
        name = path if number == 1 else f"{root}-{number}{suffix}"
        try:
            return name, os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            continue
    raise FileExistsError(errno.EEXIST, f"there are {MAX_FILES:,} files of that name already", path)


class Writer:
    """Owns the file and the thread.

    Parameters
    ----------
    path
        A new file. One that exists is kept: the new one then is ``run-2.trace`` beside ``run.trace``, and so on.

    Raises
    ------
    OSError
        The file cannot be made.
    """

    def __init__(self, path: str) -> None:
        #: of the file that was made
        self.path, descriptor = _make(path)
        #: records handed over, and those dropped
        self.records = 0
        self.lost = 0
        self.bytes = 0
        #: of blocks that were dropped, to be written with the next one
        self._names: list[list[Any]] = []
        #: why it ended early; None: it did not. The file is whole where it is full
        self.error: str | None = None
        self.full = False
        #: what helps against the error, or against records that were dropped for want of time
        self.remedy = "a --local-directory of the scheduler on a faster disk"
        self._file = os.fdopen(descriptor, "wb")
        self._queue: queue.Queue[list[list[Any]] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="gpurt-trace", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that little more has room."""
        return self._queue.qsize() > MAX_WAITING // 2

    def put(self, records: list[list[Any]]) -> None:
        """Hand over a block; never waits. The list must not be changed afterwards."""
        if self.error is not None:
            self.lost += len(records)
            return
        records = [*self._names, *records]
        try:
            self._queue.put_nowait(records)
        except queue.Full:
            # Without these nothing of what follows can be read; there are few, and each comes once.
            names = [record for record in records if record[0] in _NAMES]
            self.lost += len(records) - len(names)
            self._names = names
        else:
            self.records += len(records)
            self._names = []

    def close(self, last: Callable[[int, int], list[Any]]) -> None:
        """Write what waits, then the record that `last` makes of (records, lost), and close the file. Blocks."""
        self._queue.put(None)
        self._thread.join()
        try:
            if self.error is None or self.full:
                self.records += len(self._names)
                self._write([*self._names, last(self.records, self.lost)])
        except OSError as e:
            self._failed(e, str(e))
        finally:
            try:
                self._file.close()
            except OSError as e:  # the buffer's last flush
                if self.error is None:
                    self._failed(e, str(e))

    def _failed(self, e: Exception, text: str) -> None:
        self.remedy = "room in the scheduler's --local-directory" if isinstance(e, OSError) else FAULT
        self.error = text

    def _write(self, records: list[list[Any]]) -> None:
        block = pack(records)
        self._file.write(block)
        # A block at a time reaches the file, so that a killed scheduler leaves all but the last seconds.
        self._file.flush()
        self.bytes += len(block)

    def _run(self) -> None:
        try:
            write_header(self._file)
            while (records := self._queue.get()) is not None:
                self._write(records)
                if self.bytes >= MAX_BYTES:
                    self.full, self.remedy = True, "record a shorter part of the run"
                    self.error = f"the file has {self.bytes:,} bytes, and {MAX_BYTES:,} are allowed"
                    break
            else:
                return
        except Exception as e:
            self._failed(e, f"{type(e).__name__}: {e}")
        # A close waits for nothing; what still comes is counted by `put`.
        while (records := self._queue.get()) is not None:
            self.lost += len(records)
            self.records -= len(records)


def discard(path: str, writer: Writer | None, last: Callable[[int, int], list[Any]]) -> None:
    """End a recording that nothing can fetch, and remove its file and directory. Blocks."""
    if writer is not None:
        writer.close(last)
    with contextlib.suppress(FileNotFoundError):  # the client has just fetched it
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
