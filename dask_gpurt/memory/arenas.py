"""`Arenas`: memory that is free inside of the C allocator, and how all of it goes back to the system.

A thread that allocates much calls `Arenas.mark`; then something is allocated in its arena. To free that later, from any
thread, makes the allocator look at that arena's end (`Arenas.trim`).

glibc gives each thread an *arena* of its own. `malloc_trim` returns what is free in the middle of any of them, but the
end of one (its *top*) only of the main one. The top of a thread's arena goes when something large is freed in it, if
the top is longer than the trim threshold by then. Shuffles raise that threshold for their time. After it, or when the
worker is paused for want of memory, nothing is freed in those arenas any more. (Seen: a worker of 500 MB, paused for
good with no value in memory, 145 MB of it in the tops of five arenas.)

Rejected: having each thread allocate and free something (a pool does not say which of its threads runs a function, and
one that is busy would be waited for); one arena for all threads (they then wait for each other's lock).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

#: more than the 64 KiB from which glibc looks at the top, less than what is a mapping of its own under any setting
_MARK_BYTES = 80_000


def glibc() -> Any:
    """The C library, if it can give memory back; else None."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt.argtypes, libc.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
        libc.malloc_trim.argtypes, libc.malloc_trim.restype = (ctypes.c_size_t,), ctypes.c_int
        libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    except (OSError, AttributeError, TypeError):
        return None
    return libc


class Arenas:
    """Those of the threads that said so. One per process (`arenas`); any thread. Without a `libc` it does nothing."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self._lock = threading.Lock()
        #: addresses, one for each thread that called `mark` since the last `trim`
        self._marks: list[int] = []
        self._thread = threading.local()

    def __len__(self) -> int:
        return len(self._marks)

    def mark(self) -> None:
        """This thread is about to allocate much. Costs next to nothing when it has said so."""
        if self._libc is None or getattr(self._thread, "marks", None) is self._marks:
            return
        with self._lock:
            at = self._libc.malloc(_MARK_BYTES)
            if at:
                self._marks.append(at)
            self._thread.marks = self._marks

    def trim(self) -> None:
        """Return what is free, as far as the trim threshold of now allows. Takes time: not on an event loop."""
        if self._libc is None:
            return
        with self._lock:
            marks, self._marks = self._marks, []
        for at in marks:
            self._libc.free(at)
        self._libc.malloc_trim(0)


#: this process's
arenas = Arenas(glibc())
