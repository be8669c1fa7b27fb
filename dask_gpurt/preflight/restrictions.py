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
import operator
import time
import weakref
from typing import TYPE_CHECKING, Any

from distributed.comm import get_address_host
from distributed.core import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dask.typing import Key
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.model.node_class import NodeClass

#: a worker that is never there. An empty set would be no restriction.
NOWHERE = "gpurt://no-node-of-this-class"


@dataclasses.dataclass(eq=False)
class _Group:
    """What some tasks ask for alike, and where they may run."""

    patterns: tuple[str, ...]
    #: workers and hosts that the user has named; empty: any
    workers: frozenset[str]
    hosts: frozenset[str]
    #: one set for all of them, changed in place as workers come and go. 100,000 tasks of 500 addresses each would take
    #: seconds, and gigabytes; a pass over them for each worker, a tenth of a second. Others replace a task's set, they
    #: do not change it: a shuffle that binds an output to its worker gives its task another one
    allowed: set[str]
    #: that ask for it
    tasks: int = 0

    def allows(self, address: str, node: NodeClass) -> bool:
        named = not (self.workers or self.hosts) or address in self.workers or get_address_host(address) in self.hosts
        return named and any(map(node.matches, self.patterns))


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What one task asks for."""

    task: weakref.ref[TaskState]
    group: _Group


class ClassRestrictions:
    """Those of one scheduler."""

    def __init__(self) -> None:
        self._asked: dict[Key, _Asked] = {}
        self._groups: dict[tuple[Any, ...], _Group] = {}
        self._scheduler: Scheduler | None = None

    def start(self, scheduler: Scheduler) -> None:
        """Begin."""
        self._scheduler = scheduler

    def stop(self) -> None:
        """Give tasks back the restrictions of their user; without this package the annotation means nothing."""
        assert self._scheduler is not None
        for asked in list(self._asked.values()):
            ts, group = asked.task(), asked.group
            # What a shuffle has bound to a worker stays there: another one has nothing of it.
            if ts is not None and ts.worker_restrictions is group.allowed:
                ts.worker_restrictions, ts.host_restrictions = set(group.workers) or None, set(group.hosts) or None
        for ws in list(self._scheduler.running) if self._asked else ():
            self._begin(ws)
        self._asked.clear()
        self._groups.clear()
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
        for key, value in annotations.items():
            patterns, problem = _patterns(value)
            if problem:
                wrong[problem] = None
            ts = self._scheduler.tasks.get(key)
            if patterns and ts is not None:
                group, again = self._take(ts, patterns, nodes)
                ts.host_restrictions = None  # Dask would add these workers, rather than choose among them
                # Submitted again: a shuffle may have bound it meanwhile.
                if not again or (ts.worker_restrictions or frozenset()) == group.workers:
                    ts.worker_restrictions = group.allowed
        return list(wrong)

    def _take(self, ts: TaskState, patterns: tuple[str, ...], nodes: Mapping[str, NodeClass]) -> tuple[_Group, bool]:
        """The group of a task, and whether it had one before, as its graph was submitted again."""
        assert self._scheduler is not None
        known = self._asked.get(ts.key)
        if known is not None and known.task() is ts:
            return known.group, True
        if known is not None:
            self._leave(known.group)
        workers = frozenset(ts.worker_restrictions or ())
        hosts = frozenset(map(self._scheduler.coerce_hostname, ts.host_restrictions or ()))
        group = self._groups.get((patterns, workers, hosts))
        if group is None:
            group = self._groups[patterns, workers, hosts] = _Group(patterns, workers, hosts, set())
            group.allowed |= {a for a, node in nodes.items() if group.allows(a, node)} or {NOWHERE}
        group.tasks += 1
        self._asked[ts.key] = _Asked(weakref.ref(ts, self._forget(ts.key)), group)
        return group, False

    def _forget(self, key: Key) -> Any:
        def forget(gone: weakref.ref[TaskState]) -> None:
            known = self._asked.get(key)
            if known is not None and known.task is gone:
                del self._asked[key]
                self._leave(known.group)

        return forget

    def _leave(self, group: _Group) -> None:
        """A task of it is no more."""
        group.tasks -= 1
        if not group.tasks:
            del self._groups[group.patterns, group.workers, group.hosts]

    def joined(self, address: str, node: NodeClass) -> None:
        """A worker has told its class: tasks that wait for it begin, if it works already."""
        assert self._scheduler is not None
        # A copy: tasks may be forgotten at any time, as garbage is collected.
        allowing = [group for group in list(self._groups.values()) if group.allows(address, node)]
        for group in allowing:
            group.allowed.discard(NOWHERE)
            group.allowed.add(address)
        ws = self._scheduler.workers.get(address)
        if allowing and ws is not None and ws.status is Status.running:
            self._begin(ws)

    def _begin(self, ws: WorkerState) -> None:
        """Begin tasks that no worker could run so far, and this one can."""
        assert self._scheduler is not None
        found = self._scheduler.bulk_schedule_unrunnable_after_adding_worker(ws)
        self._scheduler.transitions(found, f"gpurt-node-class-{time.time()}")

    def left(self, address: str) -> None:
        """A worker has gone; another one may come at its address."""
        for group in list(self._groups.values()):
            group.allowed.discard(address)
            if not group.allowed:
                group.allowed.add(NOWHERE)

    def waiting(self, nodes: Mapping[str, NodeClass]) -> dict[str, int]:
        """Pattern -> tasks that wait for it, where no worker fits."""
        groups = list(self._groups.values())
        lacking = {p for group in groups for p in group.patterns if not any(map(_fits(p), nodes.values()))}
        if self._scheduler is None or not lacking:
            return {}
        # By their set, in one pass: 100,000 may wait, and pages look each second.
        sets = collections.Counter(map(id, map(operator.attrgetter("worker_restrictions"), self._scheduler.unrunnable)))
        counts: collections.Counter[str] = collections.Counter()
        for group in groups:
            for p in lacking.intersection(group.patterns):
                counts[p] += sets[id(group.allowed)]
        return dict(+counts)


def _fits(pattern: str) -> Callable[[NodeClass], bool]:
    return lambda node: node.matches(pattern)


def _patterns(value: Any) -> tuple[tuple[str, ...], str]:
    """The patterns of an annotation, and what is wrong with it; "" if nothing is."""
    asked = value.get("node_class") if isinstance(value, dict) and len(value) == 1 else None
    patterns = (asked,) if isinstance(asked, str) else tuple(asked) if isinstance(asked, (list, tuple, set)) else ()
    if patterns and all(isinstance(p, str) and p for p in patterns):
        return patterns, ""
    example = 'must be a mapping such as {"node_class": "h200*"}, with a pattern or a list of patterns'
    return (), f"the annotation gpurt is {value!r}, {example}. The tasks run anywhere"
