"""A hundred storms of failed allocations on four threads: no value is lost, and the event loop stays free."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.target import MB, memory

if TYPE_CHECKING:
    from benchmarks.gpu.target import Target

THREADS, STORMS = 4, 100


class Gap:
    """The longest time that an event loop of its own did not get to run."""

    def __init__(self) -> None:
        self.worst_seconds = 0.0
        self._stop = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._beat()))

    def __enter__(self) -> Gap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    async def _beat(self) -> None:
        while not self._stop:
            start = time.perf_counter()
            await asyncio.sleep(0.005)
            self.worst_seconds = max(self.worst_seconds, time.perf_counter() - start - 0.005)


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: storm. The values of one storm are twice what the device tier may hold."""
    limit = int(2048 * MB * target.scale)
    size = limit // 32
    storms = STORMS if target.name == "gpu" else 10
    lost, begun = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(THREADS) as threads, Gap() as gap:
        device = memory(limit, 2 * limit, folder)  # no disk: its rate would be all that is seen

        def one(number: int, thread: int) -> int:
            """Values of one thread: made, read back, compared. Those that are lost."""
            names = [100 * number + 16 * thread + i for i in range(16)]
            boxes = [device.space.put(i, target.value(i, size)) for i in names]
            wrong = sum(not target.is_value(box.get(), i) for i, box in zip(names, boxes, strict=True))
            for box in boxes:
                device.space.remove(box)
            return wrong

        for number in range(storms):
            lost += sum(threads.map(one, [number] * THREADS, range(THREADS)))
        statistics = device.statistics()
        device.space.validate()
        device.close()
    out: dict[str, Any] = {
        "storms": storms,
        "values": storms * THREADS * 16,
        "lost": lost,
        "seconds": round(time.perf_counter() - begun, 3),
        "worst_gap_of_the_loop_seconds": round(gap.worst_seconds, 4),
        "out_of_memory": statistics["out_of_memory"],
        "peak_bytes": statistics["peak_bytes"],
        "limit_bytes": limit,
    }
    if lost or statistics["out_of_memory"]["exceptions"] or statistics["out_of_memory"]["given_up"]:
        out["problem"] = f"{lost} values were lost; {statistics['out_of_memory']}"
    elif not statistics["out_of_memory"]["calls"]:
        out["problem"] = "no allocation failed: there was no storm"
    return out
