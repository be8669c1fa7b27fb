"""Plays programs as users write them, by seeds, on clusters of processes whose workers stop, die, leave and join.

    python ci/soak.py FIRST [COUNT] [--seconds S] [--burners N] [--stock] [--programs a,b] [--events a,b]

A cluster plays `GAMES` seeds, each of one to three programs at once and one of `EVENTS`; its first seed gives the
cluster. A program fails by a wrong answer, an exception, or no answer within `--limit`. A worker that goes without
being sent away fails the seed as well, and so does an error in the log of a worker or the scheduler that names this
package. ``--burners`` are processes that only use processors. ``--stock`` plays the same without the extension: does
Dask fail as well? Exit: 0 when none failed, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
from distributed import Client, LocalCluster

sys.path.insert(0, str(Path(__file__).parents[1]))

import dask_gpurt
from tests.stress.programs import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: seeds that a cluster plays before the next one is started
GAMES = 8
# Not `Client.restart_workers`: in stock Dask, too, a worker of seven does not come back.
EVENTS = ("none", "none", "none", "stop", "stop", "stop-long", "kill", "retire", "grow", "shrink")
#: what makes a program lose a worker that it may need
DEADLY = ("kill", "shrink")


class Shape(NamedTuple):
    """What the first seed of a cluster gives."""

    workers: int
    threads: int
    megabytes: int
    settings: dict[str, Any]
    config: dict[str, Any]


def shape(r: random.Random) -> Shape:
    """A cluster."""
    return Shape(
        r.randint(2, 4),
        r.choice([1, 1, 2, 4]),
        r.choice([700, 1000, 2000]),
        {
            "shuffle.transport": r.choice(["auto", "auto", "rpc"]),
            "transfers.verify": r.random() < 0.2,
            "tiers.host-limit": r.choice([0.6, 0.6, 0.6, 0.05]),
        },
        {
            "distributed.scheduler.worker-saturation": r.choice([1.1, 1.1, 1.1, "inf"]),
            "dataframe.shuffle.method": r.choice([None, None, "tasks", "p2p"]),
            "distributed.scheduler.active-memory-manager.measure": "managed",
            "distributed.comm.timeouts.connect": "30s",
        },
    )


@contextlib.contextmanager
def burning(n: int) -> Iterator[None]:
    """Processes beside that use processors."""
    burners = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(n)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()


def _burn() -> None:
    while True:
        sum(range(100_000))


class Table:
    """A cluster, its client, and what happens to its workers."""

    def __init__(self, given: Shape, stock: bool, folder: Path) -> None:
        kwargs: dict[str, Any] = {
            "n_workers": given.workers,
            "threads_per_worker": given.threads,
            "memory_limit": f"{given.megabytes}MB",
            "local_directory": str(folder),
            "dashboard_address": None,
        }
        self.cluster = LocalCluster(**kwargs) if stock else dask_gpurt.local_cluster(settings=given.settings, **kwargs)
        self.client = Client(self.cluster)
        self.least = given.workers
        #: addresses or process ids of those that were sent away
        self.sent: set[str] = set()
        self.seen: dict[str, int] = {}
        self.look()

    def look(self) -> list[str]:
        """The workers that went since the last look, and were not sent away."""
        pids = self.client.run(os.getpid, on_error="ignore")
        gone = [address for address in self.seen if address not in pids and address not in self.sent]
        self.seen = pids
        return gone

    def happen(self, kind: str, r: random.Random) -> None:
        """One of `EVENTS`."""
        address = r.choice(list(self.seen))
        if kind in ("stop", "stop-long"):
            _stop(self.seen[address], r.uniform(0.2, 4) if kind == "stop" else r.uniform(8, 25))
        elif kind == "kill":
            self.sent.add(address)
            os.kill(self.seen[address], signal.SIGKILL)
        elif kind == "retire":
            self.sent.add(address)
            self.client.retire_workers([address])
            self.cluster.scale(len(self.cluster.worker_spec) + 1)
        elif kind == "grow":
            self.cluster.scale(len(self.seen) + 1)
        elif kind == "shrink":
            self.sent.update(self.seen)
            self.cluster.scale(self.least)

    def errors(self) -> list[str]:
        """Errors in the logs that name this package."""
        logs = {"scheduler": self.client.get_scheduler_logs(), **self.client.get_worker_logs()}
        return [
            f"{at}: {text[:3000]}"
            for at, lines in logs.items()
            for level, text in lines
            # A task that fails is its program's matter; those of work that was cancelled fail in stock Dask as well.
            if level in ("ERROR", "CRITICAL") and "dask_gpurt" in text and "Compute Failed" not in text
        ]

    def close(self) -> None:
        """The client, then the cluster."""
        self.client.close()
        self.cluster.close(timeout=30)


def _stop(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def play(table: Table, seed: int, programs: tuple[str, ...], events: tuple[str, ...], limit: float) -> list[str]:
    """Play a seed; what failed."""
    r = random.Random(seed)
    chosen = programs or tuple(r.choice(list(PROGRAMS)) for _ in range(r.choice([1, 1, 2, 3])))
    kind = r.choice(events or EVENTS)
    if kind in DEADLY and not all(PROGRAMS[name].stands_kill for name in chosen):
        kind = "stop"
    bad: list[str] = []

    def run(name: str, own: random.Random, folder: str) -> None:
        try:
            PROGRAMS[name].body(table.client, own, Path(folder))
        except Exception:
            bad.append(f"{name}: {traceback.format_exc()}")

    def event() -> None:
        time.sleep(r.uniform(0, 3))
        try:
            table.happen(kind, r)
        except Exception:
            bad.append(f"event {kind}: {traceback.format_exc()}")

    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        threads = [threading.Thread(target=event, daemon=True)]
        threads += [
            threading.Thread(target=run, args=(name, random.Random(seed + i), f"{folder}/{i}"), daemon=True)
            for i, name in enumerate(chosen)
        ]
        for i in range(len(chosen)):
            Path(f"{folder}/{i}").mkdir()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.1, began + limit - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            bad.append(f"no answer in {limit:.0f} s: {state(table)}\n{stacks(threads)}")
            return [f"seed {seed} {chosen} {kind}: {text}" for text in bad]
    bad += [f"{address} went" for address in table.look()]
    bad += table.errors()
    sys.stdout.write(f"seed {seed} {'+'.join(chosen)} {kind} {time.monotonic() - began:.1f} s{' BAD' * bool(bad)}\n")
    sys.stdout.flush()
    return [f"seed {seed} {chosen} {kind}: {text}" for text in bad]


def state(table: Table) -> str:
    """What the scheduler has left."""
    scheduler = table.cluster.scheduler
    left = [(ts.key, ts.state, str(ts.processing_on)) for ts in list(scheduler.tasks.values()) if ts.state != "memory"]
    return f"{len(left)} tasks: {left[:20]}; workers: {[(ws.address, ws.status) for ws in scheduler.workers.values()]}"


def stacks(threads: list[threading.Thread]) -> str:
    """Where those that still run are."""
    frames = sys._current_frames()
    alive = [frames[t.ident] for t in threads if t.is_alive() and t.ident in frames]
    return "\n".join("".join(traceback.format_stack(frame)[-12:]) for frame in alive)


def lockless(self: Any, instance: Any, owner: Any = None) -> Any:
    """`functools.cached_property` as from Python 3.12 on: before, one lock for all instances locks planning threads."""
    if instance is None:
        return self
    if self.attrname not in instance.__dict__:
        instance.__dict__[self.attrname] = self.func(instance)
    return instance.__dict__[self.attrname]


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name for name in text.split(",") if name)


def main() -> int:
    """See the module."""
    p = argparse.ArgumentParser(description="Programs on clusters of processes whose workers stop, die, leave and join")
    p.add_argument("first", type=int, help="seed of the first")
    p.add_argument("count", type=int, nargs="?", default=GAMES, help="seeds, default %(default)s")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after so long")
    p.add_argument("--limit", type=float, default=180.0, help="seconds for the programs of a seed, default %(default)s")
    p.add_argument("--burners", type=int, default=0, help="processes beside, default %(default)s")
    p.add_argument("--stock", action="store_true", help="without the extension")
    p.add_argument("--programs", type=names, default=(), help="instead of the seed's")
    p.add_argument("--events", type=names, default=(), help="instead of the seed's")
    args = p.parse_args()
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    functools.cached_property.__get__ = lockless  # type: ignore[method-assign,assignment]
    end, played, bad = time.monotonic() + args.seconds, 0, []
    with burning(args.burners):
        for first in range(args.first, args.first + args.count, GAMES):
            if time.monotonic() > end:
                break
            given = shape(random.Random(first // GAMES))
            sys.stdout.write(f"{given}\n")
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, dask.config.set(given.config):
                table = Table(given, args.stock, Path(folder))
                for seed in range(first, min(first + GAMES, args.first + args.count)):
                    found = play(table, seed, args.programs, args.events, args.limit)
                    played += 1
                    bad += found
                    if found:
                        sys.stdout.write("\n".join(found) + "\n")
                        sys.stdout.flush()
                        break
                table.close()
    sys.stdout.write(f"{played} played, {len(bad)} failures\n")
    sys.stdout.flush()
    # Threads of programs that have no answer would be waited for.
    os._exit(1 if bad else 0)


if __name__ == "__main__":
    main()
