"""`DeviceFrames`: what a shuffle asks of a library whose data frames lie in device memory.

`provider_of` says which implementation a frame has, `refused` which frames it does not take, `load` makes it.
`CudfFrames` (`cudf_frames`) is the implementation for cuDF; `tests/backends/host_frames.py` has a stand-in in host
memory, for tests alone.

Theory of operation. A frame becomes a *table*, which is whatever the library computes with: the frame's columns but the
one with the ids of outputs, then the columns of its index. The rows of a table are put in the order of their outputs
once (`order`). Ranges of these rows become *packs* (`pack`): one device buffer each, with a head on the host that says
how to read it. From then on the shuffle knows rows only as packs. It keeps them on the device, copies them to the host
(`to_host`), sends and stores these bytes, and copies them back (`from_host`). Between workers that may, packs go from
device to device, and what comes is one again (`adopt`). The shuffle never looks into them. An output is
made of packs in the order of their inputs: `unpack` views each, `concat` joins them, `frame` puts names and dtypes on.

Device work is asynchronous: a call may return before it is done. The contract is that of one stream per thread:

- A thread's calls take effect in their order.
- `ready` waits for all that the calling thread has begun. After it, results may be read on the host and used by other
  threads, and what was copied from may be given up. Before it, neither.
- What a call was given is kept alive by the caller until the next `ready` of its thread.
- Device memory that becomes garbage is free once the stream that it was allocated on gets there.
- A call that finds no memory raises MemoryError, and has changed nothing. Packs that were made before stay good.

Names, dtypes and the kind of the index are no part of a pack. They come from the meta: `apart` refuses a frame that
differs from it, `frame` restores what the library cannot infer. Numbers alone may be wider than the meta says, such as
floats in a column of integers. They stay so, and an output has the common type of its partitions, as with stock Dask.

The scheduler decides from the meta alone, by the names of types, and imports no library of a device. What is refused
runs as stock Dask runs it. That is every dtype which the public calls of cuDF are not known to keep through a pack: the
list is one of what is allowed.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

#: attribute of a class of frames that names its `DeviceFrames`, as "package.module:Class"
ATTRIBUTE = "__gpurt_frames__"
#: library -> its `DeviceFrames`
_PROVIDERS = {"cudf": "dask_gpurt.backends.cudf_frames:CudfFrames"}
#: libraries whose columns of dtype object are text and nothing else
_OBJECT_IS_TEXT = frozenset({"cudf"})
#: library -> classes of its dtypes that its columns keep through a pack, and that the meta restores
_KEPT = {
    "cudf": frozenset(
        [
            *("ListDtype", "StructDtype", "DatetimeTZDtype", "BooleanDtype", "Float32Dtype", "Float64Dtype"),
            *(f"Decimal{bits}Dtype" for bits in (32, 64, 128)),
            *(f"{kind}{bits}Dtype" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)),
        ]
    )
}
#: kinds of numpy's dtypes that are kept: integers, floats, booleans, timestamps and timedeltas without a time zone
_PLAIN_KINDS = "iufbmM"


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Rows of a table in one device buffer. Immutable."""

    #: says how to read the buffer; on the host
    head: bytes
    #: of the buffer
    nbytes: int
    #: the buffer, as the library has it; with ``__cuda_array_interface__``, by which it is sent
    data: Any


class DeviceFrames(Protocol):
    """Frames of one library in device memory. All methods from any thread; see the module for what is asynchronous."""

    def owns(self, frame: object) -> bool:
        """Whether a frame is of this library."""

    def apart(self, frame: Any, column: str, meta: Any) -> tuple[Any, Any]:
        """(table, ids) of a frame.

        Parameters
        ----------
        column
            Name of the column of output ids, integers without nulls.
        meta
            Empty frame with the columns of the table, in their order: with that column or without it.

        Raises
        ------
        TypeError
            Columns or dtypes differ from the meta's.
        """

    def order(
        self, table: Any, ids: Any, code_of: np.ndarray[Any, Any], outputs: int
    ) -> tuple[Any, np.ndarray[Any, Any]]:
        """(rows by code, offsets on the host): row ``offsets[c]`` is the first of code ``c``. The sort is stable.

        Parameters
        ----------
        code_of
            Code of each id, `outputs` for rows to drop; so are ids outside of it.
        outputs
            Number of codes; there is one offset more.
        """

    def pack(self, table: Any, ranges: Sequence[tuple[int, int]]) -> list[Packed]:
        """Ranges of rows, (first, one past the last), each in a buffer of its own."""

    def to_host(self, packs: Sequence[Packed], target: memoryview) -> None:
        """Copy packs, one behind the other, into `target`, which has as many bytes as they."""

    def from_host(self, head: bytes, data: memoryview) -> Packed:
        """The reverse, for one pack."""

    def room(self, nbytes: int) -> memoryview:
        """Host memory to copy packs to: page-locked as long as there is some."""

    def adopt(self, head: bytes, data: Any, nbytes: int) -> Packed:
        """A pack whose bytes came into device memory, ready: `data` is another worker's `Packed.data`, or a buffer of
        `ucx_device.DeviceSide.allocate`."""

    def unpack(self, pack: Packed) -> Any:
        """The table of a pack: a view."""

    def concat(self, tables: Sequence[Any]) -> Any:
        """One table of the rows of several, in their order; at least one. Numbers get their common type.

        Raises
        ------
        OverflowError
            The rows are more than a table of the library holds.
        """

    def frame(self, table: Any, meta: Any) -> Any:
        """A frame with names, dtypes and index as in an empty one, numbers as in the table, which is ready."""

    def ready(self) -> None:
        """Wait for what this thread has begun."""


