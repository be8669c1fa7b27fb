"""`Backlog`: running sums of the work assigned to each worker, in seconds and bytes.

`Backlog.charge` adds a task to a worker when the task enters processing. `Backlog.settle` takes it off when the task
leaves. The sums are fields of `WorkerInfo`.

Invariants
----------
1. A charge is settled by the amount that was charged, whatever has been learned in between. So the sums return to zero.
   (They are floats: a worker without tasks has its sums set to exactly 0.)
2. A task charged before its duration was known is charged again as soon as it is known, once. Without that, a burst of
   new tasks counts 5 ms each until the last of them is done.
3. A task that has seceded (`worker_client`, `distributed.secede`) occupies no thread and leaves the backlog. No event
   reports it: `Backlog.reconcile` compares counts when the worker is next looked at.
4. A stolen task moves with its charge: stealing writes `processing_on` without any transition.

Dask itself keeps counts per prefix and multiplies them by the current mean duration each time it looks at a worker,
which is O(prefixes) per candidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.tables.durations import UNKNOWN_SECONDS, Prefix

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dask_gpurt.placement.tables.workers import WorkerInfo


class Charge:
    """The amounts by which one task in processing was charged to its worker."""

    __slots__ = ("info", "inputs", "nbytes", "prefix", "queued", "root", "row", "seconds", "unknown")

    def __init__(
        self, info: WorkerInfo, prefix: Prefix, seconds: float, nbytes: float, unknown: bool, root: bool
    ) -> None:
        self.info = info
        self.prefix = prefix
        #: seconds in the worker's backlog for this task, on a worker of slowness 1; 0: it has seceded
        self.seconds = seconds
        #: expected size of the result
        self.nbytes = nbytes
        #: whether the duration was a guess
        self.unknown = unknown
        #: whether it is a root pulled from its block. Tasks that join roots run before the roots that still wait
        self.root = root
        #: whether it came from the queue of roots, of a block or not
        self.queued = False
        #: the inputs being fetched for this task, when nothing else was inbound; () otherwise
        self.inputs: tuple[Any, ...] = ()
        #: its row of the decision log; None: the log finds it by key
        self.row: list[Any] | None = None


class Backlog:
    """All charges, by key."""

    def __init__(self) -> None:
        self.charges: dict[Hashable, Charge] = {}
        #: keys charged with a guess, by name of the kind
        self.unknown: dict[str, dict[Hashable, None]] = {}

    def charge(self, key: Hashable, info: WorkerInfo, prefix: Prefix, hint: float, root: bool = False) -> Charge:
        """Charge a task that entered processing. A charge under the same key is settled first.

        `hint`: seconds expected where nothing was learned of its kind, negative if unknown. `root`: pulled from its
        block.
        """
        charges = self.charges
        if key in charges:  # back in processing, and no event said that it had left
            self.settle(key)
        known = prefix.seconds
        if known is not None:
            seconds, nbytes = known, prefix.output_bytes
        elif (usual := prefix.usual) is not None and usual.settled() is not None:
            seconds, nbytes = usual.seconds or 0.0, usual.output_bytes
        else:
            seconds, nbytes = hint if hint >= 0 else UNKNOWN_SECONDS, 0.0
        charge = charges[key] = Charge(info, prefix, seconds, nbytes, known is None, root)
        if known is None:
            self.unknown.setdefault(prefix.name, {})[key] = None
        info.tasks += 1
        info.backlog_seconds += seconds
        if root:
            info.roots += 1
            info.root_seconds += seconds
        info.reserved_bytes += nbytes
        return charge

    def settle(self, key: Hashable) -> Charge | None:
        """Take a task that left processing off its worker. Return its charge; None when it was not charged."""
        charge = self.charges.pop(key, None)
        if charge is None:
            return None
        if charge.unknown:
            self._known(key, charge)
        self._take(charge)
        return charge

    def learned(self, prefix: Prefix) -> None:
        """Charge again what was charged with a guess, now that the prefix has a duration (invariant 2)."""
        for key in self.unknown.pop(prefix.name, ()):
            charge = self.charges[key]
            charge.unknown = False
            if charge.seconds and prefix.seconds is not None:  # 0: seceded
                charge.info.backlog_seconds += prefix.seconds - charge.seconds
                if charge.root:
                    charge.info.root_seconds += prefix.seconds - charge.seconds
                charge.seconds = prefix.seconds
            charge.info.reserved_bytes += prefix.output_bytes - charge.nbytes
            charge.nbytes = prefix.output_bytes

    def move(self, key: Hashable, thief: WorkerInfo) -> None:
        """Move the charge of a stolen task to the worker that took it (invariant 4)."""
        charge = self.charges.get(key)
        if charge is None or charge.info is thief:
            return
        self._take(charge)
        charge.info = thief
        charge.inputs = ()
        thief.tasks += 1
        thief.backlog_seconds += charge.seconds
        if charge.root:
            thief.roots += 1
            thief.root_seconds += charge.seconds
        thief.reserved_bytes += charge.nbytes

    def reconcile(self, info: WorkerInfo) -> None:
        """Take seceded tasks out of the backlog (invariant 3)."""
        for ts in info.ws.long_running:
            charge = self.charges.get(ts.key)
            if charge is not None and charge.seconds:
                info.backlog_seconds -= charge.seconds
                if charge.root:
                    info.root_seconds -= charge.seconds
                charge.seconds = 0.0
        info.seceded = len(info.ws.long_running)

    def forget(self) -> None:
        """Drop all charges: the scheduler has forgotten all tasks."""
        self.charges.clear()
        self.unknown.clear()

    def _known(self, key: Hashable, charge: Charge) -> None:
        keys = self.unknown.get(charge.prefix.name)
        if keys is not None:
            keys.pop(key, None)
            if not keys:
                del self.unknown[charge.prefix.name]

    @staticmethod
    def _take(charge: Charge) -> None:
        info = charge.info
        info.tasks -= 1
        if charge.root:
            info.roots -= 1
            info.root_seconds = info.root_seconds - charge.seconds if info.roots else 0.0
        if info.tasks:
            info.backlog_seconds -= charge.seconds
            info.reserved_bytes -= charge.nbytes
        else:
            info.backlog_seconds = info.reserved_bytes = 0.0  # invariant 1
