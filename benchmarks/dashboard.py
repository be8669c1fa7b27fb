"""What does an open page cost the scheduler's loop? The overview with all plots, for clusters of several sizes.

A scheduler of plain objects whose workers tell figures that change every second; ten minutes of history. Timed is what
happens once a second while one page is open: the look of the feed, the update of all plots, and the JSON of what has
changed in the document, which is what Bokeh sends. No browser and no workers.

``python -m benchmarks.dashboard`` writes benchmarks/results/dashboard.json.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from bokeh.document import Document
from bokeh.protocol import Protocol

from benchmarks.data import RESULTS, facts, write_json
from dask_gpurt.observe.dashboard import pages
from dask_gpurt.observe.figures import history as feeds
from tests.observe.fakes import Clock, FakeScheduler, MiB, figures, heartbeat

if TYPE_CHECKING:
    from bokeh.document.events import DocumentPatchedEvent

SIZES = (10, 100, 1000)
#: of the loop's time that one open page may take
GOAL = 0.05


def _live(rnd: random.Random, addresses: list[str], second: int) -> dict[str, Any]:
    """A worker's heartbeat."""
    use = {f"slot_{name}_seconds": second * share for name, share in (("busy", 0.8), ("network", 0.1), ("memory", 0.1))}
    fetched = {
        rnd.choice(addresses): {"bytes": second * MiB, "seconds": 0.01 * second, "requests": second} for _ in range(32)
    }
    return heartbeat(
        host_bytes=rnd.randrange(100) * MiB,
        disk_bytes=rnd.randrange(100) * MiB,
        written_bytes=second * MiB,
        read_bytes=second * MiB,
        shuffle_sent_bytes=second * MiB,
        fetched=fetched,
        slot_slots_seconds=float(second),
        **use,
    )


def measure(workers: int, seconds: int) -> dict[str, Any]:
    rnd = random.Random(0)
    scheduler = FakeScheduler()
    addresses = [scheduler.add(i, heartbeat()) for i in range(workers)]
    told: dict[str, Any] = {}
    clock = Clock()
    feed = feeds.Feed(scheduler, lambda: told, clock)
    feeds._feeds[scheduler] = feed
    scheduler.periodic_callbacks = {feeds.CALLBACK: None}  # type: ignore[attr-defined]

    def move(second: int) -> None:
        told.clear()
        told.update(figures(local=10 * second, moved=second))
        told["placement"]["speeds"] = {a: rnd.uniform(0.7, 1.2) for a in addresses}
        for address in addresses:
            scheduler.workers[address].metrics["gpurt"] = _live(rnd, addresses, second)
        clock.now += 1

    for second in range(1, feeds.KEEP + 1):
        if second % 20 == 1 or workers <= 100:
            move(second)
        else:
            clock.now += 1
        feed.tick()
    document = Document()
    plots = [plot(scheduler) for plot in pages.PLOTS.values()]
    changed: list[DocumentPatchedEvent] = []
    for plot in plots:
        plot.update()
        document.add_root(plot.root)
    document.on_change(changed.append)
    protocol = Protocol()
    look, draw, send, sent = [], [], [], []
    for second in range(feeds.KEEP + 1, feeds.KEEP + 1 + seconds):
        move(second)
        t = time.perf_counter()
        feed.tick()
        look.append(time.perf_counter() - t)
        t = time.perf_counter()
        for plot in plots:
            plot.update()
        draw.append(time.perf_counter() - t)
        t = time.perf_counter()
        message = protocol.create("PATCH-DOC", changed)
        sent.append(len(message.content_json) + sum(len(buffer.data) for buffer in message.buffers))
        send.append(time.perf_counter() - t)
        changed.clear()
    errors = [plot.said for plot in plots if plot.errors]
    if errors or feed.errors:
        raise RuntimeError("\n".join([*errors, feed.last_error]))
    every = [a + b + c for a, b, c in zip(look, draw, send, strict=True)]
    return {
        "workers": workers,
        "look_ms": 1e3 * statistics.median(look),
        "draw_ms": 1e3 * statistics.median(draw),
        "send_ms": 1e3 * statistics.median(send),
        "all_ms": 1e3 * statistics.median(every),
        "worst_ms": 1e3 * max(every),
        "sent_bytes": statistics.median(sent),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--out", default=os.path.join(RESULTS, "dashboard.json"))
    o = parser.parse_args()
    rows = []
    for workers in SIZES:
        row = measure(workers, o.seconds)
        rows.append(row)
        print(
            f"{workers:5} workers: {row['all_ms']:.1f} ms a second (look {row['look_ms']:.1f}, draw"
            f" {row['draw_ms']:.1f}, send {row['send_ms']:.1f}; worst {row['worst_ms']:.1f}),"
            f" {row['sent_bytes'] / 1e3:.0f} kB",
            flush=True,
        )
    write_json(o.out, {**facts("one CPU core, no workers, no browser, no GPU"), "goal_share": GOAL, "sizes": rows})
    return 0 if all(row["all_ms"] <= 1e3 * GOAL for row in rows if row["workers"] <= 100) else 1


if __name__ == "__main__":
    raise SystemExit(main())
