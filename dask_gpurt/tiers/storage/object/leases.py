"""Leases on prefixes of a shared object store: they say what may be deleted when processes die without a word.

::

    <url>/gpurt/<cluster>/<16 hex digits>/lease       written first, renewed every `RENEW_SECONDS`
    <url>/gpurt/<cluster>/<16 hex digits>/<number>    values

Three sweepers, each for what the one before it could not do:

1. the worker itself, when its tiers are taken out;
2. the scheduler (`shared.scheduler`), when a worker is gone for good, and at its own end. It sweeps only prefixes that
   it issued itself;
3. any later scheduler with the same URL: a prefix whose newest object is older than `EXPIRE_SECONDS`, and still the
   newest `second_look_seconds` later, has no owner. One look is not enough: after an outage of the store, all leases
   are that old until their owners have come to renew them.

All else in the store stays. A prefix is swept only if its name has the form above and a lease that we wrote is in it
(`is_ours`). In it, only names of our form are deleted (`is_object`), the lease last, so that the next sweep finds what
a failed one leaves behind. A prefix that lost its lease is never swept. A lifecycle rule of the bucket should drop it,
and incomplete multipart uploads, which no client can list.

A worker that has adopted objects of a dead one renews that one's lease as well, as long as it keeps any of them.

Ages are by the store's own clock (an object is written, and its date compared with that of the others), so clocks of
machines that differ delete nothing.
"""

from __future__ import annotations

import asyncio
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

    from dask_gpurt.tiers.storage.object.client import Bucket

logger = logging.getLogger("distributed.worker.gpurt")

ROOT: Final = "gpurt"
RENEW_SECONDS: Final = 60.0
EXPIRE_SECONDS: Final = 900.0
#: for a renewal that is under way at the end
STOP_SECONDS: Final = 5.0
_LEASE: Final = "lease"
#: a lease is smaller
_LEASE_BYTES: Final = 8192
_PREFIX: Final = re.compile(rf"{ROOT}/[A-Za-z0-9-]+/[0-9a-f]{{16}}")
#: the second part: of a file that was not complete when its process was killed (`folder`)
_LEAF: Final = re.compile(rf"({_LEASE}|[0-9a-f]{{1,16}})(\.[0-9a-f]{{8}}\.part)?")


def worker_prefix(scheduler_address: str) -> str:
    """Return a new prefix in the cluster behind this scheduler; no other process gets the same."""
    cluster = re.sub(r"[^A-Za-z0-9]+", "-", scheduler_address).strip("-") or "cluster"
    return f"{ROOT}/{cluster}/{secrets.token_hex(8)}"


def is_object(name: str, prefix: str = "") -> bool:
    """Say whether a name has the form that this package gives to objects, and lies below `prefix` if that is given."""
    parent, _, leaf = name.rpartition("/")
    return bool(_LEAF.fullmatch(leaf)) and (parent == prefix if prefix else bool(_PREFIX.fullmatch(parent)))


def is_ours(bucket: Bucket, prefix: str) -> bool:
    """Say whether this package made a prefix: by its form and its lease. Blocks; raises OSError."""
    if not _PREFIX.fullmatch(prefix):
        return False
    try:
        lease = json.loads(bytes(bucket.read_range(f"{prefix}/{_LEASE}", 0, _LEASE_BYTES)))
    except FileNotFoundError:
        return False
    except (ValueError, RecursionError):
        return False
    if not isinstance(lease, dict) or not isinstance(lease.get("renewed"), (int, float)):
        return False
    keeper = lease.get("keeper")
    return isinstance(keeper, str) and bool(_PREFIX.fullmatch(keeper))


