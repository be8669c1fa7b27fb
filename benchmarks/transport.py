"""Transports between two processes: GB/s and CPU seconds per GB by size of message, and what that is in a real shuffle.

    python -m benchmarks.transport --runs 5 --out results.json
    python -m benchmarks.transport --runs 5 --place netns --out results.json      (as root; makes a veth pair)
    python -m benchmarks.transport --runs 5 --shuffle --out results.json
    python -m benchmarks.transport --runs 5 --kill --out results.json

Parts, each alternating over the transports, medians of the runs:

- messages: one process sends `--bytes` in messages of one size to another, as a run does it (the data plane of a
  worker with one transport forced, and one with `auto`; ten at a time); the receiver checks nothing and drops them
  (what a shuffle does with messages is in `shuffle_meters`). `auto` keeps what it has learned from round to round.
- `--place netns`: the receiver in a network namespace of its own, over a veth pair.
- `--kill`: how soon a sender knows that its receiver was killed.
- `--shuffle`: the frame of `shuffle_meters` on two workers, with each transport forced, and `auto`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import compare, data

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = {"64K": 1 << 16, "1M": 1 << 20, "8M": 8 << 20, "64M": 64 << 20}
TRANSPORTS = ("rpc", "tcp", "ucx")
WAYS = (*TRANSPORTS, "auto")
#: messages under way at a time: as many as a run has, but not many long ones
AT_ONCE = 10
AHEAD = 16 << 20
#: so that a message of 64 MiB is allowed
RECEIVE_BUDGET = 512 << 20
LOCAL = "127.0.0.1"
NAMESPACE = "gpurtbench"
_NEWNS, _SLAVE, _RECURSIVE, _DETACH = 0x20000, 1 << 19, 1 << 14, 2


def _cpu() -> float:
    t = os.times()
    return t.user + t.system


class Drop:
    """In place of a shuffle's run: takes messages and drops them, asks over distributed's comms."""

    def __init__(self, end: End, way: str) -> None:
        self.end, self.way = end, way

    def unpack(self, frames: Any) -> Any:
        return frames

    async def accept(self, shards: Any, nbytes: int) -> None:
        if self.end.hold:
            await asyncio.Event().wait()

    async def ask(self, peer: str, question: Any) -> Any:
        return await self.end.server.rpc(peer).shuffle_receive(data=question, way=self.way)


class End:
    """One process: a server of distributed's, and the data plane of a worker for each way to be forced."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.hold = False
        self.runs: dict[str, tuple[Any, Any]] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.do(self._start())

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    async def _start(self) -> None:
        from distributed.core import Server

        self.server = Server({"shuffle_receive": self.receive}, deserialize=True)
        await self.server.rpc.start()
        await self.server.listen(f"tcp://{self.host}:0")
        self.address = self.server.address

    async def open(self, way: str) -> None:
        """A plane with this transport, and a run on it."""
        from dask_gpurt.config import ShuffleSettings
        from dask_gpurt.model.pages import pages
        from dask_gpurt.shuffle.transport.plane import Plane
        from dask_gpurt.shuffle.transport.records import RunKey

        pages.keep(True)
        settings = ShuffleSettings(enabled=True, transport=way, receive_budget=RECEIVE_BUDGET)
        plane = Plane(self, settings, lambda **counts: None, RECEIVE_BUDGET)
        run: Any = Drop(self, way)
        plane.join(run, RunKey(1, WAYS.index(way)), bytes(16))
        self.runs[way] = plane, run

    async def receive(self, data: Any, way: str) -> Any:
        """What a worker does with a message by distributed's comms."""
        from dask_gpurt.shuffle.transport import records

        plane, run = self.runs[way]
        key = records.RunKey(1, WAYS.index(way))
        if isinstance(data, dict):
            return await plane.answer(key, data)
        stored = plane.arrive(key, data.sender, records.message_bytes(data.frames))
        await run.accept(data.frames, data.nbytes)
        stored()
        return {"status": "OK", "granted": plane.granted(key, data.sender)}

    async def send(self, way: str, peer: str, size: int, count: int) -> None:
        """Messages of `size`, as many at a time as a run sends."""
        from dask_gpurt.shuffle.sending import Message, _as_is
        from dask_gpurt.shuffle.transport.records import RunKey

        plane, run = self.runs[way]
        key = RunKey(1, WAYS.index(way))
        block = memoryview(np.ones(size, "u1").data)
        left = iter(range(count))

        async def safe() -> Any:
            message = _as_is(Message([block], self.address))
            return await self.server.rpc(peer).shuffle_receive(data=message, way=way)

        async def some() -> None:
            for _ in left:
                answer = await plane.send(run, key, peer, [block], safe)
                assert answer["status"] == "OK", answer

        await asyncio.gather(*(some() for _ in range(min(AT_ONCE, max(2, AHEAD // size)))))

    def counts(self, way: str) -> dict[str, int]:
        """Messages sent by transport, and what went wrong."""
        stats = self.runs[way][0].statistics()
        assert not stats["unavailable"], stats["unavailable"]
        assert not stats["last_problem"], stats["last_problem"]
        return {link["transport"]: link["messages_out"] for link in stats["links"] if link["messages_out"]}


def enter(name: str) -> None:
    """Move this process into a network namespace, and let it see that one's interfaces.

    UCX finds interfaces by /sys, which shows those of the namespace that mounted it: with the old one it looks for
    interfaces that are not there and says "Destination is unreachable" (``ip netns exec`` mounts it anew, too).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as f:
        steps = [libc.setns(f.fileno(), 0), libc.unshare(_NEWNS)]
    steps.append(libc.mount(b"", b"/", b"none", _SLAVE | _RECURSIVE, None))
    steps.append(libc.umount2(b"/sys", _DETACH))
    steps.append(libc.mount(b"bench", b"/sys", b"sysfs", 0, None))
    if any(steps):
        raise OSError(ctypes.get_errno(), f"entering {name}: {steps}")


def receiver(pipe: Any, host: str) -> None:
    """The other process."""
    if host != LOCAL:
        enter(NAMESPACE)
    end = End(host)
    while (asked := pipe.recv()) is not None:
        if asked == "cpu":
            pipe.send(_cpu())
        else:
            way, end.hold = asked
            end.do(end.open(way))
            pipe.send(end.address)
    os._exit(0)


class Bench:
    """Sends to the other process."""

    def __init__(self, host: str, here: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receiver, args=(theirs, host), daemon=True)
        self.process.start()
        self.end = End(here)
        self.peer = ""

    def ask(self, what: Any) -> Any:
        self.pipe.send(what)
        return self.pipe.recv()

    def open(self, way: str, hold: bool = False) -> None:
        """Connect, so that the clock sees messages only."""
        self.peer = self.ask((way, hold))
        self.end.do(self.end.open(way))
        if not hold:
            self.end.do(self.end.send(way, self.peer, 10, 1))

    def send_held(self, way: str) -> Any:
        """One message to a receiver that never says that it is stored; the receipt, as a future."""
        from dask_gpurt.shuffle.transport.records import RunKey

        self.open(way, hold=True)
        plane, run = self.end.runs[way]
        key = RunKey(1, WAYS.index(way))

        route = self.end.do(plane._route(run, key, self.peer))

        async def held() -> Any:
            return await plane._direct(way, route, key, self.peer, [b"held"])

        return asyncio.run_coroutine_threadsafe(held(), self.end.loop)

    def send(self, way: str, size: int, total: int) -> None:
        """`total` bytes in messages of `size`."""
        self.end.do(self.end.send(way, self.peer, size, total // size))

    def close(self) -> None:
        for plane, _ in self.end.runs.values():
            self.end.do(plane.stop())
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(5)


@contextlib.contextmanager
def namespace() -> Iterator[tuple[str, str]]:
    """A veth pair into a namespace of our own; gives (their address, ours)."""

    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True)

    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", "gpurtb0", "type", "veth", "peer", "name", "gpurtb1", "netns", NAMESPACE)
        ip("addr", "add", "10.199.7.1/24", "dev", "gpurtb0")
        ip("link", "set", "gpurtb0", "up")
        ip("-n", NAMESPACE, "addr", "add", "10.199.7.2/24", "dev", "gpurtb1")
        ip("-n", NAMESPACE, "link", "set", "gpurtb1", "up")
        ip("-n", NAMESPACE, "link", "set", "lo", "up")
        time.sleep(1)
        yield "10.199.7.2", "10.199.7.1"
    finally:
        ip("netns", "del", NAMESPACE)


def messages(args: argparse.Namespace) -> dict[str, Any]:
    """Per size and way: GB/s and CPU s/GB, each run and the median; auto against the best in the same round."""
    if args.place == "netns":
        os.environ.setdefault("UCX_TLS", "tcp,self")  # as between two hosts: no shared memory
        where: Any = namespace()
    else:
        where = contextlib.nullcontext((LOCAL, LOCAL))
    names = [*args.transports, "auto"]
    out: dict[str, Any] = {}
    with where as (there, here):
        bench = Bench(there, here)
        for name in names:
            bench.open(name)
        for label, size in SIZES.items():
            total = max(args.bytes, 4 * size)
            rates: dict[str, list[float]] = {t: [] for t in names}
            cpu: dict[str, list[float]] = {t: [] for t in names}
            sent = collections.Counter(bench.end.counts("auto"))
            for i, name in compare.turns(names, args.runs + 1):
                before = _cpu() + bench.ask("cpu")
                start = time.perf_counter()
                bench.send(name, size, total)
                took = time.perf_counter() - start
                used = _cpu() + bench.ask("cpu") - before
                if i:  # the first round faults pages in
                    rates[name].append(total // size * size / took / 1e9)
                    cpu[name].append(used / (total / 1e9))
            median = {t: statistics.median(r) for t, r in rates.items()}
            best = max(args.transports, key=lambda t: median[t])
            out[label] = {
                "gb_per_second": median,
                "cpu_seconds_per_gb": {t: statistics.median(c) for t, c in cpu.items()},
                "runs": rates,
                "best_forced": best,
                "auto_took": dict(collections.Counter(bench.end.counts("auto")) - sent),
                "auto_over_best": statistics.median(a / b for a, b in zip(rates["auto"], rates[best], strict=True)),
            }
            told = {t: round(m, 2) for t, m in median.items()}
            print(label, told, {k: out[label][k] for k in ("auto_took", "auto_over_best")}, flush=True)
        for name in args.transports:
            counts = bench.end.counts(name)
            assert set(counts) == {name}, (name, counts)
        bench.close()
    return out


def killed(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from SIGKILL of the receiver, which holds messages, until the sender knows that they are lost."""
    out: dict[str, list[float]] = {kind: [] for kind in args.transports if kind != "rpc"}
    for _, kind in compare.turns(list(out), args.runs):
        bench = Bench(LOCAL, LOCAL)
        future = bench.send_held(kind)
        time.sleep(1.0)
        assert not future.done()
        os.kill(bench.process.pid or 0, signal.SIGKILL)
        start = time.perf_counter()
        bench.process.join()  # a process that nobody has waited for still counts as alive
        receipt = future.result(60)
        out[kind].append(time.perf_counter() - start)
        assert receipt.lost, receipt
        bench.close()
    return {kind: {"seconds": s, "median": statistics.median(s), "max": max(s)} for kind, s in out.items()}


def shuffles(args: argparse.Namespace) -> dict[str, Any]:
    """Wall and CPU seconds of a real shuffle with each transport."""
    import dask
    import dask.dataframe as dd
    from distributed import Client, LocalCluster, wait

    from benchmarks import shuffle_meters as small

    async def install(dask_scheduler: Any, transport: str) -> None:
        from dask_gpurt.config import ShuffleSettings
        from dask_gpurt.shuffle import ShuffleTakeover

        await ShuffleTakeover.install(dask_scheduler, ShuffleSettings(enabled=True, transport=transport))

    def ways(dask_worker: Any) -> Any:
        from dask_gpurt.shuffle import worker_statistics

        stats = worker_statistics(dask_worker)
        return stats["links_lost"] + stats["transport_errors"], stats["transport"]["links"]

    config = {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause", "terminate")}
    out: dict[str, Any] = {}
    with (
        dask.config.set(config | {"logging.distributed": "error"}),
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for n in args.partitions:
            rows = int(small.ROWS_PER_GB * args.size) // n
            d = dd.from_map(small.make, list(range(n)), n=rows, meta=small.make(0, 3).iloc[:0]).persist()
            wait(d)
            names = [*args.transports, "auto"]
            runs: dict[str, list[dict[str, float]]] = {v: [] for v in names}
            for i, name in compare.turns(names, args.runs + 1):
                client.run_on_scheduler(install, transport=name)
                before = client.run(small.begin)
                start = time.perf_counter()
                result = d.shuffle("k", shuffle_method="p2p").persist()
                wait(result)
                wall = time.perf_counter() - start
                after = client.run(small.end)
                assert len(result) == rows * n
                faults = client.run(ways)
                assert not any(f for f, _ in faults.values()), faults
                if name != "auto":
                    used = {x["transport"] for _, links in faults.values() for x in links if x["messages_out"]}
                    assert name in used, (name, used)
                del result
                client.run_on_scheduler(small.give_back)
                time.sleep(0.3)
                if i:
                    runs[name].append(
                        {"wall_seconds": wall, "cpu_seconds": sum(after[w][0] - before[w] for w in after)}
                    )
            median = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in runs.items()}
            out[str(n)] = {"median": median, "runs": runs}
            print(n, {v: {k: round(x, 2) for k, x in m.items()} for v, m in median.items()}, flush=True)
            del d
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=256 << 20, help="bytes per run")
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--place", default="host", choices=["host", "netns"])
    parser.add_argument("--shuffle", action="store_true", help="the real shuffle instead of messages")
    parser.add_argument("--kill", action="store_true", help="how soon a killed peer is noticed, instead of messages")
    parser.add_argument("--size", type=float, default=1.0, help="GB of the shuffle's input")
    parser.add_argument("--partitions", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--out", default="-", help="JSON file; - for standard output")
    args = parser.parse_args()
    where = "a veth pair between two network namespaces" if args.place == "netns" else "loopback and shared memory"
    report = {
        **data.facts(f"{data.cores()} CPU cores, two processes, {where}, no GPU, no RDMA"),
        "load_before": os.getloadavg()[0],
        "arguments": vars(args),
        "results": (shuffles if args.shuffle else killed if args.kill else messages)(args),
    }
    if args.out == "-":
        print(json.dumps(report, indent=1))
    else:
        print(data.write_json(args.out, report))


if __name__ == "__main__":
    main()
