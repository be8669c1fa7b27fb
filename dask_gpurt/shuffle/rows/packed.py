"""Rows of device frames as the shuffle has them: packs that it moves and never looks into.

`Pack` is some rows of one output, on the device or on the host. `PackedRows` stands where a host frame's rows are an
Arrow table. `PackedChunk` implements `model.Chunk`. `to_buffers` and `from_buffers` take rows through a message.

Theory of operation. Each output of an input has packs of its own, of a message's size at most. So all that happens to
rows between splitting and assembling is done with whole packs, on the host, without the device: cutting and dividing a
shard, sending it again, handing an output over, writing a chunk part by part and reading one part back. One pack for a
group of outputs, the alternative, needs fewer kernels where outputs are small. But it can be divided on a device only,
and would be read back from disk whole for each of its outputs.

A pack is made on the device. What this worker has for itself, and what goes to a peer that takes device memory, stays
there until its output is made, it is sent, the tiers write it, or device memory is short. What other peers get is
*staged*, copied to the host, when it is split. The tiers count a pack as host bytes wherever it is, so staging never
takes more than they know of, and what is on the host goes on to disk by their rules.

`shelf` has the packs that take device memory. The device tier asks it for room when an allocation fails, a task's or
one of ours (`model.device_memory`). Without a device tier nothing asks, and `with_room` stages all packs.

In a message, bytes on the device are an `OnDevice`. They have no checksum: to hash them they would have to come to the
host. Links between devices have their own, and the heads, on the host, have one.

Invariants
- A pack has its host bytes before it gives its device buffer up: any thread may read it while another stages it.
- Device buffers are given up after `DeviceFrames.ready`, see there.
- A pack is on the shelf only once it is ready: another thread may stage it from then on.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import struct
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dask_gpurt.errors import CorruptData

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import pyarrow as pa

    from dask_gpurt.backends.frames import DeviceFrames, Packed
    from dask_gpurt.model import Buffer
    from dask_gpurt.shuffle.rows.partition import Shard

T = TypeVar("T")
#: bytes of a pack that is worth a frame of a message for itself
SENT_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")
# input id, rows, bytes of the head, bytes of the pack
_PIECE = struct.Struct("<qQIQ")


@dataclasses.dataclass(frozen=True, slots=True)
class OnDevice:
    """Bytes of a message that lie on the device, where others are Arrow's buffers."""

    buffer: Any
    size: int


#: (head, rows, a buffer that came) -> the pack in it
Adopt = Callable[[bytes, int, OnDevice], "Pack"]


class Pack:
    """Rows of one output in one buffer. The rows never change; any thread.

    Parameters
    ----------
    head
        Says how to read the buffer.
    rows
        In the pack.
    host
        Its bytes; or
    device, frames
        the buffer on the device, and whose it is.
    """

    __slots__ = ("__weakref__", "_device", "_frames", "_host", "head", "nbytes", "rows", "serial")

    def __init__(
        self,
        head: bytes,
        rows: int,
        *,
        host: memoryview | None = None,
        device: Packed | None = None,
        frames: DeviceFrames | None = None,
    ) -> None:
        self.head, self.rows = head, rows
        self._host, self._device, self._frames = host, device, frames
        #: on the shelf; 0: it was never there
        self.serial = 0
        self.nbytes = host.nbytes if device is None else device.nbytes  # type: ignore[union-attr]

    @property
    def on_device(self) -> bool:
        """Whether it takes device memory."""
        return self._device is not None

    def host(self) -> memoryview:
        """Its bytes on the host; staged if need be."""
        stage([self])
        assert self._host is not None
        return self._host

    def where(self) -> OnDevice | None:
        """Its bytes on the device; None: they are on the host. They stay there as long as the answer is kept."""
        device = self._device  # another thread may be staging it
        return None if device is None else OnDevice(device.data, device.nbytes)

    def device(self, frames: DeviceFrames) -> Packed:
        """The rows on the device: what is there, or a copy of the host's bytes."""
        device = self._device  # another thread may be staging it
        if device is not None:
            return device
        assert self._host is not None
        return frames.from_host(self.head, self._host)

    def staged(self, host: memoryview) -> None:
        """Its bytes are on the host."""
        self._host = host
        self._device = self._frames = None
        if self.serial:
            shelf.staged(self.serial)


