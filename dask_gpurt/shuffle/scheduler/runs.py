"""`RunRecord`, what the scheduler knows of one run of our shuffle, and `Runs`, the registry of all active ones.

A record has a phase, which events move (`phases`); nothing else does.

Theory of operation. Dask's plugin keeps the active runs; a record is added when one of ours is first looked up, and
ends when Dask drops its run. What workers have to know travels with the run's spec (`amendments`, see
`protocol.recovery.State`), the rest is here. Everything that recovers, rebalances or holds runs uses the record. These
parts do not know each other.

Who waits for a run, as its barrier does, takes `RunRecord.version`, looks at what it waits for, and then awaits
`RunRecord.change` with that version: no change in between is missed. Events, epochs, and the end of a barrier's task
are changes. Two shuffles that share outputs (the sides of a join) wait for each other, so a change of one wakes both.
`RECHECK_SECONDS` bounds the wait, in case that something changed without an event.

Record and registry are used on the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import enum
import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.recovery import agreed, too_narrow
from dask_gpurt.shuffle.scheduler.candidates import keepers
from dask_gpurt.shuffle.scheduler.phases import TRANSITIONS, InvalidTransition, Phase, RunEvent
from dask_gpurt.shuffle.spec import GpurtShuffleSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.shuffle.protocol.messages import HistogramAnswer, Vouched
    from dask_gpurt.shuffle.protocol.recovery import State
    from dask_gpurt.shuffle.rows.key_filter import KeyFilter

logger = logging.getLogger("distributed.scheduler.gpurt")

#: a wait for a change looks again after so long
RECHECK_SECONDS = 0.25
#: how often a flush that fails is asked for again, and after how many seconds: a worker may be leaving
PATIENCE = 15
PATIENCE_SECONDS = 0.2
#: tasks whose end is listened for, and shuffles that are left alone, at most
LISTENED = 4096
LEFT_ALONE = 10_000


class Step(enum.Enum):
    """What to do next, for who waits for a run: what one try came to."""

    #: it is as it has to be
    DONE = "done"
    #: what was looked at has changed: try again at once
    AGAIN = "again"
    #: try again after a change
    WAIT = "wait"


class Begun(enum.Enum):
    """What became of a run when a worker was lost."""

    #: an epoch has begun, to be announced to the workers
    EPOCH = "epoch"
    #: the worker had nothing that is wanted
    NOTHING = "nothing"
    #: the run cannot be amended
    IMPOSSIBLE = "impossible"


@dataclasses.dataclass(eq=False, slots=True)
class RunRecord:
    """One run of our shuffle, as the scheduler knows it."""

    #: ids, spec, owners and the workers that take part
    run: seam.SchedulerShuffleState
    phase: Phase = Phase.RECEIVING
    #: key of a transfer task whose result was lost with a worker -> the epoch of that loss
    least: dict[Hashable, int] = dataclasses.field(default_factory=dict)
    #: number of inputs, known when its barrier has passed: Dask may forget some of their tasks later
    inputs: int = 0
    #: outputs that were made since they were opened last
    made: set[int] = dataclasses.field(default_factory=set)
    #: output -> how often its task has asked for it, as it was handed out before
    asked: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    #: tells the workers of the latest epoch; None: they know it
    telling: asyncio.Task[None] | None = None
    #: what its workers counted; None: not known
    histograms: list[HistogramAnswer] | None = None
    #: whether it was looked at, to bind outputs late
    rebalanced: bool = False
    #: until when the end of a partner's barrier is waited for, by the monotonic clock
    partner_deadline: float | None = None
    #: flushes that failed while its outputs were handed over, after its barrier
    failed_flushes: int = 0
    #: its keys, for the other side of its join; and whether its workers were asked for them
    join_filter: KeyFilter | None = None
    join_asked: bool = False
    #: workers that were asked to copy its barrier's result
    copied_to: set[str] = dataclasses.field(default_factory=set)
    #: whether its tasks are being released, for a restart
    restarting: bool = False
    #: counts changes
    version: int = 0
    _change: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    # ---- what distributed's state says

    @property
    def id(self) -> seam.ShuffleId:
        """Of the shuffle."""
        return self.run.id

    @property
    def spec(self) -> GpurtShuffleSpec:
        """What its workers got."""
        return self.run.run_spec.spec

    @property
    def amendments(self) -> State:
        """Its epochs; every worker that joins gets them as they are then."""
        return self.spec.state

    @property
    def worker_for(self) -> dict[int, str]:
        """Output -> address of its owner."""
        return self.run.run_spec.worker_for

    @property
    def participants(self) -> set[str]:
        """Addresses of the workers that take part, or did."""
        return self.run.participating_workers

    @property
    def failed(self) -> bool:
        """Whether a task of it has failed."""
        return seam.has_failed(self.run)

    @property
    def passed(self) -> bool:
        """Whether its barrier has passed."""
        return self.phase in (Phase.PASSED, Phase.OPENED)

    def owners_there(self, workers: Mapping[str, WorkerState]) -> set[str]:
        """Of these workers, those that keep their outputs. One under the address of a lost one gets no rows."""
        return keepers(workers) - set(self.amendments.lost)

    def alive(self, parts: Iterable[int], workers: Mapping[str, WorkerState]) -> frozenset[int]:
        """Of these outputs, those whose owner has rows of them and may yet send or make something."""
        there = set(workers) - set(self.amendments.lost)
        return frozenset(part for part in parts if self.worker_for[part] in there)

    # ---- phases

    def happened(self, event: RunEvent) -> None:
        """Move to the phase that the table gives.

        Raises
        ------
        InvalidTransition
            The event cannot happen in this phase.
        """
        phase = TRANSITIONS[self.phase].get(event)
        if phase is None:
            raise InvalidTransition(
                f"{event.name} happened to {self.run}, which is {self.phase.name}; must be one of "
                f"{', '.join(p.name for p, events in TRANSITIONS.items() if event in events)}"
            )
        self.phase = phase
        self.changed()

    # ---- changes

    def changed(self, *_: object) -> None:
        """Wake who waits for a change of this run."""
        self.version += 1
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def change(self, since: int) -> None:
        """Wait until there is another version than `since`, for `RECHECK_SECONDS` at most."""
        if self.version == since:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), RECHECK_SECONDS)

    def agreed(self, answers: Iterable[Vouched]) -> tuple[dict[int, int], set[Hashable]]:
        """(input -> the attempt that counts, keys of their tasks), see `protocol.recovery.agreed`."""
        narrow = too_narrow(self.amendments.scopes, self.amendments.opened)
        return agreed((one for answer in answers for one in answer.vouched), self.least, narrow)


@dataclasses.dataclass(slots=True)
class RecoveryCounters:
    """What recovery has done on one scheduler."""

    #: losses of workers that runs went on without
    amended: int = 0
    #: times that a run gave outputs of workers that leave to others
    drained: int = 0
    #: transfer tasks that ran again
    transfers_again: int = 0
    #: outputs in memory that a restart has left there
    outputs_kept: int = 0
    #: outputs opened after the barrier, and those of them whose owner lived
    outputs_opened: int = 0
    outputs_void: int = 0
    #: shuffles restarted because a worker was lost
    restarted: int = 0


class Runs:
    """The active runs of our shuffle on one scheduler."""

    def __init__(self, scheduler: Scheduler, plugin: seam.ShuffleSchedulerPlugin) -> None:
        self._scheduler = scheduler
        self._plugin = plugin
        #: run id -> record
        self._records: dict[int, RunRecord] = {}
        #: key of a task -> who wants to know when it has ended well, and the seconds of it
        self._listeners: dict[Hashable, list[Callable[[Iterable[dict[str, Any]]], None]]] = {}
        #: shuffles whose outputs stay where they are, the oldest first
        self._left_alone: dict[seam.ShuffleId, None] = {}
        self.counters = RecoveryCounters()

    # ---- finding runs and tasks

    def get(self, shuffle_id: seam.ShuffleId) -> RunRecord | None:
        """The active run of a shuffle; None: there is none, or it is not of our kind."""
        run = self._plugin.active_shuffles.get(shuffle_id)
        if run is None or type(run.run_spec.spec) is not GpurtShuffleSpec:
            return None
        record = self._records.get(run.run_id)
        if record is None:
            for other in [one for one in self._records.values() if not self.current(one)]:
                self.dropped(other)
            record = self._records[run.run_id] = RunRecord(run)
        return record

    def of_run(self, shuffle_id: seam.ShuffleId, run_id: int) -> RunRecord | None:
        """As `get`; None, too, when another run than that is active."""
        record = self.get(shuffle_id)
        return record if record is not None and record.run.run_id == run_id else None

    def all(self) -> list[RunRecord]:
        """All active runs of our kind."""
        return [record for name in self._plugin.active_shuffles if (record := self.get(name)) is not None]

    def current(self, record: RunRecord) -> bool:
        """Whether a run is active."""
        return self._plugin.active_shuffles.get(record.id) is record.run

    def barrier_of(self, shuffle_id: seam.ShuffleId) -> TaskState | None:
        """The task of a shuffle's barrier."""
        return self._scheduler.tasks.get(seam.barrier_key(shuffle_id))

    def sources(self, ts: TaskState) -> Iterator[tuple[seam.ShuffleId, RunRecord | None]]:
        """(shuffle, its active run of our kind) of the barriers that a task depends on."""
        for other in ts.dependencies:
            if (name := seam.id_from_key(other.key)) is not None:
                yield name, self.get(name)

    def owner(self, ts: TaskState, part: int) -> str | None:
        """Worker of an output, by all runs that its task takes rows of; None unless all have passed and agree."""
        owners = {None if one is None or not one.passed else one.worker_for.get(part) for _, one in self.sources(ts)}
        return owners.pop() if len(owners) == 1 else None

    # ---- shuffles that share outputs: the sides of a join

    def partners(self, shuffle_id: seam.ShuffleId) -> list[seam.ShuffleId]:
        """Ids of the other shuffles whose barriers an output of this one depends on, too."""
        barrier = self.barrier_of(shuffle_id)
        # All outputs of a join depend on the same two barriers.
        ts = None if barrier is None else next(iter(barrier.dependents), None)
        names = () if ts is None else (seam.id_from_key(other.key) for other in ts.dependencies)
        return [name for name in names if name is not None and name != shuffle_id]

    def partner_owners(self, shuffle_id: seam.ShuffleId) -> dict[int, str]:
        """Owners of outputs in active shuffles, of any kind, that share outputs with this one."""
        runs = (self._plugin.active_shuffles.get(name) for name in self.partners(shuffle_id))
        return {part: owner for run in runs if run is not None for part, owner in run.run_spec.worker_for.items()}

    def changed(self, record: RunRecord, *_: object) -> None:
        """Wake who waits for this run, or for one that shares outputs with it."""
        record.changed()
        for name in self.partners(record.id):
            if (other := self.get(name)) is not None:
                other.changed()

    # ---- the end of a task

    def listen(self, key: Hashable, heard: Callable[[Iterable[dict[str, Any]]], None]) -> None:
        """Call `heard` with the seconds of a task (``startstops``) when it has ended well, once."""
        listeners = self._listeners.setdefault(key, [])
        if heard not in listeners:
            listeners.append(heard)
        while len(self._listeners) > LISTENED:
            del self._listeners[next(iter(self._listeners))]

    def ended(self, key: Hashable, startstops: Iterable[dict[str, Any]]) -> None:
        """A task has ended well."""
        for heard in self._listeners.pop(key, ()):
            heard(startstops)

    def forget(self) -> None:
        """Drop the listeners of tasks that the scheduler has forgotten, such as those of a cancelled query."""
        for key in [key for key in self._listeners if key not in self._scheduler.tasks]:
            del self._listeners[key]

    # ---- the end of a run

    def dropped(self, record: RunRecord) -> None:
        """Dask has dropped a run."""
        if self._records.pop(record.run.run_id, None) is record:
            record.happened(RunEvent.DROPPED)

    def restart(self, record: RunRecord, why: str) -> None:
        """Restart a shuffle as Dask does when a worker is lost. Nothing when the run is over."""
        if not self.current(record):
            return
        logger.warning("gpurt: shuffle %s is restarted: %s", record.id, why)
        self.counters.restarted += 1
        if record.amendments.handing:
            self._left_alone[record.id] = None
            while len(self._left_alone) > LEFT_ALONE:
                del self._left_alone[next(iter(self._left_alone))]
        seam.restart_run(self._plugin, self._scheduler, record.run, why)

    def left_alone(self, shuffle_id: seam.ShuffleId) -> bool:
        """Whether a shuffle was restarted while its outputs were handed over; then none is bound late again."""
        return shuffle_id in self._left_alone