def provider_of(kind: type) -> str:
    """Which `DeviceFrames` a class of frames has, as "package.module:Class"; "" when it has none."""
    named = getattr(kind, ATTRIBUTE, None)
    if isinstance(named, str):
        return named
    return _PROVIDERS.get(kind.__module__.partition(".")[0], "") if kind.__name__ == "DataFrame" else ""


def load(provider: str) -> DeviceFrames:
    """Make the `DeviceFrames` of that name; imports its library."""
    module, _, name = provider.partition(":")
    frames: DeviceFrames = getattr(importlib.import_module(module), name)()
    return frames


def refused(meta: Any, column: str) -> str:
    """Why frames with this meta cannot be shuffled as device frames; "" when they can.

    Parameters
    ----------
    meta
        Empty frame, the column of output ids included.
    """
    if meta.columns.nlevels > 1 or not meta.columns.is_unique:
        return "its columns have several levels, or one name twice"
    if meta.index.nlevels > 1:
        return "its index is a MultiIndex"
    ids = meta.dtypes[column]
    if not _is_numpys(ids) or ids.kind not in "iu":
        return f"column {column} is {ids}, must be of integers"
    library = type(meta).__module__.partition(".")[0]
    for name, dtype in [*meta.dtypes.items(), ("the index", meta.index.dtype)]:
        if not _kept(dtype, library):
            return f"{name} is {dtype}"
    return ""


def _kept(dtype: Any, library: str) -> bool:
    """Whether a dtype goes through a pack and comes back the same."""
    object_is_text = library in _OBJECT_IS_TEXT
    if type(dtype).__name__ == "StringDtype" or type(dtype).__name__ in _KEPT.get(library, ()):
        return True
    return _is_numpys(dtype) and (dtype.kind in _PLAIN_KINDS or (dtype.kind == "O" and object_is_text))


def _is_numpys(dtype: Any) -> bool:
    return type(dtype).__module__.partition(".")[0] == "numpy"


def reason_for_stock(meta: Any, column: str, enabled: bool) -> str:
    """Why a shuffle of frames that are not pandas' is stock Dask's; "" when it need not be.

    Parameters
    ----------
    enabled
        ``gpurt.shuffle.device-frames``.
    """
    kind = f"meta is {type(meta).__module__}.{type(meta).__name__}"
    if not provider_of(type(meta)):
        return kind
    if not enabled:
        return f"{kind}, and gpurt.shuffle.device-frames is false"
    why = refused(meta, column)
    return f"{kind}, and {why}" if why else ""


def to_cast(frame: Any, meta: Any, column: str) -> dict[Any, Any]:
    """Column -> dtype of the meta, where a frame has another one that it goes into; for `apart`.

    Numbers that do not go into the meta's are left as they are; see `DeviceFrames.concat`.

    Parameters
    ----------
    column
        Name of the column of output ids, which is not looked at.

    Raises
    ------
    TypeError
        The columns are others, or a dtype that is not of numbers does not go into the meta's.
    """
    if set(frame.columns) - {column} != set(meta.columns) - {column}:
        raise TypeError(
            f"the columns of a partition are {list(frame.columns)}, those of its meta {list(meta.columns)}. "
            "Remedy: make partitions and meta agree"
        )
    out = {}
    for name, wanted in meta.dtypes.items():
        actual = frame[name].dtype
        if name == column or actual == wanted:
            continue
        if not _goes_into(actual, wanted):
            if is_number(actual) and is_number(wanted):
                continue
            raise TypeError(
                f"column {name} of a partition is {actual}, in its meta it is {wanted}. Remedy: make partitions and "
                "meta agree, or set gpurt.shuffle.device-frames: false"
            )
        out[name] = wanted
    return out


def is_number(dtype: Any) -> bool:
    """Whether a dtype is one of numpy's for integers or floats."""
    return _is_numpys(dtype) and dtype.kind in "iuf"


def _goes_into(actual: Any, wanted: Any) -> bool:
    """Whether the common type of both, which stock Dask casts to, is the other."""
    import numpy as np

    if isinstance(actual, np.dtype) and isinstance(wanted, np.dtype):
        return bool(np.promote_types(actual, wanted) == wanted)
    if type(actual) is type(wanted) and hasattr(wanted, "precision"):  # a decimal
        return bool(actual.scale == wanted.scale and actual.precision <= wanted.precision)
    return type(actual).__name__ == type(wanted).__name__ == "StringDtype"
