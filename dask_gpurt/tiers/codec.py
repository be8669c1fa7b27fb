"""Objects to frames and back: pickle 5 with out-of-band buffers.

Large buffers (arrays, columns) are handed to ``writev`` where they lie and are read into fresh memory once; upstream
joins them into one ``bytes`` and copies twice on reading. Everything that Dask's own spilling can store can be stored
here:

1. ``distributed.protocol.pickle`` (pickle, then Dask's reducers, then cloudpickle), protocol 5, buffers out of band;
2. if that fails, or would copy (an array that is neither C- nor F-contiguous, above all a broadcast one, which would be
   blown up), Dask's serialization families through ``distributed.protocol.serialize``.

No compression: on local disks above about 0.4 GB/s it makes both directions slower (measured, and so in the figures
of others). Frames of both kinds start with one byte that says which.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from distributed.protocol import deserialize, serialize
from distributed.protocol import pickle as dask_pickle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.model.shards import Buffer
    from dask_gpurt.tiers.account import Group

_PICKLE = b"P"
_FAMILY = b"F"


def flat(buffer: Any) -> memoryview:
    """A one-dimensional view of bytes, without a copy. BufferError when the memory is not contiguous."""
    if isinstance(buffer, pickle.PickleBuffer):
        return buffer.raw()
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else pickle.PickleBuffer(view).raw()


class PickleCodec:
    """The codec of task results. Stateless."""

    def encode(self, value: Any, parts: Sequence[int] | None = None) -> list[Group]:
        frames: list[Buffer]
        if not _would_copy(value):
            out_of_band: list[pickle.PickleBuffer] = []
            try:
                head = dask_pickle.dumps(value, buffer_callback=out_of_band.append, protocol=5)
                frames = [_PICKLE, head, *map(flat, out_of_band)]
            except Exception:
                # The families know types that pickle does not; what they raise is the answer.
                frames = _by_family(value)
        else:
            frames = _by_family(value)
        return [(0, frames)]

    def decode(self, frames: list[memoryview]) -> Any:
        kind = bytes(frames[0])
        if kind == _PICKLE:
            return pickle.loads(frames[1], buffers=frames[2:])
        header = pickle.loads(frames[1])
        return deserialize(header, frames[2:])


def _by_family(value: Any) -> list[Buffer]:
    header, frames = serialize(value, on_error="raise")
    return [_FAMILY, pickle.dumps(header, 5), *map(flat, frames)]


def _would_copy(value: Any) -> bool:
    flags = getattr(value, "flags", None)
    if flags is None or type(value).__module__ != "numpy":
        return False
    return not (getattr(flags, "c_contiguous", True) or getattr(flags, "f_contiguous", True))
