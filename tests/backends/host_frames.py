"""`HostFrames`: a stand-in for a library of device frames, for tests without a GPU. It runs on the host and says so.

Partitions are `HostFrame`, a pandas frame under another name. As soon as a shuffle takes one apart, its rows are Arrow
record batches in `LazyMemory`, one buffer each, and stay there until an output is made of them. So everything between
is exercised as it is with a device: order, packs, copies that come late, memory that runs short. What a GPU computes is
not.

It is part of the tests, not of the package: nothing that users install contains something that looks like a device.
Worker processes import it as ``tests.backends.host_frames``, which needs the repository's root on their path, as
`LocalCluster` passes it on.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.dataframe.dispatch import meta_nonempty

from dask_gpurt.backends.frames import ATTRIBUTE, Packed, to_cast
from dask_gpurt.shuffle.rows.assemble import general
from tests.backends.lazy_memory import Block, LazyMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: that of this process
MEMORY = LazyMemory()


class HostSeries(pd.Series):
    """A column of a `HostFrame`."""

    @property
    def _constructor(self) -> Any:
        return HostSeries

    @property
    def _constructor_expanddim(self) -> Any:
        return HostFrame


class HostFrame(pd.DataFrame):
    """A partition that a shuffle takes for one in device memory."""

    @property
    def _constructor(self) -> Any:
        return HostFrame

    @property
    def _constructor_sliced(self) -> Any:
        return HostSeries


setattr(HostFrame, ATTRIBUTE, f"{__name__}:HostFrames")


def _frame_nonempty(x: HostFrame) -> HostFrame:
    return HostFrame(meta_nonempty(pd.DataFrame(x)))


def _series_nonempty(x: HostSeries) -> HostSeries:
    return HostSeries(meta_nonempty(pd.Series(x)))


meta_nonempty.register(HostFrame, _frame_nonempty)
meta_nonempty.register(HostSeries, _series_nonempty)


class HostSide:
    """`DeviceSide` over the memory of this process: UCX sends and receives blocks of it.

    It computes nothing and has no context. What it finds out is whether all that is sent was waited for, and that no
    allocation is made in the UCX thread.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0
        #: allocations that fail, by number
        self.fail: Callable[[int], bool] = lambda number: False

    def in_use(self) -> bool:
        """Always."""
        return True

    def enter(self) -> None:
        """There is no context."""

    def prepare(self, buffers: Sequence[Any]) -> list[Any]:
        """The buffers; all that is to be sent is there."""
        _beside()
        for buffer in buffers:
            if isinstance(buffer, Block):
                MEMORY.whole(buffer)
                self.sent += buffer.nbytes
        return list(buffers)

    def allocate(self, nbytes: int) -> Block:
        """A block."""
        _beside()
        self.received += nbytes
        if self.fail(self.received):
            raise MemoryError("on purpose")
        return MEMORY.allocate(nbytes)

    def keep(self, buffers: Sequence[Any]) -> list[Any]:
        """The buffers: there is one memory."""
        _beside()
        return list(buffers)


def _beside() -> None:
    if not threading.current_thread().name.startswith("gpurt-ucx-device"):
        MEMORY.faults.append(f"the device was waited for in {threading.current_thread().name}")


SIDE = HostSide()


def use_ucx() -> None:
    """Have workers of this process find a device for UCX, before their first shuffle: `SIDE`."""
    from dask_gpurt.backends import ucx_device
    from dask_gpurt.shuffle.transport.select import locality

    vars(ucx_device)["CudaSide"] = lambda: SIDE
    # Not for `ucx`: what that sets for a GPU asks for one.
    assert not ucx_device.has_device()
    vars(ucx_device)["has_device"] = lambda: True
    locality.UCX_ON_HOST = True
    ucx_device.device_side.cache_clear()


class HostTable:
    """A record batch in a block."""

    def __init__(self, schema: pa.Schema, block: Block) -> None:
        self.schema, self.block = schema, block


