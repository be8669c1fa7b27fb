"""The parts of a run, each alone: what it needs are fakes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distributed.exceptions import Reschedule
from distributed.shuffle._exceptions import ShuffleClosedError
from distributed.shuffle._limiter import ResourceLimiter

from dask_gpurt.errors import LostData
from dask_gpurt.shuffle import counters as module_of_counters
from dask_gpurt.shuffle.counters import RESTARTED, RESTARTED_SECONDS, ShuffleCounters
from dask_gpurt.shuffle.protocol.messages import Amend, BarrierAnswer, OutputOpened, Reopen, Valid
from dask_gpurt.shuffle.protocol.recovery import Counting, State, Validity, origin, shard_id
from dask_gpurt.shuffle.rows import coalesce, wire
from dask_gpurt.shuffle.rows.kinds import PandasRows
from dask_gpurt.shuffle.rows.partition import OutputLayout, Shard, separate, split
from dask_gpurt.shuffle.rows.received_chunk import ReceivedChunk
from dask_gpurt.shuffle.rows.slices import Slice
from dask_gpurt.shuffle.transport.link.records import RunKey
from dask_gpurt.shuffle.worker import handover, peer_calls, receiver
from dask_gpurt.shuffle.worker import sender as sending
from dask_gpurt.shuffle.worker.amendment import Amendment
from dask_gpurt.shuffle.worker.flushed_buffers import FlushedBuffers
from dask_gpurt.shuffle.worker.join_filter import JoinRows
from dask_gpurt.shuffle.worker.message import Message, Outgoing
from dask_gpurt.shuffle.worker.output_builder import OutputBuilder, counted
from dask_gpurt.shuffle.worker.owners import Owners
from dask_gpurt.shuffle.worker.peer_calls import PeerCalls
from dask_gpurt.shuffle.worker.receiver import Receiver
from dask_gpurt.shuffle.worker.resend import Resender
from dask_gpurt.shuffle.worker.scheduler_calls import SchedulerCalls
from dask_gpurt.shuffle.worker.send_log import RetainBudget, SendLog
from dask_gpurt.shuffle.worker.sender import Sender
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore
from dask_gpurt.shuffle.worker.splitter import Splitter
from tests.shuffle.helpers import held

OWNERS = {0: "a", 1: "b", 2: "a"}
KEY = RunKey(7, 1)


class Host:
    """A run without distributed; its threads are this one."""

    id, run_id, local_address, closed = "s", 1, "a", False
    RETRY_COUNT, RETRY_DELAY_MIN, RETRY_DELAY_MAX = 0, 0.0, 0.0

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.executor: Any = SimpleNamespace(submit=lambda function: function())
        self.rpc: Any = None

    def raise_if_closed(self) -> None:
        if self.closed:
            raise ShuffleClosedError("closed")

    def fail(self, exception: Exception) -> None:
        self.error = exception

    async def offload(self, function: Any, *args: Any) -> Any:
        return function(*args)


def frame() -> pd.DataFrame:
    return pd.DataFrame({"v": np.arange(90), "_partitions": np.arange(90) % 3})


def rows(cut_bytes: int = 1 << 20) -> PandasRows:
    return PandasRows(frame().iloc[:0], "_partitions", True, cut_bytes)


def log() -> SendLog[Shard]:
    return SendLog(RetainBudget(1 << 20), separate)


def outgoing(owners: Owners, ledger: SendLog[Shard]) -> Outgoing:
    splitter = Splitter(
        Host(),
        owners=owners,
        log=ledger,
        column="_partitions",
        rows=rows(),
        join=JoinRows(None, None, ShuffleCounters()),
        direct=lambda addresses: (),
        counters=ShuffleCounters(),
    )
    return splitter.split(frame(), 4)


async def restart() -> None:
    raise AssertionError("restarted")


def shards(partition: int = 0) -> list[Shard]:
    layout = OutputLayout(dict.fromkeys(OWNERS, "a"))
    return [s for _, s in split(frame(), "_partitions", True, shard_id(partition, 0, 0), layout)]


def test_an_input_is_split_for_the_owners_of_its_rows():
    owners, ledger = Owners("a", OWNERS, None), log()
    ledger.epoch = 3
    out = outgoing(owners, ledger)
    assert (out.partition, out.attempt) == (4, 3)
    assert [s.table.num_rows for s in out.own] == [60]
    assert {address: sum(p.rows for p in some) for address, some in out.parcels.items()} == {"b": 30}
    assert [(address, s.table.num_rows) for address, s in out.sent] == [("b", 30)]
    assert {p.input_id for p in out.parcels["b"]} == {s.input_id for s in out.own} == {shard_id(4, 3, 3)}


def split_for(address: str, join: Any, cut_bytes: int = 1 << 12) -> Outgoing:
    """An input of which each worker gets several shards or cuts, split by one worker of two."""

    class There(Host):
        local_address = address

    many = pd.DataFrame({"v": np.arange(9000), "_partitions": np.arange(9000) % 3})
    splitter = Splitter(
        There(),
        owners=Owners(address, OWNERS, None),
        log=log(),
        column="_partitions",
        rows=rows(cut_bytes),
        join=join,
        direct=lambda addresses: (),
        counters=ShuffleCounters(),
    )
    return splitter.split(many, 4)


def received(parcels: list[Any]) -> list[Shard]:
    return wire.unpack(wire.pack(KEY.tag, KEY.run_id, 1, parcels), KEY.tag, KEY.run_id, {})


def filtered() -> Any:
    class Half(JoinRows):
        def keep(self, data: Any) -> Any:
            return np.arange(len(data)) % 2 == 0

    return Half(None, None, ShuffleCounters())


@pytest.mark.parametrize("again", ["alike", "filtered", "elsewhere"])
def test_an_input_that_is_split_twice_counts_once_or_the_shuffle_starts_anew(again):
    # A first attempt has sent some of its shards. The second one numbers them in another way where a filter came in
    # between; or where it is of the worker that gets them, which does not cut what it has for itself.
    restarted: list[int] = []

    async def anew() -> None:
        restarted.append(1)

    async def check() -> None:
        plain = JoinRows(None, None, ShuffleCounters())
        credit: Any = None
        counters = ShuffleCounters()
        one = Receiver(
            Host(), key=KEY, store=MemoryShardStore(), rows=rows(), credit=credit, restart=anew, counters=counters
        )
        first = split_for("a", plain)
        assert len(first.parcels["b"]) > 2
        await one.accept(received(first.parcels["b"][:2]), 100)
        if again == "elsewhere":
            second = split_for("b", plain).own
        else:
            second = received(split_for("a", plain if again == "alike" else filtered()).parcels["b"])
        if again == "alike":
            await one.accept(second, 100)
            assert sum(rows.table().num_rows for some in await one.take(1) for _, rows in some) == 3000
        else:
            with pytest.raises(ShuffleClosedError, match="input 4 was split twice, in different ways"):
                await one.keep(second, 100)
        assert len(restarted) == counters.restarts == (again != "alike")

    asyncio.run(check())


def test_what_is_no_frame_is_refused():
    splitter = Splitter(
        Host(),
        owners=Owners("a", OWNERS, None),
        log=log(),
        column="k",
        rows=rows(),
        join=JoinRows(None, None, ShuffleCounters()),
        direct=lambda addresses: (),
        counters=ShuffleCounters(),
    )
    with pytest.raises(TypeError, match=r"input partition 4 of shuffle s is a builtins\.list"):
        splitter.split([], 4)  # type: ignore[arg-type]


def test_after_the_barrier_inputs_are_split_for_what_is_open():
    owners = Owners("a", OWNERS, None)
    owners.move({1: "a"}, frozenset({1}))
    assert owners.mine() == [0, 1, 2]
    out = outgoing(owners, log())
    assert not out.parcels
    assert [s.parts.tolist() for s in out.own] == [[1]]


def sender(host: Host, limiter: Any, written: list[Any], kept: list[Any]) -> Sender:
    async def write(batches: dict[str, Any]) -> None:
        written.append(batches)

    async def keep(own: list[Shard], nbytes: int) -> None:
        kept.append((own, nbytes))

    plane: Any = SimpleNamespace(unsent=limiter, settings=SimpleNamespace(cut_bytes=1 << 20))
    peers: Any = None
    owners = Owners("a", OWNERS, None)
    return Sender(
        host, key=KEY, plane=plane, owners=owners, peers=peers, write=write, keep=keep, counters=ShuffleCounters()
    )


def test_what_is_staged_is_charged_until_it_is_handed_over_or_dropped():
    async def check() -> None:
        host, written, kept = Host(), [], []
        limiter = ResourceLimiter(1 << 20)
        one = sender(host, limiter, written, kept)
        out = outgoing(Owners("a", OWNERS, None), log())
        await one.stage(out.parcels, out.own)
        assert not limiter.empty
        assert not written
        assert kept == [(out.own, sum(s.nbytes for s in out.own))]
        await one.flush()
        assert limiter.empty
        assert [[p.rows for p in batch.parcels] for one in written for batch in one.values()] == [[30]]
        await one.stage(out.parcels, [])
        await one.drop()
        assert limiter.empty
        assert len(written) == len(kept) == 1
        host.closed = True
        with pytest.raises(ShuffleClosedError):
            await one.stage(out.parcels, [])

    asyncio.run(check())


def test_an_input_that_waits_for_room_when_its_run_closes_is_charged_no_longer(monkeypatch):
    """The budget is the worker's: what one run leaves in it is missing for all that follow."""
    monkeypatch.setattr(sending, "STAGE_BYTES", 1)

    async def check() -> None:
        room = asyncio.Event()
        host, limiter = Host(), ResourceLimiter(1 << 20)
        one = sender(host, limiter, [], [])

        async def slowly(batches: dict[str, Any]) -> None:
            await room.wait()

        one._write = slowly
        parcels = split_for("a", JoinRows(None, None, ShuffleCounters())).parcels
        assert len(parcels["b"]) > 1
        staging = asyncio.create_task(one.stage(parcels, []))
        await asyncio.sleep(0)
        monkeypatch.setattr(sending, "STAGE_BYTES", 1 << 30)
        await one.drop()
        room.set()
        with pytest.raises(ShuffleClosedError):
            await staging
        assert limiter.empty
        # It is closed only after that.
        with pytest.raises(ShuffleClosedError):
            await one.stage(parcels, [])
        assert limiter.empty

    asyncio.run(check())


