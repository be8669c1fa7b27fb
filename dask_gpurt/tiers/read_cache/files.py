"""What a file is, and what was asked of it: `stamp` and `plain`."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import os
import stat
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

#: a file that changed so recently may change again in the same tick of its file system's clock; seconds. Ticks are
#: milliseconds, two seconds on FAT
SETTLED_SECONDS = 3.0
#: items of what was asked beyond which it is not compared
MOST_ITEMS = 1_000
_NONBLOCK = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # a FIFO would wait for its writer
_PLAIN = (
    *(type(None), bool, int, float, str, bytes, decimal.Decimal),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta),
)
#: packages whose scalars say all that they are by their `repr`
_LIBRARIES = {"numpy", "pandas"}


class NotPlain(Exception):
    """Something that cannot be compared with what was asked before."""


def stamp(path: str) -> tuple[int, ...] | None:
    """What the system says of a file's content, the same as long as it was not changed; None: it may change unseen.

    The file is opened, as network file systems ask their server only then.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _NONBLOCK)
    except (OSError, ValueError):  # the reader says what is wrong
        return None
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    changed = max(found.st_mtime, found.st_ctime)
    if not stat.S_ISREG(found.st_mode) or time.time() - changed < SETTLED_SECONDS:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def plain(*values: Any) -> bytes:
    """A key that is the same for the same values only.

    Raises
    ------
    NotPlain
        There may be two different values with one key: an expression or an array shows only part of itself.
    """
    return digest(repr(_plain(values, [MOST_ITEMS])).encode(errors="surrogatepass"))


def digest(data: Any) -> bytes:
    """Of bytes, or of a buffer."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _plain(value: Any, left: list[int]) -> tuple[str, Any]:
    left[0] -= 1
    if left[0] < 0:
        raise NotPlain(f"more than {MOST_ITEMS} items")
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _PLAIN or (kind.__module__.partition(".")[0] in _LIBRARIES and _is_scalar(value)):
        if value != value:  # Dask asks whether one is the very object numpy.nan
            raise NotPlain(f"{value!r} is not equal to itself")
        return name, repr(value)
    if kind in (list, tuple):
        return name, _all(value, left)
    if kind in (set, frozenset):
        return name, tuple(sorted(_all(value, left)))
    if kind is dict:
        return name, _all(value.items(), left)
    raise NotPlain(f"{kind.__name__} cannot be compared")


def _all(values: Iterable[Any], left: list[int]) -> tuple[tuple[str, Any], ...]:
    return tuple(_plain(value, left) for value in values)


def _is_scalar(value: Any) -> bool:
    """Such as ``numpy.float64(1)`` or a ``Timestamp``: no structure, nothing that contains others."""
    import numpy as np
    import pandas as pd

    simple = (np.number, np.bool_, np.datetime64, np.timedelta64, np.str_, np.bytes_)
    return isinstance(value, simple) or type(value) in (pd.Timestamp, pd.Timedelta)