class HostFrames:
    """`DeviceFrames` over `LazyMemory`.

    Parameters
    ----------
    memory
        None: that of this process.
    """

    def __init__(self, memory: LazyMemory | None = None) -> None:
        self._given = memory

    @property
    def memory(self) -> LazyMemory:
        """Where tables lie."""
        return self._given or MEMORY

    def owns(self, frame: object) -> bool:
        """Whether it is a `HostFrame`."""
        return isinstance(frame, HostFrame)

    def apart(self, frame: HostFrame, column: str, meta: pd.DataFrame) -> tuple[HostTable, HostTable]:
        """(table, ids)."""
        plain = pd.DataFrame(frame)
        casts = to_cast(plain, meta, column)
        kept = plain[list(meta.columns)].astype(casts)
        rows = pa.Table.from_pandas(kept, preserve_index=True)
        return self._put(rows, "input"), self._put(pa.table({"ids": frame[column].to_numpy()}), "ids")

    def order(
        self, table: HostTable, ids: HostTable, code_of: np.ndarray[Any, Any], outputs: int
    ) -> tuple[HostTable, np.ndarray[Any, Any]]:
        """(rows by code, offsets)."""
        self.ready()  # a device has to wait here, too: the sizes of what is gathered depend on the rows
        given = self._get(ids).column(0).to_numpy()
        codes = np.full(len(given), outputs, dtype=np.int64)
        inside = (given >= 0) & (given < len(code_of))
        codes[inside] = code_of[given[inside]]
        at = np.argsort(codes, kind="stable")
        offsets = np.searchsorted(codes[at], np.arange(outputs + 1)).astype(np.int64)
        return self._put(self._get(table).take(pa.array(at)), "gather"), offsets

    def pack(self, table: HostTable, ranges: Sequence[tuple[int, int]]) -> list[Packed]:
        """One block for each range."""
        self.ready()
        rows = self._get(table)
        parts = [self._put(rows.slice(first, last - first), "pack") for first, last in ranges]
        return [Packed(part.schema.serialize().to_pybytes(), part.block.nbytes, part.block) for part in parts]

    def to_host(self, packs: Sequence[Packed], target: memoryview) -> None:
        """Copy packs to the host, at `ready`."""
        for pack in packs:
            self.memory.read(pack.data, target[: pack.nbytes])
            target = target[pack.nbytes :]

    def from_host(self, head: bytes, data: memoryview) -> Packed:
        """Copy a pack from the host, at `ready`."""
        block = self.memory.allocate(data.nbytes)
        self.memory.write(block, data, "from host")
        return Packed(head, data.nbytes, block)

    def room(self, nbytes: int) -> memoryview:
        """Ordinary memory."""
        return memoryview(bytearray(nbytes))

    def adopt(self, head: bytes, data: Block, nbytes: int) -> Packed:
        """A pack in a block that came."""
        assert data.nbytes == nbytes
        return Packed(head, nbytes, data)

    def unpack(self, pack: Packed) -> HostTable:
        """The table in a pack's block."""
        return HostTable(pa.ipc.read_schema(pa.py_buffer(pack.head)), pack.data)

    def concat(self, tables: Sequence[HostTable]) -> HostTable:
        """Rows of several tables."""
        self.ready()
        rows = pa.concat_tables([self._get(table) for table in tables], promote_options="permissive")
        return self._put(rows, "concatenate")

    def frame(self, table: HostTable, meta: pd.DataFrame) -> HostFrame:
        """A frame like the meta."""
        return HostFrame(general([self._get(table)], pd.DataFrame(meta)))

    def ready(self) -> None:
        """Do what this thread has asked for."""
        self.memory.ready()

    def _put(self, rows: pa.Table, what: str) -> HostTable:
        """Rows in a block of their own, at `ready`."""
        whole = rows.combine_chunks().to_batches()
        batch = whole[0] if whole else pa.record_batch([pa.array([], f.type) for f in rows.schema], rows.schema)
        data = batch.serialize()
        block = self.memory.allocate(data.size)
        self.memory.write(block, data, what)
        return HostTable(rows.schema, block)

    def _get(self, table: HostTable) -> pa.Table:
        """The rows as a kernel finds them now."""
        data = pa.py_buffer(self.memory.bytes_of(table.block))
        return pa.Table.from_batches([pa.ipc.read_record_batch(data, table.schema)])
