"""Who may delete what in a shared object store, when processes die without a word.

::

    <url>/gpurt/<cluster>/<worker>/lease        written first, renewed every `RENEW_SECONDS`
    <url>/gpurt/<cluster>/<worker>/<number>     values

Three sweepers, each for what the one before it could not do:

1. the worker itself, when its tiers are taken out;
2. the scheduler (`shared_scheduler`), when a worker is gone for good, and at its own end;
3. any later scheduler with the same URL: a prefix whose newest object is older than `EXPIRE_SECONDS` is nobody's.

A worker that has adopted objects of a dead one renews that one's lease as well, as long as it keeps any of them.

Ages are by the store's own clock (an object is written, and its date compared with that of the others), so clocks of
machines that differ delete nothing. A lifecycle rule of the bucket should still drop incomplete multipart uploads: no
client can list those of a process that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import datetime
    from collections.abc import Collection

    from dask_gpurt.tiers.bucket import Bucket

logger = logging.getLogger("distributed.worker.gpurt")

ROOT: Final = "gpurt"
RENEW_SECONDS: Final = 60.0
EXPIRE_SECONDS: Final = 900.0
_LEASE: Final = "lease"


def worker_prefix(scheduler_address: str) -> str:
    """A new prefix for a worker of the cluster behind this scheduler; no other process gets the same."""
    cluster = re.sub(r"[^A-Za-z0-9]+", "-", scheduler_address).strip("-") or "cluster"
    return f"{ROOT}/{cluster}/{secrets.token_hex(8)}"


class LeaseKeeper:
    """Keeps the lease of one prefix, and of those that were adopted. `start` and `stop` on the event loop.

    Parameters
    ----------
    owner
        Goes into the lease, for people who look.
    """

    def __init__(
        self, bucket: Bucket, prefix: str, owner: dict[str, Any], *, renew_seconds: float = RENEW_SECONDS
    ) -> None:
        self._bucket = bucket
        self.prefix = prefix
        self._owner = owner
        self._renew_seconds = renew_seconds
        self._lock = threading.Lock()
        #: adopted prefix -> objects of it that we keep
        self._fostered: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self.renewals = 0
        self.failures = 0

    def renew(self) -> None:
        """Write the leases now. Blocks.

        Raises
        ------
        OSError
            The store refused one.
        """
        with self._lock:
            prefixes = [self.prefix, *self._fostered]
        for prefix in prefixes:
            text = json.dumps({**self._owner, "renewed": time.time(), "keeper": self.prefix})
            self._bucket.put(f"{prefix}/{_LEASE}", [text.encode()])
        self.renewals += 1

    def foster(self, prefix: str, objects: int) -> None:
        """Renew another prefix as well, for so many more (or fewer) objects of it that we keep."""
        with self._lock:
            n = self._fostered.get(prefix, 0) + objects
            if n > 0:
                self._fostered[prefix] = n
            else:
                self._fostered.pop(prefix, None)

    @property
    def fostered(self) -> list[str]:
        """Adopted prefixes that are kept."""
        with self._lock:
            return list(self._fostered)

    def start(self) -> None:
        """Renew from now on."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds)
            try:
                await asyncio.to_thread(self.renew)
            except OSError as e:
                self.failures += 1
                if self.failures in (1, 10, 100):
                    logger.warning("the lease on %s was not renewed: %s", self._bucket.where(self.prefix), e)

    async def stop(self) -> None:
        """No more renewals. The lease stays, for the sweep."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def sweep(bucket: Bucket, prefix: str, *, keep: Collection[str] = ()) -> int:
    """Delete what is below a prefix but for the names in `keep`; how many. Blocks; raises OSError."""
    names = bucket.list(prefix.rstrip("/") + "/")
    # With objects that stay, the lease stays too: it is what keeps them from the sweep of others.
    doomed = [n for n in names if n not in keep and not (keep and n.endswith("/" + _LEASE))]
    bucket.delete(doomed)
    return len(doomed)


def sweep_expired(bucket: Bucket, *, expire_seconds: float = EXPIRE_SECONDS) -> list[str]:
    """Delete all prefixes, of any cluster, that nobody has renewed for so long; which. Blocks; raises OSError."""
    clock = f"{ROOT}/clock-{secrets.token_hex(8)}"
    bucket.put(clock, [b"now"])
    try:
        now = bucket.modified(clock)
    finally:
        bucket.delete([clock])
    newest: dict[str, datetime.datetime] = {}
    found: dict[str, list[str]] = {}
    for name, when in bucket.list(ROOT + "/").items():
        root, *middle = name.split("/")
        prefix = "/".join([root, *middle[:2]]) if len(middle) >= 3 else name
        newest[prefix] = max(when, newest.get(prefix, when))
        found.setdefault(prefix, []).append(name)
    expired = [p for p, when in newest.items() if (now - when).total_seconds() > expire_seconds]
    for prefix in expired:
        bucket.delete(found[prefix])
    return expired
