"""`Fusion`: graphs of data frames are fused as they come, see `placement.decide.steps`.

Where
    `distributed.scheduler._materialize_graph`, in the thread where Dask makes the graph of an expression. It is a
    function of a module, so ours stays there, and does nothing but for a scheduler that has said so by `_current`.

Which graphs
    Those for whose result a client waits, ``df.compute()`` and ``dask.compute(...)``. Futures, as of
    ``client.compute``, are left: the next graph may use a step of the first one, while both run. Steps that the
    scheduler has already are left for the same reason.

Graphs that run side by side
    Two threads, or two clients, may ask for results that have steps in common. Dask runs these once. A step that was
    fused is in the first graph only, so the second one runs it again. The first time that this is seen
    (`Fusion.shares`), nothing is fused for `SHARED_SECONDS`.

The same key twice
    A key may now have other inputs than in a graph that came before, as of another client. The scheduler has that task
    already, with all that it needs, so what the new graph says of it is left out, with what only that needs
    (`_forget_known`). Stock would keep the tasks below it for good, as nothing asks for them. After `uninstall` that
    goes on until the fused graphs have ended, or by the next `Fusion` of the scheduler.
"""

from __future__ import annotations

import contextvars
import functools
import math
import time
from typing import TYPE_CHECKING, Any

from distributed import scheduler as module

from dask_gpurt.model.checks import require_call
from dask_gpurt.model.wrapped import Wrapped
from dask_gpurt.placement.decide import steps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dask.typing import Key
    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.placement.takeover.seam import Seam

#: how a client says that it waits for the result
WAITS = [{"type": "low-level-graph"}]
#: for which nothing is fused after graphs with common steps ran side by side
SHARED_SECONDS = 600.0
#: states of a task whose result is still to come
_TO_COME = frozenset(("no-worker", "processing", "queued", "waiting"))
#: the scheduler's method that takes in a graph, and the attribute with which ours refers to its `_States`
_NOTE, _STATES = "_generate_taskstates", "gpurt_states"
#: what is in the place of Dask's function
_ours: Callable[..., Any] | None = None
#: the graph that is being made, if it is to be fused
_current: contextvars.ContextVar[_Request | None] = contextvars.ContextVar("gpurt_fusion", default=None)


class Fusion:
    """Fuses the graphs of one scheduler.

    Parameters
    ----------
    seam
        Counts failures.
    active
        Whether to do so now.

    Raises
    ------
    SeamMismatch
        This distributed makes its graphs in another way. Nothing was changed.
    """

    def __init__(self, seam: Seam, active: Callable[[], bool]) -> None:
        self.scheduler = seam.scheduler
        self._seam = seam
        self._part = seam.part("fusion")
        self._active = active
        make = "_materialize_graph"
        require_call(getattr(module, make, None), f"distributed.scheduler.{make}", None, validate=False)
        require_call(getattr(self.scheduler, _NOTE, None), f"Scheduler.{_NOTE}", keys=(), dsk={}, computation=None)
        #: graphs with fewer tasks, and tasks that were left out
        self.graphs = self.spared = 0
        #: times that a graph had steps in common with one that ran, while graphs were fused
        self.shared = 0
        #: those that run, and some that have ended
        self.running: list[_Request] = _States.succeeded(self.scheduler)
        #: monotonic seconds from which on graphs are fused
        self._again = -math.inf
        self._graphs = _Graphs(self)
        self._states = _States(self)

    def install(self) -> None:
        """Fuse the graphs that come from now on."""
        global _ours
        if module._materialize_graph is not _ours:
            _ours = module._materialize_graph = _materializing(module._materialize_graph)
        self._graphs.install()
        self._states.install()

    def uninstall(self) -> None:
        """Graphs that come later are Dask's. A second call does nothing."""
        self._graphs.uninstall()
        self._states.leave()

    def statistics(self) -> dict[str, int]:
        """Plain JSON."""
        return {"graphs": self.graphs, "spared": self.spared, "shared": self.shared}

    def wants(self, request: dict[str, Any]) -> bool:
        """Whether the graph of a request is to be fused."""
        metadata = request.get("span_metadata")
        # Retries are for a step, and a function is asked for each key.
        wishes = request.get("annotations") or {}
        return (
            isinstance(metadata, dict)
            and metadata.get("collections") == WAITS
            and "retries" not in wishes
            and not any(map(callable, wishes.values()))
            and not request.get("internal_priority")
            and not isinstance(request.get("user_priority"), dict)
            and not request.get("actors")
            and time.monotonic() >= self._again
            and self._part.retired is None
            and self._active()
        )

    def shares(self, names: set[str]) -> bool:
        """Whether a graph that runs has one of these steps in a task of another name. In a thread."""
        self.running = [one for one in self.running if one.runs()]
        if all(names.isdisjoint(one.dropped) for one in self.running):
            return False
        now = time.monotonic()
        self.shared += now >= self._again
        self._again = now + SHARED_SECONDS
        return True

    def began(self, request: _Request) -> None:
        """A graph was fused. In a thread."""
        self.running = [*self.running, request]

    def ended(self, request: _Request) -> None:
        """A graph was made."""
        request.is_made = True
        self.graphs += request.spared > 0
        self.spared += request.spared
        if request.error is not None:
            try:
                raise request.error
            except Exception:
                self._seam.failed(self._part.name)


