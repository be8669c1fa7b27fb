"""Between a transport's threads and the event loop: many at a time, none lost, none behind one that waits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import patch

import pytest

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.shuffle.protocol.messages import Card
from dask_gpurt.shuffle.transport.base import Header, Receipt
from dask_gpurt.shuffle.transport.ioloop import IoLoop
from dask_gpurt.shuffle.transport.link.events import Deliver, Instruction, Send
from dask_gpurt.shuffle.transport.link.records import RunKey
from dask_gpurt.shuffle.transport.link_ends import InboundEnd
from dask_gpurt.shuffle.transport.mailbox import FEW, Mailbox, Outcomes
from dask_gpurt.shuffle.transport.peers import Route
from dask_gpurt.shuffle.transport.plane import Plane
from dask_gpurt.shuffle.transport.select.compress import LEAST
from dask_gpurt.shuffle.transport.select.selector import Locality, TransportChooser

KEY = RunKey(3, 1)


class CountingLoop:
    """Counts how often it is called from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.calls = loop, 0
        self.create_future = loop.create_future

    def call_soon_threadsafe(self, function: Any) -> None:
        self.calls += 1
        self.loop.call_soon_threadsafe(function)


def test_what_comes_together_calls_the_loop_once():
    async def main() -> tuple[int, list[int], int]:
        loop: Any = CountingLoop(asyncio.get_running_loop())
        got: list[int] = []

        def take() -> None:
            while box.waiting:
                got.append(box.waiting.popleft())

        box: Mailbox[int] = Mailbox(loop.call_soon_threadsafe, take)
        for i in range(100):
            box.put(i)
        await asyncio.sleep(0)
        first = loop.calls
        box.put(100)
        await asyncio.sleep(0)
        return first, got, loop.calls

    first, got, calls = asyncio.run(main())
    assert (first, calls) == (1, 2)
    assert got == list(range(101))


