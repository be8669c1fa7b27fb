"""What travels between the runs of a shuffle: the result of a split, parcels that wait together, and the message.

Theory of operation. A split gives an `Outgoing`. Its parcels wait in a `Batch` per receiver. What batches hold
is cut to `groups` that fit a message. A `Message` is the frames of one (see `rows.wire`). distributed's comms carry it
as it is: not pickled, not compressed, not split.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.transport.link import records

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from dask_gpurt.model import Buffer
    from dask_gpurt.shuffle.rows.partition import Shard
    from dask_gpurt.shuffle.rows.wire import Parcel


@dataclasses.dataclass(slots=True)
class Outgoing:
    """What one input became, by receiver."""

    #: number of the input
    partition: int
    #: key of the task that split it
    key: Hashable
    #: epoch of the owners that it was split for
    attempt: int
    #: worker address -> what is sent there
    parcels: dict[str, list[Parcel]] = dataclasses.field(default_factory=dict)
    #: (worker address, shard) that `parcels` were made of
    sent: list[tuple[str, Shard]] = dataclasses.field(default_factory=list)
    #: shards for this worker itself
    own: list[Shard] = dataclasses.field(default_factory=list)


class Batch:
    """Parcels for one peer that wait together in distributed's send buffer."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []
        self.nbytes = 0

    def append(self, parcel: Parcel) -> None:
        """Add a parcel."""
        self.parcels.append(parcel)
        self.nbytes += sys.getsizeof(parcel)

    def __sizeof__(self) -> int:  # what the send buffer charges its limiter with
        return self.nbytes


def groups(parcels: Sequence[Parcel], limit_bytes: int) -> Iterator[list[Parcel]]:
    """Parcels that travel together: at most `limit_bytes`, or one that is more than that."""
    group: list[Parcel] = []
    nbytes = 0
    for parcel in parcels:
        size = sys.getsizeof(parcel)
        if group and nbytes + size > limit_bytes:
            yield group
            group, nbytes = [], 0
        group.append(parcel)
        nbytes += size
    if group:
        yield group


class Message:
    """The frames of one message, as `rows.wire.pack` makes them, and the address of the worker that made it."""

    def __init__(self, frames: Sequence[Buffer], sender: str = "") -> None:
        self.frames = list(frames)
        self.sender = sender
        self.nbytes = sum(map(records.size_of, self.frames))


@seam.dask_serialize.register(Message)  # type: ignore[untyped-decorator]
def _to_frames(message: Message) -> tuple[dict[str, str], list[Buffer]]:
    return {"sender": message.sender}, message.frames


@seam.dask_deserialize.register(Message)  # type: ignore[untyped-decorator]
def _from_frames(header: dict[str, Any], frames: list[Buffer]) -> Message:
    return Message(frames, str(header.get("sender", "")))


def as_is(message: Message) -> Any:
    """The message in the form that distributed's comms send without compressing or splitting its frames."""
    return seam.Serialized(*seam.serialize(message, serializers=("dask",), on_error="raise"))
