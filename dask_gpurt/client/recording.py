"""`record`: write a run of a cluster into a file on the client's machine.

The scheduler records into a file in its own local directory (`observe.trace.recorder`). The client fetches it in
pieces when the block ends, so the two need no file system in common. When the client disappears, the recording ends
and its file is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import uuid
import warnings
from typing import TYPE_CHECKING, Any

from distributed import Client

from dask_gpurt.client.ask import Session, after_block, ask_scheduler, checked_seconds, found, is_asynchronous
from dask_gpurt.errors import GpurtError, TraceError
from dask_gpurt.observe.output_file import replaceable, replacing

if TYPE_CHECKING:
    from types import TracebackType

    from distributed import Scheduler

    from dask_gpurt.client.ask import Asked

#: bytes fetched at a time
PIECE_BYTES = 4 * 2**20
#: seconds for one answer of the scheduler, which writes at the end what it still has in memory
ANSWER_SECONDS = 60.0
_UNWRITTEN = "the recording of a block that raised was not written"


class record:
    """Record what the cluster does while a block runs.

    ::

        with dask_gpurt.record(client, "run.trace"):
            df.groupby("a").b.sum().compute()

    ``dask gpurt trace run.trace`` says what is in the file and makes one for https://ui.perfetto.dev of it;
    `Trace.load` of `dask_gpurt.observe.trace.reader` reads it in Python.

    Parameters
    ----------
    client
        Of any cluster whose scheduler can import this package; the extension need not be installed there. Or the
        cluster, or its scheduler's address; None: the current client, or else the address in Dask's configuration.
        With an asynchronous client use ``async with``.
    path
        Where the file goes, on the client's machine. It appears when the block ends, also by an exception; one that is
        there is replaced then. If that fails after an exception, it is a warning, and the exception goes on. So is a
        recording that the scheduler could not finish, such as on a full disk.
    timeout
        Seconds for each answer of the scheduler, and to connect to an address.

    Raises
    ------
    FileNotFoundError
        `path` is in a directory that does not exist. Nothing was recorded.
    ValueError, IsADirectoryError, FileExistsError
        `path` is not that of a file, or `timeout` is no number above 0. Nothing was recorded.
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    GpurtError
        The scheduler cannot record (no room, the package is missing there).
    """

    def __init__(self, client: Asked, path: str | os.PathLike[str], *, timeout: float = ANSWER_SECONDS) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"the path is {path!r}, must be where the file goes. The client comes first")
        self.client = client
        checked_seconds(timeout)
        self.path = replaceable(path)
        self._timeout = timeout
        self._session: Session | None = None
        self._name = f"gpurt-trace-{uuid.uuid4().hex[:12]}"
        #: what the scheduler answered at the end: records, lost_records, bytes, error, remedy
        self.summary: dict[str, Any] = {}
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"cannot record into {self.path!r}: there is no directory {folder!r}")

    def __enter__(self) -> record:
        target = found(self.client)
        if is_asynchronous(target):
            raise TypeError("the client is asynchronous. Remedy: `async with dask_gpurt.record(client, path)`")
        # One client for the whole block: the recording ends with it.
        with contextlib.ExitStack() as undo:
            session = undo.enter_context(Session(target, self._timeout))
            session.ask(self._begin)
            undo.pop_all()
        self._session = session
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._session is not None
        with after_block(error, _UNWRITTEN), contextlib.ExitStack() as end:
            end.push(self._session.__exit__)
            self._session.ask(self._end)
        self._warn()

    async def __aenter__(self) -> record:
        target = found(self.client)
        if not is_asynchronous(target):
            raise TypeError("the client is not asynchronous. Remedy: `with dask_gpurt.record(client, path)`")
        if not isinstance(target, Client):
            raise TypeError(f"{type(target).__name__} is asynchronous. Remedy: give an asynchronous client of it")
        self.client = target
        await self._begin(target)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert isinstance(self.client, Client)
        with after_block(error, _UNWRITTEN):
            await self._end(self.client)
        self._warn()

    async def _begin(self, client: Client) -> None:
        problem = await ask_scheduler(client, _begin, timeout=self._timeout, name=self._name, client=client.id)
        if problem is not None:
            raise GpurtError(f"the scheduler cannot record: {problem}")

    async def _end(self, client: Client) -> None:
        self.summary = await ask_scheduler(client, _end, timeout=self._timeout, name=self._name)
        if "gone" in self.summary:
            raise TraceError(
                f"the scheduler's file of the recording is gone ({self.summary['gone']}). Remedy: a "
                "--local-directory of the scheduler that nothing cleans up"
            )
        if "path" not in self.summary:
            raise TraceError("the scheduler was restarted in the meantime; what it had recorded is gone with it")
        source, size = self.summary.pop("path"), self.summary["bytes"]
        if not size:  # not even the header had room
            await ask_scheduler(client, _remove, timeout=self._timeout, name=self._name, path=source)
            raise TraceError(f"the scheduler could record nothing: {self.summary['error']}")
        try:
            with replacing(self.path) as partial:
                for offset in range(0, size, PIECE_BYTES):
                    piece = await ask_scheduler(client, _piece, timeout=self._timeout, path=source, offset=offset)
                    await asyncio.to_thread(_append, partial, piece)
        finally:
            await ask_scheduler(client, _remove, timeout=self._timeout, name=self._name, path=source)

    def _warn(self) -> None:
        """Say that the file lacks something: it looks like any other."""
        why, lost = self.summary.get("error"), self.summary.get("lost_records", 0)
        if why or lost:
            warnings.warn(
                f"dask-gpurt: the recording {self.path!r} is not whole: {why or 'the disk was too slow'}; {lost:,} "
                f"records are missing at least. Remedy: {self.summary['remedy']}. `dask gpurt trace --damaged` takes "
                "what is good of it",
                stacklevel=3,
            )


def _append(path: str, piece: bytes) -> None:
    with open(path, "ab") as file:
        file.write(piece)


def _begin(dask_scheduler: Scheduler, name: str, client: str) -> str | None:
    """Runs on the scheduler."""
    from dask_gpurt.errors import SeamMismatch
    from dask_gpurt.extension import NAME, GpurtScheduler
    from dask_gpurt.observe.trace.recorder import TraceRecorder

    plugin = dask_scheduler.plugins.get(NAME)
    ours = plugin if isinstance(plugin, GpurtScheduler) else None
    try:
        folder = tempfile.mkdtemp(prefix="trace-", dir=dask_scheduler.local_directory)
    except OSError as e:  # raised at the client, it would look like a lost connection
        return str(e)
    recorder = TraceRecorder(
        os.path.join(folder, "run.trace"), name=name, client=client, decision=None if ours is None else ours.decision
    )
    policy = "stock" if ours is None else ours.settings.policy
    try:
        recorder.open(dask_scheduler, {"policy": policy})
    except (OSError, SeamMismatch) as e:
        os.rmdir(folder)
        return str(e)
    dask_scheduler.add_plugin(recorder, name=name)
    return None


async def _end(dask_scheduler: Scheduler, name: str) -> dict[str, Any]:
    """Runs on the scheduler."""
    from dask_gpurt.observe.trace.recorder import TraceRecorder
    from dask_gpurt.observe.trace.writer import FAULT

    # It stays a plugin until the file was fetched: a client that leaves before takes the file along.
    recorder = dask_scheduler.plugins.get(name)
    writer = recorder.stop() if isinstance(recorder, TraceRecorder) else None
    if writer is None:
        return {}
    await asyncio.to_thread(writer.close, recorder.last)
    try:
        size = await asyncio.to_thread(os.path.getsize, writer.path)
    except OSError as e:  # as in `_begin`
        dask_scheduler.plugins.pop(name, None)
        return {"gone": str(e)}
    return {
        "path": writer.path,
        "bytes": size,
        "records": writer.records,
        "lost_records": writer.lost,
        "error": writer.error or recorder.last_error,
        "remedy": FAULT if writer.error is None and recorder.last_error is not None else writer.remedy,
    }


async def _piece(dask_scheduler: Scheduler, path: str, offset: int) -> bytes:
    """Runs on the scheduler."""
    return await asyncio.to_thread(_read, path, offset)


def _read(path: str, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(PIECE_BYTES)


def _remove(dask_scheduler: Scheduler, name: str, path: str) -> None:
    """Runs on the scheduler."""
    dask_scheduler.plugins.pop(name, None)
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
