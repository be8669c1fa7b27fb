"""What threads left free in their arenas goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dask_gpurt.memory.arenas import Arenas, glibc

# In a process of its own, whose allocator is set as a shuffle sets it.
PROGRAM = """
import ctypes, threading
from dask_gpurt.memory.arenas import arenas, glibc

libc = glibc()
MB = 1 << 20

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096 // MB

def work():
    arenas.mark()
    arenas.mark()
    places = [libc.malloc(MB) for _ in range(50)]
    for at in places:
        ctypes.memset(at, 1, MB)
    for at in places:
        libc.free(at)
    freed.set()
    done.wait()

assert libc.mallopt(-1, 1 << 30) and libc.mallopt(-3, 32 * MB)
freed, done = threading.Event(), threading.Event()
before = resident()
thread = threading.Thread(target=work)
thread.start()
freed.wait()
libc.malloc_trim(0)
kept = resident() - before
marks = len(arenas)
libc.mallopt(-1, 64 << 10)
libc.malloc_trim(0)
still = resident() - before
arenas.trim()
left = resident() - before
done.set()
thread.join()
print(kept, still, left, marks, len(arenas))
"""


@pytest.mark.skipif(glibc() is None, reason="another C library")
def test_the_end_of_a_threads_arena_goes_back() -> None:
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    kept, still, left, marks, later = map(int, out.split())
    assert kept > 40  # else there is nothing to mend
    assert still > 40
    assert left < 10
    assert (marks, later) == (1, 0)


def test_a_thread_is_marked_again_after_a_trim() -> None:
    calls: list[str] = []
    libc = SimpleNamespace(
        malloc=lambda n: calls.append("malloc") or 8,
        free=lambda at: calls.append("free"),
        malloc_trim=lambda n: calls.append("trim"),
    )
    arenas = Arenas(libc)
    for _ in range(2):
        arenas.mark()
        arenas.mark()
        arenas.trim()
    arenas.trim()
    assert calls == ["malloc", "free", "trim", "malloc", "free", "trim", "trim"]


def test_without_the_c_library_nothing_is_done() -> None:
    arenas = Arenas(None)
    arenas.mark()
    arenas.trim()
    assert len(arenas) == 0
