"""`Blocks`: which values share memory, so that it is counted once.

Two keys may hold the same object (a task that returns its input), an array and a view of it, or a frame and one of its
columns. Their memory goes when the last of them goes. `buffer_roots` finds what memory a value holds; each stretch of
it is a `Block`, and a value in memory is a member of one or several. Only what is in memory has blocks, so the memory
is alive and its address belongs to nothing else.

Keys of the very same object are *twins*: one copy on disk serves them all (`Books.twins`). They are common: work on a
persisted dataframe begins with a task per partition that only gives it another name. A task of the user's that returns
its input may have changed it in place, so its result gets a copy of its own (`Entry.apart`).

What a value holds may be more than its ``sizeof``, by which it gets room: a column that is written and dropped comes
back as large as it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.tiers.engine.buffer_roots import roots_of
from dask_gpurt.tiers.engine.entry import Block

if TYPE_CHECKING:
    from collections.abc import Collection

    from dask_gpurt.tiers.engine.entry import Entry


class Blocks:
    """The blocks of all values in memory, and their bytes."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        #: bytes of all blocks, and of those that are about to go
        self.resident_bytes = 0
        self.moving_bytes = 0

    def join(self, entry: Entry, value: object) -> None:
        """A value is in memory now."""
        roots = roots_of(value, entry.nbytes)
        if len(roots) == 1:  # the usual case
            ((root, nbytes),) = roots
            entry.blocks = (self._join(entry, root, nbytes),)
        else:
            entry.blocks = tuple(self._join(entry, root, nbytes) for root, nbytes in roots)

    def _join(self, entry: Entry, root: int, nbytes: int) -> Block:
        block = self._blocks.get(root)
        if block is None:  # the usual case
            self._blocks[root] = block = Block(root, nbytes, 1, 0, entry)
            self.resident_bytes += nbytes
            return block
        if not block.members:
            block.only = entry
        else:
            if block.several is None:
                assert block.only is not None
                block.several, block.only = {block.only: None}, None
            block.several[entry] = None
        self._change(block, members=1, nbytes=max(block.nbytes, nbytes))
        return block

    def leave(self, entry: Entry, *, was_moving: bool) -> None:
        """A value is not in memory any more."""
        blocks, entry.blocks = entry.blocks, ()
        assert blocks
        for block in blocks:
            if block.members == 1 and not was_moving:  # the usual case
                self.resident_bytes -= block.nbytes
                del self._blocks[block.root]
                continue
            if block.several is None:
                block.only = None
            else:
                del block.several[entry]
            self._change(block, members=-1, moving=-was_moving)
            if not block.members:
                del self._blocks[block.root]

    def move(self, entry: Entry, sign: int) -> None:
        """Writing a value begins (1), or ends (-1) while it stays."""
        assert entry.blocks
        for block in entry.blocks:
            self._change(block, moving=sign)

    def _change(self, block: Block, *, members: int = 0, moving: int = 0, nbytes: int | None = None) -> None:
        self.resident_bytes -= block.resident_bytes
        self.moving_bytes -= block.moving_bytes
        block.members += members
        block.moving += moving
        if nbytes is not None:
            block.nbytes = nbytes
        self.resident_bytes += block.resident_bytes
        self.moving_bytes += block.moving_bytes

    def validate(self, entries: Collection[Entry]) -> None:
        """Check every invariant; AssertionError names what is broken."""
        blocks = {b for e in entries for b in e.blocks}
        assert blocks == set(self._blocks.values()), "blocks"
        assert self.resident_bytes == sum(b.nbytes for b in blocks), "resident_bytes"
        assert self.moving_bytes == sum(b.moving_bytes for b in blocks), "moving_bytes"
        members: dict[Block, set[Entry]] = {}
        for entry in entries:
            for block in entry.blocks:
                members.setdefault(block, set()).add(entry)
            if entry.blocks:
                held = dict(roots_of(entry.value, entry.nbytes))
                assert {b.root for b in entry.blocks} == set(held), "roots"
                assert all(b.nbytes >= held[b.root] for b in entry.blocks), "nbytes of a block"
        for block, mine in members.items():
            assert block.members == len(mine) == len(block.entries), "members"
            assert set(block.entries) == mine, "entries of a block"