def test_nothing_is_lost_between_threads():
    """Those who put and the loop that takes meet at every possible moment."""

    async def main() -> set[int]:
        got: set[int] = set()
        box: Mailbox[int]

        def take() -> None:
            while box.waiting:
                got.add(box.waiting.popleft())

        box = Mailbox(asyncio.get_running_loop().call_soon_threadsafe, take)
        threads = [threading.Thread(target=lambda i=i: [box.put(i * 5000 + k) for k in range(5000)]) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            await asyncio.to_thread(t.join)
        for _ in range(3):
            await asyncio.sleep(0)
        return got

    assert asyncio.run(main()) == set(range(20_000))


def test_a_closed_loop_takes_nothing_and_receipts_do_not_mind():
    loop = asyncio.new_event_loop()
    refused: list[int] = []
    box: Mailbox[int] = Mailbox(loop.call_soon_threadsafe, lambda: None, refused.append)
    outcomes = Outcomes(loop)
    _future, ended = outcomes.expect()
    loop.close()
    box.put(1)
    box.put(2)
    assert refused == [1, 2]
    assert not box.waiting
    ended(Receipt("lost", lost=True))


def test_what_a_turn_brings_goes_together():
    """At its end, or a few at a time; and at once when the thread of the turns has ended."""

    class Calls:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def call_soon_threadsafe(self, function: Any) -> None:
            self.calls.append(function)

    loop: Any = Calls()
    seen: list[int] = []
    box: Mailbox[int] = Mailbox(loop.call_soon_threadsafe, lambda: None)
    io = IoLoop("gpurt-test", lambda text: None)

    def turn(n: int) -> None:
        for i in range(n):
            box.put(i)
        seen.append(len(loop.calls))

    def run(n: int) -> None:
        over = threading.Event()
        io.call(lambda: turn(n))
        io.call(lambda: io.later(over.set))  # in the turn after it
        assert over.wait(20)

    run(FEW - 1)
    assert (seen.pop(), len(loop.calls)) == (0, 1)
    loop.calls.pop()()
    box.waiting.clear()
    run(3 * FEW)
    assert (seen.pop(), len(loop.calls)) == (1, 1)
    loop.calls.pop()()
    box.waiting.clear()
    io.stop(lambda: turn(1))
    assert (seen.pop(), len(loop.calls)) == (0, 1)
    loop.calls.pop()()
    io.call(lambda: turn(1))
    assert (seen.pop(), len(loop.calls)) == (1, 1)


def test_receipts_reach_those_who_wait_and_no_others():
    async def main() -> list[str]:
        outcomes = Outcomes(asyncio.get_running_loop())
        expected = [outcomes.expect() for _ in range(3)]
        expected[1][0].cancel()
        await asyncio.to_thread(lambda: [ended(Receipt(str(i))) for i, (_, ended) in enumerate(expected)])
        expected[0][1](Receipt("a second time"))
        await asyncio.sleep(0)
        return [(await expected[i][0]).problem for i in (0, 2)]

    assert asyncio.run(main()) == ["0", "2"]


class Run:
    """Stores messages; those named in `slow` wait until `go`."""

    def __init__(self, slow: set[int]) -> None:
        self.slow, self.go, self.stored = slow, asyncio.Event(), []

    def unpack(self, frames: list[Any]) -> int:
        return int(bytes(frames[0]))

    async def accept(self, shards: int, nbytes: int) -> None:
        if shards in self.slow:
            await self.go.wait()
        self.stored.append(shards)


class Worker:
    address = "tcp://127.0.0.1:1"
    security = None


def test_messages_are_stored_by_few_tasks_and_none_waits_for_another():
    slow = {3, 50, 51, 99}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        plane = Plane(Worker(), ShuffleSettings(enabled=True), lambda **counts: None, 1 << 20)
        run: Any = Run(slow)
        plane.join(run, KEY, bytes(16))
        tasks = 0

        def counted(loop: Any, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
            nonlocal tasks
            tasks += 1
            return asyncio.Task(coroutine, loop=loop, **kwargs)

        loop.set_task_factory(counted)
        done: list[int] = []
        for i in range(100):
            # As a transport's thread would, while the loop has no time.
            plane.inbox.on_message(KEY, "peer", [str(i).encode()], 100, lambda problem, i=i: done.append(i), "tcp")
        for _ in range(20):
            await asyncio.sleep(0)
        assert done == run.stored == [i for i in range(100) if i not in slow]
        assert tasks == len(slow) + (max(slow) < 99), (
            "one, and one more for each that waits and leaves others behind it"
        )
        run.go.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(done) == list(range(100))
        assert not plane.inbox._tasks
        await plane.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("error", "corrupt"), [(MemoryError("no room"), {}), (ValueError("odd"), {"peer": 1})])
def test_a_message_for_which_there_is_no_memory_is_not_counted_as_corrupt(error, corrupt):
    async def main() -> None:
        plane = Plane(Worker(), ShuffleSettings(enabled=True), lambda **counts: None, 1 << 20)
        run: Any = Run(set())

        def unpack(frames: list[Any]) -> int:
            raise error

        run.unpack = unpack
        plane.join(run, KEY, bytes(16))
        done: list[str] = []
        plane.inbox.on_message(KEY, "peer", [b"1"], 100, done.append, "tcp")
        assert done == [repr(error)]
        assert plane.links.corrupt == corrupt
        assert "peer" in plane.links.problems
        await plane.stop()

    asyncio.run(main())


class Machine:
    run, sender = KEY, "peer"

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []

    def stored(self, sequence: int, problem: str) -> list[Instruction]:
        self.answers.append((sequence, problem))
        return []


class Owner:
    """Its own services and gate, and a loop that is called when the test says so."""

    def __init__(self) -> None:
        self.services = self.gate = self
        self.calls: list[Any] = []
        self.given_back: list[int] = []
        self.done: list[Any] = []

    def call(self, function: Any) -> None:
        self.calls.append(function)

    def stored(self, link: Any, nbytes: int) -> None:
        self.given_back.append(nbytes)

    def on_message(self, run: Any, sender: str, frames: Any, paid: int, done: Any) -> None:
        self.done.append(done)


class Silent(InboundEnd):
    """Writes nothing."""

    def put(self, send: Send) -> None:
        pass

    def shut(self) -> None:
        pass


def test_what_ended_meanwhile_is_answered_at_once_and_its_credit_given_back_together():
    owner: Any = Owner()
    link = Silent()
    link.machine, link.owner, link.loop = Machine(), owner, owner  # type: ignore[assignment]
    link.carry_out([Deliver(i, 100 * i, []) for i in range(1, 5)])
    for done, problem in zip(owner.done[:3], ("", "no", ""), strict=True):
        done(problem)
    assert len(owner.calls) == 1
    owner.calls.pop()()
    assert owner.given_back == [600]
    owner.done[3]("")
    owner.calls.pop()()
    assert owner.given_back == [600, 400]
    assert link.machine.answers == [(1, ""), (2, "no"), (3, ""), (4, "")]


class Ways:
    """A transport whose messages end when the test says so, and with `cut` as lost when their run ends."""

    def __init__(self, submitted: list[Any], cut: bool = False) -> None:
        self.submitted, self.cut = submitted, cut

    def submit(self, ended: Any, *args: Any) -> None:
        self.submitted.append(ended)

    def stop(self) -> None:
        pass

    def forget(self, run: RunKey, peer: str | None = None) -> None:
        for ended in self.submitted if self.cut else ():
            ended(Receipt("the run ended", lost=True))


def plane_with_a_route(
    chooser: TransportChooser, way: Ways, count: Any = lambda **counts: None, limit: int = 0
) -> Plane:
    """It has `way` as its transport "tcp", and knows a peer, which asks for credit where it has a `limit`."""
    plane = Plane(Worker(), ShuffleSettings(enabled=True), count, 1 << 20)
    run: Any = Run(set())
    plane.join(run, KEY, bytes(16))
    route = asyncio.get_running_loop().create_future()
    card = Card("", "", limit, (), {"tcp": ["", 0]})
    route.set_result(Route(card, chooser, Header(KEY, bytes(16)), squeezes=True))
    plane._routes[KEY, "peer"] = route
    plane.transports._open["tcp"] = way  # type: ignore[assignment]
    return plane


@pytest.mark.parametrize("end", ["stored", "refused", "cancelled"])
def test_every_message_that_began_ends_for_the_bandwidth(end):
    """Else the link would count as busy for ever."""

    async def main() -> None:
        chooser = TransportChooser(Locality.REMOTE, ["tcp"])
        submitted: list[Any] = []
        plane = plane_with_a_route(chooser, Ways(submitted))

        async def safe() -> Any:
            return {"status": "OK"}

        nothing: Any = None
        task = asyncio.create_task(plane.send(nothing, KEY, "peer", [bytes(2 * LEAST)], safe))
        await asyncio.sleep(0)
        assert chooser.pace._flying == 1
        if end == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            submitted[0](Receipt("" if end == "stored" else "refused", stall_seconds=1.5))
            assert await task == {"status": "OK"}
            assert plane.links.of("peer", "tcp").stall_seconds == 1.5
        assert chooser.pace._flying == 0
        assert (chooser.pace._bytes > 0) == (end == "stored")
        await plane.stop()

    asyncio.run(main())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("of the codec")], ids=["memory", "codec"])
