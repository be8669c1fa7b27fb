"""Random schedules of streams, frees, allocation failures, flips and spilling, played on `DeviceRows`.

`play(seed)` plays one, without a cluster: two workers split some inputs, send each other what is theirs, store it, lose
memory, spill, and make their outputs. All of it lies in `LazyMemory`: what is not waited for is found, see there. At
each allocation, and before each wait, some stream may advance by some steps; the allocation may fail. Messages go by
the host, where one may arrive damaged, or from device to device, where the receiver may have no memory.

Inputs and outputs are Arrow tables: what pandas makes of them is not the question, and took nine tenths of the time.
"""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pyarrow as pa

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.protocol.recovery import shard_id
from dask_gpurt.shuffle.rows import device_rows, packed, wire
from dask_gpurt.shuffle.rows.device_rows import DeviceRows
from dask_gpurt.shuffle.rows.packed import PackedChunk
from dask_gpurt.shuffle.rows.partition import OutputLayout
from tests.backends.host_frames import HostFrames, HostTable
from tests.backends.lazy_memory import LazyMemory, Stream

OUTPUTS = 4
LAYOUT = OutputLayout({part: "ab"[part % 2] for part in range(OUTPUTS)})
#: what happened in the schedules of this process
COUNTS: collections.Counter[str] = collections.Counter()
CUTS = (1, 500, 500, 1000, 1000, 1 << 20)