def test_a_flush_ends_when_all_is_handed_over_that_another_one_has_taken():
    """The first one waits for room when a worker is lost; the second must not close the buffer before it."""

    async def check() -> None:
        go, written = asyncio.Event(), []
        one = sender(Host(), ResourceLimiter(1 << 20), [], [])

        async def slowly(batches: dict[str, Any]) -> None:
            await go.wait()
            written.append(batches)

        one._write = slowly
        await one.stage(outgoing(Owners("a", OWNERS, None), log()).parcels, [])
        first = asyncio.create_task(one.flush())
        await asyncio.sleep(0)
        second = asyncio.create_task(one.flush())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done()
        go.set()
        await asyncio.gather(first, second)
        assert len(written) == 1

    asyncio.run(check())


def test_a_flush_goes_on_waiting_when_rows_are_taken_in_the_turn_in_which_it_is_woken():
    async def check() -> None:
        one = sender(Host(), ResourceLimiter(1 << 20), [], [])
        one._handing = 1
        one._handed.clear()
        stale = asyncio.create_task(one.flush())
        for _ in range(5):
            await asyncio.sleep(0)
        # All is handed over, and the flush of a new epoch has rows in hand before the stale one runs.
        one._handed.set()
        one._handed.clear()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not stale.done()
        one._handing = 0
        one._handed.set()
        await stale

    asyncio.run(check())


