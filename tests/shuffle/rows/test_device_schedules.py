"""Random schedules of streams, frees, failures, flips and spilling: no use after free, no lost row, flips are caught.

Two workers split some inputs, send each other what is theirs, store it, lose memory, spill, and make their outputs. All
of it runs on `LazyMemory`: whatever is not waited for is found, see there. At each allocation some stream may advance
by some steps, and the allocation may fail. `GPURT_SCHEDULES=100000` plays that many.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("rmm")

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.protocol.recovery import shard_id
from dask_gpurt.shuffle.rows import packed, wire
from dask_gpurt.shuffle.rows.device_rows import DeviceRows
from dask_gpurt.shuffle.rows.packed import PackedChunk
from dask_gpurt.shuffle.rows.partition import OutputLayout
from tests.backends.host_frames import HostFrame, HostFrames
from tests.backends.lazy_memory import LazyMemory, Stream

SCHEDULES = int(os.environ.get("GPURT_SCHEDULES", "60"))
OUTPUTS = 4
LAYOUT = OutputLayout({part: "ab"[part % 2] for part in range(OUTPUTS)})


def rows(seed: int) -> HostFrame:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 60))
    text = pd.Series([None if i % 5 == 0 else "x" * int(i % 9) for i in range(n)], dtype="str")
    out = pd.DataFrame({"v": np.arange(n) + 100 * seed, "t": text, "_partitions": rng.integers(0, OUTPUTS, n)})
    return HostFrame(out.set_index(pd.Index(rng.integers(0, 9, n), name="i")))


INPUTS = [rows(i) for i in range(8)]
WANT = {
    (n, part): pd.concat([d[d._partitions == part].drop(columns="_partitions") for d in INPUTS[:n]])
    for n in range(1, len(INPUTS) + 1)
    for part in range(OUTPUTS)
}


class Node:
    """A worker: its memory, three streams, and the chunks that it has."""

    def __init__(self, address: str, cut_bytes: int, rng: Any) -> None:
        self.address, self.rng = address, rng
        self.memory = LazyMemory()
        self.streams = [Stream() for _ in range(3)]
        self.rows = DeviceRows(
            HostFrames(self.memory),
            meta=INPUTS[0].iloc[:0],
            column="_partitions",
            drop_column=True,
            cut_bytes=cut_bytes,
            local_address=address,
        )
        #: (chunk, or its shell and frames by output)
        self.chunks: list[Any] = []
        self.failures = 0.0
        self.memory.fail = self.at_allocation

    def at_allocation(self, number: int) -> bool:
        """Between two steps of a thread anything may happen on the device."""
        if self.rng.random() < 0.3:
            self.rng.choice(self.streams).run(self.rng.randrange(4))
        return bool(self.rng.random() < self.failures)

    def on_some_stream(self, step: Any) -> Any:
        """As a task in some thread, which is retried when it finds no memory."""
        for failures in (0.1, 0.05, 0.0):
            self.memory.use(self.rng.choice(self.streams))
            self.failures = failures
            try:
                return step()
            except MemoryError:
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


def send(parcels: list[Any], receiver: Node, rng: Any) -> None:
    """A message that arrives damaged is refused, and sent again."""
    while True:
        frames = [bytearray(frame) for frame in wire.pack(7, 1, 1, parcels)]
        damaged = rng.random() < 0.3
        if damaged:
            frame = rng.choice([f for f in frames if f])
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        try:
            shards = wire.unpack(frames, 7, 1, {})
        except WireError:
            assert damaged
            continue
        assert not damaged, "a flipped bit was not found"
        receiver.store(shards)
        return


@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**64 - 1),
    n_inputs=st.integers(1, len(INPUTS)),
    cut_bytes=st.sampled_from([1, 600, 2000, 1 << 20]),
)
def test_schedules(seed: int, n_inputs: int, cut_bytes: int) -> None:
    rng = random.Random(seed)
    packed._shelf = packed._Shelf()  # what other tests left is not to be staged here
    nodes = {address: Node(address, cut_bytes, rng) for address in "ab"}
    inputs = list(range(n_inputs))
    rng.shuffle(inputs)
    for i in inputs:
        node = rng.choice(list(nodes.values()))
        shards = node.on_some_stream(lambda i=i, node=node: list(node.rows.split(INPUTS[i], 0, LAYOUT)))
        first = shard_id(i, 0, 0)
        own: list[Any] = []
        parcels: list[Any] = []
        for address, shard in shards:
            shard = node.rows.copied(shard, first + (len(own) if address == node.address else len(parcels)))
            if address == node.address:
                own.append(shard)
            else:
                parcels += node.rows.encoder()(shard)
        if own:
            node.store(own)
        if parcels:
            send(parcels, nodes["b" if node.address == "a" else "a"], rng)
        del shards, own, parcels
        shard = None
        if rng.random() < 0.3:
            rng.choice(node.streams).run(rng.randrange(5))
    parts = list(range(OUTPUTS))
    rng.shuffle(parts)
    for part in parts:
        node = nodes["ab"[part % 2]]
        got = node.on_some_stream(lambda part=part, node=node: node.rows.assemble(node.pieces(part)))
        pd.testing.assert_frame_equal(pd.DataFrame(got), pd.DataFrame(WANT[n_inputs, part]))
    del got
    for node in nodes.values():
        assert not node.memory.faults
        node.chunks.clear()
        node.memory.drain()
        assert node.memory.allocated_bytes() == 0