class _Request:
    """A graph that is being made, or that runs."""

    def __init__(self, fusion: Fusion, keys: Collection[Key], *, wanted: bool) -> None:
        self._fusion = fusion
        self._keys = keys
        #: False: it is only looked whether it has steps in common with a graph that runs
        self._wanted = wanted
        self.is_made = False
        #: tasks that were left out, and the names of their steps
        self.spared = 0
        self.dropped: set[str] = set()
        self.error: Exception | None = None

    def runs(self) -> bool:
        """Whether a result is still to come."""
        tasks = self._fusion.scheduler.tasks
        return not self.is_made or any(key in tasks and tasks[key].state in _TO_COME for key in self._keys)

    def fused(self, expression: Any, graph: dict[Key, Any], annotations: dict[str, dict[Key, Any]]) -> dict[Key, Any]:
        """A graph with fewer tasks, or the same one. In a thread."""
        scheduler = self._fusion.scheduler
        try:
            found = steps.Steps(expression)
            if self._fusion.shares(found.names) or not self._wanted:
                return graph
            less = steps.fused(
                graph,
                found,
                asked=self._keys,
                annotated=[key for keys in annotations.values() for key in keys],
                known=scheduler.task_groups,
                # Nothing is known of workers to come.
                threads=scheduler.total_nthreads or math.inf,
            )
            self.dropped = {key[0] for key in graph.keys() - less.keys() if isinstance(key, tuple)}
        except Exception as e:
            self.error = e
            return graph
        self.spared = len(graph) - len(less)
        if self.spared:
            self._fusion.began(self)
        return less


def _materializing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def materialize(expr: Any, *args: Any, **kwargs: Any) -> Any:
        graph, annotations = stock(expr, *args, **kwargs)
        request = _current.get()
        return graph if request is None else request.fused(expr, graph, annotations), annotations

    return materialize


class _Graphs(Wrapped):
    """Says which graph is being made."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        super().__init__(fusion.scheduler.stream_handlers, "update-graph")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        async def update_graph(*args: Any, **kwargs: Any) -> Any:
            wanted = self._active and self._fusion.wants(kwargs)
            if not (wanted or self._fusion.running):
                return await stock(*args, **kwargs)
            request = _Request(self._fusion, kwargs.get("keys", ()), wanted=wanted)
            token = _current.set(request)
            try:
                return await stock(*args, **kwargs)
            finally:
                _current.reset(token)
                self._fusion.ended(request)

        return update_graph


class _States(Wrapped):
    """Leaves out what a graph says of tasks that the scheduler has, with other inputs."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._leaves = False
        super().__init__(fusion.scheduler, _NOTE)
        vars(self._ours)[_STATES] = self

    @staticmethod
    def succeeded(scheduler: Scheduler) -> list[_Request]:
        """End the one that an earlier `Fusion` has left behind, and return the graphs that it waits for.

        Covered by the next one it could not go, and each `Fusion` that comes while a graph runs would add a layer.
        """
        states = getattr(vars(scheduler).get(_NOTE), _STATES, None)
        if states is None:
            return []
        states.uninstall()
        return [one for one in states._fusion.running if one.runs()]

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def generate(keys: Any, dsk: dict[Any, Any], computation: Any) -> Any:
            # On the event loop, so not where nothing was ever fused.
            if self._active and (self._fusion.running or self._fusion.graphs):
                _forget_known(self._fusion.scheduler.tasks, dsk, keys)
            if self._leaves:
                self.leave()
            return stock(keys=keys, dsk=dsk, computation=computation)

        return generate

    def leave(self) -> None:
        """Go, now or when the last fused graph has ended. A second call does nothing."""
        self._leaves = True
        if not any(one.runs() for one in self._fusion.running):
            self.uninstall()


def _forget_known(tasks: Mapping[Key, TaskState], graph: dict[Key, Any], keys: Iterable[Key]) -> None:
    """Take out of a graph what the scheduler has with other inputs, and what only that needs."""
    known = [key for key in graph if key in tasks and _differs(tasks[key], graph[key])]
    if not known:
        return
    for key in known:
        del graph[key]
    needed: set[Key] = set()
    left = list(keys)
    while left:
        key = left.pop()
        if key in graph and key not in needed:
            needed.add(key)
            left += graph[key].dependencies
    for key in graph.keys() - needed:
        del graph[key]


def _differs(ts: TaskState, task: Any) -> bool:
    """Whether the scheduler has a task with other inputs, and one of the two is fused. Others are Dask's to judge."""
    if ts.run_spec is None or not (steps.is_fused(task) or steps.is_fused(ts.run_spec)):
        return False
    return {other.key for other in ts.dependencies} != task.dependencies