async def staged(limiter: ResourceLimiter, written: list[Any], instead: Any) -> tuple[Sender, Any]:
    """A sender with 30 rows to flush, which calls `instead` for its buffer; and the buffer."""
    one = sender(Host(), limiter, written, [])
    write, one._write = one._write, instead
    await one.stage(outgoing(Owners("a", OWNERS, None), log()).parcels, [])
    return one, write


def test_rows_that_the_buffer_refuses_stay_staged():
    """A flush that is tried again would pass without them."""

    async def check() -> None:
        limiter, written = ResourceLimiter(1 << 20), []

        async def closed(batches: dict[str, Any]) -> None:
            raise RuntimeError("Trying to put data in closed buffer")

        one, write = await staged(limiter, written, closed)
        with pytest.raises(RuntimeError, match="closed buffer"):
            await one.flush()
        assert not limiter.empty
        one._write = write
        await one.flush()
        assert limiter.empty
        assert [[p.rows for p in batch.parcels] for one in written for batch in one.values()] == [[30]]

    asyncio.run(check())


def test_rows_of_a_flush_that_is_cancelled_stay_staged():
    """It waits for room; the next flush must not pass without what it has taken."""

    async def check() -> None:
        written: list[Any] = []

        async def waits(batches: dict[str, Any]) -> None:
            await asyncio.Event().wait()

        one, write = await staged(ResourceLimiter(1 << 20), written, waits)
        flush = asyncio.create_task(one.flush())
        await asyncio.sleep(0)
        flush.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flush
        one._write = write
        await one.flush()
        assert [[p.rows for p in batch.parcels] for one in written for batch in one.values()] == [[30]]

    asyncio.run(check())


