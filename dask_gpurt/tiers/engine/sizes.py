"""Numbers of bytes that somebody else's ``sizeof`` gave: they need not be numbers of bytes.

A ``sizeof`` that overflows an int32 is negative; one that divides by zero is NaN. In sums that decide about eviction,
one such number makes memory look empty for good, and a NaN never goes away again.
"""

from __future__ import annotations

from typing import Any, Final

#: for a value whose size is not known, as in distributed's `safe_sizeof`
UNKNOWN_BYTES: Final = 1_000_000


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


def require_number(key: Any, nbytes: Any) -> None:
    """Raise `TypeError` unless a size can be added up, be it negative or NaN."""
    try:
        0 + nbytes
    except Exception as e:
        raise TypeError(
            f"sizeof says that {key!r} takes {nbytes!r} ({type(nbytes).__name__}) bytes, must be a number. Remedy: "
            "correct what is registered with dask.sizeof for its type"
        ) from e