class Shelf:
    """The packs of this process that take device memory. A `model.HeldOnDevice`; any thread."""

    def __init__(self) -> None:
        #: serial -> (pack, its bytes), in the order in which they became ready
        self._packs: dict[int, tuple[weakref.ref[Pack], int]] = {}
        self._nbytes = 0
        self._serial = itertools.count(1)
        #: serials of packs that are staged or garbage; those that say so take no lock, as the collector may be one
        self._left: collections.deque[int] = collections.deque()
        #: held for a moment only, and never where device memory is allocated
        self._lock = threading.Lock()

    def add(self, packs: Iterable[Pack]) -> None:
        """Have packs leave if need be: they are ready."""
        with self._lock:
            for pack in packs:
                if pack.on_device:
                    pack.serial = serial = next(self._serial)
                    gone = weakref.ref(pack, lambda _, serial=serial: self._left.append(serial))  # type: ignore[misc]
                    self._packs[serial] = gone, pack.nbytes
                    self._nbytes += pack.nbytes

    def staged(self, serial: int) -> None:
        """A pack takes no device memory any more."""
        self._left.append(serial)

    def _forget(self) -> None:
        """Those that have left; hold the lock."""
        while self._left:
            self._nbytes -= self._packs.pop(self._left.popleft(), (None, 0))[1]

    def held(self) -> list[Pack]:
        """Those that are on the device now, the oldest first."""
        with self._lock:
            self._forget()
            return [pack for gone, _ in self._packs.values() if (pack := gone()) is not None]

    @property
    def nbytes(self) -> int:
        """Of the packs on the device."""
        with self._lock:
            self._forget()
            return self._nbytes

    def leave(self, nbytes: int) -> int:
        """Stage about so many bytes, the newest packs first: messages go in the order in which they were made."""
        left, packs = 0, self.held()
        while packs and left < nbytes:
            left += stage([packs.pop()])  # each into a block of its own, which goes with it
        return left


shelf = Shelf()


def stage(packs: Iterable[Pack]) -> int:
    """Copy packs to the host, into one block, and give their device memory up; returns the bytes that were copied."""
    held: list[tuple[Pack, Packed, DeviceFrames]] = []
    for pack in packs:
        device, frames = pack._device, pack._frames
        if device is not None and frames is not None:
            held.append((pack, device, frames))
    if not held:
        return 0
    frames = held[0][2]
    nbytes = sum(device.nbytes for _, device, _ in held)
    target = frames.room(nbytes)
    frames.to_host([device for _, device, _ in held], target)
    frames.ready()
    at = 0
    for pack, device, _ in held:
        pack.staged(target[at : at + device.nbytes].toreadonly())
        at += device.nbytes
    return nbytes


def with_room(step: Callable[[], T]) -> T:
    """Call `step`; when device memory is short, stage all packs and call it once more.

    Raises
    ------
    MemoryError
        It is short without them, too.
    """
    try:
        return step()
    except MemoryError as e:
        _let_go(e)
        if not shelf.nbytes:
            raise
    shelf.leave(1 << 62)
    try:
        return step()
    except MemoryError as e:
        _let_go(e)
        raise