def test_rows_that_were_sent_before_their_flush_is_cancelled_are_charged_no_longer():
    """It waits for room that others take; what it waits with has gone."""

    async def check() -> None:
        limiter = ResourceLimiter(1 << 20)

        async def sent(batches: dict[str, Any]) -> None:
            for batch in batches.values():
                batch.parcels.clear()
            await asyncio.Event().wait()

        one, _ = await staged(limiter, [], sent)
        flush = asyncio.create_task(one.flush())
        await asyncio.sleep(0)
        flush.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flush
        assert limiter.empty

    asyncio.run(check())


@pytest.mark.parametrize("most", [1, 1000])
def test_a_message_of_many_buffers_is_packed_in_a_thread(monkeypatch, most):
    monkeypatch.setattr(sending, "PACKED_BUFFERS", most)
    offloaded, sent = [], []

    class Threads(Host):
        async def offload(self, function: Any, *args: Any) -> Any:
            offloaded.append(function.__name__)
            return function(*args)

    async def send(run: Any, key: Any, peer: str, frames: Any, safe: Any) -> dict[str, str]:
        sent.append(frames)
        return {"status": "OK"}

    async def check() -> None:
        one = sender(Threads(), ResourceLimiter(1 << 20), written := [], [])
        one._plane = SimpleNamespace(send=send, takes_device=lambda key, peer: False)
        one._peers = SimpleNamespace(unless_lost=lambda address, coroutine: coroutine, call=None)
        out = outgoing(Owners("a", OWNERS, None), log())
        await one.stage(out.parcels, [])
        await one.flush()
        ((address, batch),) = written[0].items()
        want = wire.pack(KEY.tag, KEY.run_id, 1, batch.parcels)
        await one.send(address, [batch])
        assert [[bytes(f) for f in frames] for frames in sent] == [[bytes(f) for f in want]]
        assert offloaded == (["_message"] if most == 1 else [])

    asyncio.run(check())


def test_more_messages_than_there_are_numbers_are_refused():
    async def check() -> None:
        host = Host()
        sent: Any = SimpleNamespace(stage=None)
        one = Resender(host, owners=Owners("a", OWNERS, None), log=log(), sender=sent, rows=rows(1))
        (shard,) = shards()
        with pytest.raises(OverflowError, match="must have at most 5"):
            await one.send(shard, "b", 0, 4, 5)

    asyncio.run(check())


def test_a_shard_is_stored_once_and_a_copy_waits_for_it():
    class Slow(MemoryShardStore):
        def __init__(self) -> None:
            super().__init__()
            self.go = asyncio.Event()

        async def put(self, *args: Any) -> bool:
            await self.go.wait()
            return await super().put(*args)

    async def check() -> None:
        store, counters = Slow(), ShuffleCounters()
        credit: Any = None
        one = Receiver(Host(), key=KEY, store=store, rows=rows(), credit=credit, restart=restart, counters=counters)
        first = asyncio.create_task(one.accept(shards(), 100))
        await asyncio.sleep(0)
        second = asyncio.create_task(one.accept(shards(), 100))
        await asyncio.sleep(0)
        assert not first.done()
        assert not second.done()
        store.go.set()
        await asyncio.gather(first, second)
        assert (counters.duplicates, counters.chunks, one.received_bytes) == (1, 1, 200)
        await one.settle()
        assert [[rows.table().num_rows for _, rows in some] for some in await one.take(1)] == [[30]]
        one.drop()
        assert not held(store)
        with pytest.raises(TypeError, match="must be a Message"):
            await one.receive(b"")  # type: ignore[arg-type]

    asyncio.run(check())


