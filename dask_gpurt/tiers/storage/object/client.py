"""`Bucket`: an object store by URL, with our retries, limits and error types.

``s3://bucket/prefix``, ``gs://``, ``az://``: by obstore (`remote`). ``file:///folder``: a folder that workers share
(`folder`). ``memory://``: this process only, for tests.

Two layers of retries: obstore repeats single requests (one part of an upload); here a whole operation, or one piece of
a read (`READ_BYTES`), is repeated with back-off and jitter, at most `ATTEMPTS` times, and counted. What then still
fails is an `OSError`, as from a disk: `FileNotFoundError` and `PermissionError` at once, all else as ``EIO``.

Calls block and are for I/O threads; both kinds release the GIL.
"""

from __future__ import annotations

import errno
import functools
import random
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from dask_gpurt.errors import ConfigError, CorruptData, InstallError
from dask_gpurt.tiers.storage.object.folder import Folder
from dask_gpurt.tiers.storage.protocol import TierMetrics

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterable, Iterator, Sequence

#: of one operation
ATTEMPTS: Final = 4
#: before the second attempt; doubles
BACK_OFF_SECONDS: Final = 0.2
#: of one request of a read: its time is limited, however large the value is and however steadily it comes
READ_BYTES: Final = 16 << 20
#: names per delete call
_DELETE_BATCH: Final = 500


