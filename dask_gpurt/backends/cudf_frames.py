"""`CudfFrames`: cuDF's frames for the shuffle, by calls of cuDF, pylibcudf and RMM 26.10.

`tests/gpu/test_names.py` compares every call below with the installed libraries, `tests/gpu/test_cudf_frames.py` runs
what needs no kernel on cuDF's own columns in host memory. What only a GPU can prove are the effects of the others;
`tests/gpu/unproven.txt` lists them.

Theory of operation. One call each:

========== ============================================================================================
apart      ``to_pylibcudf`` of the frame and, as its table lacks it, of its index
order      gather of a look-up table, stable sorted order, gather; offsets by a lower bound of the codes
pack       slices in one call, then ``contiguous_split.pack`` each
to_host    RMM's copies, in RMM's default stream
adopt      ``gpumemoryview`` of a buffer of RMM: no copy
unpack     ``unpack_from_memoryviews``: no copy
frame      the meta's dtypes and labels on these columns (`cudf_values.like`): no copy
========== ============================================================================================

`partition` and `hash_partition` of libcudf leave the order within a partition undefined, hence the sort. Ids that are
not asked for get the last code, so their rows fall off the end. An id may be anything that 64 bits hold, and a gather
reads 32 bits of it: so ids are clamped first, as unsigned, in which negative ones are large.

Text of more than 2 GiB: libcudf gives a column offsets of 64 bits then. Slice, pack, gather and concatenate take either
width, also mixed, so packs that were cut to a message's size join to an output that is larger than 2 GiB.

cuDF works in the default stream of CUDA, or in that of the thread (``CUDF_PER_THREAD_STREAM``), which CUDA orders with
each other. So a thread's calls take effect in their order either way, and `ready` waits for both.

It ran on an H200 (docs/gpu.md): rows were right. It is not faster than stock in all that was tried, so cuDF is left to
stock Dask where `gpurt.shuffle.device-frames` does not say otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cudf
import numpy as np
import pyarrow as pa
import pylibcudf as plc
import rmm
from pylibcudf.contiguous_split import pack as pack_table
from pylibcudf.contiguous_split import unpack_from_memoryviews
from rmm.pylibrmm.device_buffer import copy_ptr_to_host
from rmm.pylibrmm.stream import DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM

from dask_gpurt.backends.cudf_values import like
from dask_gpurt.backends.device_copies import pinned_room
from dask_gpurt.backends.frames import Packed, to_cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ASCENDING, _NULLS_LAST = [plc.types.Order.ASCENDING], [plc.types.NullOrder.AFTER]
#: holds every id of an output
_WIDE = plc.DataType(plc.TypeId.UINT64)
#: rows of a table, at most
_MOST_ROWS = 2**31 - 1


class CudfFrames:
    """`DeviceFrames` for cuDF."""

    def owns(self, frame: object) -> bool:
        """Whether a frame is cuDF's."""
        return isinstance(frame, cudf.DataFrame)

    def apart(self, frame: Any, column: str, meta: Any) -> tuple[Any, Any]:
        """(table, ids). Tables of one meta have the same types, the index included: only such can be joined."""
        casts = to_cast(frame, meta, column)
        rest = frame[list(meta.columns)]
        table, _ = (rest.astype(casts) if casts else rest).to_pylibcudf()
        ids, _ = frame[column].to_pylibcudf()
        rows = frame.index
        if rows.dtype != meta.index.dtype:
            rows = rows.astype(meta.index.dtype)
        index, _ = rows.to_pylibcudf()
        return plc.Table([*table.columns(), index]), ids

    def order(
        self, table: Any, ids: Any, code_of: np.ndarray[Any, Any], outputs: int
    ) -> tuple[Any, np.ndarray[Any, Any]]:
        """(rows by code, offsets)."""
        look_up = plc.Table([plc.Column.from_arrow(pa.array(np.append(code_of, outputs).astype("i4")))])
        first, last = plc.Scalar.from_py(0, _WIDE), plc.Scalar.from_py(len(code_of), _WIDE)
        places = plc.replace.clamp(plc.unary.cast(ids, _WIDE), first, last)
        codes = plc.copying.gather(look_up, places, plc.copying.OutOfBoundsPolicy.DONT_CHECK)
        at = plc.sorting.stable_sorted_order(codes, _ASCENDING, _NULLS_LAST)
        sorted_codes = plc.copying.gather(codes, at, plc.copying.OutOfBoundsPolicy.DONT_CHECK)
        wanted = plc.Table([plc.Column.from_arrow(pa.array(np.arange(outputs + 1, dtype="i4")))])
        bounds = plc.search.lower_bound(sorted_codes, wanted, _ASCENDING, _NULLS_LAST)
        offsets = bounds.to_arrow().to_numpy(zero_copy_only=False).astype(np.int64)
        return plc.copying.gather(table, at, plc.copying.OutOfBoundsPolicy.DONT_CHECK), offsets

    def pack(self, table: Any, ranges: Sequence[tuple[int, int]]) -> list[Packed]:
        """One buffer for each range."""
        packs = []
        for part in plc.copying.slice(table, [at for both in ranges for at in both]):
            head, data = pack_table(part).release()
            packs.append(Packed(bytes(head), int(data.nbytes), data))
        return packs

    def to_host(self, packs: Sequence[Packed], target: memoryview) -> None:
        """Copy packs to the host."""
        for pack in packs:
            if pack.nbytes:
                copy_ptr_to_host(pack.data.ptr, target[: pack.nbytes], DEFAULT_STREAM)
            target = target[pack.nbytes :]

    def from_host(self, head: bytes, data: memoryview) -> Packed:
        """Copy a pack to the device."""
        buffer = rmm.DeviceBuffer.to_device(data, DEFAULT_STREAM)
        return Packed(head, data.nbytes, plc.gpumemoryview(buffer))

    def room(self, nbytes: int) -> memoryview:
        """Page-locked memory, or ordinary."""
        return pinned_room(nbytes)

    def adopt(self, head: bytes, data: Any, nbytes: int) -> Packed:
        """A pack in a buffer that came."""
        return Packed(head, nbytes, data if isinstance(data, plc.gpumemoryview) else plc.gpumemoryview(data))

    def unpack(self, pack: Packed) -> Any:
        """A view."""
        return unpack_from_memoryviews(memoryview(pack.head), pack.data)

    def concat(self, tables: Sequence[Any]) -> Any:
        """Rows of several tables."""
        rows = sum(table.num_rows() for table in tables)
        if rows > _MOST_ROWS:
            raise OverflowError(f"an output has {rows} rows, a cuDF table holds {_MOST_ROWS}. Remedy: more partitions")
        if len(tables) == 1:
            return tables[0]
        return plc.concatenate.concatenate(_alike(tables))

    def frame(self, table: Any, meta: Any) -> Any:
        """A frame like the meta."""
        *columns, index = table.columns()
        return like(meta, columns, index)

    def ready(self) -> None:
        """Wait for the stream that cuDF uses, which may be the thread's, and for that of the copies."""
        PER_THREAD_DEFAULT_STREAM.synchronize()
        DEFAULT_STREAM.synchronize()


def _alike(tables: Sequence[Any]) -> list[Any]:
    """Tables of one type: numbers in the common type of all, as a partition may have others than the meta."""
    parts = [list(table.columns()) for table in tables]
    for i in range(len(parts[0])):
        types = {columns[i].type() for columns in parts}
        if len(types) > 1:
            wanted = _common(types)
            for columns in parts:
                columns[i] = plc.unary.cast(columns[i], wanted)
    return [plc.Table(columns) for columns in parts]


def _common(types: Iterable[Any]) -> Any:
    """The type that numpy gives numbers of these types."""
    common = np.result_type(*(np.dtype(one.typestr) for one in types))
    return plc.DataType.from_arrow(pa.from_numpy_dtype(common))
