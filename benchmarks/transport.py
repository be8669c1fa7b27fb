"""Transports between two processes: GB/s and CPU seconds per GB by size of message, and what that is in a real shuffle.

    python -m benchmarks.transport --runs 5 --out results.json
    python -m benchmarks.transport --runs 5 --place netns --out results.json      (as root; makes a veth pair)
    python -m benchmarks.transport --runs 5 --shuffle --out results.json
    python -m benchmarks.transport --runs 5 --kill --out results.json

Parts, each alternating over the transports, medians of the runs:

- messages: one process sends `--bytes` in messages of one size to another, at most 16 MiB ahead of the answers; the
  receiver checks nothing and drops them (what a shuffle does with messages is in `shuffle_meters`). `auto` is the
  choice that `transport.choice` makes for that pair and size from its priors.
- `--place netns`: the receiver in a network namespace of its own, over a veth pair.
- `--kill`: how soon a sender knows that its receiver was killed.
- `--shuffle`: the frame of `shuffle_meters` on two workers, with each transport forced, and `auto`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
AHEAD = 16 << 20
NAMESPACE = "gpurtbench"
_RUN_SECRET = bytes(16)


def _cpu() -> float:
    t = os.times()
    return t.user + t.system


def _node(kind: str, address: str, host: str, hold: bool = False) -> Any:
    from dask_gpurt.shuffle.pages import Pages, system
    from dask_gpurt.shuffle.transport.base import Gate, Services
    from dask_gpurt.shuffle.transport.tcp import TcpTransport

    services = Services(
        address=address,
        gate=Gate(512 << 20),
        secret_of=lambda run: _RUN_SECRET,
        on_message=lambda run, sender, frames, done: None if hold else done(""),
        on_loss=lambda *a: print("lost", a),
    )
    pool = Pages(system())
    pool.keep(True)
    if kind == "tcp":
        return TcpTransport(services, host, pool)
    from dask_gpurt.shuffle.transport.ucx import UcxTransport

    return UcxTransport(services, pool)


def receiver(pipe: Any, host: str) -> None:
    """The other process: opens transports as asked, and says what CPU it has used."""
    from dask_gpurt.shuffle.transport.records import RunKey

    if host != "127.0.0.1":
        libc = __import__("ctypes").CDLL(None)
        fd = os.open(f"/run/netns/{NAMESPACE}", os.O_RDONLY)
        if libc.setns(fd, 0):
            raise OSError("setns failed")
    nodes: dict[str, Any] = {}
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def listen() -> str:
        from distributed.comm import listen

        async def handle(comm: Any) -> None:
            with contextlib.suppress(Exception):
                while True:
                    await comm.read()
                    await comm.write({"status": "OK"})

        nodes["rpc"] = await listen(f"tcp://{host}:0", handle, deserialize=True)
        return str(nodes["rpc"].contact_address)

    while (asked := pipe.recv()) is not None:
        if asked == "cpu":
            pipe.send(_cpu())
        elif asked == "rpc":
            pipe.send(asyncio.run_coroutine_threadsafe(listen(), loop).result())
        else:
            kind, run, hold = asked
            node = nodes[kind] = nodes.get(kind) or _node(kind, "b", host, hold)
            pipe.send(node.endpoint_for(RunKey(1, run), "a"))
    os._exit(0)


class Bench:
    """Sends to the other process."""

    def __init__(self, host: str, here: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receiver, args=(theirs, host), daemon=True)
        self.process.start()
        self.here = here
        self.run = 0
        self.nodes: dict[str, Any] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.comms: list[Any] = []

    def ask(self, what: Any) -> Any:
        self.pipe.send(what)
        return self.pipe.recv()

    def open(self, kind: str, hold: bool = False) -> Any:
        """Connect, so that the clock sees messages only; returns what `send` needs."""
        from dask_gpurt.shuffle.transport.base import Header, Peer
        from dask_gpurt.shuffle.transport.records import RunKey

        if kind == "rpc":
            if not self.comms:
                address = self.ask("rpc")

                async def connect() -> None:
                    from distributed.comm import connect

                    self.comms = [await connect(address) for _ in range(4)]

                asyncio.run_coroutine_threadsafe(connect(), self.loop).result()
            return None
        self.run += 1
        endpoint = self.ask((kind, self.run, hold))
        node = self.nodes.get(kind) or self.nodes.setdefault(kind, _node(kind, "a", self.here))
        target = Peer("b", endpoint, 128 << 20), Header(RunKey(1, self.run), _RUN_SECRET)
        first = node.send(*target, [b"first"])
        if not hold:
            first.result(30)
        return target

    def send_held(self, kind: str) -> Any:
        """One message to a receiver that never says that it is stored."""
        target = self.open(kind, hold=True)
        return self.nodes[kind].send(*target, [b"held"])

    def send(self, kind: str, size: int, total: int, target: Any) -> None:
        """`total` bytes in messages of `size`."""
        block = memoryview(np.ones(size, "u1"))
        count = total // size
        if kind == "rpc":
            asyncio.run_coroutine_threadsafe(self._rpc(block, count), self.loop).result()
            return
        node = self.nodes[kind]
        ahead = max(2, AHEAD // size)
        pending = []
        for _ in range(count):
            if len(pending) >= ahead:
                assert not pending.pop(0).result(60).problem
            pending.append(node.send(*target, [block]))
        for future in pending:
            assert not future.result(60).problem

    async def _rpc(self, block: memoryview, count: int) -> None:
        """As the run sends: several comms to a peer, one message under way on each."""
        from distributed.protocol.serialize import Serialized, serialize

        from dask_gpurt.shuffle.sending import Message

        left = iter(range(count))

        async def one(comm: Any) -> None:
            for _ in left:
                message = Serialized(*serialize(Message([block]), serializers=("dask",), on_error="raise"))
                await comm.write({"op": "x", "data": message})
                await comm.read()

        await asyncio.gather(*(one(comm) for comm in self.comms))

    def close(self) -> None:
        for node in self.nodes.values():
            node.stop()
        self.pipe.send(None)
        self.process.join(5)


def chosen(place: str, size: int) -> str:
    """What `auto` takes for a first message of this size."""
    from dask_gpurt.shuffle.transport.choice import Chooser, Place
    from dask_gpurt.shuffle.transport.places import candidates

    at = Place.REMOTE if place == "netns" else Place.HOST
    return Chooser(at, candidates(at)).choose(size, False, 0.0)


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
    """Per size and transport: GB/s and CPU s/GB, each run and the median; auto against the best."""
    if args.place == "netns":
        os.environ.setdefault("UCX_TLS", "tcp,self")  # as between two hosts: no shared memory
        where: Any = namespace()
    else:
        where = contextlib.nullcontext(("127.0.0.1", "127.0.0.1"))
    out: dict[str, Any] = {}
    with where as (there, here):
        bench = Bench(there, here)
        for label, size in SIZES.items():
            total = max(args.bytes, 4 * size)
            rates: dict[str, list[float]] = {t: [] for t in args.transports}
            cpu: dict[str, list[float]] = {t: [] for t in args.transports}
            for i, kind in compare.turns(args.transports, args.runs + 1):
                target = bench.open(kind)
                before = _cpu() + bench.ask("cpu")
                start = time.perf_counter()
                bench.send(kind, size, total, target)
                took = time.perf_counter() - start
                used = _cpu() + bench.ask("cpu") - before
                if i:  # the first round connects and faults pages in
                    rates[kind].append(total // size * size / took / 1e9)
                    cpu[kind].append(used / (total / 1e9))
            median = {t: statistics.median(r) for t, r in rates.items()}
            auto = chosen(args.place, size)
            out[label] = {
                "gb_per_second": median,
                "cpu_seconds_per_gb": {t: statistics.median(c) for t, c in cpu.items()},
                "runs": rates,
                "auto": auto,
                "auto_over_best": median.get(auto, float("nan")) / max(median.values()),
            }
            print(label, {t: round(m, 2) for t, m in median.items()}, "auto:", auto, flush=True)
        bench.close()
    return out


def killed(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from SIGKILL of the receiver, which holds messages, until the sender knows that they are lost."""
    out: dict[str, list[float]] = {kind: [] for kind in args.transports if kind != "rpc"}
    for _, kind in compare.turns(list(out), args.runs):
        bench = Bench("127.0.0.1", "127.0.0.1")
        future = bench.send_held(kind)
        time.sleep(1.0)
        assert not future.done()
        os.kill(bench.process.pid or 0, signal.SIGKILL)
        start = time.perf_counter()
        bench.process.join()  # a process that nobody has waited for still counts as alive
        receipt = future.result(60)
        out[kind].append(time.perf_counter() - start)
        assert receipt.lost, receipt
        for node in bench.nodes.values():
            node.stop()
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
