"""Objects to frames and back: pickle 5 with out-of-band buffers.

Large buffers (arrays, columns) are handed to ``writev`` where they lie and are read into fresh memory once; upstream
joins them into one ``bytes`` and copies twice on reading. Everything that Dask's own spilling can store can be stored
here:

1. ``distributed.protocol.pickle`` (pickle, then Dask's reducers, then cloudpickle), protocol 5, buffers out of band;
2. if that fails, or would copy or write too much, Dask's serialization families through
   ``distributed.protocol.serialize``: for an array that has a mask, or is neither C- nor F-contiguous (above all a
   broadcast one, which would be blown up), and as Arrow IPC for a slice of an Arrow table, whose pickle holds the
   buffers of the whole table (1,300 times the bytes for 100 rows of 100,000); for a `memoryview`, which pickle makes
   bytes; for a mapped file, which pickle would copy as a whole; for a tensor of PyTorch, whose pickle is a copy of all
   that it is a slice of, without its gradient. A list, tuple or dict with such a value goes the same way.

Pickle forgets that an array of a subclass (a matrix, a masked array) is read-only. That is written beside it.

Other Arrow data gain nothing by IPC: pickled, their buffers are out of band too and are not copied, and pandas cuts its
Arrow columns to size itself. IPC of a pandas frame was rejected: it changes the dtype of object columns.

Frames of both kinds start with one byte that says which. Compression is the tier's business (`compression`).
"""

from __future__ import annotations

import itertools
import pickle
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol import deserialize, serialize
from distributed.protocol import pickle as dask_pickle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.model.shards import Buffer
    from dask_gpurt.tiers.storage.handle import Group

_PICKLE = b"P"
#: pickled, and an array that is not to be written to
_READ_ONLY = b"R"
_FAMILY = b"F"
#: of a list, tuple or dict so many elements are looked at
_ELEMENTS = 10
#: of those that are in it, only the first, as Dask does; to this depth, as a list may contain itself
_DEPTH = 20
_COLLECTIONS = (list, tuple, dict)


def flat(buffer: Any) -> memoryview:
    """A one-dimensional view of bytes, without a copy. BufferError when the memory is not contiguous."""
    if isinstance(buffer, pickle.PickleBuffer):
        return buffer.raw()
    view = memoryview(buffer)
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    raw = pickle.PickleBuffer(view).raw()
    # Not `raw` itself, a view of a view: CPython crashes where both are garbage of one cycle, as after an exception.
    # It does not look into an array.
    return np.frombuffer(raw, "u1").data if raw.nbytes else memoryview(b"")


class PickleCodec:
    """The codec of task results. Stateless."""

    def encode(self, value: object, parts: Sequence[int] | None = None) -> list[Group]:
        """See `Codec.encode`. There is one group: task results have no parts."""
        first, second = _by_pickle, _by_family
        if _better_by_family(value):
            first, second = second, first
        try:
            frames = first(value)
        except MemoryError:  # the other way would take as much
            raise
        except Exception:
            # The families know types that pickle does not, and the reverse; what the second raises is the answer.
            frames = second(value)
        return [(0, frames)]

    def decode(self, frames: list[memoryview]) -> Any:
        """See `Codec.decode`."""
        kind = bytes(frames[0])
        if kind == _PICKLE:
            return pickle.loads(frames[1], buffers=frames[2:])
        if kind == _READ_ONLY:
            value = pickle.loads(frames[1], buffers=frames[2:])
            if isinstance(value, np.ndarray):  # a class of the user's may come back as something else
                value.flags.writeable = False
            return value
        header = pickle.loads(frames[1])
        return deserialize(header, frames[2:])


def _by_pickle(value: object) -> list[Buffer]:
    out_of_band: list[pickle.PickleBuffer] = []
    head = dask_pickle.dumps(value, buffer_callback=out_of_band.append, protocol=5)
    kind = _PICKLE
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray and not value.flags.writeable:
        kind = _READ_ONLY
    return [kind, head, *map(flat, out_of_band)]


def _by_family(value: object) -> list[Buffer]:
    header, frames = serialize(value, on_error="raise", iterate_collection=type(value) in _COLLECTIONS or None)
    return [_FAMILY, pickle.dumps(header, 5), *map(_flat_copy, frames)]


def _flat_copy(frame: Any) -> memoryview:
    view = memoryview(frame)
    # One with steps, or the columns first, is read back as rows first: its bytes as they lie are in another order.
    return flat(frame) if view.c_contiguous else memoryview(view.tobytes())


def _better_by_family(value: Any, looked_at: int = _ELEMENTS, depth: int = _DEPTH) -> bool:
    kind = type(value)
    if kind in _COLLECTIONS:
        elements = itertools.islice(value.values() if kind is dict else value, looked_at)
        return depth > 0 and any(_better_by_family(e, 1, depth - 1) for e in elements)
    if kind is memoryview or kind is np.memmap:
        return True
    if kind is np.ma.MaskedArray:
        # Pickle copies it, blows a broadcast one up, and makes a mask where there was none. The family makes an array
        # of what is below the mask.
        return bool(value.baseclass is np.ndarray)
    module = kind.__module__
    if module == "numpy":
        flags = getattr(value, "flags", None)
        return flags is not None and not (getattr(flags, "c_contiguous", True) or getattr(flags, "f_contiguous", True))
    if module == "torch" and kind.__name__ == "Tensor":
        # One without strides is not known to the family; an expanded one would come back blown up.
        return bool(value.layout is sys.modules["torch"].strided and 0 not in value.stride())
    if module == "pyarrow.lib" and kind.__name__ in ("Table", "RecordBatch"):
        # Pickle forgets how many rows a table without columns has.
        return bool(not value.num_columns or value.get_total_buffer_size() > 1.1 * value.nbytes + 4096)
    return False
