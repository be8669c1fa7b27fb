"""`PlacementPlugin`: the scheduler plugin of placement. Events in, decisions out.

`start` takes over, `uninstall` gives everything back, `statistics` and `explain` report.

1. `start` compares signatures, adopts workers and tasks that are there, then installs. A failure before the last step
   has changed nothing.
2. Every hook is guarded. distributed only logs what a hook raises; here it is counted as well. When the bookkeeping
   fails too often, all of placement is left to Dask (`Engine.untrusted`): decisions by wrong sums are worse than Dask's
   own.
3. `uninstall` restores the scheduler and drops the tables. Hooks that still arrive find no engine and do nothing
   (`remove_plugin` has no hook of its own).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, TypeVarTuple

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_gpurt.errors import GpurtError, InstallError
from dask_gpurt.model import Event, Sink, null_sink
from dask_gpurt.placement import statistics
from dask_gpurt.placement.decide.decision import Declined
from dask_gpurt.placement.engine import Engine
from dask_gpurt.placement.monitor import Monitor
from dask_gpurt.placement.takeover.fetch_sources import FetchSources
from dask_gpurt.placement.takeover.fusion import Fusion
from dask_gpurt.placement.takeover.prompt_messages import PromptMessages
from dask_gpurt.placement.takeover.root_queue import RootQueue
from dask_gpurt.placement.takeover.seam import Seam
from dask_gpurt.placement.takeover.speculation import Speculation
from dask_gpurt.placement.takeover.stealing import Stealing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable

    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.config import PlacementSettings
    from dask_gpurt.placement.decide.policy import Policy

logger = logging.getLogger("distributed.scheduler.gpurt")

#: the part that fails when a hook does
BOOKKEEPING = "bookkeeping"
#: states in which a root task that was not assigned is no longer needed
_UNWANTED = frozenset(("released", "forgotten", "erred", "no-worker"))
_Ts = TypeVarTuple("_Ts")


class PlacementPlugin(SchedulerPlugin):
    """Decides where tasks run.

    Parameters
    ----------
    settings
        ``gpurt.placement``.
    policy
        Chooses among the candidates; None: the cheapest by `cost`.
    sink
        Receives ``placement.fallback`` and ``placement.retired`` events.

    Examples
    --------
    In ``dask_setup``: ``scheduler.add_plugin(PlacementPlugin(Settings.load().placement))``; the scheduler calls
    `start`. On a scheduler that runs already, await `start` yourself.
    """

    name = "gpurt-placement"
    idempotent = True

    def __init__(self, settings: PlacementSettings, *, policy: Policy | None = None, sink: Sink = null_sink) -> None:
        self.settings = settings
        self.policy = policy
        self._sink = sink
        #: None before `start` and after `uninstall`
        self.engine: Engine | None = None
        self.seam: Seam | None = None
        self.stealing: Stealing | None = None
        self.routes: FetchSources | None = None
        #: None also when second copies are switched off
        self.copies: Speculation | None = None
        self.monitor: Monitor | None = None
        self.messages: PromptMessages | None = None
        self.fusion: Fusion | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Take over. A second call for the same scheduler does nothing.

        Raises
        ------
        SeamMismatch
            This distributed is not what the seam was written for. Nothing was changed.
        InstallError
            Another plugin has taken over already, or the scheduler's state could not be read. Nothing was changed.
        """
        if self.engine is not None and self.engine.scheduler is scheduler:
            return  # started by a preload; the scheduler starts every plugin again
        if self.engine is not None:
            raise InstallError(f"{self.name} has been started already. Remedy: use one plugin object per scheduler")
        seam = Seam(scheduler, sink=self._sink, on_fallback=self._fell_back)
        seam.check()
        engine = Engine(scheduler, self.settings, self.policy)
        try:
            engine.adopt()
            self.seam, self.engine = seam, engine
            if self.settings.shadow:
                seam.watch(engine.shadowed.look)
            else:
                self._take_over(scheduler, seam, engine)
        except GpurtError:
            self.uninstall()
            raise
        except Exception as e:
            self.uninstall()
            raise InstallError(f"placement could not take over: {type(e).__name__}: {e}. Nothing was changed") from e

    def _take_over(self, scheduler: Scheduler, seam: Seam, engine: Engine) -> None:
        seam.install(self._decide, engine.comm_cost)
        RootQueue(seam, engine).install()
        engine.on_retired = self._retired
        self.stealing = Stealing(scheduler, seam)
        self.stealing.install(engine.thief)
        self.routes = FetchSources(scheduler, seam, engine.zones)
        self.routes.install()
        if self.settings.stragglers:
            self.copies = Speculation(scheduler, seam)
            self.copies.on_won = engine.books.copy_won
            self.copies.install()
        self.messages = PromptMessages(scheduler, lambda: engine.safe)
        if self.settings.fusion:
            self.fusion = Fusion(seam, lambda: not engine.safe)
            self.fusion.install()
        self.monitor = Monitor(engine, seam, self.stealing, self.copies)
        self.monitor.start()

    def uninstall(self) -> None:
        """Give the scheduler back as it was. Safe to call at any time, also twice."""
        for part in (self.fusion, self.monitor, self.messages, self.copies, self.routes, self.stealing, self.seam):
            if part is not None:
                (part.stop if isinstance(part, Monitor) else part.uninstall)()
        self.fusion = self.monitor = self.messages = self.copies = self.routes = self.stealing = None
        engine, self.engine = self.engine, None
        if engine is not None:
            self._guard(_give_out, engine.scheduler)

    async def close(self) -> None:
        """Hook of distributed: the scheduler closes."""
        self.uninstall()

    @property
    def installed(self) -> tuple[str, ...]:
        """What is taken over now, by name of the scheduler's attribute."""
        return () if self.seam is None else self.seam.installed

    def slowness(self) -> dict[str, float]:
        """How many times the time of the median worker ended tasks took on each worker of which that is learned."""
        return {} if self.engine is None else statistics.slowness(self.engine)

    def counts(self) -> dict[str, Any]:
        """``decisions``, ``declined`` and ``fallbacks`` of `statistics`, in microseconds; empty after `uninstall`."""
        if self.engine is None or self.seam is None:
            return {}
        return {
            "decisions": {"moved": self.engine.decided["moved"], "local": self.engine.decided["local"]},
            "declined": {str(reason): n for reason, n in self.engine.declined.items()},
            "fallbacks": {name: dict(p.fallbacks) for name, p in self.seam.parts.items() if p.fallbacks},
        }

    def statistics(self) -> dict[str, Any]:
        """Counts since `start`, as plain JSON.

        ``decisions`` (total, moved, local, restricted; predicted and actual times of the newest, see
        `DecisionLog.calibration`), ``declined`` (left to stock, Dask's own choice, by reason),
        ``prices`` given to stealing, ``roots`` (blocks cut, root tasks handed to their owner, blocks split),
        ``microseconds`` per decision (total, median, p99), ``links`` (latency in s, bytes/s, samples),
        ``prefixes`` known, ``speeds`` of workers, sizes of the ``tables``; ``fallbacks`` (part -> reason -> count),
        ``governor`` (standing, reason, trials, robust predicted against actual per prefix), ``graph_judge`` (whole
        graphs: those left to stock and why, in words; see `GraphJudge.statistics`), ``shadow`` (in shadow mode:
        agreement, predicted gains), ``stealing`` (opinions, tasks asked back from slow workers), ``copies`` of
        stragglers by what became of them, ``fusion`` (graphs of data frames with fewer tasks, and the tasks spared),
        ``messages_early`` (to idle workers); ``exceptions``, ``last_traceback``,
        ``retired`` (part -> reason). Only ``installed: false`` after `uninstall`.
        """
        if self.engine is None or self.seam is None:
            return {"installed": False}
        parts = self.seam.parts
        return {
            "installed": True,
            "overrides": list(self.seam.installed),
            **statistics.of(self.engine),
            "shadow": self.engine.shadowed.statistics() if self.settings.shadow else None,
            "stealing": {
                "installed": self.stealing is not None and self.stealing.installed,
                "opinions": dict(self.engine.steal_policy.opinions),
                "rescued": 0 if self.stealing is None else self.stealing.requested,
            },
            "copies": {
                **({} if self.copies is None else self.copies.counts),
                "running": 0 if self.copies is None else len(self.copies.copies),
                "forbidden": dict(self.engine.forbade),
            },
            "fusion": {} if self.fusion is None else self.fusion.statistics(),
            "messages_early": 0 if self.messages is None else self.messages.early,
            "routes_shortened": 0 if self.routes is None else self.routes.shortened,
            "fallbacks": self.counts()["fallbacks"],
            "exceptions": sum(p.fallbacks["exception"] for p in parts.values()),
            "last_traceback": next((p.last_traceback for p in parts.values() if p.last_traceback), None),
            "retired": {name: p.retired for name, p in parts.items() if p.retired is not None},
        }

    def explain(self, key: Hashable) -> dict[str, Any] | None:
        """The newest decision about a key as plain JSON, see `DecisionLog.story`; None when there is none."""
        return None if self.engine is None else self.engine.log.story(key)

    def decision(self, key: Hashable) -> tuple[str, str | None, float | None] | None:
        """The same in short, see `DecisionLog.brief`."""
        return None if self.engine is None else self.engine.log.brief(key)

    # ------------------------------------------------------------------ hooks

    def _decide(self, ts: TaskState, valid: Collection[WorkerState] | None) -> Any:
        engine = self.engine
        if engine is None or self.seam is None:
            return None
        if not engine.knows_more(ts):
            # Most tasks of most clusters end here.
            engine.declined[Declined.PLAIN] += 1
            engine.books.plain_key = ts.key
            return None
        return engine.decide(ts, valid)

    def _retired(self, reason: str) -> None:
        """Report that the governor retires the policy, or that the judge of graphs leaves some graphs to Dask."""
        logger.warning("placement: the policy retires, stock Dask decides: %s", reason)
        try:
            self._sink(Event("placement.retired", f"the policy retires: {reason}", {"part": "policy"}))
        except Exception:
            logger.exception("placement: the event sink failed")

    def _fell_back(self, key: Hashable, reason: str) -> None:
        if self.engine is not None:
            self._guard(self.engine.log.failed, key, reason)

    def _guard(self, event: Callable[[*_Ts], object], *args: *_Ts) -> None:
        try:
            event(*args)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        """Count a hook that has raised. Call while its exception is handled."""
        if self.seam is not None:
            self.seam.failed(BOOKKEEPING)
            if self.engine is not None and self.seam.parts[BOOKKEEPING].retired is not None:
                self.engine.untrusted = True

    def transition(
        self, key: Hashable, start: str, finish: str, *args: object, stimulus_id: str, **kwargs: object
    ) -> None:
        """Hook of distributed: a task changes its state. Called for every transition: leaves as early as possible."""
        engine = self.engine
        if engine is None:
            return
        if start == "processing":
            if finish == "processing":
                return
            try:
                engine.books.left(key, finish, kwargs)
            except Exception:
                self._failed()
            copies = self.copies
            if copies is not None and copies.copies:
                self._guard(copies.left_processing, key, finish)
        elif finish == "processing":
            try:
                engine.books.entered(key, start == "queued")
            except Exception:
                self._failed()
            copies = self.copies
            if copies is not None and copies.copies:
                self._guard(copies.entered_processing, key)
        elif finish in _UNWANTED and start != finish:
            groups = engine.groups
            if groups.by_key or groups.later:
                self._guard(groups.gone, key)
            copies = self.copies
            if copies is not None and copies.copies and finish == "forgotten":
                self._guard(copies.unwanted, key)

    def update_graph(self, scheduler: Scheduler, *, client: str, tasks: Collection[Hashable], **kwargs: object) -> None:
        """Hook of distributed: a graph arrived."""
        if self.messages is not None:
            self._guard(self.messages.graph_arrived, client)
        if self.engine is not None:
            self._guard(self.engine.graph_arrived, tasks)

    def log_event(self, topic: str | Collection[str], msg: object) -> None:
        """Hook of distributed: an event was logged. Used for stealing, which moves tasks without a transition."""
        engine = self.engine
        if engine is None or topic != "stealing":
            return
        if isinstance(msg, (tuple, list)) and msg and msg[0] == "confirm":
            # ("confirm", key, state, victim, thief, stimulus_id)
            self._guard(engine.books.stolen, msg[1], msg[3], msg[4])
            copies = self.copies
            if copies is not None and copies.copies:
                self._guard(copies.entered_processing, msg[1])

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Hook of distributed: a worker joined."""
        if self.engine is not None:
            self._guard(self.engine.worker_added, worker)
        if self.messages is not None:
            self._guard(self.messages.worker_added, worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: object) -> None:
        """Hook of distributed: a worker left."""
        if self.engine is not None:
            self._guard(self.engine.worker_removed, worker)
        if self.copies is not None:
            self._guard(self.copies.worker_removed, worker)
        if self.messages is not None:
            self._guard(self.messages.worker_removed, worker)
        if self.stealing is not None:
            self._guard(self.stealing.worker_removed)

    def restart(self, scheduler: Scheduler) -> None:
        """Hook of distributed: the scheduler has forgotten all tasks."""
        if self.engine is not None:
            self._guard(self.engine.books.restarted)
        if self.copies is not None:
            self._guard(self.copies.restarted)


def _give_out(scheduler: Scheduler) -> None:
    """Fill slots as stock does: a root that was held for its owner would wait until that one's task ends."""
    if scheduler.status is Status.running and scheduler.queued and scheduler.idle_task_count:
        scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=f"gpurt-uninstall-{time.time()}")
