"""`WithContainers`: lists, tuples and dicts of device values are device values, too.

Splits return dicts of frames, aggregations return tuples. Taken for values in host memory, they would be counted there
with the bytes of the device, and their members would be pickled through host memory one by one.

A container is encoded as its structure, with a `_Slot` for each device member, and the frames of the members, which go
where those of single values go. Members in host memory stay in the structure. Only the plain types are looked into, two
deep, and only where one of the first `LOOK` members lies on the device: this is asked for every result of a task.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import TYPE_CHECKING, Any

from dask_gpurt.tiers.storage.codec import PickleCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from dask_gpurt.tiers.device.backend import DeviceBackend
    from dask_gpurt.tiers.storage.handle import Group

#: members of a container that are looked at, to see whether it has any on the device
LOOK = 16
#: containers in containers that are looked into
DEPTH = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a device member in the structure of its container."""

    number: int


class WithContainers:
    """A `DeviceBackend` for the values of another one (`inner`), and for containers of them."""

    def __init__(self, inner: DeviceBackend) -> None:
        self.inner = inner
        self.fence = inner.fence
        self.allocated_bytes = inner.allocated_bytes
        self._structure = PickleCodec()

    def owns(self, value: object) -> bool:
        """Whether it is a device value, or a container with one among the first members."""
        return self.inner.owns(value) or any(True for _ in self._members(value, LOOK))

    def _members(self, value: Any, most: int | None = None, depth: int = DEPTH) -> Iterator[Any]:
        """The device members of a container; `most`: among so many of its first members."""
        kind = type(value)
        if not depth or (kind is not dict and kind is not list and kind is not tuple):
            return
        for member in itertools.islice(value.values() if kind is dict else value, most):
            if self.inner.owns(member):
                yield member
            else:
                yield from self._members(member, most, depth - 1)

    def blocks(self, value: Any) -> Sequence[tuple[Hashable, int]]:
        """The allocations of all members, each once."""
        if self.inner.owns(value):
            return self.inner.blocks(value)
        found: dict[Hashable, int] = {}
        for member in self._members(value):
            for block, nbytes in self.inner.blocks(member):
                found[block] = max(nbytes, found.get(block, 0))
        return list(found.items())

    def outside(self, value: object) -> bool:
        """Whether all its memory came past the allocator."""
        if self.inner.owns(value):
            return self.inner.outside(value)
        return all(self.inner.outside(member) for member in self._members(value))

    def encode(self, value: Any, parts: Sequence[int] | None = None) -> list[Group]:
        """One group: an index; the structure; the frames of each member."""
        if self.inner.owns(value):
            return [(0, [pickle.dumps(None, 5), *_frames(self.inner.encode(value, parts))])]
        slots: dict[int, tuple[_Slot, Any]] = {}

        def slot(member: Any) -> _Slot:
            return slots.setdefault(id(member), (_Slot(len(slots)), member))[0]

        structure = _frames(self._structure.encode(self._map(value, self.inner.owns, slot)))
        members = [_frames(self.inner.encode(member)) for _, member in slots.values()]
        index = pickle.dumps((len(structure), [len(frames) for frames in members]), 5)
        return [(0, [index, *structure, *itertools.chain.from_iterable(members)])]

    def decode(self, frames: list[memoryview]) -> Any:
        """The value on the device again, from its frames."""
        return self._decode([[f] for f in frames], lambda pieces: pieces[0])

    def decode_pieces(self, frames: list[list[memoryview]]) -> Any:
        """The same, from frames that lie in pieces."""
        return self._decode(frames, _copied)

    def _decode(self, frames: list[list[memoryview]], own: Callable[[list[memoryview]], memoryview]) -> Any:
        """`own`: makes memory of the value's own of the pieces of a frame."""
        index = pickle.loads(own(frames[0]))
        if index is None:
            return self.inner.decode_pieces(frames[1:])
        n, lengths = index
        structure = self._structure.decode([own(f) for f in frames[1 : 1 + n]])
        at, members = 1 + n, []
        for length in lengths:
            members.append(self.inner.decode_pieces(frames[at : at + length]))
            at += length
        return self._map(structure, lambda member: type(member) is _Slot, lambda slot: members[slot.number])

    def _map(self, value: Any, which: Callable[[Any], bool], change: Callable[[Any], Any], depth: int = DEPTH) -> Any:
        """A container of the same structure, with some members replaced."""
        kind = type(value)
        if not depth or (kind is not dict and kind is not list and kind is not tuple):
            return value

        def member(one: Any) -> Any:
            return change(one) if which(one) else self._map(one, which, change, depth - 1)

        if kind is dict:
            return {key: member(one) for key, one in value.items()}
        return kind(member(one) for one in value)


def _frames(groups: Sequence[Group]) -> list[Any]:
    return [frame for _, frames in groups for frame in frames]


def _copied(pieces: Sequence[memoryview]) -> memoryview:
    # Pieces are blocks that are used again once the copy is freed. Members in host memory are views of what is decoded
    # here, and may live longer: a task can return one.
    return memoryview(bytearray().join(pieces))
