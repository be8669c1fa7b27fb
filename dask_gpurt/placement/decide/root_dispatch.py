"""`RootDispatch`: which worker gets which queued root now.

`root_blocks` knows the owner of each root. This module knows when it is better not to follow it. *Stock* means Dask's
own choice.

* `held`: a root waits for its owner when only workers on other nodes are free and the owner is at work. A root there
  would cost the transfer of its result.
* `better_left`: the last roots are not queued behind busy threads; the first free thread gets them. Nor are long roots,
  where that would delay tasks that depend on the root before.
* An input that a root needs, and that a neighbour is fetching from another zone, is waited for (`zone_cost`).
* `hungry`: a worker whose slots are all taken gets a root all the same, a few at most, if these tasks wait for inputs.
  So its threads work while the network does. Likewise if they are done before a message could bring it more.

None of this applies where hardly any worker is at work: it relies on a worker that finishes a task and so opens slots.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.link import LinkClass
from dask_gpurt.placement.decide.root_cuts import Member
from dask_gpurt.placement.decide.root_home import home
from dask_gpurt.placement.decide.root_lateness import Lateness
from dask_gpurt.placement.decide.root_times import AHEAD_SHARE, ROUND_TRIP_SECONDS, RootTimes
from dask_gpurt.placement.decide.tiny_roots import TinyRoots
from dask_gpurt.placement.decide.zone_cost import under_way
from dask_gpurt.placement.tables import worker_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.decide.root_blocks import RootBlocks
    from dask_gpurt.placement.tables.tables import Tables
    from dask_gpurt.placement.tables.workers import WorkerInfo

#: tasks per thread up to which a worker that waits for inputs gets one more
MAX_AHEAD = 3
#: a task with more inputs is not searched for missing ones, nor are the tasks of a worker that has more in hand
MAX_LOOKED = 64
#: roots ahead per thread, at most: a worker runs some 6,000 empty tasks a second
MOST_AHEAD = 64
#: not where a root sent ahead waits so long behind a long one, in the mean: four times what a message takes. Not less:
#: of tasks of 50 us, one that the machine holds up for 20 ms would have stock's way taken for hundreds
WAITED_SECONDS = 4 * ROUND_TRIP_SECONDS
#: what contiguous blocks may hold in one worker beyond what stock's queue would, as a share of its memory mark
BEYOND_STOCK = 1 / 16
#: roots that take longer are not queued ahead at the end, in seconds: ten times what a message takes
AHEAD_SECONDS = 0.05
#: and these not before the end either, where that would delay what follows: a hundredth is lost at most
LONG_SECONDS = 0.2
#: a root whose result is sent in this share of its time is not worth waiting for its owner
CHEAP = 0.25
#: a worker that takes so many times as long as usual is not waited for
SLOW = 1.5
#: a root is held for so long at most, in seconds, or as many roots as this take, if that is longer
PATIENCE_SECONDS, PATIENCE = 5.0, 4.0
#: dependents of a root that are looked at
FOLLOWERS = 4
#: idle workers looked at, to find which is the least busy
LOOKED_AT = 16
#: workers with a free thread that are offered roots besides those that have just finished a task
ASKED = 8


class RootDispatch:
    """Gives out the queued roots of one scheduler; `retired`: whether Dask decides everything now."""

    def __init__(self, tables: Tables, groups: RootBlocks, retired: Callable[[], bool]) -> None:
        self._tables = tables
        self._groups = groups
        self._retired = retired
        #: which roots are not queued at all
        self.tiny = TinyRoots(tables, groups)
        self._owned = RootTimes()
        #: of queued tasks without a block. Only what is sent ahead depends on it: of how much they need each other, and
        #: whose memory they fill, nothing is known
        self._plain = RootTimes()
        #: how much the time of messages asks to send ahead
        self.lateness = Lateness()
        #: workers that got or finished a task since roots were last given out, and all of whose tasks may wait for
        #: inputs
        self._fetching: dict[WorkerInfo, None] = {}
        #: workers that finished a task since then
        self._freed: dict[WorkerInfo, None] = {}
        #: the same, noted while they may get roots ahead: roots are short, or what they have in hand is
        self._ended: dict[WorkerInfo, None] = {}
        #: roots that were sent to their `home`
        self.at_home = 0
        #: key of the root that was held last, and since when
        self._waiting: tuple[Any, float] = None, 0.0
        #: whether a root waits, or did lately, for an input that is on its way to its worker's zone
        self._crossing = False
        #: workers in the order in which blocks are given out; None: to be sorted anew
        self._members: list[WorkerInfo] | None = None

    # ------------------------------------------------------------------ events

    def graph_arrived(self, fresh: Collection[TaskState]) -> None:
        """Cut the roots of a graph, by its tasks that are still to run, into blocks. Call before their transitions."""
        self.tiny.graph_arrived()
        if self._waiting[0] not in self._groups.by_key:
            self._waiting = None, 0.0  # a query that comes again has the same keys: its patience begins anew
        s = self._tables.scheduler
        known: dict[Any, bool] = {}

        def is_root(ts: TaskState) -> bool:
            # By the group first: most tasks of most graphs end there.
            group = ts.group
            answer = known.get(group)
            if answer is False:
                return False
            if ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions:
                return False
            if answer is None:
                answer = known[group] = s.is_rootish(ts)
            return answer

        self._groups.arrived(fresh, self._dealt_to, is_root)

    def _dealt_to(self) -> list[Member]:
        """The workers in the order in which blocks are given out: neighbours together, hosts by number."""
        if self._members is None:
            workers = self._tables.workers.all.items
            self._members = sorted(workers, key=lambda w: (w.node.order, w.order))
        return [Member(w.address, w.node.name, w.ws.nthreads / w.slowness) for w in self._members]

    def workers_changed(self, removed: WorkerInfo | None = None) -> None:
        """Note that workers came, left or changed nodes."""
        self._members = None
        if removed is not None:
            for noted in (self._fetching, self._freed, self._ended):
                noted.pop(removed, None)
            self.lateness.lost(removed)

    def assigned(self, info: WorkerInfo) -> None:
        """Note that a worker with inputs to fetch got a task."""
        if self._groups.by_key:
            self._fetching[info] = None

    def finished(self, info: WorkerInfo) -> None:
        """Note that a task left a worker while roots are queued."""
        self._freed[info] = None
        if info.ws.needs_what:
            self._fetching[info] = None
        if self._ahead() or self._runs_dry(info):
            self._ended[info] = None

    def root_done(self, info: WorkerInfo, seconds: float, nbytes: float, owned: bool = True) -> None:
        """Learn from a queued task that a worker has computed: its seconds, bytes of its result, whether of a block."""
        if not owned:
            self._plain.learn(seconds, nbytes)
            return
        self._owned.learn(seconds, nbytes)
        groups = self._groups
        if groups.beyond * self._owned.nbytes > BEYOND_STOCK * info.mark_bytes:
            groups.dissolve()

    def clear(self) -> None:
        """Drop what was noted: the scheduler has forgotten all tasks."""
        self.tiny.clear()
        for noted in (self._fetching, self._freed, self._ended):
            noted.clear()

    # ------------------------------------------------------------------ dealing

    def pull(self, ws: WorkerState) -> Any:
        """The queued root task that a worker with a free slot should run; None: none in particular."""
        tables = self._tables
        info = tables.workers.by_address.get(ws.address)
        node = None if info is None else info.node.name
        scheduler, pull = tables.scheduler, self._groups.pull
        head = scheduler.queued.peek()
        ts = pull(ws.address, scheduler.tasks, head, node, self.may_take)
        if ts is None and self.held(head):
            # What waits for a busy owner does not keep other workers from their own roots, though it is more urgent.
            ts = pull(ws.address, scheduler.tasks, None, node, self.may_take)
        return None if ts is None or self._crosses_again(ts, info) else ts

    def home(self, ts: TaskState) -> WorkerState | None:
        """The worker to run a root on before its inputs could be elsewhere, see `root_home`; None: there is none."""
        return home(ts, self._tables)

    def pull_ahead(self, ws: WorkerState) -> Any:
        """The queued root task that a `hungry` worker gets beyond its slots: its own, or the head if nobody's."""
        ts = self.pull(ws)
        if ts is not None:
            return ts
        tables = self._tables
        info = tables.workers.by_address.get(ws.address)
        head = tables.scheduler.queued.peek()
        if info is None or self._groups.waits(head) or self._crosses_again(head, info):
            return None
        return head

    def _crosses_again(self, ts: TaskState, info: WorkerInfo | None) -> bool:
        """Whether a root should wait until an input that it shares with others has come to the worker's zone."""
        tables = self._tables
        if info is None or not tables.workers.zoned or not ts.dependencies:
            return False
        far = tables.links.link(LinkClass.NETWORK)
        crosses = under_way(ts.dependencies, info, far, tables.workers.by_address)
        self._crossing |= crosses
        return crosses

    def may_take(self, owner: str, left: int) -> bool:
        """Whether a worker on another node should take half of the roots that `owner` has `left`."""
        if left > 1:
            return True
        info = self._tables.workers.by_address.get(owner)
        return info is None or not self._at_work(info) or self._cheap()

    def held(self, ts: TaskState) -> bool:
        """Whether a queued root, which an idle worker could run, should be left to its owner."""
        tables = self._tables
        owner = self._groups.owner(ts.key)
        info = None if owner is None else tables.workers.by_address.get(owner)
        if info is None or not self._at_work(info) or self._cheap():
            return False
        # All that is behind the head of the queue waits with it, so not for ever: what its owner runs may take hours.
        now = tables.clock()
        if self._waiting[0] != ts.key:
            self._waiting = ts.key, now
        return now - self._waiting[1] < max(PATIENCE_SECONDS, PATIENCE * self._owned.found_seconds())

    def impatient(self) -> bool:
        """Whether slots are to be filled though no task ends: a root was held for too long, or its input may be there.

        The latter is asked once: where the input is still under way, that is found again when slots are filled.
        """
        crossing, self._crossing = self._crossing, False
        key, since = self._waiting
        return crossing or (key in self._groups.by_key and self._tables.clock() - since >= PATIENCE_SECONDS)

    def better_left(self, ws: WorkerState) -> bool:
        """Whether this worker would only queue a root, so that the root had better stay in the scheduler's queue.

        Queuing a task ahead (``worker-saturation``) saves its thread the time of a message. When no other work is left,
        it costs all other workers up to the time of a root. Two conditions restrict it:

        * The worker's threads are taken by other roots. Behind a task that joins roots, which may still wait for its
          inputs, the owner keeps its root: its neighbours need the result soon.
        * Another worker would take the root (`_cheap`), or the root would run before a task that the root before it
          makes ready at once.
        """
        threads = ws.nthreads
        if len(ws.processing) - len(ws.long_running) < threads:
            return False
        info = self._tables.workers.by_address.get(ws.address)
        return (info is None or info.roots >= threads) and self._none_ahead()

    def _none_ahead(self) -> bool:
        """Whether each of the remaining roots is better given to the first free thread.

        True of the last ones, fewer than threads, if another worker would take them. True of any root that would run
        before a task that the root before it makes ready at once: that task is needed sooner and frees its input.
        """
        seconds = self._owned.seconds
        if seconds <= AHEAD_SECONDS:
            return False
        s = self._tables.scheduler
        queued = s.queued
        last = len(queued) < s.total_nthreads
        if not queued or not (last or seconds > LONG_SECONDS):
            return False
        return (last and self._cheap()) or any(
            len(d.dependencies) == 1 for d in islice(queued.peek().dependents, FOLLOWERS)
        )

    def _cheap(self) -> bool:
        """Whether sending the result of a root takes much less time than waiting until its owner is free."""
        seconds, nbytes = self._owned.found_seconds(), self._owned.nbytes
        return self._tables.usual_link().seconds(nbytes, 1) < CHEAP * seconds

    def _at_work(self, info: WorkerInfo) -> bool:
        """Whether a worker will soon finish a task, upon which slots are given out again."""
        ws = info.ws
        return info.slowness < SLOW and worker_facts.is_running(ws) and len(ws.processing) > len(ws.long_running)

    def quiet(self) -> bool:
        """Whether `hungry` would return no worker. Call while no slot is free: it forgets who finished tasks."""
        if self._fetching or self._ended:
            return False
        self._freed.clear()
        return True

    def hungry(self) -> list[Any]:
        """Workers to get a root beyond their slots: their tasks wait for inputs, or are done before a message comes."""
        if not (self._fetching or self._ended):
            return []
        looked, self._fetching = self._fetching, {}
        ended, self._ended = self._ended, {}
        if self._retired():
            return []
        found = [info.ws for info in looked if self._starves(info)]
        ahead, nbytes = self._ahead(), self._times().nbytes
        half_share = len(self._tables.scheduler.queued) // (2 * max(1, len(self._tables.workers.all.items)))
        for info in ended:
            ws = info.ws
            if ahead:
                most = min(ahead * ws.nthreads, int(AHEAD_SHARE * min(info.mark_bytes, 1e15) / max(1.0, nbytes)))
                in_hand = len(ws.processing) - len(ws.long_running)
                # In lots: a message costs more than a short root in it. What is in hand doubles at most, and no lot is
                # more than half of an even share of the queue: the last roots stay where every worker can get them.
                if in_hand <= most / 2:
                    found += [ws] * min(most - in_hand, max(2, min(in_hand, half_share)))
            elif ws.processing and nbytes * ws.nthreads <= BEYOND_STOCK * info.mark_bytes and self._runs_dry(info):
                found.append(ws)
        return found

    def _times(self) -> RootTimes:
        """Of the roots that are given out now."""
        return self._owned if self._groups.by_key else self._plain

    def _ahead(self) -> int:
        """Short roots that a thread gets ahead; 0: they are not short, or some take so long that others would wait."""
        times, ahead = self._times(), self.lateness.seconds_ahead
        # One in hand that takes two round trips is enough, however late the others come.
        if not 0 < times.seconds < min(ahead, 4 * ROUND_TRIP_SECONDS) / 2 or times.found_seconds() >= WAITED_SECONDS:
            return 0
        return min(MOST_AHEAD, int(ahead / times.seconds))

    def _runs_dry(self, info: WorkerInfo) -> bool:
        """Whether all that a worker has in hand is done before a message could bring it more.

        Slots count tasks. Two short tasks, such as those that follow roots, fill the slots of a thread for no time.
        """
        seconds_of = self._tables.durations.seconds_of
        ws = info.ws
        left = ROUND_TRIP_SECONDS * ws.nthreads
        if len(ws.processing) > MAX_LOOKED:  # asked after each task: with unlimited slots it would be all of thousands
            return False
        for ts in ws.processing:
            seconds = seconds_of(ts)
            if seconds is None:
                return False
            left -= seconds
            if left <= 0:
                return False
        return bool(ws.processing)  # without any, it has a free slot

    def first(self) -> list[Any]:
        """Workers to be offered tasks: those that have just finished one, and all of a few that could take one.

        Of many only some that have a free thread.
        """
        freed, self._freed = self._freed, {}
        idle = self._tables.scheduler.idle_task_count
        if len(idle) == 1:
            return list(idle)
        return [*(info.ws for info in freed), *(idle if len(idle) <= ASKED else self._free())]

    def takers(self, ts: TaskState | None = None, able: Callable[[WorkerState], bool] = lambda ws: True) -> list[Any]:
        """Workers of which the least busy gets a root that none pulls (`ts`, if known): all of a few, some of many.

        `able` says whether an idle worker should get it: the others do not wait for an owner that should not.
        """
        tables = self._tables
        idle = tables.scheduler.idle_task_count
        owner = None if ts is None else tables.workers.by_address.get(self._groups.owner(ts.key) or "")
        if owner is not None and owner.ws in idle and able(owner.ws) and not self._crosses_again(ts, owner):
            return [owner.ws]  # of many idle workers it was not among those that were asked
        if self._none_ahead():
            found = self._free()  # the others come for theirs themselves
        else:
            found = list(idle) if len(idle) <= LOOKED_AT else [*self._free(), *islice(idle, ASKED)]
        if ts is not None and tables.workers.zoned:
            by_address = tables.workers.by_address
            return [ws for ws in found if not self._crosses_again(ts, by_address.get(ws.address))]
        return found

    def _free(self) -> list[Any]:
        """Some running workers with a free thread."""
        workers = self._tables.workers
        items = workers.idle.items
        n = len(items)
        start = int(workers.random() * n) if n > ASKED else 0
        found = []
        for i in range(min(n, 4 * ASKED)):
            ws = items[(start + i) % n].ws
            if worker_facts.is_running(ws):
                found.append(ws)
                if len(found) >= ASKED:
                    break
        return found

    def _starves(self, info: WorkerInfo) -> bool:
        ws = info.ws
        needs, processing, threads = ws.needs_what, ws.processing, ws.nthreads
        if not needs or len(processing) > MAX_AHEAD * threads:
            return False
        runnable = 0
        for ts in processing:
            deps = ts.dependencies
            if len(deps) <= MAX_LOOKED and not any(d in needs for d in deps):
                runnable += 1
                if runnable >= threads:
                    return False
        return True
