"""Which values share memory, so that it is counted once.

Two keys may hold the same object (a task that returns its input), or a NumPy array and a view of it: memory goes when
the last of them goes. Those in memory with the same root form a `Block`; its bytes are those of the largest one seen.
Only what is in memory has a block, so the root is alive and its ``id`` belongs to nothing else.

Keys of the very same object are *twins*: one copy on disk serves them all (`Books.twins`). They are common: work on a
persisted dataframe begins with a task per partition that only gives it another name.

A frame that shares some of its columns with another counts as separate: to look into it costs more than it tells.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    from dask_gpurt.tiers.entry import Entry


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """Memory that one or more values in memory are made of."""

    root: int
    nbytes: int
    #: entries in memory
    members: int = 0
    #: of these, being written
    moving: int = 0
    #: the entry in memory, while it is the only one; else all of them (a worker has 100,000 blocks, few with several)
    only: Entry | None = None
    several: dict[Entry, None] | None = None

    @property
    def entries(self) -> Collection[Entry]:
        """Those in memory."""
        if self.several is not None:
            return self.several.keys()
        return () if self.only is None else (self.only,)

    @property
    def resident_bytes(self) -> int:
        return self.nbytes if self.members else 0

    @property
    def moving_bytes(self) -> int:
        """It goes when all its members are gone: until the last is on its way, nothing is."""
        return self.nbytes if self.members and self.moving == self.members else 0


class Blocks:
    """The blocks of all values in memory, and their bytes."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        #: bytes of all blocks, and of those that are about to go
        self.resident_bytes = 0
        self.moving_bytes = 0

    def join(self, entry: Entry, value: Any) -> None:
        """A value is in memory now."""
        root = root_of(value)
        block = self._blocks.get(root)
        if block is None:
            block = self._blocks[root] = Block(root, entry.nbytes)
        entry.block = block
        if not block.members:
            block.only = entry
        else:
            if block.several is None:
                assert block.only is not None
                block.several, block.only = {block.only: None}, None
            block.several[entry] = None
        self._change(block, members=1, nbytes=max(block.nbytes, entry.nbytes))

    def leave(self, entry: Entry, *, was_moving: bool) -> None:
        """A value is not in memory any more."""
        block, entry.block = entry.block, None
        assert block is not None
        if block.several is None:
            block.only = None
        else:
            del block.several[entry]
        self._change(block, members=-1, moving=-was_moving)
        if not block.members:
            del self._blocks[block.root]

    def move(self, entry: Entry, sign: int) -> None:
        """Writing a value begins (1), or ends (-1) while it stays."""
        assert entry.block is not None
        self._change(entry.block, moving=sign)

    def _change(self, block: Block, *, members: int = 0, moving: int = 0, nbytes: int | None = None) -> None:
        self.resident_bytes -= block.resident_bytes
        self.moving_bytes -= block.moving_bytes
        block.members += members
        block.moving += moving
        if nbytes is not None:
            block.nbytes = nbytes
        self.resident_bytes += block.resident_bytes
        self.moving_bytes += block.moving_bytes

    def validate(self, entries: set[Entry]) -> None:
        """Check every invariant; AssertionError names what is broken."""
        blocks = {e.block for e in entries if e.block is not None}
        assert blocks == set(self._blocks.values()), "blocks"
        assert self.resident_bytes == sum(b.nbytes for b in blocks), "resident_bytes"
        assert self.moving_bytes == sum(b.moving_bytes for b in blocks), "moving_bytes"
        for block in blocks:
            mine = [e for e in entries if e.block is block]
            assert block.members == len(mine) == len(block.entries), "members"
            assert set(block.entries) == set(mine), "entries of a block"
            assert block.nbytes >= max(e.nbytes for e in mine), "nbytes of a block"
            assert len({root_of(e.value) for e in mine}) == 1, "root"


def root_of(value: Any) -> int:
    """The ``id`` of what owns the memory of a value."""
    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    return id(value)