def test_no_output_is_made_without_rows_that_could_not_be_stored_after_the_barrier():
    class Full(MemoryShardStore):
        async def put(self, *args: Any) -> bool:
            raise OSError("no space left")

    async def check() -> None:
        credit: Any = None
        host = Host()
        one = Receiver(
            host, key=KEY, store=Full(), rows=rows(), credit=credit, restart=restart, counters=ShuffleCounters()
        )
        layout = OutputLayout(dict.fromkeys(OWNERS, "a"))
        await one.accept([s for _, s in split(frame()[:9], "_partitions", True, shard_id(0, 0, 0), layout)], 100)
        # Two outputs at once; the error is the first one's.
        first, second = await asyncio.gather(one.settle(), one.settle(), return_exceptions=True)
        assert isinstance(first, OSError)
        assert isinstance(second, LostData)
        with pytest.raises(LostData, match="no space left"):
            await one.settle()

    asyncio.run(check())


def test_a_message_that_does_not_parse_is_refused_and_its_credit_given_back():
    async def check() -> None:
        given: list[int] = []
        credit: Any = SimpleNamespace(
            arrive=lambda key, sender, nbytes: lambda: given.append(nbytes), granted=lambda key, sender: 9
        )
        counters = ShuffleCounters()
        one = Receiver(
            Host(), key=KEY, store=MemoryShardStore(), rows=rows(), credit=credit, restart=restart, counters=counters
        )
        answer = await one.receive(Message([b"no message"], "b"))
        assert "gpurt-refused" in answer
        assert counters.refused == len(given) == 1

    asyncio.run(check())


@pytest.mark.parametrize("least", [1, 1 << 20])
def test_a_message_of_many_buffers_is_unpacked_in_a_thread(monkeypatch, least):
    monkeypatch.setattr(receiver, "OFFLOAD_HEAD_BYTES", least)
    offloaded = []

    class Threads(Host):
        async def offload(self, function: Any, *args: Any) -> Any:
            offloaded.append(function)
            return function(*args)

    async def check() -> None:
        credit: Any = SimpleNamespace(arrive=lambda *args: lambda: None, granted=lambda *args: 0)
        counters = ShuffleCounters()
        one = Receiver(
            Threads(), key=KEY, store=MemoryShardStore(), rows=rows(), credit=credit, restart=restart, counters=counters
        )
        message = Message(wire.pack(KEY.tag, KEY.run_id, 1, [wire.encode(s) for s in shards()]), "b")
        assert (await one.receive(message))["status"] == "OK"
        assert len(offloaded) == (least == 1)

    asyncio.run(check())


def test_a_send_ends_with_its_peer(monkeypatch):
    monkeypatch.setattr(peer_calls, "NEWS_SECONDS", 60.0)
    monkeypatch.setattr(peer_calls, "ODD_SECONDS", 0.01)

    async def never() -> Any:
        await asyncio.Event().wait()

    async def fails(error: Exception) -> Any:
        raise error

    async def check() -> None:
        lost: set[str] = set()
        calls = PeerCalls(Host(), lost, lambda address: None)
        under_way = asyncio.create_task(calls.unless_lost("b", never()))
        failed = asyncio.create_task(calls.unless_lost("b", fails(OSError("gone"))))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not under_way.done()
        assert not failed.done()
        with pytest.raises(ArithmeticError):  # does not look like a lost peer
            await calls.unless_lost("b", fails(ArithmeticError()))
        lost.add("b")
        calls.end(["b"])
        assert await under_way == await failed == {"status": "OK"}
        assert await calls.unless_lost("b", never()) == {"status": "OK"}

    asyncio.run(check())


