"""`ClassRestrictions`: ``dask.annotate(gpurt={"node_class": "h200*"})`` as restrictions of workers.

A task that asks for a class may run on the workers whose `NodeClass.key` fits the pattern, as if they had been named
with ``workers=``. Several patterns may be given in a list. Workers that the user has named too stay: a task then runs
where both agree. A worker that comes later is added. Where none fits, the task waits in Dask's state ``no-worker``, as
it does for an address that is not there.

An annotation that cannot be used is a warning at the client, and restricts nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import weakref
from typing import TYPE_CHECKING, Any

from distributed.comm import get_address_host
from distributed.core import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dask.typing import Key
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.model.node_class import NodeClass

#: a worker that is never there. An empty set would be no restriction.
NOWHERE = "gpurt://no-node-of-this-class"


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What one task asks for."""

    task: weakref.ref[TaskState]
    patterns: tuple[str, ...]
    #: workers and hosts that the user has named; empty: any
    workers: frozenset[str]
    hosts: frozenset[str]

    def allows(self, address: str, node: NodeClass) -> bool:
        named = not (self.workers or self.hosts) or address in self.workers or get_address_host(address) in self.hosts
        return named and any(map(node.matches, self.patterns))


class _Changed:
    """Sets with one change, made once for all tasks that have the same set."""

    def __init__(self, change: Callable[[set[str]], set[str]]) -> None:
        self._change = change
        #: id -> the old set, which must live on for its id to mean it, and the new one
        self._made: dict[int, tuple[set[str], set[str]]] = {}

    def of(self, old: set[str]) -> set[str]:
        if id(old) not in self._made:
            self._made[id(old)] = old, self._change(old)
        return self._made[id(old)][1]


class ClassRestrictions:
    """Those of one scheduler."""

    def __init__(self) -> None:
        self._asked: dict[Key, _Asked] = {}
        self._scheduler: Scheduler | None = None

    def start(self, scheduler: Scheduler) -> None:
        """Begin."""
        self._scheduler = scheduler

    def stop(self) -> None:
        """Give tasks back the restrictions of their user; without this package the annotation means nothing."""
        assert self._scheduler is not None
        for ts, asked in self._tasks():
            ts.worker_restrictions, ts.host_restrictions = set(asked.workers) or None, set(asked.hosts) or None
        for ws in list(self._scheduler.running) if self._asked else ():
            self._begin(ws)
        self._asked.clear()
        self._scheduler = None

    def ask(self, annotations: Mapping[Key, Any], nodes: Mapping[str, NodeClass]) -> list[str]:
        """Restrict tasks that have come.

        Parameters
        ----------
        annotations
            Key -> the value of the annotation ``gpurt``.
        nodes
            Address -> class, of the workers that have told.

        Returns
        -------
        list of str
            What is wrong with annotations, in words.
        """
        assert self._scheduler is not None
        wrong: dict[str, None] = {}
        # Tasks that ask for the same have one set: 100,000 of 500 addresses each would take seconds, and gigabytes.
        # It is never changed in place: Dask sets another one, too.
        allowed: dict[tuple[Any, ...], set[str]] = {}
        for key, value in annotations.items():
            patterns, problem = _patterns(value)
            if problem:
                wrong[problem] = None
            ts = self._scheduler.tasks.get(key)
            if patterns and ts is not None:
                asked = self._take(ts, patterns)
                ts.host_restrictions = None  # Dask would add these workers, rather than choose among them
                what = asked.patterns, asked.workers, asked.hosts
                found = allowed.get(what)
                if found is None:
                    found = allowed[what] = {a for a, node in nodes.items() if asked.allows(a, node)} or {NOWHERE}
                ts.worker_restrictions = found
        return list(wrong)

    def _take(self, ts: TaskState, patterns: tuple[str, ...]) -> _Asked:
        assert self._scheduler is not None
        asked = self._asked.get(ts.key)
        if asked is None or asked.task() is not ts:  # else its graph was submitted again
            asked = self._asked[ts.key] = _Asked(
                weakref.ref(ts, self._forget(ts.key)),
                patterns,
                frozenset(ts.worker_restrictions or ()),
                frozenset(map(self._scheduler.coerce_hostname, ts.host_restrictions or ())),
            )
        return asked

    def _forget(self, key: Key) -> Any:
        def forget(gone: weakref.ref[TaskState]) -> None:
            known = self._asked.get(key)
            if known is not None and known.task is gone:
                del self._asked[key]

        return forget

    def _tasks(self) -> Iterable[tuple[TaskState, _Asked]]:
        for asked in list(self._asked.values()):
            ts = asked.task()
            if ts is not None:
                yield ts, asked

    def joined(self, address: str, node: NodeClass) -> None:
        """A worker has told its class: tasks that wait for it begin, if it works already."""
        assert self._scheduler is not None
        added = False
        allows: dict[tuple[Any, ...], bool] = {}
        changed = _Changed(lambda old: (old | {address}) - {NOWHERE})
        for ts, asked in self._tasks():
            what = asked.patterns, asked.workers, asked.hosts
            if what not in allows:
                allows[what] = asked.allows(address, node)
            if allows[what]:
                ts.worker_restrictions = changed.of(ts.worker_restrictions or set())
                added = True
        ws = self._scheduler.workers.get(address)
        if added and ws is not None and ws.status is Status.running:
            self._begin(ws)

    def _begin(self, ws: WorkerState) -> None:
        """Begin tasks that no worker could run so far, and this one can."""
        assert self._scheduler is not None
        found = self._scheduler.bulk_schedule_unrunnable_after_adding_worker(ws)
        self._scheduler.transitions(found, f"gpurt-node-class-{time.time()}")

    def left(self, address: str) -> None:
        """A worker has gone; another one may come at its address."""
        changed = _Changed(lambda old: old - {address} or {NOWHERE})
        for ts, _ in self._tasks():
            if ts.worker_restrictions and address in ts.worker_restrictions:
                ts.worker_restrictions = changed.of(ts.worker_restrictions)

    def waiting(self, nodes: Mapping[str, NodeClass]) -> dict[str, int]:
        """Pattern -> tasks that wait for it, where no worker fits."""
        if self._scheduler is None:
            return {}
        # Not all that ask: there may be 100,000 that run, and pages look each second.
        found = ((ts, self._asked.get(ts.key)) for ts in self._scheduler.unrunnable)
        counts = collections.Counter(p for ts, asked in found if asked and asked.task() is ts for p in asked.patterns)
        return {p: n for p, n in counts.items() if not any(node.matches(p) for node in nodes.values())}


def _patterns(value: Any) -> tuple[tuple[str, ...], str]:
    """The patterns of an annotation, and what is wrong with it; "" if nothing is."""
    asked = value.get("node_class") if isinstance(value, dict) and len(value) == 1 else None
    patterns = (asked,) if isinstance(asked, str) else tuple(asked) if isinstance(asked, (list, tuple, set)) else ()
    if patterns and all(isinstance(p, str) and p for p in patterns):
        return patterns, ""
    example = 'must be a mapping such as {"node_class": "h200*"}, with a pattern or a list of patterns'
    return (), f"the annotation gpurt is {value!r}, {example}. The tasks run anywhere"
