"""`TieredStore`: what stands in for ``worker.data``.

To distributed it is the mapping it expects. Three things differ from its own `SpillBuffer`:

* nothing here evicts or reads files on the event loop. The worker's ``execute`` and ``get_data`` are wrapped
  (`worker.overrides`) to await `ensure` first. ``store[key]`` on a value that is on disk still works, blocks, and is
  counted (`sync_reads`);
* there is neither ``fast`` nor ``evict``: without both, distributed's own memory monitor leaves eviction alone. While
  the store is drained into a `SpillBuffer` it has that buffer's, so that the monitor watches again;
* ``in``, ``len``, iteration, ``keys`` and ``del`` never touch a file.

Metrics by duck type keep the dashboards true: `spilled_total`, `slow`, `cumulative_metrics`. `spilled_total` counts
values that are *only* on disk; `TierRuntime.statistics` counts clean copies of values in memory apart.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.metrics import context_meter
from distributed.sizeof import safe_sizeof
from distributed.spill import SpilledSize

from dask_gpurt.errors import LostData
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.device.box import BOX_BYTES, Box
from dask_gpurt.tiers.engine.buffer_roots import require_number
from dask_gpurt.tiers.engine.entry import Account, Entry, State
from dask_gpurt.tiers.engine.victims import soonest_use
from dask_gpurt.tiers.storage.codec import PickleCodec

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask.typing import Key
    from distributed.spill import SpillBuffer

    from dask_gpurt.tiers.device.ahead import DeviceAhead
    from dask_gpurt.tiers.device.space import DeviceSpace
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.storage.handle import Handle


class StoredCopy:
    """Set as the value of a key whose value is on a lower tier already: the store takes the copy over, unread."""

    __slots__ = ("handle", "nbytes")

    def __init__(self, nbytes: int, handle: Handle) -> None:
        #: of the value in memory
        self.nbytes = nbytes
        self.handle = handle

    def __sizeof__(self) -> int:
        return self.nbytes


class Place(NamedTuple):
    """Where a value is."""

    #: the fastest that has it
    tier: Tier
    #: bytes that it takes where it is computed with: on the device or in host memory
    nbytes: int
    #: what its copy takes on a lower tier; None without one
    below_bytes: int | None
    #: tasks can compute on it as it is
    here: bool


class _Keys(Collection["Key"]):
    """The keys of a store in some states; a live view."""

    def __init__(self, entries: dict[Key, Entry], states: tuple[State, ...], count: Callable[[], int]) -> None:
        self._entries = entries
        self._states = states
        self._count = count

    def __len__(self) -> int:
        return self._count()

    def __iter__(self) -> Iterator[Key]:
        return (k for k, e in self._entries.items() if e.state in self._states)

    def __contains__(self, key: object) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.state in self._states


class TieredStore(MutableMapping["Key", Any]):
    """Task results of one worker, in memory and on disk. Use on the event loop's thread; the mapping works elsewhere.

    Parameters
    ----------
    engine
        Moves the bytes; may have other owners too.
    on_lost
        Called on the loop with a key whose last copy turned out to be unreadable. The key is still in the store.
    renames
        The key to which the task of a key only gives another name; None: it does more, and may change its inputs.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_lost: Callable[[Key], None] = lambda key: None,
        renames: Callable[[Key], Key | None] = lambda key: None,
    ) -> None:
        self._engine = engine
        self._entries: dict[Key, Entry] = {}

        self._renames = renames

        def renamed(entry: Entry) -> Entry | None:
            of = renames(entry.key)
            return None if of is None else self._entries.get(of)

        self._account = Account("data", PickleCodec(), on_lost=lambda entry: on_lost(entry.key), renames=renamed)
        #: keys that are set go there while the store is being drained (see `spill_buffer`)
        self.successor: MutableMapping[Key, Any] | None = None
        #: called with each entry made, before any victim is chosen; must not raise
        self.on_add: list[Callable[[Entry], None]] = []
        #: keeps the values that are in device memory; the entry's value is then a `Box`. Set by `use_device`
        self.device: DeviceSpace | None = None
        #: called on the loop with the key of a device value that is on another tier now; must not raise
        self.on_device_moved: Callable[[Key], None] = lambda key: None
        #: brings values back to the device before they are needed; None: nothing does
        self.ahead: DeviceAhead | None = None

    def use_device(self, device: DeviceSpace) -> None:
        """Keep device values there from now on, and those that are here but for what runs or moves now."""
        self.device = device
        device.on_moved = self._moved
        for key, entry in list(self._entries.items()):
            if entry.state is State.RESIDENT and not entry.pins and device.backend.owns(entry.value):
                self[key] = entry.value

    def drain_into(self, successor: SpillBuffer) -> None:
        """From now on keys are set in `successor`; the caller moves those that are here."""
        self.successor = successor
        self.fast = successor.fast
        self.evict = successor.evict

    # ------------------------------------------------------------------ mapping

    def __setitem__(self, key: Key, value: object) -> None:
        """Set a value. Never raises for reasons of space, never blocks on I/O.

        Raises
        ------
        TypeError
            ``sizeof`` says something that is no number. distributed turns that into an error of the task; were it
            accepted here, its own sum of sizes would raise next and end the worker.
        """
        if not self._engine.io.on_loop:  # a task has `get_worker().data`
            self._engine.io.run_on_loop(self.__setitem__, key, value)
            return
        old = self._entries.pop(key, None)
        if old is not None:
            self._remove(old)
        if self.successor is not None:
            self.successor[key] = value
            return
        if isinstance(value, StoredCopy):
            self.adopt(key, value.nbytes, value.handle)
            return
        if self.device is not None and self.device.backend.owns(value):
            self._set_device_value(self.device, key, value)
            return
        nbytes = safe_sizeof(value)
        if type(nbytes) is not int:
            require_number(key, nbytes)
        # First the dict: adding may evict, and must find the key when something goes wrong.
        entry = self._entries[key] = self._engine.add(self._account, key, value, nbytes, balance=False)
        for listener in self.on_add:
            listener(entry)
        self._engine.balance()

    def __getitem__(self, key: Key) -> Any:
        entry = self._entries.get(key)
        if entry is None:
            if self.successor is not None:
                return self.successor[key]
            raise KeyError(key)
        if entry.state is State.RESIDENT or entry.state is State.MOVING:  # `in_memory`, without a call
            counters = self._engine.counters
            counters.memory_reads += 1
            counters.memory_read_bytes += entry.nbytes
            # Under whatever reads: a task, a peer. Dask's fine performance metrics have it from stock's buffer.
            context_meter.digest_metric("memory-read", 1, "count")
            context_meter.digest_metric("memory-read", entry.nbytes, "bytes")
        value = self._engine.get(entry)
        if type(value) is not Box:
            return value
        on_device = value.get()
        if not entry.pins:
            value.lent = True  # as `Loading._hand_out`
        return on_device

    def __delitem__(self, key: Key) -> None:
        if not self._engine.io.on_loop:
            self._engine.io.run_on_loop(self.__delitem__, key)
            return
        entry = self._entries.pop(key, None)
        if entry is None:
            if self.successor is None:
                raise KeyError(key)
            del self.successor[key]
            return
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        value = entry.value
        self._engine.remove(entry)
        if type(value) is Box:
            if self.ahead is not None:
                self.ahead.removed(value)
            # In a thread: its copy may be on a disk, and another thread may be at work on it.
            self._engine.io.submit(value.space.remove, value)

    def _set_device_value(self, device: DeviceSpace, key: Key, value: object) -> None:
        box = device.put(key, value)
        entry = self._entries[key] = self._engine.add(self._account, key, box, sys.getsizeof(box), balance=False)
        entry.unspillable = True  # it leaves the device by other ways than memory
        self._engine.books.victims.discard(entry)
        box.next_use = lambda: soonest_use(entry)
        for listener in self.on_add:
            listener(entry)
        self._engine.balance()
        if device.over:
            self._engine.io.submit(device.balance)

    def _moved(self, box: Box) -> None:
        """A device value has left the device, or come back. Any thread, perhaps inside of an allocation."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._engine.io.loop.call_soon_threadsafe(self._note_moved, box)

    def _note_moved(self, box: Box) -> None:
        entry = self._entries.get(box.key)
        if entry is not None and entry.value is box:
            self._engine.log.append(entry.key, entry.state, f"to {box.tier.name.lower()}", entry.state)
            self.on_device_moved(entry.key)
            if self.ahead is not None:
                self.ahead.moved(box)

    def device_inputs(self, entries: Iterable[Entry]) -> list[Box]:
        """Those of the values that are the device's."""
        return [e.value for e in entries if type(e.value) is Box]

    def host_bytes(self, value: Any, nbytes: int) -> int:
        """What a value whose ``sizeof`` is `nbytes` takes of host memory once it is here."""
        return BOX_BYTES if self.device is not None and self.device.backend.owns(value) else nbytes

    def __contains__(self, key: object) -> bool:
        return key in self._entries or (self.successor is not None and key in self.successor)

    def __len__(self) -> int:
        return len(self._entries) + (0 if self.successor is None else len(self.successor))

    def __iter__(self) -> Iterator[Key]:
        keys = dict.fromkeys(self._entries)
        if self.successor is not None:
            keys.update(dict.fromkeys(self.successor))
        return iter(keys)

    def clear(self) -> None:
        """Forget all keys, without reading any."""
        # The mixin's version pops items, which would read every value.
        for key in list(self):
            del self[key]

    def __repr__(self) -> str:
        return f"<TieredStore: {len(self)} keys, {len(self.slow)} on disk>"

    # ------------------------------------------------------------------ residence

    async def ensure(self, keys: Iterable[Key]) -> list[Entry]:
        """Bring keys into memory and pin them. Unknown keys are skipped.

        Returns
        -------
        list of Entry
            What was pinned: give it to `release` in any case. An entry may have become LOST.
        """
        entries = [e for e in map(self._entries.get, keys) if e is not None]
        for entry in entries:
            self._engine.pin(entry)
            if type(entry.value) is Box:
                entry.value.pins += 1
        try:
            await self._engine.ensure(entries)
            for entry in entries:
                if type(entry.value) is Box and not entry.gone:
                    await self._bring(entry)
        except BaseException:
            self.release(entries)
            raise
        return entries

    def lend(self, key: Key, entries: Iterable[Entry]) -> None:
        """The task of a key gets these, and may change them in place. One that only gives another name does not."""
        for entry in entries:
            # Most have no copy, and none is being made: there is nothing that could become wrong.
            copied = entry.handle is not None or entry.state is State.MOVING or type(entry.value) is Box
            if not copied and not self._engine.books.shares(entry):
                continue
            if self._renames(key) is not None:
                return
            if type(entry.value) is Box:
                entry.value.lent = True
            elif entry.in_memory:
                self._engine.books.lend(entry)

    async def _bring(self, entry: Entry) -> None:
        """Bring a value to the device. What fails here fails again, and is reported, where the value is read."""
        box = entry.value
        if self.ahead is not None:
            self.ahead.used(box)
        if box.space.touch(box):
            return
        try:
            await self._engine.offload(box.get)
        except LostData:
            if not entry.gone:
                box.lost = True
                self._account.on_lost(entry)
        except Exception:  # want of memory, counted by the device; of descriptors; the code of a member in host memory
            pass

    def release(self, entries: Iterable[Entry]) -> None:
        """Unpin what `ensure` returned."""
        for entry in entries:
            if type(entry.value) is Box:
                entry.value.pins -= 1
            self._engine.unpin(entry)

    async def unbox(self) -> list[Key]:
        """Make plain values of all device values, for a store that has no device tier; keys that could not be."""
        failed = []
        for key, entry in list(self._entries.items()):
            box = entry.value
            if type(box) is not Box:
                continue
            try:
                value = await self._engine.offload(box.get)
            except Exception:  # as in `_bring`
                failed.append(key)
                continue
            if not entry.gone and entry.value is box:
                self._engine.books.replace(entry, value)
            self._engine.io.submit(box.space.remove, box)
        self.device = None
        return failed

    def place_of(self, key: Key) -> Place | None:
        """Where the value of a key is, and how large; None: not here, or lost."""
        entry = self._entries.get(key)
        if entry is None or entry.state is State.LOST:
            return None
        box = entry.value
        if type(box) is Box:
            return Place(box.tier, box.nbytes, box.below_bytes, box.tier is Tier.DEVICE)
        below = entry.handle
        tier = Tier.HOST if entry.in_memory else getattr(below, "tier", Tier.DISK)
        return Place(tier, entry.nbytes, None if below is None else below.nbytes, entry.in_memory)

    def is_lost(self, key: Key) -> bool:
        """The key is here by name, but no valid copy is left."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        box = entry.value
        return box.lost if type(box) is Box else entry.state is State.LOST

    def adopt(self, key: Key, nbytes: int, handle: Handle) -> None:
        """Take over a value that is on disk already, without reading it."""
        self._entries[key] = self._engine.add_stored(self._account, key, nbytes, handle)

    def entry(self, key: Key) -> Entry | None:
        """For inspection, and for draining."""
        return self._entries.get(key)

    def own_keys(self) -> list[Key]:
        """Keys that are not in the successor."""
        return list(self._entries)

    def forget(self, key: Key) -> None:
        """Drop a key that its successor has by now."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._remove(entry)

    # ------------------------------------------------------------------ what distributed reads

    @property
    def spilled_total(self) -> SpilledSize:
        """Becomes ``spilled_bytes`` in the worker's metrics."""
        total = SpilledSize(self._account.stored_memory_bytes, self._account.stored_disk_bytes)
        other = getattr(self.successor, "spilled_total", None)
        return total if other is None else total + other

    @property
    def slow(self) -> Collection[Key]:
        """Keys that are not in memory; its length is the task count "disk" in Prometheus."""
        return _Keys(self._entries, (State.STORED, State.LOADING), lambda: self._account.stored)

    @property
    def disk(self) -> Collection[Key]:
        """The same as `slow`, under its name in distributed's store."""
        return self.slow

    @property
    def memory(self) -> Collection[Key]:
        """Keys that are in memory."""
        return _Keys(
            self._entries, (State.RESIDENT, State.MOVING), lambda: sum(e.in_memory for e in self._entries.values())
        )

    @property
    def below_device(self) -> list[Key]:
        """Keys of device values that are not on the device."""
        return [k for k, e in self._entries.items() if type(e.value) is Box and e.value.tier is not Tier.DEVICE]

    @property
    def cumulative_metrics(self) -> dict[tuple[str, str], float]:
        """(activity, unit) to an ever growing value; ``dask_worker_spill_*`` in Prometheus."""
        return self._engine.counters.as_stock()
