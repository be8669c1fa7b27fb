"""`roots_of`: what memory a value holds, which may be more than it shows.

A slice of an array holds the whole array. A column of a pandas frame holds the block that its neighbours lie in. What
was read from disk, or came out of a shuffle, holds the block of `memory.pages` that it was put into. ``sizeof`` shows
none of that. So memory is counted by its *roots*: stretches of memory, each known by its address, that are freed as a
whole.

NumPy arrays, pandas frames, series, indexes and arrays (NumPy blocks and Arrow columns) and Arrow tables and arrays
are looked into. Anything else is one root of its own with its ``sizeof``.

A buffer outside of our own blocks is taken for a root itself. It may be a part of something larger, as a message or a
file mapped into memory; a mapped file must not be counted as memory.

A ``sizeof`` need not give a number of bytes. One that overflows an int32 is negative; one that divides by zero is NaN.
In sums that decide about eviction, one such number makes memory look empty for good. So sizes pass `as_bytes`.
"""

from __future__ import annotations

import logging
import mmap
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from dask_gpurt.memory.pages import pages

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

#: address, or ``id`` of an object that was not looked into, and bytes
Root: TypeAlias = tuple[int, int]

logger = logging.getLogger("distributed.worker.gpurt")

#: for a value whose size is not known, as in distributed's `safe_sizeof`
UNKNOWN_BYTES: Final = 1_000_000

#: values that could not be looked into, of this process
errors = 0
#: types that are not looked into, looked up first: most results of tiny tasks are of them
_PLAIN = frozenset({int, float, complex, bool, str, bytes, tuple, list, dict, set, frozenset, type(None)})
#: parts below this are left out: an index, the validity bits of a column
LEAST_BYTES = 4096
#: a value of more parts than this is not looked into: it costs 1 us each
MOST_PARTS = 200


def as_bytes(nbytes: Any) -> int | None:
    """Return a size as a whole number of bytes; None if it is negative, NaN, infinite or no number."""
    if type(nbytes) is int:  # each task passes here
        return nbytes if nbytes >= 0 else None
    if isinstance(nbytes, (str, bytes)):
        return None
    try:
        whole = int(nbytes)
    except (TypeError, ValueError, OverflowError):
        return None
    return whole if whole >= 0 else None


def require_number(key: Hashable, nbytes: Any) -> None:
    """Raise `TypeError` unless a size can be added up, be it negative or NaN."""
    try:
        0 + nbytes
    except Exception as e:
        raise TypeError(
            f"sizeof says that {key!r} takes {nbytes!r} ({type(nbytes).__name__}) bytes, must be a number. Remedy: "
            "correct what is registered with dask.sizeof for its type"
        ) from e


def roots_of(value: object, nbytes: int) -> tuple[Root, ...]:
    """The roots of a value; never empty, each once. What its roots do not show of `nbytes` is a root of its own.

    Does not raise: an entry without its memory in the books would stop eviction, and those that wait for its load.
    """
    if type(value) in _PLAIN:
        return ((id(value), nbytes),)
    try:
        return _look_into(value, nbytes)
    except Exception:  # a class of the user's, whose attributes raise or are something else
        _count_error(value)
        return ((id(value), nbytes),)


def _look_into(value: object, nbytes: int) -> tuple[Root, ...]:
    if isinstance(value, np.ndarray):
        address, size = _array(value)
        return ((address, max(size, nbytes)),)  # an array of objects holds more than pointers
    found = _parts(value)
    if found is None:
        return ((id(value), nbytes),)
    roots = {}
    shown = 0
    for address, size, shows in found:
        roots[address] = size
        shown += shows
    rest = nbytes - shown
    if rest >= LEAST_BYTES or not roots:
        roots[id(value)] = max(0, rest)
    return tuple(roots.items())


def _array(array: np.ndarray[Any, Any]) -> Root:
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    if not base.nbytes:  # it may have any address
        return id(base), 0
    address = int(base.__array_interface__["data"][0])
    if base.base is None:
        return address, base.nbytes
    owner = base.base.obj if isinstance(base.base, memoryview) else base.base
    # Of a mapped file nothing but this array may be in memory.
    return pages.owner(address) or (address, array.nbytes if isinstance(owner, mmap.mmap) else base.nbytes)


def _parts(value: object) -> list[tuple[int, int, int]] | None:
    """(address, bytes, bytes of it that the value shows) of the large parts of a frame; None: it is none."""
    module = type(value).__module__.partition(".")[0]
    if module not in ("pandas", "pyarrow") or module not in sys.modules:
        return None
    out = []
    try:
        for i, part in enumerate(_pandas(value) if module == "pandas" else _arrow(value)):
            if i >= MOST_PARTS:
                return None
            if isinstance(part, np.ndarray):
                address, size = _array(part)
                shows = part.nbytes
            else:
                address, size = pages.owner(part.address) or (part.address, part.size)
                shows = part.size
            if size >= LEAST_BYTES:
                out.append((address, size, shows))
    except Exception:  # a class of the user's, or a pandas that is made otherwise
        _count_error(value)
        return None
    return out


def _count_error(value: object) -> None:
    global errors
    errors += 1
    if errors in (1, 100, 10_000):
        # The traceback as text: a worker keeps its last records, and with the exception they would keep the value.
        message = "a %s cannot be looked into: its sizeof counts (%d such values)\n%s"
        logger.warning(message, type(value).__qualname__, errors, traceback.format_exc())


def _pandas(value: Any) -> Iterator[Any]:
    pandas = sys.modules["pandas"]
    if isinstance(value, (pandas.DataFrame, pandas.Series)):
        for block in value._mgr.blocks:
            yield from _column(block.values)
        indexes = value._mgr.axes
    elif isinstance(value, pandas.Index):
        indexes = (value,)
    else:  # a column without a frame; a date, a dtype or groups have no memory to look for
        if isinstance(value, pandas.api.extensions.ExtensionArray):
            yield from _column(value)
        return
    for index in indexes:
        # Those two would be made into what they stand for.
        if type(index).__name__ not in ("RangeIndex", "MultiIndex"):
            yield from _column(index.array)


def _column(values: Any) -> Iterator[Any]:
    """The memory of a block, or of an extension array."""
    if isinstance(values, np.ndarray):
        yield values
        return
    arrow = getattr(values, "_pa_array", None)
    if arrow is not None:
        yield from _arrow(arrow)
        return
    for name in ("_ndarray", "_data", "_mask", "_codes"):  # dates, numpy-backed, nullable, categories
        inner = getattr(values, name, None)
        if isinstance(inner, np.ndarray):
            yield inner


def _arrow(value: Any) -> Iterator[Any]:
    if hasattr(value, "columns") and hasattr(value, "schema"):
        for column in value.columns:
            yield from _arrow(column)
    elif hasattr(value, "chunks"):
        for chunk in value.chunks:
            yield from _arrow(chunk)
    elif hasattr(value, "buffers"):  # a schema, a scalar and a type have none
        yield from (b for b in value.buffers() if b is not None and b.is_cpu)
