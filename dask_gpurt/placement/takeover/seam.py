"""`Seam`: override methods of a live Scheduler safely, and give them back. Inspects every private name in use.

`check` compares what placement relies on with the installed version of Dask. `install` and `put` override, `uninstall`
restores. *Stock* means Dask's own method.

An override is an instance attribute: ``scheduler.decide_worker_non_rootish = ours`` hides the class's method, and
``delattr`` restores it exactly. `Scheduler` has a ``__dict__`` although `SchedulerState` has slots.

An exception that escapes an overridden decider while a task finishes closes that worker's comm, and the scheduler
*removes the worker*. So every override is wrapped:

1. It raises: stock decides, and `circuit_breaker` counts it.
2. It returns None: it declines, and stock decides. That is no failure.
3. It returns something that is not a running worker of this scheduler, or not one the task may run on: as 1, counted as
   "rejected". The check costs less than a microsecond, and keeps user restrictions safe from mistakes of placement.
4. Too many failures (see `circuit_breaker`): this override retires. It stays installed, but stock decides from then on.
   (It must not uninstall itself: it may be on the stack.)

Signatures are compared at installation. A private name that changed in meaning but not in signature cannot be found
that way; the supported range of versions in setup.cfg and Dask's own test suites cover that.

Rejected: patching the class (it leaks into every scheduler of the process, and tests have many); a Scheduler subclass
(``dask scheduler`` has no option for one).
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import distributed
from distributed import Client
from distributed.core import Status
from distributed.scheduler import TaskState, WorkerState
from distributed.stealing import WorkStealing

from dask_gpurt.errors import InstallError, SeamMismatch
from dask_gpurt.model import Sink, null_sink
from dask_gpurt.model.circuit_breaker import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distributed.scheduler import Scheduler

logger = logging.getLogger("distributed.scheduler.gpurt")

#: what an override or the plugin calls or hides: name -> parameters
SIGNATURES: dict[str, tuple[str, ...]] = {
    "bulk_schedule_unrunnable_after_adding_worker": ("self", "ws"),
    "decide_worker_non_rootish": ("self", "ts"),
    "decide_worker_rootish_queuing_enabled": ("self",),
    "get_comm_cost": ("self", "ts", "ws"),
    "is_rootish": ("self", "ts"),
    "stimulus_queue_slots_maybe_opened": ("self", "stimulus_id"),
    "transitions": ("self", "recommendations", "stimulus_id"),
    "valid_workers": ("self", "ts"),
    "_task_to_msg": ("self", "ts"),
}
#: the same of work stealing
STEALING: dict[str, tuple[str, ...]] = {"_get_thief": ("self", "scheduler", "ts", "potential_thieves", "occupancies")}
#: entries of `_TRANSITIONS_TABLE` that are hidden, and their parameters
ENTRIES: dict[tuple[str, str], tuple[str, ...]] = {("waiting", "processing"): ("self", "key", "stimulus_id")}
#: attributes and slots that must exist
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Client: ("_instances",),
    WorkerState: (
        "_network_occ",
        "address",
        "host",
        "long_running",
        "memory_limit",
        "nbytes",
        "needs_what",
        "nthreads",
        "processing",
        "status",
    ),
    TaskState: (
        "actor",
        "dependencies",
        "host_restrictions",
        "_queueable",
        "key",
        "loose_restrictions",
        "nbytes",
        "prefix",
        "priority",
        "processing_on",
        "resource_restrictions",
        "who_has",
        "worker_restrictions",
    ),
}


class Seam(Guard):
    """The overrides on one scheduler.

    `on_fallback` is called with the key of a task that stock decided for because the override failed, and why. It must
    not raise.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        sink: Sink = null_sink,
        clock: Callable[[], float] | None = None,
        on_fallback: Callable[[Any, str], None] = lambda key, reason: None,
    ) -> None:
        # Looked up at each call, so that a simulator can exchange it.
        super().__init__("placement", logger, sink=sink, clock=clock or (lambda: time.monotonic()))
        self._on_fallback = on_fallback
        self.scheduler = scheduler
        self._installed: dict[str, object] = {}

    def check(self) -> None:
        """Compare what is relied on with the installed version of Dask. Changes nothing.

        Raises
        ------
        SeamMismatch
            A name is missing or has other parameters.
        """
        cls = type(self.scheduler)
        for owner, names in ((cls, SIGNATURES), (WorkStealing, STEALING)):
            for name, expected in names.items():
                self._check_signature(owner, name, expected)
        table = getattr(cls, "_TRANSITIONS_TABLE", None)
        for entry, expected in ENTRIES.items():
            said = f"{cls.__name__}._TRANSITIONS_TABLE[{entry!r}]"
            taken: Callable[..., object] | None = table.get(entry) if isinstance(table, Mapping) else None
            if taken is None:
                self._mismatch(f"{said}{_said(expected)}", "no such entry")
            found = tuple(inspect.signature(taken).parameters)
            if found != expected:
                self._mismatch(f"{said}{_said(expected)}", _said(found))
        for state, attributes in ATTRIBUTES.items():
            for name in attributes:
                if not hasattr(state, name):
                    self._mismatch(f"{state.__name__}.{name}", "nothing of that name")

    def _check_signature(self, owner: type, name: str, expected: tuple[str, ...]) -> None:
        wanted = f"{owner.__name__}.{name}{_said(expected)}"
        method: Callable[..., object] | None = getattr(owner, name, None)
        if method is None:
            self._mismatch(wanted, "nothing of that name")
        try:
            parameters = tuple(inspect.signature(method).parameters)
        except (TypeError, ValueError):
            self._mismatch(wanted, repr(method))
        if parameters != expected:
            self._mismatch(wanted, f"{name}{_said(parameters)}")

    @staticmethod
    def _mismatch(expected: str, found: str) -> NoReturn:
        raise SeamMismatch(
            f"distributed {distributed.__version__} is not what placement was written for: expected {expected}, "
            f"found {found}. Remedy: install a supported version (see `pip show dask-gpurt`), or set "
            "gpurt.placement.enabled: false"
        )

    def install(
        self,
        decide: Callable[[TaskState, set[WorkerState] | None], WorkerState | None],
        comm_cost: Callable[[TaskState, WorkerState], float | None],
    ) -> None:
        """Override what decides, and what wakes tasks that wait for a worker; all of it, or none.

        Each of the callables may decline with None.

        Parameters
        ----------
        decide
            The worker for a task, of those that it may run on; None: all.
        comm_cost
            Seconds to bring the inputs of a task to a worker.

        Raises
        ------
        InstallError
            Another plugin has overridden one of them.
        """
        bulk = "bulk_schedule_unrunnable_after_adding_worker"
        self.require_free("decide_worker_non_rootish", "get_comm_cost", bulk)
        self.put("decide_worker_non_rootish", self._wrap_decide(decide))
        self.put("get_comm_cost", self._wrap_comm_cost(comm_cost))
        self.put(bulk, self._wrap_bulk(bulk))

    def watch(self, observe: Callable[[TaskState, Collection[WorkerState] | None, WorkerState | None], None]) -> None:
        """Call ``observe(ts, valid, ws)`` after each decision that Dask makes for a task, for shadow mode.

        `valid` are the workers that the task may run on (None: all), `ws` is the one that Dask chose (None: none).

        Raises
        ------
        InstallError
            Another plugin has overridden the method.
        """
        name = "decide_worker_non_rootish"
        self.require_free(name)
        part, stock = self.part(name), self.stock(name)

        def decide_worker_non_rootish(ts: TaskState) -> WorkerState | None:
            ws = stock(ts)
            if part.retired is None:
                try:
                    restricted = ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions
                    observe(ts, self._allowed(ts) if restricted else None, ws)
                except Exception:
                    self.failed(part.name)
            return ws

        self.put(name, decide_worker_non_rootish)

    def require_free(self, *names: str) -> None:
        """InstallError where another plugin has overridden one of these attributes of the scheduler."""
        for name in names:
            if name in self.scheduler.__dict__:
                raise InstallError(
                    f"Scheduler.{name} is already overridden by {self.scheduler.__dict__[name]!r}. Remedy: remove "
                    "the other plugin, or set gpurt.placement.enabled: false"
                )

    def put(self, name: str, ours: object) -> None:
        """Hide the class's attribute `name` behind `ours` until `uninstall`."""
        self._installed[name] = ours
        setattr(self.scheduler, name, ours)

    def uninstall(self) -> None:
        """Restore the class's methods. An override that another plugin has put over ours is left, with a warning."""
        attributes = self.scheduler.__dict__
        for name, wrapped in self._installed.items():
            if attributes.get(name) is wrapped:
                delattr(self.scheduler, name)
            elif name in attributes:
                logger.warning("Scheduler.%s was overridden after placement took it over; left as it is", name)
        self._installed.clear()

    @property
    def installed(self) -> tuple[str, ...]:
        """Names taken over now."""
        return tuple(self._installed)

    def stock(self, name: str) -> Callable[..., Any]:
        """The class's own method, bound."""
        return getattr(type(self.scheduler), name).__get__(self.scheduler)

    def _allowed(self, ts: TaskState) -> set[WorkerState] | None:
        """The workers that a restricted task may run on; None: all, as none that it names is there."""
        valid: set[WorkerState] | None = self.scheduler.valid_workers(ts)
        return None if not valid and ts.loose_restrictions else valid

    def _wrap_decide(self, ours: Callable[..., Any]) -> Callable[..., Any]:
        scheduler = self.scheduler
        part, stock = self.part("decide_worker_non_rootish"), self.stock("decide_worker_non_rootish")
        running, on_fallback = Status.running, self._on_fallback

        def decide_worker_non_rootish(ts: TaskState) -> WorkerState | None:
            if part.retired is not None:
                part.fallbacks["retired"] += 1
                on_fallback(ts.key, f"placement had retired after {part.retired}")
                return stock(ts)
            try:
                valid = None
                if ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions:
                    valid = self._allowed(ts)
                ws = ours(ts, valid)
                if ws is None:
                    return stock(ts)
                if ws.status is running and scheduler.workers.get(ws.address) is ws and (valid is None or ws in valid):
                    return ws
                detail = f"{ws!r} is not a running worker that {ts!r} may run on"
                self.failed(part.name, "rejected", detail)
                on_fallback(ts.key, f"the choice was rejected: {detail}")
            except Exception as e:
                self.failed(part.name)
                on_fallback(ts.key, f"{type(e).__name__}: {e}")
            return stock(ts)

        return decide_worker_non_rootish

    def _wrap_comm_cost(self, ours: Callable[..., Any]) -> Callable[..., Any]:
        part, stock = self.part("get_comm_cost"), self.stock("get_comm_cost")

        def get_comm_cost(ts: TaskState, ws: WorkerState) -> float:
            if part.retired is not None:
                part.fallbacks["retired"] += 1
                return stock(ts, ws)
            try:
                seconds = ours(ts, ws)
                if seconds is None:
                    return stock(ts, ws)
                if 0 <= seconds < math.inf:
                    return seconds
                self.failed(part.name, "rejected", f"{seconds!r} is not a time in seconds, for {ts!r} on {ws!r}")
            except Exception:
                self.failed(part.name)
            return stock(ts, ws)

        return get_comm_cost

    def _wrap_bulk(self, name: str) -> Callable[..., Any]:
        """Tasks with ``allow_other_workers`` begin on any worker that runs, where none that they name is there.

        Such a task is ``no-worker`` if the worker that it names leaves while no other runs. Others may be paused, or
        start: a worker is in the scheduler's books as soon as it registers, and runs once its plugins are set up, ours
        among them. Dask then wakes only tasks that name the worker which begins to run, and this one waits for ever.
        """
        scheduler, part, stock = self.scheduler, self.part(name), self.stock(name)

        def bulk_schedule_unrunnable_after_adding_worker(ws: WorkerState) -> Any:
            found = stock(ws)
            if part.retired is None:
                try:
                    loose = [ts for ts in scheduler.unrunnable if ts.loose_restrictions and ts.key not in found]
                    if more := [ts for ts in loose if not _kept(ts) and not scheduler.valid_workers(ts)]:
                        # Dask does what comes last first.
                        more += [scheduler.tasks[key] for key in found]
                        more.sort(key=operator.attrgetter("priority"), reverse=True)
                        return {ts.key: "processing" for ts in more}
                except Exception:
                    self.failed(part.name)
            return found

        return bulk_schedule_unrunnable_after_adding_worker


def _kept(ts: TaskState) -> bool:
    """Whether this package itself keeps a task waiting, by the address of a worker that is never there."""
    return any(address.startswith("gpurt://") for address in ts.worker_restrictions or ())


def _said(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})"
