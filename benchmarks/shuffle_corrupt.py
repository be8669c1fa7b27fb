"""Corrupted and truncated messages at the receiver of each transport, in real shuffles: how many were accepted?

    python -m benchmarks.shuffle_corrupt --messages 10000 --out results.json

Two worker processes. On both, a share of the messages is changed as they come out of the transport (one bit flipped,
or cut short) before anybody looks at them, until `--messages` were; every shuffle is compared with pandas, row by row.
Then as many changed record headers are parsed. A message counts as accepted when it was not refused; a worker that died
shows by its process id.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd

from benchmarks import data
from benchmarks.shuffle_meters import give_back, take_over, two_workers

if TYPE_CHECKING:
    from distributed import Client

#: many small ones: a shuffle costs more than its messages
INPUTS = 1000
WAYS = ("rpc", "tcp", "ucx")


def part(i: int) -> pd.DataFrame:
    r = np.random.default_rng(i)
    text = pd.Series(r.integers(0, 999, 80).astype("U3"), dtype="str")
    return pd.DataFrame({"k": r.integers(0, 500, 80), "v": r.random(80), "s": text})


class Spoiler:
    """Changes a share of the messages."""

    def __init__(self, seed: int, rate: float) -> None:
        self.random = np.random.default_rng(seed)
        self.rate = rate
        self.flipped = self.cut = 0

    def hit(self) -> bool:
        return bool(self.random.random() < self.rate)

    def body(self, record: Any, body: memoryview) -> tuple[Any, memoryview]:
        """For a message in one buffer."""
        if record.kind.name != "DATA" or not self.hit():
            return record, body
        if self.random.random() < 0.3:
            self.cut += 1
            return record, body[: int(self.random.integers(len(body)))]
        self.flipped += 1
        body[int(self.random.integers(len(body)))] ^= 1 << int(self.random.integers(8))
        return record, body

    def frames(self, frames: list[Any]) -> list[Any]:
        """For a message as a list of frames."""
        if not self.hit():
            return frames
        some = [i for i, f in enumerate(frames) if memoryview(f).nbytes]
        i = some[int(self.random.integers(len(some)))]
        frame = bytearray(frames[i])
        if self.random.random() < 0.3:
            self.cut += 1
            del frame[int(self.random.integers(len(frame))) :]
        else:
            self.flipped += 1
            frame[int(self.random.integers(len(frame)))] ^= 1 << int(self.random.integers(8))
        return [*frames[:i], frame, *frames[i + 1 :]]


def begin(seed: int, way: str, dask_worker: Any) -> int:
    """On a worker: spoil what this transport receives."""
    from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
    from dask_gpurt.shuffle.worker import sender
    from dask_gpurt.shuffle.worker.receiver import Receiver

    spoiler = Spoiler(seed, 0.5)
    dask_worker.spoiler = spoiler
    sender.STAGE_BYTES = 1  # every shard a message
    if not hasattr(dask_worker, "untouched"):
        dask_worker.untouched = ReceiverLink.receive, Receiver.receive
    arrives, receive = dask_worker.untouched
    ReceiverLink.receive = arrives  # type: ignore[method-assign]
    Receiver.receive = receive  # type: ignore[method-assign]

    def spoilt(self: Any, record: Any, body: Any, *given: Any, **named: Any) -> Any:
        return arrives(self, *spoiler.body(record, body), *given, **named)

    async def spoilt_rpc(self: Any, message: Any) -> Any:
        message.frames = spoiler.frames(message.frames)
        return await receive(self, message)

    if way == "rpc":
        Receiver.receive = spoilt_rpc  # type: ignore[method-assign]
        sender.RESENDS = 50
    else:
        ReceiverLink.receive = spoilt  # type: ignore[method-assign]
    return os.getpid()


def counts(dask_worker: Any) -> dict[str, int]:
    from dask_gpurt.shuffle.counters import worker_statistics

    stats = worker_statistics(dask_worker)
    keys = ("refused", "resent_safe", "links_lost", "transport_errors", "restarts")
    s = dask_worker.spoiler
    return {**{k: stats[k] for k in keys}, "flipped": s.flipped, "cut": s.cut, "pid": os.getpid()}


def headers(n: int) -> int:
    """Changed record headers that were parsed all the same."""
    from dask_gpurt.errors import WireError
    from dask_gpurt.shuffle.transport.link.records import HEADER_BYTES, LinkRecord, RecordKind, RunKey

    r = np.random.default_rng(0)
    good = LinkRecord(RecordKind.DATA, RunKey(7, 1), 3, 4096, 2, 9).pack()
    accepted = 0
    for _ in range(n):
        raw = bytearray(good)
        if r.random() < 0.2:
            del raw[int(r.integers(HEADER_BYTES)) :]
        else:
            raw[int(r.integers(HEADER_BYTES))] ^= 1 << int(r.integers(8))
        try:
            LinkRecord.unpack(raw)
            accepted += 1
        except WireError:
            pass
    return accepted


def over(client: Client, way: str, messages: int, want: pd.DataFrame) -> dict[str, Any]:
    """Shuffles over one transport until enough messages were spoiled."""
    client.run_on_scheduler(take_over, transport=way)
    for seed, worker in enumerate(client.scheduler_info()["workers"]):
        client.run(begin, seed, way, workers=[worker])
    first = client.run(counts)
    runs = wrong = 0
    start = time.perf_counter()
    while True:
        d = dd.from_map(part, list(range(INPUTS)), meta=part(0).iloc[:0])
        got = d.shuffle("k", npartitions=4 + runs % 3).compute()
        got = got.sort_values(list(got.columns), ignore_index=True)
        runs += 1
        wrong += not got.equals(want.astype(dict(got.dtypes)))  # dask turns text into its own dtype
        now = client.run(counts)
        spoiled = sum(now[w]["flipped"] + now[w]["cut"] for w in now)
        if spoiled >= messages:
            break
    client.run_on_scheduler(give_back)
    more = {k: sum(now[w][k] - first[w][k] for w in now) for k in next(iter(now.values())) if k != "pid"}
    return {
        "shuffles": runs,
        "wrong_results": wrong,
        "spoiled": spoiled,
        "accepted": spoiled - more["refused"],
        "workers_died": sum(now.get(w, {}).get("pid") != x["pid"] for w, x in first.items()),
        **more,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=10_000, help="spoiled messages, over all transports together")
    parser.add_argument("--transports", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--out", default="-", help="JSON file; - for standard output")
    args = parser.parse_args()
    want = pd.concat([part(i) for i in range(INPUTS)])
    want = want.sort_values(list(want.columns), ignore_index=True)
    report: dict[str, Any] = {
        **data.facts(f"{data.cores()} CPU cores, 2 worker processes, loopback and shared memory, no GPU"),
        "arguments": vars(args),
        "headers": {"changed": args.messages, "accepted": headers(args.messages)},
        "results": {},
    }
    config = {"distributed.p2p.comm.message-bytes-limit": "1 B", "logging.distributed": "error"}
    with dask.config.set(config), two_workers() as client:
        for way in args.transports:
            report["results"][way] = over(client, way, -(-args.messages // len(args.transports)), want)
            print(way, report["results"][way], flush=True)
    ran = report["results"].values()
    report["all"] = {k: sum(r[k] for r in ran) for k in ("spoiled", "accepted", "wrong_results", "workers_died")}
    data.put(args.out, report)


if __name__ == "__main__":
    main()
