"""Root tasks that belong together, and which worker pulls them.

Stock queuing hands root tasks to whichever worker has a free slot, in order of priority: the eight chunks of one sum
end up on eight workers and seven are moved (dask/distributed#7555). Without queuing neighbours stay together, but all
roots are sent out at once and memory overflows. Here the *number* of tasks out is stock's; only who gets which differs:

1. A graph arrives: one pass in priority order closes a *cogroup* at the first task that joins two or more roots, which
   it may reach through chains of tasks with one input. Groups are capped at roots per worker, and at `MAX_GROUP`, so
   that every worker gets one.
2. Roots of a group stay queued when they become ready (`waits`); after the graph, the slots are dealt at once.
3. A worker with a free slot pulls from the group it owns, else it comes to own the next group nobody owns, else None:
   stock's rule, the head of the queue. Nobody waits for anybody, and there are no timers.
4. A worker leaves: its group goes back to the front.
5. Within one graph a worker may be a group ahead of the queue; across graphs and user priorities it never is.

A root is forgotten here as soon as it is assigned, by whomever, or no longer wanted; a group when it has no roots left.
All of it is advice: a task that is not where a group says it is (cancelled, already running, recomputed) is skipped.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

#: roots per group, at most; also the number of groups' worth of priority order that a worker can be ahead
MAX_GROUP = 32
#: a root with more dependents than this is shared by everybody and joins nobody
MAX_DEPENDENTS = 64


class Group:
    """Roots that one worker should run, in priority order."""

    __slots__ = ("keys", "left", "owner")

    def __init__(self) -> None:
        #: may contain keys that are gone
        self.keys: deque[Hashable] = deque()
        #: roots that are still to be assigned
        self.left = 0
        #: address of the worker that pulls from it
        self.owner: str | None = None


class RootGroups:
    """All groups with roots to be assigned."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, Group] = {}
        self.by_owner: dict[str, Group] = {}
        #: groups nobody owns, in priority order; may contain ones that are used up
        self.unowned: deque[Group] = deque()
        #: groups ever closed, and roots handed to the owner of their group
        self.closed = 0
        self.pulled = 0

    def arrived(self, tasks: Iterable[Any], workers: int) -> None:
        """A graph arrived: `tasks` are its TaskStates, before their first transition."""
        # Scattered data and futures of earlier graphs are among them; only what is still to run has a place to choose.
        ordered = sorted((t for t in tasks if t.priority and t.state == "released"), key=lambda t: t.priority)
        roots = sum(1 for t in ordered if not t.dependencies)
        cap = min(MAX_GROUP, roots // max(1, workers))
        if cap < 2:
            return
        reach: dict[Any, tuple[Any, ...]] = {}
        grown: dict[Any, Group] = {}
        for t in ordered:
            if not t.dependencies:
                reach[t] = (t,) if len(t.dependents) <= MAX_DEPENDENTS and t.key not in self.by_key else ()
                continue
            joined: dict[Any, None] = {}
            for d in t.dependencies:
                for r in reach.get(d, ()):
                    joined[r] = None
                if len(joined) > cap:
                    break
            if len(joined) > cap:
                continue
            reach[t] = tuple(joined)
            if len(joined) < 2:
                continue
            fresh = [r for r in joined if r not in grown]
            if not fresh:
                continue
            # A stencil's tasks overlap: let the group of the neighbour grow until it is full, then begin the next.
            group = next((g for r in joined if (g := grown.get(r)) is not None and g.left + len(fresh) <= cap), None)
            if group is None:
                group = Group()
                self.closed += 1
            for r in fresh:
                grown[r] = group
                group.left += 1
        seen: dict[Group, None] = {}
        for t in ordered:
            group = grown.get(t)
            if group is not None:
                group.keys.append(t.key)
                self.by_key[t.key] = group
                seen[group] = None
        # Groups whose roots all ran without ever being pulled are still listed; drop them now and then.
        self.unowned = deque(g for g in (*self.unowned, *seen) if g.left)

    def waits(self, ts: Any) -> bool:
        """Whether a root that is ready should be queued for the owner of its group, even though workers are idle."""
        return ts.key in self.by_key

    def pull(self, address: str, tasks: Mapping[Hashable, Any], head: Any) -> Any:
        """The queued TaskState that this worker should run next; None: the head of the queue.

        `head` is that head. What the user or an older graph put before a group's roots goes first.
        """
        group = self.by_owner.get(address)
        while True:
            if group is not None:
                while group.keys:
                    key = group.keys.popleft()
                    ts = tasks.get(key)
                    if ts is not None and ts.state == "queued" and self.by_key.get(key) is group:
                        if head.priority[:2] < ts.priority[:2]:  # (minus the user's priority, generation of the graph)
                            group.keys.appendleft(key)
                            return None
                        self.pulled += 1
                        return ts
                    self.gone(key, group)
                self.by_owner.pop(address, None)
            if not self.unowned:
                return None
            group = self.unowned.popleft()
            if group.left and group.owner is None:
                group.owner = address
                self.by_owner[address] = group
            else:
                group = None

    def gone(self, key: Hashable, group: Group | None = None) -> None:
        """A root was assigned, or is no longer wanted."""
        found = self.by_key.get(key)
        if found is None or (group is not None and found is not group):
            return
        del self.by_key[key]
        found.left -= 1
        if not found.left and found.owner is not None and self.by_owner.get(found.owner) is found:
            del self.by_owner[found.owner]
        if not self.by_key:
            self.unowned.clear()

    def worker_removed(self, address: str) -> None:
        group = self.by_owner.pop(address, None)
        if group is not None and group.left:
            group.owner = None
            self.unowned.appendleft(group)

    def __len__(self) -> int:
        """Roots that are still to be assigned."""
        return len(self.by_key)

    def clear(self) -> None:
        self.by_key.clear()
        self.by_owner.clear()
        self.unowned.clear()