def test_a_message_that_cannot_be_compressed_goes_as_it_is(error):
    async def main() -> None:
        counted: dict[str, int] = {}
        chooser = TransportChooser(Locality.REMOTE, ["tcp"])
        chooser.pace.best = 1e6

        class Way(Ways):
            def submit(self, ended: Any, *args: Any) -> None:
                self.submitted.append(args[-1])
                ended(Receipt())

        submitted: list[Any] = []
        plane = plane_with_a_route(chooser, Way(submitted), counted.update)
        nothing: Any = None
        frames = [bytes(2 * LEAST)]
        with patch.object(plane._squeezer, "squeeze", side_effect=error):
            assert await plane.send(nothing, KEY, "peer", frames, nothing) == {"status": "OK"}
        assert submitted == [frames]
        assert counted["transport_errors"] == 1
        assert type(error).__name__ in plane.links.problems["peer"]
        await plane.stop()

    asyncio.run(main())


def test_a_way_that_is_lost_before_its_first_message_has_never_worked():
    async def main() -> None:
        class Way(Ways):
            def submit(self, ended: Any, *args: Any) -> None:
                ended(self.submitted.pop(0))

        chooser = TransportChooser(Locality.REMOTE, ["tcp"])
        receipts = [Receipt("no connection", lost=True), Receipt(), Receipt("reset", lost=True)]
        plane = plane_with_a_route(chooser, Way(receipts), limit=1 << 20)

        async def ask(peer: str, question: dict[str, Any]) -> dict[str, Any]:
            return {"status": "OK"}

        async def safe() -> Any:
            return {"status": "OK"}

        seen = []
        with patch.object(chooser, "lost", lambda name, now, worked: seen.append((name, worked))):
            while receipts:
                await plane.send(ask, KEY, "peer", [b"text"], safe)
        assert seen == [("tcp", False), ("tcp", True)]
        await plane.stop()

    asyncio.run(main())


@pytest.mark.parametrize("when", ["under way", "before"])
def test_a_run_that_leaves_with_sends_under_way(when):
    """It leaves nothing behind: no route, and no way that counts as bad."""

    async def main() -> None:
        plane = Plane(Worker(), ShuffleSettings(enabled=True), lambda **counts: None, 1 << 20)
        run: Any = Run(set())
        card = Card("", "", 1 << 20, (), {"tcp": ["", 0]}).to_dict()

        async def ask(peer: str, question: dict[str, Any]) -> dict[str, Any]:
            await asyncio.sleep(0)
            return card if "process" in question else {"status": "OK"}

        plane.join(run, KEY, bytes(16))
        submitted: list[Any] = []
        plane.transports._open["tcp"] = Ways(submitted, cut=True)  # type: ignore[assignment]

        async def safe() -> Any:
            return {"status": "OK"}

        task = asyncio.create_task(plane.send(ask, KEY, "peer", [b"text"], safe))
        if when == "under way":
            for _ in range(10):
                await asyncio.sleep(0)
        plane.leave(run, KEY)
        await task
        assert len(submitted) == (when == "under way")
        assert not plane._routes
        assert not plane._choosers["peer"]._out
        await plane.stop()

    asyncio.run(main())
