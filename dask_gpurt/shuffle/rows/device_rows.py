"""`DeviceRows`: the `RowKind` of frames in device memory, over a `DeviceFrames`.

Theory of operation. Rows are put in the order of their outputs once. Each output is packed, a large one in several
packs, so that a shard is at most `cut_bytes`; what stays here is no message, and may be `LOCAL_CUTS` times as much, as
a pack takes half a millisecond however small it is. What bytes a row takes is learned from earlier packs; a pack
that came out larger is packed again in halves. The shards of workers that do not take device memory are staged as they
are made: device memory then holds the input, its rows in order, this worker's own packs and those on their way.

An output is one copy to the device of what came from elsewhere, and one concatenation. Inputs sort by their ids, and
rows of an input keep their order, so outputs are the same, row by row, as those of pandas frames.

Everything of a split or an output that finds no device memory is tried once more, after all packs were staged.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.packed import SENT_BYTES, Pack, PackedChunk, PackedRows, shelf, stage, with_room
from dask_gpurt.shuffle.rows.partition import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dask_gpurt.backends.frames import DeviceFrames, Packed
    from dask_gpurt.shuffle.rows.packed import OnDevice
    from dask_gpurt.shuffle.rows.partition import OutputLayout
    from dask_gpurt.shuffle.rows.wire import Parcel

#: (output, first row, one past the last) in the order of outputs
Range = tuple[int, int, int]
#: `cut_bytes` for what stays on this worker. Not more: it may be staged, and sent after all when an output moves
LOCAL_CUTS = 8
#: packs of fewer bytes say nothing of the bytes of a row: each buffer of theirs is padded
_TELLING_BYTES = 1 << 16


class DeviceRows:
    """`RowKind` of device frames.

    Parameters
    ----------
    cut_bytes
        Bytes of a shard, at most, as far as one row is not more than that already.
    local_address
        Of this worker, whose own rows stay on the device.
    """

    on_host = False

    def __init__(
        self, frames: DeviceFrames, *, meta: Any, column: str, drop_column: bool, cut_bytes: int, local_address: str
    ) -> None:
        self._frames, self._column = frames, column
        self._meta = meta.drop(columns=column) if drop_column else meta
        self._cut_bytes, self._local_address = cut_bytes, local_address
        self.frame = f"{type(meta).__module__}.{type(meta).__name__}"
        #: bytes of a row, about
        self._row_bytes = 8.0 * (1 + len(meta.columns))

    def owns(self, data: object) -> bool:
        """Whether a partition is of the library."""
        return self._frames.owns(data)

    def split(
        self,
        data: Any,
        input_id: int,
        layout: OutputLayout,
        *,
        keep: np.ndarray[Any, Any] | None = None,
        direct: Collection[str] = (),
    ) -> Iterable[tuple[str, Shard]]:
        """(worker address, shard); all of it ready, and of all rows: the joins of device frames have no filter."""
        return with_room(lambda: self._split(data, input_id, layout, direct)) if len(data) else ()

    def _split(
        self, data: Any, input_id: int, layout: OutputLayout, direct: Collection[str]
    ) -> list[tuple[str, Shard]]:
        frames = self._frames
        table, ids = frames.apart(data, self._column, self._meta)
        ordered, offsets = frames.order(table, ids, layout.code_of, layout.unwanted)
        frames.ready()
        del table, ids
        out: list[tuple[str, Shard]] = []
        for address, (begin, end) in layout.ranges.items():
            cut = self._cut_bytes * (LOCAL_CUTS if address == self._local_address else 1)
            for ranges in self._ranges(offsets, begin, end, layout, cut):
                for group in self._packed(ordered, ranges, cut):
                    shard = self._shard(input_id, group)
                    # Many small packs are one copy to the host, and would be a message's frame each.
                    large = shard.nbytes >= SENT_BYTES * len(group)
                    if address != self._local_address and not (large and address in direct):
                        stage(shard.table.packs)
                    out.append((address, shard))
        frames.ready()
        shelf.add(pack for _, shard in out for pack in shard.table.packs)
        return out

    def _ranges(
        self, offsets: np.ndarray[Any, Any], begin: int, end: int, layout: OutputLayout, cut: int
    ) -> Iterator[list[Range]]:
        """Ranges of rows for about a shard at a time, each output in it once."""
        some: list[Range] = []
        rows = 0
        for code in (begin + np.flatnonzero(np.diff(offsets[begin : end + 1]))).tolist():
            part, at, last = int(layout.part_of[code]), int(offsets[code]), int(offsets[code + 1])
            while at < last:
                most = max(1, int(cut / self._row_bytes))
                stop = min(at + most, last)
                if some and (rows + stop - at > most or some[-1][0] == part):
                    yield some
                    some, rows = [], 0
                some.append((part, at, stop))
                rows += stop - at
                at = stop
        if some:
            yield some

    def _packed(self, table: Any, ranges: Sequence[Range], cut: int) -> Iterator[list[tuple[Range, Packed]]]:
        """Pack ranges, in groups of `cut` bytes."""
        packs = self._frames.pack(table, [(first, last) for _, first, last in ranges])
        nbytes = sum(pack.nbytes for pack in packs)
        if nbytes >= _TELLING_BYTES:
            self._row_bytes = nbytes / sum(last - first for _, first, last in ranges)
        group: list[tuple[Range, Packed]] = []
        size = 0
        for one, pack in zip(ranges, packs, strict=True):
            part, first, last = one
            if group and size + pack.nbytes > cut:
                yield group
                group, size = [], 0
            if pack.nbytes > cut and last - first > 1:
                middle = (first + last) // 2
                yield from self._packed(table, [(part, first, middle)], cut)
                yield from self._packed(table, [(part, middle, last)], cut)
                continue
            group.append((one, pack))
            size += pack.nbytes
        if group:
            yield group

    def _shard(self, input_id: int, group: list[tuple[Range, Packed]]) -> Shard:
        packs = tuple(
            Pack(packed.head, last - first, device=packed, frames=self._frames) for (_, first, last), packed in group
        )
        parts = np.array([part for (part, _, _), _ in group], dtype=np.uint32)
        lengths = np.array([pack.rows for pack in packs], dtype=np.uint64)
        return Shard(input_id, PackedRows(packs), parts, lengths, known_bytes=sum(pack.nbytes for pack in packs))

    def encoder(self) -> Callable[[Shard], list[Parcel]]:
        """One parcel for a shard: it was cut when it was split."""
        return lambda shard: [wire.encode_packed(shard)]

    def copied(self, shard: Shard, input_id: int) -> Shard:
        """The shard under another id: packs have memory of their own."""
        return dataclasses.replace(shard, input_id=input_id)

    def adopt(self, head: bytes, rows: int, came: OnDevice) -> Pack:
        """A pack of what came on the device."""
        pack = Pack(head, rows, device=self._frames.adopt(head, came.buffer, came.size), frames=self._frames)
        shelf.add([pack])
        return pack

    def few(self, shard: Shard) -> bool:
        """Never: packs are not merged."""
        return False

    def merged(self, shards: Iterable[Shard]) -> list[Shard]:
        """The shards."""
        return list(shards)

    def chunk(self, shards: Sequence[Shard], nbytes: int | None) -> PackedChunk:
        """A chunk of packs."""
        return PackedChunk(shards, nbytes)

    def assemble(self, pieces: list[tuple[int, PackedRows]]) -> Any:
        """An output."""
        packs = [pack for _, rows in sorted(pieces, key=lambda piece: piece[0]) for pack in rows.packs]
        out = with_room(lambda: self._joined(packs)) if packs else self._meta.copy()
        pieces.clear()  # not before: where it fails they are wanted again
        return out

    def _joined(self, packs: list[Pack]) -> Any:
        frames = self._frames
        there = [pack.device(frames) for pack in packs]
        table = frames.concat([frames.unpack(pack) for pack in there])
        frames.ready()
        out = frames.frame(table, self._meta)
        frames.ready()
        return out