def amendment(
    host: Host,
    owners: Owners,
    ledger: SendLog[Shard],
    reopened: list[int],
    sent: list[Any],
    unlink: Any = lambda address: None,
) -> Amendment:
    async def send_all(epoch: int, routed: list[Any]) -> None:
        sent.append((epoch, routed))

    resender: Any = SimpleNamespace(send_all=send_all, route=list)
    handover: Any = None
    host.rpc = SimpleNamespace(remove=lambda address: None)
    return Amendment(
        host,
        state=State(),
        owners=owners,
        counting=Counting(None, None),
        log=ledger,
        peers=PeerCalls(host, ledger.lost, unlink),
        resender=resender,
        handover=handover,
        void=lambda parts: None,
        reopen=lambda: reopened.append(ledger.epoch),
        counters=ShuffleCounters(),
    )


def test_the_links_of_a_lost_worker_end():
    """Once: it may come back under its address."""

    async def check() -> None:
        owners, ledger = Owners("a", OWNERS, None), log()
        unlinked: list[str] = []
        one = amendment(Host(), owners, ledger, [], [], unlinked.append)
        one.answer(Amend(1, ["b"], {1: "c"}, {}, {}, None))
        one.answer(Amend(2, ["b", "c"], {1: "a"}, {}, {}, None))
        assert unlinked == ["b", "c"]

    asyncio.run(check())


def test_a_loss_has_rows_sent_again_and_inputs_wait_until_it_is_known_what_counts():
    async def check() -> None:
        owners, ledger = Owners("a", OWNERS, None), log()
        reopened: list[int] = []
        sent: list[Any] = []
        one = amendment(Host(), owners, ledger, reopened, sent)
        before, late = outgoing(owners, ledger), outgoing(owners, ledger)
        assert await one.may_send(before)
        one.check_sent(before)
        new = Amend(1, ["b"], {1: "c"}, {}, {}, None)
        answer: Any = one.answer(new)
        assert answer.epoch == 1
        assert [entry[:2] for entry in answer.vouched] == [(4, 0)]
        assert owners.worker_for[1] == "c"
        assert await one.settle()
        assert [(epoch, len(routed)) for epoch, routed in sent] == [(1, 1)]
        waits = asyncio.create_task(one.may_send(outgoing(owners, ledger)))
        await asyncio.sleep(0)
        assert not waits.done()
        one.answer(Valid(0, {}))  # of another epoch
        await asyncio.sleep(0)
        assert not waits.done()
        one.answer(Valid(1, {4: 0}))
        assert await waits is False  # it counts already
        with pytest.raises(ShuffleClosedError, match="was amended while input 4 was split"):
            await one.may_send(late)
        one.answer(new)
        assert len(sent) == len(reopened) == 1
        one.answer(Reopen(1))
        assert len(reopened) == 2
        one.close()

    asyncio.run(check())


@pytest.mark.parametrize("lost", [set(), {"b"}, {"a"}])
def test_a_worker_under_the_address_of_a_lost_one_owns_no_output(lost):
    """It has no rows, so the output would be empty."""
    moved: list[Any] = []

    async def move_task(key: str, owner: str) -> None:
        moved.append((key, owner))

    nothing: Any = None
    scheduler: Any = SimpleNamespace(move_task=move_task)
    one = OutputBuilder(
        Host(),
        sync=lambda call, *args: asyncio.run(call(*args)),
        rows=rows(),
        owners=Owners("a", OWNERS, frozenset()),
        counting=Counting(frozenset(), None),
        receiver=nothing,
        scheduler=scheduler,
        lost=lost,
        made_all=lambda all_made: None,
        counters=ShuffleCounters(),
    )
    if "a" in lost:
        with pytest.raises(Reschedule):
            one.check_place(0, "output")
    else:
        one.check_place(0, "output")
    assert moved == ([("output", "a")] if "a" in lost else [])


def test_a_worker_that_got_outputs_of_a_lost_one_has_not_made_all_of_its_own():
    """Else what it retains would be the first to go when another run is short of memory."""

    async def check() -> None:
        async def settle() -> None:
            pass

        async def take(part: int) -> list[Any]:
            return []

        owners, ledger = Owners("a", OWNERS, None), log()
        one: Any = amendment(Host(), owners, ledger, [], [])
        outputs: Any = OutputBuilder(
            Host(),
            sync=None,  # type: ignore[arg-type]
            rows=rows(),
            owners=owners,
            counting=Counting(None, None),
            receiver=SimpleNamespace(settle=settle, take=take),  # type: ignore[arg-type]
            scheduler=None,  # type: ignore[arg-type]
            lost=ledger.lost,
            made_all=ledger.idle,
            counters=ShuffleCounters(),
        )
        one._void = outputs.void
        one.answer(Amend(1, ["b"], {1: "a"}, {}, {}, None))
        idle = []
        for part in (0, 2, 1):
            await outputs._take(part)
            idle.append(ledger in ledger.budget.idle)
        assert idle == [False, False, True]
        one.close()

    asyncio.run(check())


