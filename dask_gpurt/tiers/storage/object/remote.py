"""An object store over the network, by obstore. Import it where such a store is opened only: obstore is an extra.

Credentials, region and endpoint come from the environment as obstore reads them (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL``, ``AWS_ALLOW_HTTP``, ...).
"""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any, Final

import obstore
import obstore.exceptions
import obstore.store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: objects above this go up in parts of this size
PART_BYTES: Final = 8 << 20
#: parts of one object under way
CONCURRENCY: Final = 8


class Remote:
    """Objects of one store. Raises whatever obstore does where it does not understand the URL."""

    errors: tuple[type[Exception], ...] = (obstore.exceptions.BaseError, OSError)
    denied: tuple[type[Exception], ...] = (
        obstore.exceptions.PermissionDeniedError,
        obstore.exceptions.UnauthenticatedError,
        PermissionError,
    )

    def __init__(self, scheme: str, url: str, timeout_seconds: float) -> None:
        options: dict[str, Any] = {}
        if scheme != "memory":
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
        self._store = obstore.store.from_url(url, **options)

    def put(self, name: str, views: Sequence[Any]) -> None:
        """Write buffers one after the other as one object."""
        if sum(memoryview(v).nbytes for v in views) <= PART_BYTES:
            obstore.put(self._store, name, b"".join(views), use_multipart=False)
            return
        # An iterator goes up in parts as it is read: no second copy of the whole.
        obstore.put(
            self._store,
            name,
            iter([v for v in views if memoryview(v).nbytes]),
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=CONCURRENCY,
        )

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """Return bytes of an object; fewer where it ends before `stop`."""
        found = self._get(name, start, stop)
        return memoryview(b"" if found is None else found.bytes())

    def fill(self, name: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with what follows `start`; return how many bytes there were."""
        total = sum(b.nbytes for b in buffers)
        found = self._get(name, start, start + total)
        if found is None:
            return 0
        targets = [b for b in reversed(buffers) if b.nbytes]
        for chunk in found.stream(min_chunk_size=1 << 20):
            view = memoryview(chunk)
            while view.nbytes and targets:
                target = targets.pop()
                n = min(view.nbytes, target.nbytes)
                target[:n] = view[:n]
                view = view[n:]
                if n < target.nbytes:
                    targets.append(target[n:])
        return total - sum(t.nbytes for t in targets)

    def _get(self, name: str, start: int, stop: int) -> obstore.GetResult | None:
        """Ask for a range; None where the object ends before it."""
        try:
            return obstore.get(self._store, name, options={"range": (start, stop)})
        except obstore.exceptions.GenericError as e:
            # A store that is down gives an error of this kind as well. So the text is a hint, and the size the proof.
            if not any(hint in str(e) for hint in ("416", "nvalid range")):
                raise
            if obstore.head(self._store, name)["size"] > start:
                raise
            return None

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        obstore.delete(self._store, list(names))

    def list(self, prefix: str) -> dict[str, datetime.datetime]:
        """Return names below a prefix and when each was last written, by the store's clock."""
        return {m["path"]: m["last_modified"] for batch in obstore.list(self._store, prefix) for m in batch}

    def modified(self, name: str) -> datetime.datetime:
        """Return when an object was last written."""
        return obstore.head(self._store, name)["last_modified"]
