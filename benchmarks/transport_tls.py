"""What TLS costs: shuffles of one frame with and without it, stock and ours; and other ways to send under TLS.

    python -m benchmarks.transport_tls --runs 5 --out results.json
    python -m benchmarks.transport_tls --raw --runs 5 --out results.json

Shuffles (`shuffle_meters`' frame, two workers with one thread, results checked by row count), in turns on two clusters,
one under ``tls://`` with `Security.temporary`:

- `stock`, `stock-tls`: stock's P2P.
- `tcp`: ours in plaintext. `rpc-tls`: ours, with all rows over Dask's comms. `tls`: ours, with the data plane.
- `tcp-sockets`, `tls-sockets`: the same with everything through sockets, as between hosts: on one host, long messages
  are read where they lie, and never sealed.

`--raw`: one process sends messages to another, without a shuffle: `plain` (a socket), `memory` (`ssl.SSLObject` between
buffers in memory, what `tcp/tls.py` does), `socket` (`ssl.SSLSocket`), `flight` (Arrow Flight's `do_put`, certificates
of both sides checked). No credit and no answers, so these are bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import ssl
import statistics
import time
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pyarrow as pa
from distributed import Security, wait

from benchmarks import compare, data
from benchmarks import shuffle_meters as small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

VARIANTS = ("stock", "stock-tls", "tcp", "rpc-tls", "tls", "tcp-sockets", "tls-sockets")
RAW = ("plain", "memory", "socket", "flight")
#: as `tcp/tls.py`
_SEALED, _OPENED = 1 << 17, 1 << 18


def _fetch(allowed: bool) -> None:
    """On a worker: whether messages may be read where they lie."""
    from dask_gpurt.shuffle.transport.tcp import cma

    cma.able = lambda: allowed


def _ways(dask_worker: Any) -> Any:
    from dask_gpurt.shuffle.counters import worker_statistics

    stats = worker_statistics(dask_worker)
    return stats["links_lost"] + stats["transport_errors"] + stats["resent_safe"], stats["transport"]["links"]


def _once(client: Client, frame: Any, variant: str, rows: int) -> dict[str, float]:
    """One shuffle; its seconds."""
    ours = not variant.startswith("stock")
    if ours:
        client.run(_fetch, not variant.endswith("-sockets"))
        client.run_on_scheduler(small.take_over, transport="rpc" if variant.startswith("rpc") else "tcp")
    before = client.run(small.begin)
    start = time.perf_counter()
    result = frame.shuffle("k", shuffle_method="p2p").persist()
    wait(result)
    wall = time.perf_counter() - start
    after = client.run(small.end)
    assert len(result) == rows
    if ours:
        faults = client.run(_ways)
        assert not any(f for f, _ in faults.values()), faults
        last = {x["transport"] for _, links in faults.values() for x in links if x["messages_out"]}
        assert variant.partition("-")[0] in last, (variant, last)
    del result
    if ours:
        client.run_on_scheduler(small.give_back)
    time.sleep(0.3)
    return {"wall_seconds": wall, "cpu_seconds": sum(after[w][0] - before[w] for w in after)}


@contextlib.contextmanager
def _cluster(args: argparse.Namespace, sealed: bool) -> Iterator[tuple[Client, Any, int]]:
    """A client, a frame in memory, and its rows."""
    import dask.dataframe as dd

    security: Any = {"security": Security.temporary(), "protocol": "tls"} if sealed else {}
    with small.two_workers(**security) as client:
        assert client.scheduler.address.startswith("tls" if sealed else "tcp")
        rows = int(small.ROWS_PER_GB * args.size) // args.partitions
        frame = dd.from_map(small.make, list(range(args.partitions)), n=rows, meta=small.make(0, 3).iloc[:0]).persist()
        wait(frame)
        yield client, frame, rows * args.partitions


def shuffles(args: argparse.Namespace) -> dict[str, Any]:
    """Wall and CPU seconds of each variant, medians and runs; wall seconds over those of others in the same round."""
    runs: dict[str, list[dict[str, float]]] = {v: [] for v in args.variants}
    with dask.config.set(small.UNMANAGED), _cluster(args, False) as plain, _cluster(args, True) as sealed:
        for i, variant in compare.turns(list(args.variants), args.runs + 1):
            client, frame, rows = sealed if "tls" in variant else plain
            # Dask sends work to the current client, which is that of the cluster made last.
            with client.as_current():
                figures = _once(client, frame, variant, rows)
            print(i, variant, {k: round(x, 2) for k, x in figures.items()}, flush=True)
            if i:
                runs[variant].append(figures)
    pairs = [("stock-tls", "tls"), ("rpc-tls", "tls"), ("tls", "tcp"), ("tls-sockets", "tcp-sockets")]
    pairs += [("stock-tls", "tls-sockets"), ("rpc-tls", "tls-sockets"), ("stock", "tcp")]
    return {
        "median": {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in runs.items()},
        "ratios": {
            f"{a} / {b}": statistics.median(
                x["wall_seconds"] / y["wall_seconds"] for x, y in zip(runs[a], runs[b], strict=True)
            )
            for a, b in pairs
            if a in runs and b in runs
        },
        "runs": runs,
    }


def _receive(way: str, pipe: Any, security: Security, size: int) -> None:
    """The other process: takes `size` bytes per round and drops them."""
    if way == "flight":
        from pyarrow import flight

        class Server(flight.FlightServerBase):
            def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
                for _ in reader:
                    pass

        server = Server(
            "grpc+tls://127.0.0.1:0",
            tls_certificates=[(security.tls_worker_cert, security.tls_worker_key)],
            verify_client=True,
            root_certificates=security.tls_ca_file,
        )
        pipe.send(server.port)
        server.serve()
    context = security.get_listen_args("worker")["ssl_context"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    into = memoryview(bytearray(1 << 20))
    scratch = memoryview(bytearray(_OPENED))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    if way == "socket":
        sock = context.wrap_socket(sock, server_side=True)
    sealer = context.wrap_bio(incoming, outgoing, server_side=True)
    if way == "memory":
        _shake(sealer, incoming, outgoing, sock)
    got = 0
    while True:
        if way == "memory":
            try:
                n = sealer.read(len(into), into)
            except ssl.SSLWantReadError:
                n = sock.recv_into(scratch)
                incoming.write(scratch[:n])
                if n:
                    continue
        else:
            n = sock.recv_into(into)
        if not n:
            return
        got += n
        if got >= size:
            got -= size
            pipe.send("round")


def _shake(sealer: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, sock: socket.socket) -> None:
    while True:
        try:
            sealer.do_handshake()
            sock.sendall(outgoing.read())
            return
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            incoming.write(sock.recv(1 << 16))


class _Raw:
    """Sends to another process by one way."""

    def __init__(self, way: str, size: int, total: int) -> None:
        self.way, self.size, self.total = way, size, total
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        security = Security.temporary()
        self.process = context.Process(target=_receive, args=(way, theirs, security, total), daemon=True)
        self.process.start()
        port = self.pipe.recv()
        self.block = np.ones(size, "u1")
        if way == "flight":
            from pyarrow import flight

            self.client = flight.FlightClient(
                f"grpc+tls://127.0.0.1:{port}",
                tls_root_certs=security.tls_ca_file,
                cert_chain=security.tls_worker_cert,
                private_key=security.tls_worker_key,
                override_hostname="dask-internal",
            )
            return
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = security.get_connection_args("worker")["ssl_context"]
        if way == "socket":
            self.sock = ours.wrap_socket(self.sock)
        if way == "memory":
            incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self.sealer = ours.wrap_bio(incoming, self.outgoing)
            _shake(self.sealer, incoming, self.outgoing, self.sock)

    def cpu(self) -> float:
        """Seconds of both processes."""
        t = os.times()
        with open(f"/proc/{self.process.pid}/stat") as f:
            words = f.read().rpartition(")")[2].split()
        return t.user + t.system + (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def round(self) -> None:
        view = self.block.data
        if self.way == "flight":
            self._put()
            return
        for _ in range(self.total // self.size):
            if self.way == "memory":
                for at in range(0, self.size, _SEALED):
                    self.sealer.write(view[at : at + _SEALED])
                    self.sock.sendall(self.outgoing.read())
            else:
                self.sock.sendall(view)
        assert self.pipe.recv() == "round"

    def _put(self) -> None:
        from pyarrow import flight

        batch = pa.record_batch([pa.array(self.block)], names=["x"])
        writer, _ = self.client.do_put(flight.FlightDescriptor.for_path("x"), batch.schema)
        for _ in range(self.total // self.size):
            writer.write_batch(batch)
        writer.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.join()


def raw(args: argparse.Namespace) -> dict[str, Any]:
    """GB/s and CPU seconds of both processes per GB, medians and runs."""
    out: dict[str, Any] = {}
    for mib in (1, 8):
        size = mib << 20
        ways = {way: _Raw(way, size, 512 << 20) for way in RAW}
        rates: dict[str, list[float]] = {way: [] for way in RAW}
        spent: dict[str, list[float]] = {way: [] for way in RAW}
        for i, way in compare.turns(list(RAW), args.runs + 1):
            before, start = ways[way].cpu(), time.perf_counter()
            ways[way].round()
            took, used = time.perf_counter() - start, ways[way].cpu() - before
            if i:
                rates[way].append(ways[way].total / took / 1e9)
                spent[way].append(used / ways[way].total * 1e9)
        for one in ways.values():
            one.close()
        out[f"{mib}M"] = {
            "gb_per_second": {way: statistics.median(r) for way, r in rates.items()},
            "cpu_seconds_per_gb": {way: statistics.median(r) for way, r in spent.items()},
            "runs": rates,
        }
        print(mib, {k: out[f"{mib}M"][k] for k in ("gb_per_second", "cpu_seconds_per_gb")}, flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--size", type=float, default=1.0, help="GB of the shuffle's input")
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--raw", action="store_true", help="ways to send under TLS, instead of shuffles")
    parser.add_argument("--out", default="-", help="JSON file; - for standard output")
    args = parser.parse_args()
    report = {
        **data.facts(f"{data.cores()} CPU cores, two processes, loopback, {ssl.OPENSSL_VERSION}"),
        "load_before": os.getloadavg()[0],
        "arguments": vars(args),
        "results": (raw if args.raw else shuffles)(args),
    }
    data.put(args.out, report)


if __name__ == "__main__":
    main()