class LeaseKeeper:
    """Keep the leases of one worker's prefixes, and of those it adopted. `start` and `stop` on the event loop.

    `owner` goes into the lease, for people.
    """

    def __init__(
        self, bucket: Bucket, prefix: str, owner: dict[str, Any], *, renew_seconds: float = RENEW_SECONDS
    ) -> None:
        self._bucket = bucket
        self._owner = owner
        self._renew_seconds = renew_seconds
        self._lock = threading.Lock()
        self._own = [prefix]
        #: adopted prefix -> objects of it that we keep
        self._fostered: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._last_success = time.monotonic()
        self.renewals = 0
        self.failures = 0

    @property
    def age_seconds(self) -> float:
        """Seconds since the leases were last renewed, or since this was made. Far above `RENEW_SECONDS`: trouble."""
        return time.monotonic() - self._last_success

    def renew(self) -> None:
        """Write the leases now. Blocks.

        Raises
        ------
        OSError
            The store refused at least one; the others were written all the same.
        """
        with self._lock:
            prefixes = [*self._own, *self._fostered]
        error: OSError | None = None
        for prefix in prefixes:
            if self._stopping.is_set():  # a lease that is written now would come after the sweep
                return
            try:
                self._write(prefix)
            except OSError as e:
                error = error or e
        if error is not None:
            raise error
        self._last_success = time.monotonic()
        self.renewals += 1

    def _write(self, prefix: str) -> None:
        text = json.dumps({**self._owner, "renewed": time.time(), "keeper": self._own[0]})
        self._bucket.put(f"{prefix}/{_LEASE}", [text.encode()])

    def add(self, prefix: str) -> None:
        """Write the lease of another prefix of this worker, and renew it from now on. Blocks; raises OSError."""
        self._write(prefix)
        with self._lock:
            self._own.append(prefix)

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
            self._stopping.clear()
            self._task = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._stopping.wait(), self._renew_seconds)
            except TimeoutError:
                pass
            else:
                return
            try:
                await asyncio.to_thread(self.renew)
            except Exception as e:  # whatever it is: were this to end, another scheduler would delete the values
                self.failures += 1
                if self.failures in (1, 10, 100):
                    where = self._bucket.where(self._own[0])
                    logger.warning("the lease on %s was not renewed (failure %d): %s", where, self.failures, e)

    async def stop(self) -> None:
        """Stop renewing. Waits for a renewal under way, `STOP_SECONDS` at most. The leases stay, for the sweep."""
        self._stopping.set()
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.wait([task], timeout=STOP_SECONDS)
        if not task.done():
            task.cancel()
            logger.warning("a renewal of leases in %s did not end within %g s", self._bucket.url, STOP_SECONDS)


def objects_below(bucket: Bucket, prefix: str) -> tuple[list[str], list[str]]:
    """Return the names of values and of leases that this package wrote below a prefix. Blocks; raises OSError."""
    names = [n for n in bucket.list(prefix + "/") if is_object(n, prefix)]
    leases = [n for n in names if _is_lease(n)]
    return [n for n in names if not _is_lease(n)], leases


def _is_lease(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_LEASE)


def sweep(bucket: Bucket, prefix: str, *, keep: Collection[str] = (), keep_lease: bool = False) -> int:
    """Delete what we wrote below a prefix; how many objects. Blocks; raises OSError.

    Parameters
    ----------
    prefix
        Without a slash at its end. Nothing is deleted unless it `is_ours`.
    keep
        Names that stay. The lease stays with them, as it keeps them from other sweeps.
    keep_lease
        Let the lease stay in any case: more values may come, for a later sweep.
    """
    if not is_ours(bucket, prefix):
        return 0
    values, leases = objects_below(bucket, prefix)
    doomed = [n for n in values if n not in keep]
    bucket.delete(doomed)
    if keep or keep_lease:
        return len(doomed)
    bucket.delete(leases)
    return len(doomed) + len(leases)


def expired(bucket: Bucket, *, expire_seconds: float = EXPIRE_SECONDS) -> dict[str, datetime.datetime]:
    """Return the prefixes, of any cluster, that were not renewed for so long, and when they were last. Blocks.

    To be looked at once more, `second_look_seconds` later, by `sweep_expired`. Raises OSError.
    """
    now = _clock(bucket)
    newest: dict[str, datetime.datetime] = {}
    for name, when in bucket.list(ROOT + "/").items():
        if is_object(name):
            prefix = name.rpartition("/")[0]
            newest[prefix] = max(when, newest.get(prefix, when))
    return {prefix: when for prefix, when in newest.items() if (now - when).total_seconds() > expire_seconds}


def second_look_seconds(bucket: Bucket) -> float:
    """After so long, a prefix that had expired and has not changed has no owner.

    A renewal that was under way at the first look may still fail, `longest_seconds` after it began. The next one begins
    `RENEW_SECONDS` later. Twice that, as it may take some time itself.
    """
    return 2 * RENEW_SECONDS + bucket.longest_seconds


def sweep_expired(bucket: Bucket, found: dict[str, datetime.datetime]) -> list[str]:
    """Sweep those that were `expired` some time ago and have not changed since, and return them. Blocks.

    Raises
    ------
    OSError
        At least one prefix could not be swept; the others were.
    """
    swept: list[str] = []
    error: OSError | None = None
    for prefix, when in found.items():
        try:
            dates = [date for name, date in bucket.list(prefix + "/").items() if is_object(name, prefix)]
            if dates and max(dates) <= when and sweep(bucket, prefix):
                swept.append(prefix)
        except OSError as e:
            error = error or e
    if error is not None:
        raise error
    return swept


def _clock(bucket: Bucket) -> datetime.datetime:
    """Return the time by the store's own clock."""
    # A lease, so that it is swept by others if this process is killed in between.
    prefix = worker_prefix("clock")
    name = f"{prefix}/{_LEASE}"
    bucket.put(name, [json.dumps({"renewed": time.time(), "keeper": prefix}).encode()])
    try:
        return bucket.modified(name)
    finally:
        bucket.delete([name])
