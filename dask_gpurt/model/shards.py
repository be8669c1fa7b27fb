"""What a shuffle asks of the memory tiers, so that neither imports the other.

A shuffle run on one worker receives *chunks*: what one sender made of one input partition for all the output
partitions of that worker. In memory a chunk is one contiguous, column-wise block that serves each output as a
view. Under memory pressure it is the chunk that leaves memory; it is then written output by output, so that an
output partition can be read back alone (reading whole chunks once per output would move outputs x bytes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

#: A read-only, contiguous object with the buffer protocol.
Buffer = bytes | bytearray | memoryview


@runtime_checkable
class Chunk(Protocol):
    """Rows received in one message, for several output partitions of this worker. Immutable."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that go when the chunk goes."""

    @property
    def parts(self) -> Collection[int]:
        """Ids of the output partitions that have rows in it."""

    def get(self, part: int) -> Any:
        """The shard of one output partition: a view, no copy. KeyError when it has none."""

    def encode(self, part: int) -> Sequence[Buffer]:
        """The shard as frames to write. Called in an I/O thread; must not touch shared mutable state."""

    def decode(self, frames: Sequence[Buffer]) -> Any:
        """The reverse of `encode`, on a fresh object of the same type made by `shell`. Called in an I/O thread."""

    def shell(self) -> Chunk:
        """The chunk without its rows: keeps what `decode` needs (the schema), costs next to nothing."""


@runtime_checkable
class ShardStore(Protocol):
    """Keeps the chunks of shuffle runs; memory first, then lower tiers by the owner's policy.

    All methods are called on the worker's event loop; none blocks it. A conformance suite for implementations is
    `dask_gpurt.testing.check_shard_store`.
    """

    async def put(self, run: Hashable, chunk_id: Hashable, chunk: Chunk) -> bool:
        """Keep a chunk; False when this id is there already or its run was dropped (nothing is kept then).

        Returns when there is room: waiting here is the backpressure that senders feel. A chunk larger than the
        whole memory budget is still accepted once nothing else can be moved out.
        """

    async def take(self, run: Hashable, part: int) -> list[Any]:
        """Remove and return all shards of one output partition, in order of chunk id (ids of one run sort).

        An output that no rows were sent for gives ``[]``.

        Raises
        ------
        LostData
            A spilled shard could not be read back, or failed its checksum. The run cannot be completed here.
        """

    def drop(self, run: Hashable) -> None:
        """Forget a run and all its chunks, on every tier. Later `put` calls for it return False."""