class Rows:
    """An input."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        n = int(rng.integers(0, 12))
        text = [None if i % 5 == 0 else "x" * int(i % 9) for i in range(n)]
        self.table = pa.table({"v": np.arange(n) + 100 * seed, "t": text, "i": rng.integers(0, 9, n)})
        self.table = self.table.cast(pa.schema([("v", pa.int64()), ("t", pa.string()), ("i", pa.int64())]))
        self.parts = rng.integers(0, OUTPUTS, n)
        self.ids = pa.table({"ids": self.parts})

    def __len__(self) -> int:
        return len(self.parts)


INPUTS = [Rows(i) for i in range(4)]
WANT = {
    (n, part): pa.concat_tables([d.table.filter(pa.array(d.parts == part)) for d in INPUTS[:n]])
    for n in range(1, len(INPUTS) + 1)
    for part in range(OUTPUTS)
}


class ArrowFrames(HostFrames):
    """`HostFrames` without pandas."""

    def apart(self, frame: Rows, column: str, meta: Any) -> tuple[HostTable, HostTable]:  # type: ignore[override]
        return self._put(frame.table, "input"), self._put(frame.ids, "ids")

    def frame(self, table: HostTable, meta: Any) -> Any:
        return self._get(table)


class Meta:
    """As much of a frame as `DeviceRows` looks at."""

    columns = ("v", "t")

    def drop(self, columns: str) -> Meta:
        return self

    def copy(self) -> pa.Table:
        return INPUTS[0].table.slice(0, 0)


class Node:
    """A worker: its memory, three streams, and the chunks that it has."""

    def __init__(self, address: str, cut_bytes: int, rng: random.Random) -> None:
        self.address, self.rng = address, rng
        self.memory = LazyMemory()
        self.streams = [Stream() for _ in range(3)]
        self.rows = DeviceRows(
            ArrowFrames(self.memory),
            meta=Meta(),
            column="_partitions",
            drop_column=True,
            cut_bytes=cut_bytes,
            local_address=address,
        )
        #: (chunk, or its shell and frames by output)
        self.chunks: list[Any] = []
        self.failures = 0.0
        self.asked = False
        self.memory.fail = self.at_allocation
        self.memory.meanwhile = self.meanwhile

    def meanwhile(self) -> None:
        """Between two steps of a thread anything may happen on the device."""
        if self.rng.random() < 0.3:
            self.rng.choice(self.streams).run(self.rng.randrange(4))
        if not self.asked and self.rng.random() < 0.05:
            self.others_need_room()

    def others_need_room(self) -> None:
        """An allocation of another thread fails."""
        stream, self.asked = self.memory.stream, True
        self.memory.use(self.rng.choice(self.streams))
        COUNTS["bytes that left for others"] += packed.shelf.leave(self.rng.randrange(1, 2000))
        self.memory.use(stream)
        self.asked = False

    def at_allocation(self, number: int) -> bool:
        self.meanwhile()
        fails = self.rng.random() < self.failures
        COUNTS["allocations"] += 1
        COUNTS["allocations that failed"] += fails
        return fails

    def on_some_stream(self, step: Any) -> Any:
        """As a task in some thread, which is retried when it finds no memory."""
        for failures in (0.1, 0.05, 0.0):
            self.memory.use(self.rng.choice(self.streams))
            self.failures = failures
            try:
                return step()
            except MemoryError:
                COUNTS["steps tried again by their task"] += 1
                continue
            finally:
                self.failures = 0.0
        raise AssertionError("the last try has memory")

    def store(self, shards: list[Any]) -> None:
        self.memory.use(self.rng.choice(self.streams))
        chunk = PackedChunk(shards)
        if self.rng.random() < 0.3:
            frames = {part: [bytes(frame) for frame in chunk.encode(part)] for part in chunk.parts}
            self.chunks.append((chunk.shell(), frames))
            COUNTS["chunks spilled"] += 1
        else:
            self.chunks.append((chunk, None))

    def pieces(self, part: int) -> list[Any]:
        out = []
        for chunk, frames in self.chunks:
            if frames is not None and part in frames:
                out += chunk.decode(frames[part])
            elif frames is None and part in chunk.parts:
                out += chunk.get(part)
        return out


def send(parcels: list[Any], sender: Node, receiver: Node, rng: random.Random) -> None:
    """A message that is refused, as it is damaged or finds no memory, comes again by the host."""
    sender.memory.use(rng.choice(sender.streams))
    if rng.random() < 0.5:
        parcels = [wire.on_host(p) for p in parcels]
    while True:
        frames, damaged = received(wire.pack(7, 1, 1, parcels), sender, receiver, rng)
        COUNTS["messages"] += 1
        COUNTS["messages damaged, and found out"] += damaged
        if frames is None:
            COUNTS["messages refused for memory"] += 1
            parcels = [wire.on_host(p) for p in parcels]
            continue
        try:
            shards = wire.unpack(frames, 7, 1, {}, receiver.rows.adopt)
        except WireError:
            assert damaged
            continue
        assert not damaged, "a flipped bit was not found"
        receiver.store(shards)
        return


def received(frames: list[Any], sender: Node, receiver: Node, rng: random.Random) -> tuple[list[Any] | None, bool]:
    """(frames as they arrive, or None: there is no memory for them; whether one is damaged)."""
    out: list[Any] = []
    for frame in frames:
        if isinstance(frame, memoryview):
            out.append(bytearray(frame))
            continue
        # As UCX does it: of bytes that must be there, into memory that must be free, past every stream.
        sender.memory.whole(frame)
        receiver.failures = 0.1
        try:
            block = receiver.memory.allocate(frame.nbytes)
        except MemoryError:
            return None, False
        finally:
            receiver.failures = 0.0
        COUNTS["frames from device to device"] += 1
        receiver.memory.fill(block, sender.memory.bytes_of(frame))
        out.append(block)
    damaged = rng.random() < 0.3
    if damaged:
        frame = rng.choice([f for f in out if isinstance(f, bytearray) and f])
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return out, damaged


def play(seed: int) -> None:
    """Play a schedule; raises AssertionError, or what the code under it raised, when something is wrong."""
    rng = random.Random(seed)
    packed.shelf = device_rows.shelf = packed.Shelf()  # what others left is not to be staged here
    n_inputs, cut_bytes = rng.randint(1, len(INPUTS)), rng.choice(CUTS)
    nodes = {address: Node(address, cut_bytes, rng) for address in "ab"}
    inputs = list(range(n_inputs))
    rng.shuffle(inputs)
    # Packs of every size may stay on the device.
    least, device_rows.SENT_BYTES = device_rows.SENT_BYTES, 0
    try:
        for i in inputs:
            _input(i, nodes, rng)
        parts = list(range(OUTPUTS))
        rng.shuffle(parts)
        for part in parts:
            node = nodes["ab"[part % 2]]
            got = node.on_some_stream(lambda part=part, node=node: node.rows.assemble(node.pieces(part)))
            assert got.equals(WANT[n_inputs, part]), f"output {part}"
    finally:
        device_rows.SENT_BYTES = least
    got = None
    for node in nodes.values():
        assert not node.memory.faults, node.memory.faults
        node.chunks.clear()
        node.memory.drain()
    for node in nodes.values():
        assert node.memory.allocated_bytes() == 0, "memory was not given back"


def _input(i: int, nodes: dict[str, Node], rng: random.Random) -> None:
    """Split an input on some worker; store and send what comes of it."""
    node = rng.choice(list(nodes.values()))
    other = nodes["b" if node.address == "a" else "a"]
    direct = other.address if rng.random() < 0.5 else ""
    shards = node.on_some_stream(lambda: list(node.rows.split(INPUTS[i], 0, LAYOUT, direct=direct)))
    first = shard_id(i, 0, 0)
    own: list[Any] = []
    parcels: list[Any] = []
    for address, shard in shards:
        shard = node.rows.copied(shard, first + (len(own) if address == node.address else len(parcels)))
        if address == node.address:
            own.append(shard)
        else:
            parcels += node.rows.encoder()(shard)
    del shards
    if own:
        node.store(own)
    if rng.random() < 0.3:
        rng.choice(node.streams).run(rng.randrange(5))
    if parcels:
        send(parcels, node, other, rng)