class Store(Protocol):
    """What `Bucket` repeats until it works. Every method may raise what `errors` names."""

    #: worth another attempt
    errors: tuple[type[Exception], ...]
    #: a refusal, which is final
    denied: tuple[type[Exception], ...]

    def put(self, name: str, views: Sequence[Any]) -> None:
        """Write an object."""

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """Read a range of bytes of an object."""

    def fill(self, name: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Read bytes from `start` on into `buffers`; how many there were."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already count as deleted."""

    def list(self, prefix: str) -> dict[str, datetime.datetime]:
        """Return the names of objects below a prefix, and when each was written."""

    def modified(self, name: str) -> datetime.datetime:
        """Return when an object was written."""


class Bucket:
    """A store and a place in it. Thread-safe.

    Parameters
    ----------
    url
        See the module.
    timeout_seconds
        Of one request, its answer included. Reads and uploads of large objects are many.

    Raises
    ------
    ConfigError
        The URL cannot be opened.
    InstallError
        obstore is not installed, and the URL needs it.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 30.0, attempts: int = ATTEMPTS) -> None:
        self.url = url
        #: of one operation; lowered to 1 before closing, so that nothing under way is begun again
        self.attempts = attempts
        #: an operation of one request takes no longer where the store does not answer: obstore repeats a request within
        #: its timeout, and the last time may take that once more
        self.longest_seconds = attempts * 2 * timeout_seconds + BACK_OFF_SECONDS * 2.0**attempts
        self.metrics = TierMetrics()
        scheme = url.partition("://")[0]
        #: other processes see the same objects
        self.shared = scheme != "memory"
        try:
            self._store = _open(scheme, url, timeout_seconds)
        except InstallError:
            raise
        except Exception as e:
            raise ConfigError(
                f"gpurt.tiers.object-store is {url!r}, which cannot be opened: {_first_line(e)}. Allowed: null, or a "
                "URL such as 's3://bucket/prefix', 'gs://bucket/prefix', 'file:///shared/folder'"
            ) from e

    # ------------------------------------------------------------------ operations

    def put(self, name: str, views: Sequence[Any]) -> None:
        """Store buffers one after the other as one object; atomic: half of it is never seen."""
        total = sum(memoryview(v).nbytes for v in views)
        start = time.perf_counter()
        self._repeat("write", name, lambda: self._store.put(name, views))
        self.metrics.add(writes=1, written_bytes=total, write_seconds=time.perf_counter() - start)

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes of an object; fewer where it ends before `stop`. Read-only memory."""
        began = time.perf_counter()
        data: memoryview = self._repeat("read", name, lambda: self._store.read_range(name, start, stop))
        self.metrics.add(reads=1, read_bytes=data.nbytes, read_seconds=time.perf_counter() - began)
        return data

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with what follows `start` in the object.

        Raises
        ------
        CorruptData
            The object is shorter.
        """
        total = sum(b.nbytes for b in buffers)
        if not total:
            return
        began = time.perf_counter()

        def once(at: int, piece: list[memoryview]) -> None:
            if self._store.fill(name, at, piece) < sum(b.nbytes for b in piece):
                raise CorruptData(f"{self.where(name)} ends before {start + total} bytes")

        for at, piece in _pieces(start, buffers):
            self._repeat("read", name, functools.partial(once, at, piece))
        self.metrics.add(reads=1, read_bytes=total, read_seconds=time.perf_counter() - began)

    def delete(self, names: Iterable[str], *, attempts: int | None = None) -> None:
        """Delete objects; those that are gone already do not matter."""
        left = list(names)
        while left:
            batch, left = left[:_DELETE_BATCH], left[_DELETE_BATCH:]
            self._delete(batch, attempts)

    def _delete(self, batch: list[str], attempts: int | None) -> None:
        try:
            self._repeat("delete", batch[0], lambda: self._store.delete(batch), attempts)
        except FileNotFoundError:
            # A store may say so of one name and leave the others: once more, one by one.
            if len(batch) > 1:
                for name in batch:
                    self._delete([name], attempts)

    def list(self, prefix: str) -> dict[str, datetime.datetime]:
        """Names below a prefix and when each was last written, by the store's clock."""
        return self._repeat("list", prefix, lambda: self._store.list(prefix))

    def modified(self, name: str) -> datetime.datetime:
        """When an object was last written, by the store's clock."""
        return self._repeat("look at", name, lambda: self._store.modified(name))

    def where(self, name: str) -> str:
        """For messages."""
        return f"{self.url.rstrip('/')}/{name}"

    # ------------------------------------------------------------------ retries

    def _repeat(self, what: str, name: str, once: Callable[[], Any], attempts: int | None = None) -> Any:
        pause = BACK_OFF_SECONDS
        attempt = 0
        while True:
            attempt += 1
            try:
                return once()
            except FileNotFoundError as e:
                raise FileNotFoundError(
                    errno.ENOENT, f"cannot {what}: there is no such object", self.where(name)
                ) from e
            except self._store.denied as e:
                raise PermissionError(errno.EACCES, f"may not {what}: {_first_line(e)}", self.where(name)) from e
            except self._store.errors as e:
                if attempt >= (attempts or self.attempts):
                    raise OSError(
                        errno.EIO, f"cannot {what} after {attempt} attempts: {_first_line(e)}", self.where(name)
                    ) from e
            self.metrics.add(retries=1)
            # Jitter: when a store comes back, its workers must not come all at once.
            time.sleep(pause * (0.5 + random.random()))
            pause *= 2


def _pieces(start: int, buffers: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Divide a read into requests: where each begins, and the memory for it."""
    piece: list[memoryview] = []
    nbytes = 0
    for buffer in buffers:
        left = buffer.cast("B") if buffer.nbytes else buffer
        while left.nbytes:
            view, left = left[: READ_BYTES - nbytes], left[READ_BYTES - nbytes :]
            piece.append(view)
            nbytes += view.nbytes
            if nbytes == READ_BYTES:
                yield start, piece
                start, piece, nbytes = start + nbytes, [], 0
    if piece:
        yield start, piece


def _open(scheme: str, url: str, timeout_seconds: float) -> Store:
    if scheme == "file":
        return Folder(url)
    try:
        from dask_gpurt.tiers.storage.object.remote import Remote
    except ImportError as e:
        raise InstallError(
            f"gpurt.tiers.object-store is {url!r}, which needs obstore ({e}). Remedy: pip install dask-gpurt[s3]"
        ) from e
    return Remote(scheme, url, timeout_seconds)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
