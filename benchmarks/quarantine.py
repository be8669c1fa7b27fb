"""How long it takes until a worker that falls ill is found and held, while TPC-H runs; and whether answers stay right.

    python -m benchmarks.quarantine --scale 1 --passes 3 --out results.json      # 6 minutes

Four worker processes with one thread each, ``gpurt.quarantine: on`` and ``gpurt.transfers.verify: true``. A pass runs
some queries and compares every answer with DuckDB's. After one pass a fault begins, and passes go on:

- `sender`: one bit turns in half of the messages of shuffles, and of the values fetched, that come from one worker;
- `link`: the same of messages of shuffles only, from that worker to one other;
- `slow`: one worker's process is stopped for 80 % of each 0.02 s, finer than its tasks, as a throttled CPU is;
- `none`: no fault. Nobody may be held.

For each: failed queries and wrong answers, seconds from the fault to the first event of the quarantine and what it
said, workers held at the end, and seconds of each pass.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from distributed import Client

import dask_gpurt
from benchmarks import data
from dask_gpurt.bench.tpch import answers, generate, queries, reference, tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import LocalCluster, Worker

FAULTS = ("none", "sender", "link", "slow")
#: with joins and shuffles
QUERIES = (3, 5, 9, 10, 18)
#: at this scale a worker sends another three messages per shuffle: a rarer fault is one of several queries
RATE = 0.5
SMALL_BYTES = 10_000
#: attribute of a worker: whose messages it spoils
BAD = "_benchmark_bad_sender"
#: without an event, passes go on for so long: a slow worker is told from a busy one after a minute
LONGEST_SECONDS = 150.0


def _turned(frame: Any, random: Any) -> Any:
    out = bytearray(frame)  # a copy: the frame may be the memory of a value
    if len(out) > 64:
        out[int(random.integers(64, len(out)))] ^= 1 << int(random.integers(8))
    return out


def _prepare(dask_worker: Worker) -> None:
    """On a worker, before its first shuffle: be able to turn one bit in a share of the messages of one sender."""
    import numpy as np

    from dask_gpurt.shuffle.transport.inbox import Inbox

    random, take = np.random.default_rng(1), Inbox.on_message

    def on_message(self: Any, key: Any, came_from: str, frames: list[Any], *rest: Any, **kwargs: Any) -> None:
        if came_from == getattr(dask_worker, BAD, None) and random.random() < RATE:
            frames = [*frames[:-1], _turned(frames[-1], random)]
        take(self, key, came_from, frames, *rest, **kwargs)

    Inbox.on_message = on_message  # type: ignore[method-assign,assignment]


def _spoil_messages(dask_worker: Worker, sender: str) -> None:
    setattr(dask_worker, BAD, sender)


def _spoil_values(dask_worker: Worker) -> None:
    """On a worker: turn one bit in a share of the values that others fetch from it."""
    import numpy as np
    from distributed.comm import tcp

    random, stock = np.random.default_rng(2), tcp.to_frames

    async def to_frames(msg: Any, **kwargs: Any) -> Any:
        frames = await stock(msg, **kwargs)
        if isinstance(msg, dict) and msg.get("status") == "OK" and msg.get("data") and random.random() < RATE:
            longest = max(range(len(frames)), key=lambda i: memoryview(frames[i]).nbytes)
            if memoryview(frames[longest]).nbytes > SMALL_BYTES:  # the value, not what Dask says about it
                frames[longest] = _turned(frames[longest], random)
        return frames

    tcp.to_frames = to_frames


@contextlib.contextmanager
def stuttering(pid: int) -> Iterator[None]:
    """A process that is stopped for 80 % of the time."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            done.wait(0.016)
            os.kill(pid, signal.SIGCONT)
            done.wait(0.004)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def fault(name: str, client: Client) -> Iterator[None]:
    """A cluster with this fault from now on."""
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    bad, other = workers[:2]
    if name == "sender":
        client.run(_spoil_messages, sender=bad, workers=[w for w in workers if w != bad])
        client.run(_spoil_values, workers=[bad])
    elif name == "link":
        client.run(_spoil_messages, sender=bad, workers=[other])
    elif name == "slow":
        with stuttering(client.run(os.getpid, workers=[bad])[bad]):
            yield
        return
    yield


def one_pass(client: Client, opened: Any, expected: dict[int, Any], found: dict[str, Any]) -> float:
    """Run all queries once; its seconds."""
    start = time.monotonic()
    for number in QUERIES:
        try:
            got = client.compute(queries.QUERIES[number](opened)).result(timeout=300)
        except Exception as e:
            found["failed"].append(f"query {number}: {type(e).__name__}: {e}"[:300])
            continue
        found["wrong"] += bool(answers.compare(number, expected[number], got))
    return time.monotonic() - start


def watch(cluster: LocalCluster, events: list[tuple[float, str]]) -> None:
    """Note when the quarantine says something."""
    plugin = cluster.scheduler.plugins["gpurt"].quarantine
    sink = plugin._sink

    def told(event: Any) -> None:
        events.append((time.monotonic(), event.message))
        sink(event)

    plugin._sink = told


def measure(name: str, args: argparse.Namespace, opened: Any, expected: dict[int, Any]) -> dict[str, Any]:
    """One fault."""
    found: dict[str, Any] = {"failed": [], "wrong": 0, "seconds": {"before": [], "after": []}}
    events: list[tuple[float, str]] = []
    settings = {"quarantine": "on", "transfers.verify": True}
    with (
        dask_gpurt.local_cluster(
            n_workers=4, threads_per_worker=1, memory_limit="4GiB", dashboard_address=":0", settings=settings
        ) as cluster,
        Client(cluster) as client,
    ):
        watch(cluster, events)
        client.run(_prepare)
        one_pass(client, opened, expected, found)  # warm
        for _ in range(args.passes):
            found["seconds"]["before"].append(one_pass(client, opened, expected, found))
        with fault(name, client):
            start = time.monotonic()
            while len(found["seconds"]["after"]) < args.passes or (
                name == "slow" and not events and time.monotonic() < start + LONGEST_SECONDS
            ):
                found["seconds"]["after"].append(one_pass(client, opened, expected, found))
                speeds = dask_gpurt.status(client).scheduler["placement"]["speeds"]
                found.setdefault("slowest", []).append(round(min(speeds.values(), default=1.0), 2))
            told = dask_gpurt.hold(client)
        found["events"] = [[round(at - start, 1), text] for at, text in events]
        found["held"] = [why["cause"] for why in told.held.values()]
        found["suspects"] = [[one["cause"], bool(one["peer"])] for one in told.suspects]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--data", default=os.path.join(data.OUT, "tpch", "sf1"), help="folder of the tables")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    directory = generate.ensure(args.data, args.scale)
    opened = tables.open_tables(directory, args.scale)
    duckdb = reference.Reference(directory, args.scale)
    expected = duckdb.answers(QUERIES)
    duckdb.close()
    result = data.facts(f"{data.cores()} CPU cores, four worker processes, loopback; no GPU")
    result |= {"load_before": os.getloadavg()[0], "scale": args.scale, "queries": list(QUERIES), "faults": {}}
    for name in args.faults:
        result["faults"][name] = found = measure(name, args, opened, expected)
        print(name, found, flush=True)
    data.write_json(args.out, result)


if __name__ == "__main__":
    main()
