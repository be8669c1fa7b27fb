"""Watches a worker from inside: gaps of its event loop and what was at work in them, and the peak of its memory.

A task on the loop sleeps 2 ms at a time; what it oversleeps by more than 20 ms is a gap. A thread looks at the loop
from outside every 10 ms. When the loop is late by then, the thread notes what the loop's thread is doing, and how late
it was itself: if it could not run either, no thread could: another thread held the interpreter lock, or the machine
had no core for this process. Long gaps keep the innermost lines of all threads, so that one can see whose they are.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from distributed import Worker, WorkerPlugin
from distributed.core import Status

if TYPE_CHECKING:
    from types import FrameType

#: how often the loop should come round
PERIOD_SECONDS = 0.002
#: by how much it may be late without being counted
ALLOWED_SECONDS = 0.020
#: gaps from here on keep their story
LONG_SECONDS = 0.050
_LOOK_SECONDS = 0.010
_STORIES = 20
_PACKAGE = f"{os.sep}dask_gpurt{os.sep}"


class Watchdog(WorkerPlugin):
    """Register it on workers; `collect` reads it."""

    name = "benchmark-watchdog"

    async def setup(self, worker: Worker) -> None:
        self.gaps: list[float] = []
        self.peak_bytes = 0
        #: seconds in which the worker was paused, for want of memory
        self.paused_seconds = 0.0
        self._worker = worker
        #: of long gaps: what kept the loop
        self.stories: list[dict[str, Any]] = []
        self._beat = time.perf_counter()
        self._caught: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._loop_thread = threading.get_ident()
        self._task = asyncio.create_task(self._watch_loop())
        threading.Thread(target=self._watch_from_outside, daemon=True, name="benchmark-watchdog").start()

    async def _watch_loop(self) -> None:
        while True:
            self._beat = last = time.perf_counter()
            await asyncio.sleep(PERIOD_SECONDS)
            now = time.perf_counter()
            gap = now - last - PERIOD_SECONDS
            if self._worker.status == Status.paused:
                self.paused_seconds += now - last
            if gap > ALLOWED_SECONDS:
                self.gaps.append(gap)
            caught, self._caught = self._caught, None
            if gap > LONG_SECONDS:
                story = {"seconds": gap, **(caught or {"kept_by": "unseen"})}
                self.stories = sorted([*self.stories, story], key=lambda s: -s["seconds"])[:_STORIES]

    def _watch_from_outside(self) -> None:
        page = mmap.PAGESIZE
        with open("/proc/self/statm") as f:
            while True:
                before = time.perf_counter()
                if self._stop.wait(_LOOK_SECONDS):
                    return
                late = time.perf_counter() - before - _LOOK_SECONDS
                f.seek(0)
                self.peak_bytes = max(self.peak_bytes, int(f.read().split()[1]) * page)
                if self._caught is None and before - self._beat > PERIOD_SECONDS + ALLOWED_SECONDS:
                    self._caught = self._describe(late)

    def _describe(self, late_seconds: float) -> dict[str, Any]:
        frames = sys._current_frames()
        names = {t.ident: t.name for t in threading.enumerate()}
        loop = _lines(frames.get(self._loop_thread))
        if late_seconds > ALLOWED_SECONDS:
            kept_by = "interpreter lock or no core"
        elif any(line.startswith("dask_gpurt") for line in loop):
            kept_by = "dask_gpurt"
        else:
            kept_by = "others on the loop"
        others = {
            f"{names.get(ident, '?')} {n}": _lines(frame, 3)
            for n, (ident, frame) in enumerate(frames.items())
            if ident not in (self._loop_thread, threading.get_ident())
        }
        return {"kept_by": kept_by, "watcher_late_seconds": late_seconds, "loop": loop, "threads": others}

    async def teardown(self, worker: Worker) -> None:
        self._stop.set()
        self._task.cancel()


def collect(worker: Worker) -> dict[str, Any]:
    """What the watchdog of a worker has seen since the last time, but for the peak, which is that of its life."""
    dog = worker.plugins[Watchdog.name]
    assert isinstance(dog, Watchdog)
    gaps, dog.gaps = dog.gaps, []
    stories, dog.stories = dog.stories, []
    paused, dog.paused_seconds = dog.paused_seconds, 0.0
    return {
        "peak_rss_bytes": dog.peak_bytes,
        "paused_seconds": paused,
        "loop_gaps_seconds": sum(gaps),
        "longest_loop_gap_seconds": max(gaps, default=0.0),
        "long_gaps": sum(gap > LONG_SECONDS for gap in gaps),
        "long_gaps_kept_by": dict(Counter(s["kept_by"] for s in stories)),
        "long_gap_stories": stories,
    }


def _lines(frame: FrameType | None, keep: int = 8) -> list[str]:
    """Innermost first: "package file:line function"."""
    out: list[str] = []
    while frame is not None and len(out) < keep:
        code = frame.f_code
        package = "dask_gpurt/" if _PACKAGE in code.co_filename else ""
        out.append(f"{package}{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return out
