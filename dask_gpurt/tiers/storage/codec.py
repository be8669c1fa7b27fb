"""Objects to frames and back: pickle 5 with out-of-band buffers.

Large buffers (arrays, columns) are handed to ``writev`` where they lie and are read into fresh memory once; upstream
joins them into one ``bytes`` and copies twice on reading. Everything that Dask's own spilling can store can be stored
here:

1. ``distributed.protocol.pickle`` (pickle, then Dask's reducers, then cloudpickle), protocol 5, buffers out of band;
2. if that fails, or would copy or write too much, Dask's serialization families through
   ``distributed.protocol.serialize``: for an array that is neither C- nor F-contiguous (above all a broadcast one,
   which would be blown up), and as Arrow IPC for a slice of an Arrow table, whose pickle holds the buffers of the whole
   table (1,300 times the bytes for 100 rows of 100,000).

Other Arrow data gain nothing by IPC: pickled, their buffers are out of band too and are not copied, and pandas cuts its
Arrow columns to size itself. IPC of a pandas frame was rejected: it changes the dtype of object columns.

Frames of both kinds start with one byte that says which. Compression is the tier's business (`compression`).
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from distributed.protocol import deserialize, serialize
from distributed.protocol import pickle as dask_pickle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.model.shards import Buffer
    from dask_gpurt.tiers.storage.handle import Group

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

    def encode(self, value: object, parts: Sequence[int] | None = None) -> list[Group]:
        """See `Codec.encode`. There is one group: task results have no parts."""
        frames: list[Buffer]
        if not _better_by_family(value):
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
        """See `Codec.decode`."""
        kind = bytes(frames[0])
        if kind == _PICKLE:
            return pickle.loads(frames[1], buffers=frames[2:])
        header = pickle.loads(frames[1])
        return deserialize(header, frames[2:])


def _by_family(value: object) -> list[Buffer]:
    header, frames = serialize(value, on_error="raise")
    return [_FAMILY, pickle.dumps(header, 5), *map(flat, frames)]


def _better_by_family(value: Any) -> bool:
    module = type(value).__module__
    if module == "numpy":
        flags = getattr(value, "flags", None)
        return flags is not None and not (getattr(flags, "c_contiguous", True) or getattr(flags, "f_contiguous", True))
    if module == "pyarrow.lib" and type(value).__name__ in ("Table", "RecordBatch"):
        return bool(value.get_total_buffer_size() > 1.1 * value.nbytes + 4096)
    return False
