"""Messages that lie on a device, over real UCX: order of streams, context, memory that fails, and the safe way.

There is no device: `OrdinarySide` has ordinary memory from RMM, on a stream whose work runs only when it is waited for.
What was read too early is poison.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.memory.pages import Pages, system
from dask_gpurt.shuffle.transport.base import Header, Peer, ReceiveGate, Services
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.records import RunKey, is_device
from tests.shuffle.helpers import receipt_of

pytest.importorskip("ucxx")
pytest.importorskip("rmm")

import rmm

from dask_gpurt.shuffle.transport.ucx.transport import UcxTransport
from tests.tiers.device.host_rmm import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

RUN, SECRET = RunKey(7, 1), bytes(range(16))
POISON = 0xDB
MEMORY = host_memory()


def filled(n: int, byte: int = POISON) -> Any:
    buffer = rmm.DeviceBuffer(size=n, mr=MEMORY)
    ctypes.memset(buffer.ptr, byte, n)
    return buffer


def content(frame: Any) -> bytes:
    return ctypes.string_at(frame.ptr, frame.size) if is_device(frame) else bytes(frame)


def filled_with(text: bytes) -> Any:
    buffer = filled(len(text))
    ctypes.memmove(buffer.ptr, text, len(text))
    return buffer


class OrdinarySide:
    """Stands in for `ucx_device.CudaSide`, with ordinary memory."""

    def __init__(self, *, used: bool = False) -> None:
        self.used = used
        #: work of the stream that has not run
        self._queued: list[Callable[[], None]] = []
        self.entered: list[str] = []
        self.allocated: list[str] = []
        self.prepared: list[str] = []
        #: allocations wait for it
        self.may = threading.Event()
        self.may.set()
        #: allocations that fail, by number
        self.fail: set[int] = set()
        self.broken = False
        self.kept: list[str] = []
        self.keep_fails = False

    def make(self, text: bytes) -> Any:
        """A device buffer whose bytes come when the stream is waited for."""
        buffer = filled(len(text))
        self._queued.append(lambda: ctypes.memmove(buffer.ptr, text, len(text)) and None)
        return buffer

    def in_use(self) -> bool:
        return self.used

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)

    def _synchronise(self) -> None:
        while self._queued:
            self._queued.pop(0)()

    def prepare(self, buffers: Sequence[Any]) -> list[Any]:
        self.prepared.append(threading.current_thread().name)
        if self.broken:
            raise RuntimeError("CUDA error 700")
        self._synchronise()
        return list(buffers)

    def allocate(self, nbytes: int) -> Any:
        self.allocated.append(threading.current_thread().name)
        assert self.may.wait(30)
        if len(self.allocated) in self.fail:
            raise MemoryError("std::bad_alloc: out_of_memory")
        return filled(nbytes)

    def keep(self, buffers: Sequence[Any]) -> list[Any]:
        self.kept.append(threading.current_thread().name)
        if self.keep_fails:
            raise MemoryError("std::bad_alloc: out_of_memory")
        self._synchronise()
        return [filled_with(content(b)) if is_device(b) else b for b in buffers]


class Node:
    """One end of a link."""

    def __init__(self, address: str, side: OrdinarySide) -> None:
        self.side = side
        self.frames: list[list[Any]] = []
        self.losses: list[str] = []
        self.gate = ReceiveGate(1 << 22)
        services = Services(
            address=address,
            gate=self.gate,
            secret_of=lambda run: SECRET if run == RUN else None,
            on_message=self.message,
            on_loss=lambda name, peer, reason, violation: self.losses.append(reason),
        )
        self.transport = UcxTransport(services, Pages(system()), side)
        self.address = address

    def message(self, run: RunKey, sender: str, frames: list[Any], paid: int, done: Any) -> None:
        self.frames.append(frames)
        done("")

    def texts(self) -> list[bytes]:
        return [b"".join(map(content, frames)) for frames in self.frames]

    def peer_for(self, sender: str) -> Peer:
        return Peer(self.address, self.transport.endpoint_for(RUN, sender), self.gate.message_limit)


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    a, b = Node("a", OrdinarySide()), Node("b", OrdinarySide())
    yield a, b
    a.transport.stop()
    b.transport.stop()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("gpurt-ucx")]


def send(node: Node, peer: Peer, *messages: list[Any]) -> list[Future[Any]]:
    return [receipt_of(node.transport, peer, Header(RUN, SECRET), m) for m in messages]


def problems(futures: list[Future[Any]]) -> list[str]:
    _, late = wait(futures, 60)
    assert not late
    return [f.result().problem for f in futures]


@pytest.mark.parametrize("n", [1, 1000, 1 << 19])
def test_a_message_is_sent_when_its_bytes_are_there(pair: tuple[Node, Node], n: int) -> None:
    a, b = pair
    text = bytes(i % 251 for i in range(n))
    assert problems(send(a, b.peer_for("a"), [b"head", a.side.make(text), b""])) == [""]
    ((head, got, empty),) = b.frames
    assert (bytes(head), content(got), bytes(empty)) == (b"head", text, b"")
    assert is_device(got)
    assert b.gate.statistics()["held_bytes"] == 0
    assert (a.losses, b.losses) == ([], [])


def test_what_waits_or_allocates_is_beside_the_ucx_thread_which_has_a_context(pair: tuple[Node, Node]) -> None:
    a, b = pair
    assert a.side.entered == b.side.entered == []  # a context takes memory of the device: not before it is needed
    assert problems(send(a, b.peer_for("a"), [b"host only"])) == [""]
    assert a.side.entered == b.side.entered == []
    peer = b.peer_for("a")
    assert problems(send(a, peer, [a.side.make(b"x" * 100)], [a.side.make(b"y" * 100)])) == ["", ""]
    for names in (a.side.prepared, b.side.allocated, b.side.kept):
        assert names
        assert all(name.startswith("gpurt-ucx-device") for name in names)
    assert a.side.entered == b.side.entered == ["gpurt-ucx"]


def test_a_process_that_uses_the_device_enters_it_at_the_start() -> None:
    side = OrdinarySide(used=True)
    node = Node("a", side)
    assert side.entered == ["gpurt-ucx"]
    node.transport.stop()


def test_messages_behind_one_that_waits_for_memory_keep_their_frames(pair: tuple[Node, Node]) -> None:
    """Frames match receives by their order alone."""
    a, b = pair
    peer = b.peer_for("a")
    assert problems(send(a, peer, [b"first"])) == [""]
    b.side.may.clear()
    futures = send(a, peer, [a.side.make(b"d" * 3000), b"tail"])
    eventually(lambda: b.side.allocated)
    futures += send(a, peer, [b"h" * 5000], [b"i", b"j" * 70])
    futures += send(a, peer, [a.side.make(b"e" * 4000)])
    futures += send(a, peer, [b"k" * 9000])
    eventually(lambda: len(a.side.prepared) == 2)
    assert not any(f.done() for f in futures)
    b.side.may.set()
    assert problems(futures) == [""] * 5
    want = [b"first", b"d" * 3000 + b"tail", b"h" * 5000, b"i" + b"j" * 70, b"e" * 4000, b"k" * 9000]
    assert sorted(b.texts()) == sorted(want)
    assert b.losses == []


def test_where_the_device_has_no_memory_the_message_is_refused_and_the_link_lives(pair: tuple[Node, Node]) -> None:
    a, b = pair
    peer = b.peer_for("a")
    b.side.fail = {2}
    futures = send(a, peer, [a.side.make(b"1" * 2000)])
    assert problems(futures) == [""]
    (refused,) = send(a, peer, [b"head", a.side.make(b"2" * 2000)])
    assert problems(send(a, peer, [b"host"])) == [""]
    receipt = refused.result(60)
    # Not before: the one that comes first would be the second to ask for memory.
    assert problems(send(a, peer, [a.side.make(b"3" * 2000)])) == [""]
    assert "no device memory for" in receipt.problem
    assert "bad_alloc" in receipt.problem
    assert not receipt.lost
    assert sorted(b.texts()) == [b"1" * 2000, b"3" * 2000, b"host"]
    assert b.gate.statistics()["held_bytes"] == 0
    assert (a.losses, b.losses) == ([], [])


def test_where_it_has_no_memory_to_keep_a_message_the_same(pair: tuple[Node, Node]) -> None:
    a, b = pair
    peer = b.peer_for("a")
    b.side.keep_fails = True
    (problem,) = problems(send(a, peer, [b"head", a.side.make(b"1" * 2000)]))
    assert "no device memory to keep" in problem
    b.side.keep_fails = False
    assert problems(send(a, peer, [a.side.make(b"2" * 2000)])) == [""]
    assert b.texts() == [b"2" * 2000]
    assert b.gate.statistics()["held_bytes"] == 0
    assert (a.losses, b.losses) == ([], [])


def test_a_device_that_is_broken_is_a_problem_of_the_message(pair: tuple[Node, Node]) -> None:
    a, b = pair
    a.side.broken = True
    (problem,) = problems(send(a, b.peer_for("a"), [a.side.make(b"x")]))
    assert problem == "the device did not bring the message: RuntimeError('CUDA error 700')"
    assert problems(send(a, b.peer_for("a"), [b"host"])) == [""]


def test_an_error_while_a_message_is_received_ends_the_link_and_not_in_a_wait_for_ever(pair: tuple[Node, Node]) -> None:
    a, b = pair
    peer = b.peer_for("a")
    assert problems(send(a, peer, [b"first"])) == [""]

    def take(nbytes: int) -> memoryview:
        raise MemoryError("of the host")

    b.transport.pool.take = take  # type: ignore[method-assign,assignment]
    (future,) = send(a, peer, [b"x" * 100])
    assert future.result(60).lost


def test_stop_while_memory_is_allocated(pair: tuple[Node, Node]) -> None:
    a, b = pair
    b.side.may.clear()
    (future,) = send(a, b.peer_for("a"), [a.side.make(b"x" * 100)])
    eventually(lambda: b.side.allocated)
    stopping = threading.Thread(target=b.transport.stop)
    stopping.start()
    eventually(lambda: b.transport._stopped)
    b.side.may.set()
    stopping.join(30)
    assert not stopping.is_alive()
    future.result(60)  # stored, or lost: it ends


def eventually(condition: Any) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


def test_sizes_of_device_buffers() -> None:
    block = filled(4000)
    assert is_device(block)
    assert records.size_of(block) == 4000
    assert records.message_bytes([block, b"x"]) == 64 + 4032 + 64
