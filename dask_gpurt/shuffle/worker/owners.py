"""Which worker owns which output of a run, as one worker knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.shuffle.rows.partition import OutputLayout

if TYPE_CHECKING:
    from collections.abc import Mapping


class Owners:
    """The owners of a run's outputs, and the layout that inputs are split by. Changed on the event loop, read anywhere.

    Parameters
    ----------
    worker_for
        Output -> owner; those of one worker in the order in which it makes them.
    opened
        Outputs that are open after the barrier, None before it (see `protocol.recovery.State`).
    """

    def __init__(self, local_address: str, worker_for: Mapping[int, str], opened: frozenset[int] | None) -> None:
        self._local_address = local_address
        #: output -> owner. A dict: a look into the pandas series that distributed keeps costs more than the rest of
        #: finding an output
        self.worker_for = dict(worker_for)
        self.layout = self._layout(opened)

    def mine(self) -> list[int]:
        """Outputs of this worker."""
        return [part for part, owner in self.worker_for.items() if owner == self._local_address]

    def move(self, moved: Mapping[int, str], opened: frozenset[int] | None) -> None:
        """Enter new owners."""
        self.worker_for.update(moved)
        self.layout = self._layout(opened)

    def _layout(self, opened: frozenset[int] | None) -> OutputLayout:
        """After the barrier inputs are split for what is open only: the other outputs have their rows."""
        if opened is None:
            return OutputLayout(self.worker_for)
        return OutputLayout({part: self.worker_for[part] for part in sorted(opened)})
