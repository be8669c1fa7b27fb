"""Two processes that send each other messages as workers do; used by `benchmarks.transport`.

Each has servers of distributed's, one of them under TLS, and the data plane of a worker for every way that is to be
forced. What comes is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import subprocess
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Security

SIZES = {"64K": 1 << 16, "1M": 1 << 20, "8M": 8 << 20, "64M": 64 << 20}
TRANSPORTS = ("rpc", "tcp", "ucx", "tls", "rpc-tls")
WAYS = (*TRANSPORTS, "auto")
#: ways of a cluster under TLS -> the transport that is forced there, and how its messages are counted
SEALED = {"tls": ("tcp", "tls"), "rpc-tls": ("rpc", "rpc")}
#: messages under way at a time: as many as a run has, but not many long ones
AT_ONCE = 10
AHEAD = 16 << 20
#: so that a message of 64 MiB is allowed
RECEIVE_BUDGET = 512 << 20
LOCAL = "127.0.0.1"
NAMESPACE = "gpurtbench"
_NEWNS, _SLAVE, _RECURSIVE, _DETACH = 0x20000, 1 << 19, 1 << 14, 2


def counted(way: str) -> str:
    """How messages of a way are counted."""
    return SEALED[way][1] if way in SEALED else way


def cpu() -> float:
    """Seconds of this process."""
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
        return await self.end.rpc(peer).shuffle_receive(data=question, way=self.way)


class End:
    """One process: a server of distributed's, and the data plane of a worker for each way to be forced."""

    def __init__(self, host: str, security: Security) -> None:
        self.host, self.security = host, security
        self.hold = False
        self.runs: dict[str, tuple[Any, Any]] = {}
        #: what is sent; kept, as 64 MiB of fresh memory take as long as to send them
        self.block = memoryview(b"")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.do(self._start())

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    async def _start(self) -> None:
        from distributed.core import Server

        #: scheme -> server
        self.servers: dict[str, Any] = {}
        for scheme in ("tcp", "tls"):
            sealed = {"connection_args": self.security.get_connection_args("worker")} if scheme == "tls" else {}
            server = self.servers[scheme] = Server({"shuffle_receive": self.receive}, deserialize=True, **sealed)
            await server.rpc.start()
            listens = self.security.get_listen_args("worker") if scheme == "tls" else {}
            await server.listen(f"{scheme}://{self.host}:0", **listens)

    def address(self, way: str) -> str:
        return str(self.servers["tls" if way in SEALED else "tcp"].address)

    def rpc(self, peer: str) -> Any:
        return self.servers[peer.partition("://")[0]].rpc(peer)

    async def open(self, way: str) -> None:
        """A plane with this transport, and a run on it."""
        from dask_gpurt.config import ShuffleSettings
        from dask_gpurt.memory.pages import pages
        from dask_gpurt.shuffle.transport.link.records import RunKey
        from dask_gpurt.shuffle.transport.plane import Plane

        pages.keep(True)
        forced = SEALED[way][0] if way in SEALED else way
        settings = ShuffleSettings(enabled=True, transport=forced, receive_budget=RECEIVE_BUDGET)
        worker: Any = types.SimpleNamespace(address=self.address(way), security=self.security)
        plane = Plane(worker, settings, lambda **counts: None, RECEIVE_BUDGET)
        run: Any = Drop(self, way)
        plane.join(run, RunKey(1, WAYS.index(way)), bytes(16))
        self.runs[way] = plane, run

    async def receive(self, data: Any, way: str) -> Any:
        """What a worker does with a message by distributed's comms."""
        from dask_gpurt.shuffle.transport.link import records

        plane, run = self.runs[way]
        key = records.RunKey(1, WAYS.index(way))
        if isinstance(data, dict):
            return await plane.answer(key, data)
        stored = plane.arrive(key, data.sender, records.message_bytes(data.frames))
        await run.accept(data.frames, data.nbytes)
        stored()
        return {"status": "OK", "granted": plane.granted(key, data.sender)}

    def message(self, block: Any, way: str) -> Any:
        """As it goes by distributed's comms."""
        from dask_gpurt.shuffle.worker.message import Message, as_is

        return as_is(Message([block], self.address(way)))

    async def send(self, way: str, peer: str, size: int, count: int) -> None:
        """Messages of `size`, as many at a time as a run sends."""
        from dask_gpurt.shuffle.transport.link.records import RunKey

        plane, run = self.runs[way]
        key = RunKey(1, WAYS.index(way))
        if self.block.nbytes != size:
            self.block = memoryview(np.ones(size, "u1").data)
        block = self.block
        left = iter(range(count))

        async def safe() -> Any:
            return await self.rpc(peer).shuffle_receive(data=self.message(block, way), way=way)

        async def some() -> None:
            for _ in left:
                answer = await plane.send(run.ask, key, peer, [block], safe)
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


def receiver(pipe: Any, host: str, security: Security) -> None:
    """The other process."""
    if host != LOCAL:
        enter(NAMESPACE)
    end = End(host, security)
    while (asked := pipe.recv()) is not None:
        if asked == "cpu":
            pipe.send(cpu())
        else:
            way, end.hold = asked
            end.do(end.open(way))
            pipe.send(end.address(way))
    os._exit(0)


class Bench:
    """Sends to the other process.

    Parameters
    ----------
    host, here
        Addresses of the two.
    fetched
        Long messages of one host may be read where they lie, else all go through sockets.
    """

    def __init__(self, host: str, here: str, fetched: bool = True) -> None:
        from distributed import Security

        from dask_gpurt.shuffle.transport.tcp import cma

        if not fetched:
            cma.able = lambda: False
        security = Security.temporary()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receiver, args=(theirs, host, security), daemon=True)
        self.process.start()
        self.end = End(here, security)
        self.peers: dict[str, str] = {}

    def ask(self, what: Any) -> Any:
        self.pipe.send(what)
        return self.pipe.recv()

    def open(self, way: str, hold: bool = False) -> None:
        """Connect, so that the clock sees messages only."""
        self.peers[way] = self.ask((way, hold))
        self.end.do(self.end.open(way))
        if not hold:
            self.end.do(self.end.send(way, self.peers[way], 10, 1))

    def send_held(self, way: str) -> Any:
        """One message to a receiver that never says that it is stored; the receipt, as a future."""
        from dask_gpurt.shuffle.transport.base import Receipt
        from dask_gpurt.shuffle.transport.link.records import RunKey

        self.open(way, hold=True)
        plane, run = self.end.runs[way]
        key = RunKey(1, WAYS.index(way))

        route = self.end.do(plane._route(run.ask, key, self.peers[way]))

        async def held() -> Any:
            name = counted(way)
            if name != "rpc":
                return await plane._direct(name, route, key, self.peers[way], [b"held"])
            try:
                return await self.end.rpc(self.peers[way]).shuffle_receive(data=self.end.message(b"held", way), way=way)
            except OSError as e:
                return Receipt(repr(e), lost=True)

        return asyncio.run_coroutine_threadsafe(held(), self.end.loop)

    def send(self, way: str, size: int, total: int) -> None:
        """`total` bytes in messages of `size`."""
        self.end.do(self.end.send(way, self.peers[way], size, total // size))

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
