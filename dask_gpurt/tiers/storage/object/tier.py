"""`ObjectTier`: the object tier, one object per value, in an object store or a shared folder.

The last tier: it has no end, but each access costs tens of milliseconds and the network. It is written to when the disk
is full or fails. With ``gpurt.tiers.object-use: first`` it is written to first of all: what is spilled then outlives
its worker (`shared.scheduler`).

Layout of an object: see `format`. Every frame is verified when it is read. Names are ``<prefix>/<number>``; the prefix
is this worker's own and holds its lease (`leases`). Nothing of a key is in a name. A worker begins with a prefix that
it makes itself; once a scheduler has issued one, new objects go there (`move_to`).

Where the store is down, slow or refuses, `client` retries with back-off, then the operation fails as an `OSError`. A
write then leaves the value where it was, and `fallback` sets the tier aside for a while. A read raises `Undelivered`:
the engine repeats it for some minutes, and keeps the copy whatever comes of it. Only one that is missing or damaged is
lost: the key is computed again, and one that has no recipe raises `LostData`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import CorruptData, TierFull, Undelivered
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.backoff import PATIENCE_SECONDS
from dask_gpurt.tiers.storage.handle import IoCost, decoded
from dask_gpurt.tiers.storage.object import leases
from dask_gpurt.tiers.storage.object.format import USUAL_HEAD_BYTES, Frame, Layout, allocate, parse, plan, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dask_gpurt.tiers.storage.handle import Codec, Group
    from dask_gpurt.tiers.storage.object.client import Bucket

logger = logging.getLogger("distributed.worker.gpurt")


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectHandle:
    """An object of an `ObjectTier`, written by it or by a worker that is gone."""

    store: ObjectTier
    name: str
    nbytes: int
    #: None: it was written elsewhere, its own head tells
    layout: Layout | None
    #: of the layout: an object that is whole, but another one, is noticed too
    digest: int
    #: called, in an I/O thread, when it was freed
    on_free: Callable[[ObjectHandle], None] | None = None
    tier: Tier = Tier.OBJECT

    def load(self, codec: Codec) -> tuple[Any, IoCost]:
        """See `Handle.load`."""
        start = time.perf_counter()
        layout = self.store.layout_of(self)
        buffers = self.store.read(self, layout.frames)
        middle = time.perf_counter()
        value = decoded(codec.decode, buffers)
        return value, IoCost(self.nbytes, middle - start, time.perf_counter() - middle)

    def load_part(self, part: int) -> tuple[list[memoryview], IoCost]:
        """See `Handle.load_part`."""
        start = time.perf_counter()
        frames = self.store.layout_of(self).of_part(part)
        buffers = self.store.read(self, frames)
        return buffers, IoCost(sum(f.nbytes for f in frames), time.perf_counter() - start, 0.0)

    def is_of(self, groups: Sequence[Group]) -> bool:
        """Whether it is a copy of these frames, by their checksums."""
        return plan(groups)[0].digest == self.digest

    def free(self) -> None:
        """Delete the object."""
        self.store.free(self)


class ObjectTier:
    """Objects below one prefix, without a slash at its end, that only this worker writes to."""

    tier = Tier.OBJECT

    def __init__(self, bucket: Bucket, prefix: str, *, limit_bytes: int | None = None) -> None:
        self.bucket = bucket
        #: where new objects go
        self.prefix = prefix
        self._earlier_prefixes: list[str] = []
        self.limit_bytes = limit_bytes
        #: leave the objects of `prefix` at `close`: the scheduler issued it, and sweeps
        self.leave_objects = False
        #: deletions that failed; a sweep finds what they left
        self.failed_deletions = 0
        self._lock = threading.Lock()
        #: of objects that this worker has written or adopted
        self.used_bytes = 0
        #: what went to and from this tier
        self.metrics = bucket.metrics
        self._names = itertools.count()
        #: when the first of the reads failed that the store did not answer, since it answered the last (monotonic)
        self._failing_since: float | None = None

    def files(self) -> list[str]:
        """Names of the objects now, without prefix. For tests."""
        return sorted(name.rpartition("/")[2] for name in self.bucket.list(self.prefix + "/"))

    def move_to(self, prefix: str) -> None:
        """Write new objects below another prefix, which has a lease already. What there is stays where it is."""
        self._earlier_prefixes.append(self.prefix)
        self.prefix = prefix

    def write(self, groups: Sequence[Group]) -> ObjectHandle:
        """See `StorageTier.write`."""
        layout, head, views = plan(groups)
        with self._lock:
            if self.limit_bytes is not None and self.used_bytes + layout.nbytes > self.limit_bytes:
                raise TierFull(
                    f"{layout.nbytes} bytes more than the {self.used_bytes} in {self.bucket.url} would pass the limit "
                    f"of {self.limit_bytes}. The value stays where it is"
                )
            self.used_bytes += layout.nbytes
        name = f"{self.prefix}/{next(self._names):x}"
        try:
            self.bucket.put(name, [head, *views])
        except BaseException:
            with self._lock:
                self.used_bytes -= layout.nbytes
            self.metrics.add(write_failures=1)
            # An answer may have been lost after the object was complete. Once: a store that is down takes its time.
            try:
                self.bucket.delete([name], attempts=1)
            except OSError:
                self.failed_deletions += 1
            raise
        return ObjectHandle(self, name, layout.nbytes, layout, layout.digest)

    def adopt(
        self, name: str, nbytes: int, digest: int, *, on_free: Callable[[ObjectHandle], None] | None = None
    ) -> ObjectHandle:
        """A handle for an object that a worker wrote which is gone; from now on it is ours to delete."""
        with self._lock:
            self.used_bytes += nbytes
        return ObjectHandle(self, name, nbytes, None, digest, on_free)

    def layout_of(self, handle: ObjectHandle) -> Layout:
        """Where the frames of an object are; read from its head if it was written elsewhere."""
        if handle.layout is not None:
            return handle.layout
        where = self.bucket.where(handle.name)
        with self._reading():
            known = parse(self._begin(handle, USUAL_HEAD_BYTES), where)
            if isinstance(known, int):
                known = parse(self._begin(handle, known), where)
            if isinstance(known, int):
                raise CorruptData(f"{where} ends before its index does")
            if known.digest != handle.digest:
                raise CorruptData(f"{where} holds another value than was written there")
        return known

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Count failures, and tell those that say something about the copy from others."""
        try:
            yield
        except CorruptData:
            self.metrics.add(checksum_failures=1)
            raise
        except FileNotFoundError:
            self.metrics.add(read_failures=1)
            raise
        except OSError as e:
            self.metrics.add(read_failures=1)
            now = time.monotonic()
            since = self._failing_since = self._failing_since or now
            undelivered = Undelivered(e.errno, e.strerror, e.filename)
            undelivered.lasting = now - since >= PATIENCE_SECONDS
            raise undelivered from e
        self._failing_since = None

    def _begin(self, handle: ObjectHandle, nbytes: int) -> memoryview:
        return self.bucket.read_range(handle.name, 0, min(nbytes, handle.nbytes))

    def read(self, handle: ObjectHandle, frames: Sequence[Frame]) -> list[memoryview]:
        """Fresh, writeable memory with the verified bytes of `frames`, which are in the order of the object.

        Raises
        ------
        CorruptData
            Short object, or a checksum differs.
        FileNotFoundError
            There is no such object.
        Undelivered
            The store did not deliver.
        """
        buffers = allocate(frames)
        with self._reading():
            run: list[memoryview] = []
            start = end = -1
            for frame, buffer in zip(frames, buffers, strict=True):
                if frame.offset != end:  # those of another part lie in between
                    self.bucket.read_into(handle.name, start, run)
                    run, start = [], frame.offset
                run.append(buffer)
                end = frame.offset + frame.nbytes
            self.bucket.read_into(handle.name, start, run)
            verify(frames, buffers, self.bucket.where(handle.name))
        return buffers

    def free(self, handle: ObjectHandle) -> None:
        """Delete the object. Once per handle."""
        with self._lock:
            self.used_bytes -= handle.nbytes
        try:
            self.bucket.delete([handle.name])
        except OSError as e:
            self.failed_deletions += 1
            if self.failed_deletions in (1, 100, 10_000):
                logger.warning("an object was not deleted and is left to the sweep (%d): %s", self.failed_deletions, e)
        if handle.on_free is not None:
            handle.on_free(handle)

    def probe(self) -> None:
        """See `StorageTier.probe`."""
        handle = self.write([(0, [b"dask-gpurt"])])
        try:
            (data,) = self.read(handle, self.layout_of(dataclasses.replace(handle, layout=None)).frames)
            if bytes(data) != b"dask-gpurt":
                raise CorruptData(f"{self.bucket.where(handle.name)} gave back {bytes(data)!r}")
        finally:
            self.free(handle)

    def close(self) -> None:
        """Delete what it wrote, but for what the scheduler sweeps."""
        for prefix in (*self._earlier_prefixes, self.prefix):
            try:
                # Where the scheduler was here already, the lease is gone, and what came after it is never swept.
                if prefix == self.prefix and self.leave_objects and leases.is_ours(self.bucket, prefix):
                    continue
                for names in leases.objects_below(self.bucket, prefix):
                    self.bucket.delete(names)
            except OSError as e:
                logger.warning("%s is left to the sweep: %s", self.bucket.where(prefix), e)
