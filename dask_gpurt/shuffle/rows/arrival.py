"""What came of a message, before `wire` knows what it is: its head, read from front to back, and its frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.rows.packed import OnDevice
from dask_gpurt.shuffle.transport.link import records

if TYPE_CHECKING:
    import struct

    import pyarrow as pa


class Reader:
    """Reads a head from front to back; never beyond its end: `WireError`."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def take(self, n: int) -> memoryview:
        """The next `n` bytes."""
        if n > len(self._view) - self._at:
            raise WireError(f"the head of a shuffle message ends {n - len(self._view) + self._at} bytes early")
        self._at += n
        return self._view[self._at - n : self._at]

    def unpack(self, fields: struct.Struct) -> tuple[int, ...]:
        """The next fields."""
        return fields.unpack(self.take(fields.size))

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._view):
            raise WireError(f"the head of a shuffle message has {len(self._view) - self._at} bytes too many")


def block_of(frame: Any) -> pa.Buffer | OnDevice:
    """A frame as an Arrow buffer at an address that suits 8-byte values, or as what lies on the device.

    distributed joins the frames of messages below 128 KiB, at any address; only these are copied.
    """
    import pyarrow as pa

    if records.is_device(frame):
        return OnDevice(frame, records.size_of(frame))
    buffer = pa.py_buffer(memoryview(frame).cast("B"))
    if buffer.size and buffer.address % 8:
        fresh = pa.allocate_buffer(buffer.size)
        memoryview(fresh).cast("B")[:] = memoryview(buffer).cast("B")
        return fresh
    return buffer