def _let_go(error: MemoryError) -> None:
    """Give up what the failed step had on the device: a task's error keeps its frames until a garbage collection."""
    traceback.clear_frames(error.__traceback__)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRows:
    """Packs in the order of their outputs. Has of Arrow's tables what the shuffle uses of them outside `rows`."""

    packs: tuple[Pack, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all packs."""
        return sum(pack.rows for pack in self.packs)

    @property
    def nbytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.nbytes for pack in self.packs)

    @property
    def inputs(self) -> None:
        """All rows are of one input, as in `slices.Slice`."""
        return

    def table(self) -> PackedRows:
        """Itself, as in `slices.Slice`."""
        return self

    def slice(self, at: int, n: int) -> PackedRows:
        """`n` rows from row `at` on; both at the borders of packs.

        Raises
        ------
        ValueError
            They are not.
        """
        ends = np.cumsum([0, *(pack.rows for pack in self.packs)]).tolist()
        return PackedRows(self.packs[ends.index(at) : ends.index(at + n)])


def to_buffers(rows: PackedRows) -> tuple[pa.Buffer, ...]:
    """Rows for a message of host memory: the heads in one buffer, then the bytes of each pack; stages them."""
    import pyarrow as pa

    stage(rows.packs)
    return (_heads(rows), *(pa.py_buffer(pack.host()) for pack in rows.packs))


def where_they_are(rows: PackedRows) -> tuple[pa.Buffer | OnDevice, ...] | None:
    """The same with the packs on the device; None: one of them has left it."""
    packs = [pack.where() for pack in rows.packs]
    there = [pack for pack in packs if pack is not None]
    return (_heads(rows), *there) if len(there) == len(packs) else None


def _heads(rows: PackedRows) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(b"".join(_LENGTH.pack(len(pack.head)) + pack.head for pack in rows.packs))


def from_buffers(
    lengths: np.ndarray[Any, Any], buffers: Sequence[pa.Buffer | OnDevice | None], adopt: Adopt | None = None
) -> PackedRows:
    """The reverse; views on the buffers.

    Parameters
    ----------
    lengths
        Rows of each pack.
    adopt
        Makes a pack of a buffer that came on the device; None: none may.

    Raises
    ------
    ValueError
        They are not what `to_buffers` makes.
    """
    if len(buffers) != 1 + len(lengths) or any(buffer is None for buffer in buffers):
        raise ValueError(f"{len(lengths)} packs have {len(buffers)} buffers, must have one more")
    if type(buffers[0]) is OnDevice or (adopt is None and any(type(buffer) is OnDevice for buffer in buffers)):
        raise ValueError("what must be in host memory came on a device")
    heads, packs = memoryview(buffers[0]).cast("B"), []  # type: ignore[arg-type]
    for rows, buffer in zip(lengths.tolist(), buffers[1:], strict=True):
        n = _LENGTH.unpack_from(heads)[0] + _LENGTH.size if len(heads) >= _LENGTH.size else len(heads) + 1
        if n > len(heads):
            raise ValueError("the heads of packs end early")
        head = bytes(heads[_LENGTH.size : n])
        if isinstance(buffer, OnDevice):
            packs.append(adopt(head, rows, buffer))  # type: ignore[misc]
        else:
            packs.append(Pack(head, rows, host=memoryview(buffer).cast("B").toreadonly()))  # type: ignore[arg-type]
        heads = heads[n:]
    if len(heads):
        raise ValueError(f"the heads of packs have {len(heads)} bytes too many")
    return PackedRows(tuple(packs))


class PackedChunk:
    """A `model.Chunk` of packs. Immutable; `get` and `encode` may run in any thread.

    Parameters
    ----------
    nbytes
        Bytes of memory that go with it; None: counted from the shards.
    """

    def __init__(self, shards: Iterable[Shard], nbytes: int | None = None) -> None:
        #: output -> (input id, its rows)
        self._pieces: dict[int, list[tuple[int, PackedRows]]] = {}
        self.nbytes = 0
        self.chunk_id = (-1, -1)
        for shard in sorted(shards, key=lambda s: s.input_id, reverse=True):
            self.chunk_id = (shard.input_id, int(shard.parts[0]))
            self.nbytes += shard.nbytes
            for part, pack in zip(shard.parts.tolist(), shard.table.packs, strict=True):
                self._pieces.setdefault(part, []).append((shard.input_id, PackedRows((pack,))))
        if nbytes is not None:
            self.nbytes = nbytes

    @property
    def parts(self) -> Collection[int]:
        """Outputs that have rows here."""
        return self._pieces.keys()

    def get(self, part: int) -> list[tuple[int, PackedRows]]:
        """(input id, rows) of one output; KeyError when it has none."""
        return list(self._pieces[part])

    def encode(self, part: int) -> Sequence[Buffer]:
        """The packs of one output as frames to write; stages them."""
        packs = [(input_id, pack) for input_id, rows in self._pieces[part] for pack in rows.packs]
        stage(pack for _, pack in packs)
        head = b"".join(_PIECE.pack(i, pack.rows, len(pack.head), pack.nbytes) for i, pack in packs)
        return [head, *(frame for _, pack in packs for frame in (pack.head, pack.host()))]

    def decode(self, frames: Sequence[Buffer]) -> list[tuple[int, PackedRows]]:
        """Pieces from the frames of `encode`; views on them.

        Raises
        ------
        CorruptData
            The frames are not what `encode` made.
        """
        try:
            fields = list(_PIECE.iter_unpack(memoryview(frames[0]).cast("B")))
        except (IndexError, struct.error) as e:
            raise CorruptData(f"a spilled pack does not decode: {e}") from e
        rest = [memoryview(frame).cast("B") for frame in frames[1:]]
        sizes = [size for _, _, head, body in fields for size in (head, body)]
        if [frame.nbytes for frame in rest] != sizes:
            raise CorruptData(f"spilled packs have frames of {[f.nbytes for f in rest]} bytes, their head says {sizes}")
        return [
            (input_id, PackedRows((Pack(bytes(rest[2 * i]), rows, host=rest[2 * i + 1].toreadonly()),)))
            for i, (input_id, rows, _, _) in enumerate(fields)
        ]

    def shell(self) -> PackedChunk:
        """The chunk without rows: packs say themselves how to read them."""
        return PackedChunk((), 0)