def test_only_attempts_that_count_are_assembled():
    (shard,) = shards()
    old, new = shard_id(5, 0, 0), shard_id(5, 1, 1)
    mixed = np.array([old] * 30 + [new] * 60)
    pieces = [
        (old, Slice.whole(shard.table)),
        (new, Slice.whole(shard.table)),
        (old, Slice.whole(shard.table, None, mixed)),
    ]
    assert counted(None, pieces) is pieces
    got = counted(Validity(1, {}), pieces)
    assert [(i, rows.table().num_rows) for i, rows in got] == [(new, 90), (new, 60)]


def test_merged_rows_of_an_output_that_is_handed_over_are_apart_by_input():
    made = [s for partition in (3, 1, 2) for s in shards(partition)]
    (one,) = coalesce.merged(made)
    pieces = ReceivedChunk([one]).get(1)
    ordered = handover._by_input(pieces)
    assert not pieces
    assert [(origin(id), table.num_rows) for id, table in ordered] == [((p, 0), 30) for p in (1, 2, 3)]
    assert all(table.column("v").to_pylist() == list(range(1, 90, 3)) for _, table in ordered)


def test_the_barrier_is_asked_again_when_inputs_are_missing():
    class Scheduler:
        async def shuffle_barrier(self, **kwargs: Any) -> str:
            return BarrierAnswer.RUN_AGAIN.value

        async def shuffle_restrict_task(self, **kwargs: Any) -> dict[str, Any]:
            return {"status": "OK"}

        async def gpurt_shuffle_open_output(self, **kwargs: Any) -> dict[str, Any]:
            return OutputOpened(True).to_dict()

    async def check() -> None:
        calls = SchedulerCalls(Scheduler(), "s", 1, ShuffleCounters())
        with pytest.raises(Reschedule):
            await calls.barrier(True)
        with pytest.raises(Reschedule):
            await calls.move_task("key", "b")
        assert await calls.open_again("key")

    asyncio.run(check())


def test_a_flushed_send_buffer_gets_a_successor():
    class Buffer:
        max_message_size = concurrency_limit = 1
        memory_limiter = None

        def __init__(self, **kwargs: Any) -> None:
            self._accepts_input = True
            self.closed = False

        async def close(self) -> None:
            self.closed = True

    async def check() -> None:
        buffers = FlushedBuffers(ShuffleCounters())
        send: Any = None
        first: Any = Buffer()
        assert buffers.reopened(first, send) is first
        first._accepts_input = False
        assert buffers.reopened(first, send) is not first
        await buffers.close()
        assert first.closed

    asyncio.run(check())


def test_what_is_known_of_restarts_is_of_the_newest_shuffles() -> None:
    counters = ShuffleCounters()
    assert [counters.restarted("first", run) for run in (1, 1, 2)] == [1, 1, 2]  # a run counts once
    for n in range(RESTARTED - 1):
        assert counters.restarted(f"other-{n}", 1) == 1
    assert counters.restarted("first", 3) == 3  # and is the newest now
    for n in range(RESTARTED - 1):
        counters.restarted(f"later-{n}", 1)
    assert counters.restarted("first", 4) == 4
    for n in range(RESTARTED):
        counters.restarted(f"last-{n}", 1)
    assert counters.restarted("first", 5) == 1


def test_restarts_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of each day has the same shuffle, and a worker lives for months."""
    now = 1000.0
    monkeypatch.setattr(module_of_counters.time, "monotonic", lambda: now)
    counters = ShuffleCounters()
    assert [counters.restarted("daily", run) for run in (1, 2)] == [1, 2]
    now += RESTARTED_SECONDS / 2
    assert counters.restarted("daily", 3) == 3
    now += RESTARTED_SECONDS / 2
    assert counters.restarted("daily", 4) == 2
