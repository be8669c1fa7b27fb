"""CPU seconds of the shuffle's stages, without a cluster: split, encode, pack, receive, unpack, get, assemble.

    python -m benchmarks.shuffle_stages --size 0.5 --partitions 16 128 --rounds 5 --out out/stages.json

One process, pinned to one core, plays the two workers of a shuffle: every input is split, the half that stays is kept,
the half that goes is encoded, packed, copied into fresh memory (as the comm does when it reads) and unpacked; then
every output is assembled. *Plain* is the floor to compare with: sort the ids, one Arrow gather, an IPC stream, its
decoding to pandas, per partition. *General* is ours with the short way for plain columns off (`shuffle.gather`). The
three alternate.

CPU seconds are user and system apart, the least and the median of the rounds. System time is page faults: it depends on
what the machine's memory went through before, so compare user time between machines, and all of it within one run.
The process runs with the ``MALLOC_TRIM_THRESHOLD_`` that distributed's nanny sets for workers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import statistics
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import data
from benchmarks.shuffle_meters import ROWS_PER_GB, make
from dask_gpurt.shuffle.rows import assemble as assembling
from dask_gpurt.shuffle.rows import gather, wire
from dask_gpurt.shuffle.rows.assemble import Assembler
from dask_gpurt.shuffle.rows.partition import OutputLayout, split
from dask_gpurt.shuffle.rows.received_chunk import ReceivedChunk
from dask_gpurt.shuffle.worker.sender import STAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIM = "65536"


class Clock:
    """User and system CPU seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        before = resource.getrusage(resource.RUSAGE_SELF)
        yield
        after = resource.getrusage(resource.RUSAGE_SELF)
        sums = self.seconds.setdefault(stage, [0.0, 0.0])
        sums[0] += after.ru_utime - before.ru_utime
        sums[1] += after.ru_stime - before.ru_stime


def ours(inputs: list[pd.DataFrame], clock: Clock) -> int:
    """One shuffle; returns the rows that came out."""
    n = len(inputs)
    layout = OutputLayout({part: "here" if part < n // 2 else "there" for part in range(n)})
    assembler = Assembler(inputs[0].iloc[:0].drop(columns="_partitions"))
    chunks: list[ReceivedChunk] = []
    staged: list[wire.Parcel] = []
    schemas: dict[int, pa.Schema] = {}

    def send() -> None:
        with clock("pack"):
            frames = wire.pack(1, 1, 1, staged, set(schemas))
        staged.clear()
        with clock("receive"):
            received = [np.empty(len(frame), dtype=np.uint8) for frame in frames]
            for to, frame in zip(received, frames, strict=True):
                to[:] = np.frombuffer(frame, dtype=np.uint8)
        del frames
        with clock("unpack"):
            shards = wire.unpack([r.data for r in received], 1, 1, schemas)
            chunks.append(ReceivedChunk(shards, sum(r.nbytes for r in received)))

    for i, frame in enumerate(inputs):
        with clock("split"):
            shards = list(split(frame, "_partitions", True, i, layout))
        chunks += [ReceivedChunk([shard]) for address, shard in shards if address == "here"]
        with clock("encode"):
            staged += [wire.encode(shard) for address, shard in shards if address == "there"]
        del shards
        if sum(p.nbytes for p in staged) >= STAGE_BYTES:
            send()
    if staged:
        send()
    out = []
    parts = [set(chunk.parts) for chunk in chunks]  # which a store keeps
    for part in range(n):
        with clock("get"):
            pieces = [
                piece for chunk, has in zip(chunks, parts, strict=True) if part in has for piece in chunk.get(part)
            ]
        with clock("assemble"):
            out.append(assembler(pieces))
    return sum(map(len, out))


def general(inputs: list[pd.DataFrame], clock: Clock) -> int:
    """Ours without the short way."""
    before = gather.plan, assembling.template
    gather.plan = lambda *_: None
    assembling.template = lambda *_: None
    try:
        return ours(inputs, clock)
    finally:
        gather.plan, assembling.template = before


def plain(inputs: list[pd.DataFrame], clock: Clock) -> int:
    """What any shuffle has to do at least, the plain way; each partition by itself."""
    out = []
    for frame in inputs:
        with clock("partition"):
            table = pa.Table.from_pandas(frame.drop(columns="_partitions"), preserve_index=True)
            narrow = frame["_partitions"].to_numpy().astype(np.uint8)
            table = pc.take(table, pa.array(np.argsort(narrow, kind="stable")), boundscheck=False)
        with clock("encode"):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            encoded = sink.getvalue()
        with clock("decode"):
            out.append(pa.ipc.open_stream(encoded).read_all().to_pandas())
    return sum(map(len, out))


WAYS = {"ours": ours, "general": general, "plain": plain}


def measure(n: int, size: float, rounds: int) -> dict[str, Any]:
    """Seconds by way and stage: least and median of user, system and their sum."""
    rows = int(ROWS_PER_GB * size) // n
    inputs = [make(i, rows) for i in range(n)]
    for frame in inputs:
        hashes = pd.util.hash_pandas_object(frame["k"], index=False).to_numpy()
        frame["_partitions"] = (hashes % n).astype(np.int64)
    samples: dict[str, list[dict[str, list[float]]]] = {way: [] for way in WAYS}
    for i in range(rounds + 1):
        for way, run in WAYS.items():
            gc.collect()
            clock = Clock()
            if (got := run(inputs, clock)) != rows * n:
                raise SystemExit(f"{way}: {got} rows came out, {rows * n} went in")
            if i:  # the first round warms up
                total = [sum(s[j] for s in clock.seconds.values()) for j in (0, 1)]
                samples[way].append(clock.seconds | {"all": total})
    out: dict[str, Any] = {"input_bytes": int(sum(f.memory_usage(deep=True).sum() for f in inputs)), "rows": rows * n}
    for way, runs in samples.items():
        out[way] = {
            stage: {
                name: [round(pick([f(run[stage]) for run in runs]), 4) for pick in (min, statistics.median)]
                for name, f in (("user", lambda s: s[0]), ("system", lambda s: s[1]), ("cpu", sum))
            }
            for stage in runs[0]
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=0.5, help="GB of input in memory")
    parser.add_argument("--partitions", type=int, nargs="+", default=[16, 128], help="each from 2 to 256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=0, help="core to run on")
    parser.add_argument("--out", default=os.path.join(data.OUT, "shuffle_stages.json"))
    args = parser.parse_args()
    if not all(2 <= n <= 256 for n in args.partitions):
        raise SystemExit(f"--partitions is {args.partitions}, each must be from 2 to 256")
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") != TRIM:  # read by the allocator when the process starts
        os.execve(sys.executable, sys.orig_argv, os.environ | {"MALLOC_TRIM_THRESHOLD_": TRIM})
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {args.core})
    pa.set_cpu_count(1)
    report = data.facts("one CPU core, one process, no network") | {"arguments": vars(args), "results": {}}
    for n in args.partitions:
        result = report["results"][str(n)] = measure(n, args.size, args.rounds)
        print(f"{n} partitions, {result['input_bytes'] / 1e6:.0f} MB: least CPU s (user + system), median of both")
        for way in WAYS:
            for stage, s in result[way].items():
                print(f"  {way:8} {stage:10} {s['user'][0]:7.3f} + {s['system'][0]:.3f} {s['cpu'][1]:9.3f}")
    print(data.write_json(args.out, report))


if __name__ == "__main__":
    main()
