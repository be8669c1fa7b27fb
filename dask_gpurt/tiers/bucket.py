"""An object store by URL: obstore with our retries, limits and error types.

``s3://bucket/prefix``, ``gs://``, ``az://``: credentials, region and endpoint come from the environment as obstore
reads them (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``AWS_ALLOW_HTTP``, ...). ``file:///folder``: a folder that
workers share. ``memory://``: this process only, for tests.

Two layers of retries: obstore repeats single requests (one part of an upload); here a whole operation is repeated with
back-off and jitter, at most `ATTEMPTS` times, and counted. What then still fails is an `OSError`, as from a disk:
`FileNotFoundError` and `PermissionError` at once, all else as ``EIO``.

Calls block and are for I/O threads; obstore releases the GIL. It is imported when a store is opened: it is an extra.
"""

from __future__ import annotations

import datetime
import errno
import os
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dask_gpurt.errors import ConfigError, CorruptData, InstallError
from dask_gpurt.tiers.protocol import TierMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: of one operation
ATTEMPTS: Final = 4
#: before the second attempt; doubles
BACK_OFF_SECONDS: Final = 0.2
#: objects above this go up in parts of this size
PART_BYTES: Final = 8 << 20
#: parts of one object under way
CONCURRENCY: Final = 8
#: names per delete call
_DELETE_BATCH: Final = 500


class Bucket:
    """A store and a place in it. Thread-safe.

    Parameters
    ----------
    url
        See the module.
    timeout_seconds
        Of one request.

    Raises
    ------
    ConfigError
        The URL is none that obstore understands.
    InstallError
        obstore is not installed.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 30.0, attempts: int = ATTEMPTS) -> None:
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as e:
            raise InstallError(
                f"gpurt.tiers.object-store is {url!r}, which needs obstore ({e}). Remedy: pip install dask-gpurt[s3]"
            ) from e
        self.url = url
        #: of one operation; lowered to 1 by who is about to close, so that nothing under way is begun again
        self.attempts = attempts
        self.metrics = TierMetrics()
        self._obstore = obstore
        self._errors: tuple[type[Exception], ...] = (obstore.exceptions.BaseError, OSError)
        self._denied = (
            obstore.exceptions.PermissionDeniedError,
            obstore.exceptions.UnauthenticatedError,
            PermissionError,
        )
        scheme = url.partition("://")[0]
        #: other processes see the same objects
        self.shared = scheme != "memory"
        options: dict[str, Any] = {}
        if scheme == "file":
            options["mkdir"] = True
        elif scheme != "memory":
            request = datetime.timedelta(seconds=timeout_seconds)
            options["client_options"] = {
                "timeout": request,
                "connect_timeout": datetime.timedelta(seconds=min(5.0, timeout_seconds)),
                # Options given here hide this one of the environment.
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"),
            }
            options["retry_config"] = {
                "max_retries": 2,
                "backoff": {"init_backoff": datetime.timedelta(seconds=0.1), "base": 2.0},
                "retry_timeout": request,
            }
        try:
            self._store: Any = obstore.store.from_url(url, **options)
        except Exception as e:
            raise ConfigError(
                f"gpurt.tiers.object-store is {url!r}, which cannot be opened: {_first_line(e)}. Allowed: null, or a "
                "URL such as 's3://bucket/prefix', 'gs://bucket/prefix', 'file:///shared/folder'"
            ) from e

    # ------------------------------------------------------------------ operations

    def put(self, name: str, views: Sequence[Any]) -> None:
        """Store buffers one after the other as one object; atomic: nobody sees half of it."""
        total = sum(memoryview(v).nbytes for v in views)

        def once() -> None:
            if total <= PART_BYTES:
                self._obstore.put(self._store, name, b"".join(views), use_multipart=False)
            else:
                # An iterator goes up in parts as it is read: no second copy of the whole.
                self._obstore.put(
                    self._store,
                    name,
                    iter([v for v in views if memoryview(v).nbytes]),
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=CONCURRENCY,
                )

        start = time.perf_counter()
        self._repeat("write", name, once)
        self.metrics.add(writes=1, written_bytes=total, write_seconds=time.perf_counter() - start)

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes of an object; fewer where it ends before `stop`. Read-only memory."""
        began = time.perf_counter()

        def once() -> memoryview:
            return memoryview(self._obstore.get(self._store, name, options={"range": (start, stop)}).bytes())

        data: memoryview = self._repeat("read", name, once)
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

        def once() -> None:
            stream = self._obstore.get(self._store, name, options={"range": (start, start + total)}).stream(
                min_chunk_size=1 << 20
            )
            targets = [b for b in reversed(buffers) if b.nbytes]
            for chunk in stream:
                view = memoryview(chunk)
                while view.nbytes and targets:
                    target = targets.pop()
                    n = min(view.nbytes, target.nbytes)
                    target[:n] = view[:n]
                    view = view[n:]
                    if n < target.nbytes:
                        targets.append(target[n:])
            if targets:
                raise CorruptData(f"{self.where(name)} ends before {start + total} bytes")

        self._repeat("read", name, once)
        self.metrics.add(reads=1, read_bytes=total, read_seconds=time.perf_counter() - began)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already do not matter."""
        left = list(names)
        while left:
            batch, left = left[:_DELETE_BATCH], left[_DELETE_BATCH:]
            try:
                self._repeat("delete", batch[0], partial(self._obstore.delete, self._store, batch))
            except FileNotFoundError:
                # A folder says so of one name and leaves the others: once more, one by one.
                for name in batch:
                    try:
                        self._repeat("delete", name, partial(self._obstore.delete, self._store, name))
                    except FileNotFoundError:
                        continue

    def list(self, prefix: str) -> dict[str, datetime.datetime]:
        """Names below a prefix and when each was last written, by the store's clock."""

        def once() -> dict[str, datetime.datetime]:
            batches = self._obstore.list(self._store, prefix)
            return {meta["path"]: meta["last_modified"] for batch in batches for meta in batch}

        found: dict[str, datetime.datetime] = self._repeat("list", prefix, once)
        return found

    def modified(self, name: str) -> datetime.datetime:
        """When an object was last written, by the store's clock."""
        when: datetime.datetime = self._repeat(
            "look at", name, lambda: self._obstore.head(self._store, name)["last_modified"]
        )
        return when

    def where(self, name: str) -> str:
        """For messages."""
        return f"{self.url.rstrip('/')}/{name}"

    # ------------------------------------------------------------------ retries

    def _repeat(self, what: str, name: str, once: Callable[[], Any]) -> Any:
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
            except self._denied as e:
                raise PermissionError(errno.EACCES, f"may not {what}: {_first_line(e)}", self.where(name)) from e
            except self._errors as e:
                if attempt >= self.attempts:
                    raise OSError(
                        errno.EIO, f"cannot {what} after {attempt} attempts: {_first_line(e)}", self.where(name)
                    ) from e
            self.metrics.add(retries=1)
            # Jitter: when a store comes back, its workers must not come all at once.
            time.sleep(pause * (0.5 + random.random()))
            pause *= 2


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
