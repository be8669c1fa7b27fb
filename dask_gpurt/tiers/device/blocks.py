"""`KeptBlocks`: the allocations that kept values hold on the device. Views of one allocation count it once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


class KeptBlocks:
    """Not thread-safe."""

    def __init__(self) -> None:
        #: of distinct allocations
        self.nbytes = 0
        #: how many values hold an allocation, and its bytes: the most that one of them sees of it
        self._blocks: dict[Hashable, tuple[int, int]] = {}

    def count(self, blocks: Iterable[tuple[Hashable, int]], sign: int) -> int:
        """Count the allocations of a value in (1) or out (-1); returns the bytes that kept values are less."""
        before = self.nbytes
        for block, nbytes in blocks:
            holders, known = self._blocks.get(block, (0, 0))
            largest = max(known, nbytes)
            if holders + sign:
                self._blocks[block] = holders + sign, largest
            else:
                self._blocks.pop(block, None)
            self.nbytes += (largest if holders + sign else 0) - (known if holders else 0)
        return before - self.nbytes

    def validate(self, blocks: Iterable[Hashable]) -> None:
        """AssertionError where others than `blocks` are counted, or the sum is wrong."""
        assert set(self._blocks) == set(blocks)
        assert self.nbytes == sum(n for _, n in self._blocks.values())
