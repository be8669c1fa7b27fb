"""`RootBlocks`: contiguous blocks of root tasks, owned by workers and pulled as slots open.

`arrived` cuts the roots of a graph into blocks. `waits` says whether a ready root stays queued for the owner of its
block. `pull` gives a worker its next root, and `gone` drops a root that was assigned or cancelled.

In this package a *root* is a task that Dask may queue (a root-ish one), and *stock* means Dask's own choice. Stock
queuing gives root tasks, in order of priority, to whichever worker has a free slot. The eight chunks of one sum end up
on eight workers, and seven are moved (dask/distributed#7555). Without queuing neighbours stay together, but all roots
are sent out at once and memory overflows. Here the *number* of assigned tasks is stock's; only the worker of each
differs.

Theory of operation
-------------------
1. *Cut.* When a graph arrives, its roots are cut into one contiguous *block* per worker, in proportion to threads and
   speed. They are taken by priority, as `dask.order` makes priorities run through the graph depth first. Cuts go first
   between nodes, then between the workers of each node, so neighbours in the graph are neighbours in the cluster. A
   cut near the border of a *cogroup* moves onto it. A cogroup is a set of roots that a later task joins, perhaps
   through chains of tasks with one input. A root that is shared by many blocks (a table that all chunks are joined
   with) is in none: it goes to the first free worker, as with stock, instead of waiting for its owner.
2. *Queue.* Roots of a block stay queued when they become ready (`waits`). Slots are given out after the whole graph has
   arrived.
3. *Pull.* A worker with a free slot pulls from its own blocks. Without one it takes over one whose owner has left.
   Else it takes the back half of the longest block: of a neighbour, or of any worker (`may_take`). The halves are
   contiguous again. Half of what is left is a lot in the beginning (workers that join late) and one task in the end.
4. *Hold.* Where nothing can be taken but roots are left, the worker gets none (`RootDispatch.held`). Their owners will
   ask in a moment, and a root on the other side of the network costs more than that. This does not apply where the
   owner is slow or not at work.
5. *Order.* Within one graph a worker may be ahead of the queue; across graphs and user priorities it never is.

A root is forgotten here as soon as it is assigned, by placement or by Dask, or is no longer needed. Blocks are advice:
a task that is not where its block says (cancelled, already running, recomputed) is skipped.

Rejected
--------
Measured on the simulated shapes (64 workers, 8 per node), these lost:

* Cogroups handed out one at a time to any free worker: tree 1.67 of the bound and 36 GB between nodes, instead of 1.06
  and none. At the joints of a tree above the first level everything moves.
* The workers of a node loading one large cogroup after the other: rechunk 1.37 instead of 1.25. Every part of a cogroup
  then waits for twice as many workers.
* A balanced min-cut partition of the graph (METIS, in benchmarks/placement_metis.py). Where the graph has a direction
  to cut along, it finds the same blocks. Stencil: the same bytes; 1.04 of the bound with every task pinned, 1.08 with
  only its roots pinned, 1.08 here. Elsewhere it saves bytes and loses time. Join on nodes: 54 GB and 2.51, here 68 GB
  and 2.44; rechunk on single hosts: 1.78, here 1.24. It balances the work of the whole graph, not that of each stage.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.decide.root_cuts import (
    beyond_even,
    by_input,
    by_priority,
    pays,
    serialises,
    share_out,
    unshared,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

    from distributed.scheduler import TaskState

    from dask_gpurt.placement.decide.root_cuts import Member

#: a root with more dependents than this is shared, as by `root_cuts.unshared`: it belongs to no block, and runs first,
#: wherever there is a slot
MAX_DEPENDENTS = 64
#: tasks looked at to cut the phases of a graph by the whole of it; phases beyond that are cut by themselves. There may
#: be hundreds, with an array object for each variable of each file
LOOKED = 2**19
#: blocks of a worker that are looked at for a root; and blocks that are used up and kept beside as many that are not,
#: as for less it is not worth to look at all of them
LOOKED_BLOCKS, KEPT = 8, 64
#: sources that the roots of a graph may share, and bytes of all of them that cost no more than a message
MAX_SOURCES, LIGHT_BYTES = 8, 64 * 2**10


class Block:
    """Consecutive roots that one worker should run, in priority order."""

    __slots__ = ("keys", "left", "node", "owner")

    def __init__(self, keys: Iterable[Hashable], owner: str | None, node: str | None) -> None:
        #: may contain keys that are gone
        self.keys: deque[Hashable] = deque(keys)
        #: roots that are still to be assigned
        self.left = len(self.keys)
        #: address of the worker that pulls from it; None: no worker yet
        self.owner = owner
        self.node = node


class Phase:
    """Roots that wait for others (a barrier, the model of the last iteration), shared out when the first is ready.

    By then it is known which workers hold the data that they will be joined with. Cut in one sequence with the roots
    before the barrier, half of the workers would own what can run now, and half would wait.

    Where the barrier is a source (what a file format calls its array object, arguments of `delayed`) and turns out to
    be light, the phase is the beginning of its graph, and is cut by the whole of it.
    """

    __slots__ = ("graph", "members", "roots")

    def __init__(self, roots: list[TaskState], members: Callable[[], Sequence[Member]], graph: list[TaskState]) -> None:
        self.roots = roots
        self.members = members
        #: all tasks of the graph by priority; empty: they wait for more than a few sources, or there are many phases
        self.graph = graph if self._begins() else []

    def _begins(self) -> bool:
        """Whether all that the roots wait for is a few tasks without inputs."""
        inputs = {d for t in self.roots for d in t.dependencies if d.state != "memory"}
        return len(inputs) <= MAX_SOURCES and not any(d.dependencies for d in inputs)

    def light(self) -> bool:
        """Whether what the roots read takes no longer to send than the message that assigns a task."""
        return sum(d.get_nbytes() for d in {d for t in self.roots for d in t.dependencies}) <= LIGHT_BYTES


class RootBlocks:
    """All blocks with roots to be assigned, on one scheduler.

    Parameters
    ----------
    seconds
        ``(ts) -> s`` that a task is expected to take; None: not known.
    """

    def __init__(self, seconds: Callable[[TaskState], float | None] = lambda ts: None) -> None:
        self._seconds = seconds
        self.by_key: dict[Hashable, Block] = {}
        #: roots of phases that have not begun
        self.later: dict[Hashable, Phase] = {}
        #: graphs whose roots were left to stock because contiguous blocks would have serialised them
        self.declined = 0
        #: and cuts taken back because a block holds too much at a time
        self.dissolved = 0
        #: roots that a worker holds at a time beyond what it would hold with an even spread, at most
        self.beyond = 0.0
        #: blocks of each owner, those of older graphs first; may contain ones that are used up
        self.by_owner: dict[str, deque[Block]] = {}
        #: blocks without an owner; may contain ones that are used up
        self.unowned: deque[Block] = deque()
        #: blocks ever cut, roots given to the owner of their block, and blocks split for a worker without one
        self.cut = 0
        self.pulled = 0
        self.split = 0
        #: keys with which a cogroup begins
        self._borders: set[Hashable] = set()
        #: node (None: all) -> heap of (-left when noted, number, block); the true `left` may be less by now
        self._longest: dict[str | None, list[tuple[int, int, Block]]] = {}
        self._number = itertools.count()
        #: blocks in `by_owner` and `unowned` by the last count, and how many of them were used up since
        self._blocks = self._used_up = 0

    def arrived(
        self,
        tasks: Iterable[TaskState],
        members: Callable[[], Sequence[Member]],
        is_root: Callable[[Any], bool] = lambda t: not t.dependencies,
    ) -> None:
        """Cut the roots of a graph that has arrived into blocks.

        Parameters
        ----------
        tasks
            Its TaskStates, before their first transition.
        members
            Returns the workers that share the roots, sorted by node. Called again when a later phase begins.
        is_root
            Whether a TaskState is a root.
        """
        # Scattered data and futures of earlier graphs are among them; only tasks that are still to run need a worker.
        fresh = [t for t in tasks if t.state == "released" and t.priority]
        roots = [t for t in fresh if is_root(t) and len(t.dependents) <= MAX_DEPENDENTS and t.key not in self.by_key]
        if len(roots) < 2:
            return
        workers = members()
        least = max(2, len(workers))
        roots = unshared(roots, len(roots) / least)
        roots.sort(key=by_priority)
        now: list[Any] = []
        later: dict[Any, list[Any]] = {}
        for t in roots:
            if any(d.state != "memory" for d in t.dependencies):
                later.setdefault(frozenset(d.group for d in t.dependencies), []).append(t)
            else:
                now.append(t)
        fresh.sort(key=by_priority)
        wholes = max(1, LOOKED // len(fresh))
        for number, waiting in enumerate(later.values()):
            if len(waiting) >= least:
                phase = Phase(waiting, members, fresh if number < wholes else [])
                self.later.update((t.key, phase) for t in waiting)
        if len(now) < least:
            return
        if workers:
            self._cut(fresh, now, workers, {t for waiting in later.values() for t in waiting})
        else:
            self._list(Block([t.key for t in now], None, None))

    def _open(self, phase: Phase) -> None:
        """Share out all roots of a later phase, because the first of them is ready."""
        mine = [t for t in phase.roots if self.later.pop(t.key, None) is phase]
        roots = [t for t in mine if t.state in ("waiting", "queued")]
        members = phase.members()
        if not members or len(roots) < max(2, len(members)):
            return
        if phase.graph and phase.light():
            self._cut(phase.graph, roots, members)
        elif pays(roots, len(members)):
            self._cut(roots, by_input(roots), members)

    def _cut(
        self,
        ordered: Sequence[TaskState],
        roots: Sequence[TaskState],
        members: Sequence[Member],
        later: Container[TaskState] = (),
    ) -> None:
        pieces, borders = share_out(ordered, roots, members)
        if len(ordered) > len(roots):
            owner = {t: i for i, piece in enumerate(pieces) for t in piece}
            if serialises(ordered, owner, [m.weight for m in members], later, self._seconds):
                self.declined += 1
                return
        self.beyond = max(self.beyond, beyond_even(roots, pieces))
        self._borders.update(t.key for t in borders)
        for member, piece in zip(members, pieces, strict=True):
            if piece:
                self._list(Block([t.key for t in piece], member.address, member.node))

    def _list(self, block: Block) -> None:
        if 2 * self._used_up > self._blocks + KEPT:
            self._sweep()
        for key in block.keys:
            self.by_key[key] = block
        self.cut += 1
        self._blocks += 1
        if block.owner is None:
            self.unowned.append(block)
            return
        self.by_owner.setdefault(block.owner, deque()).append(block)
        self._note(block)

    def _sweep(self) -> None:
        """Drop blocks that are used up. They pile up behind one of a graph that goes on for days beside others."""
        of = {address: deque(b for b in blocks if b.left) for address, blocks in self.by_owner.items()}
        self.by_owner = {address: blocks for address, blocks in of.items() if blocks}
        self.unowned = deque(block for block in self.unowned if block.left)
        heaps = {node: sorted(entry for entry in heap if entry[2].left) for node, heap in self._longest.items()}
        self._longest = {node: heap for node, heap in heaps.items() if heap}
        self._blocks, self._used_up = len(self.unowned) + sum(map(len, self.by_owner.values())), 0

    def _note(self, block: Block) -> None:
        entry = (-block.left, next(self._number), block)
        heapq.heappush(self._longest.setdefault(None, []), entry)
        heapq.heappush(self._longest.setdefault(block.node, []), entry)

    def waits(self, ts: TaskState) -> bool:
        """Whether a ready root should be queued for the owner of its block, even though workers are idle."""
        if self.later and (phase := self.later.get(ts.key)) is not None:
            self._open(phase)
        return ts.key in self.by_key

    def owner(self, key: Hashable) -> str | None:
        """Address of the worker that owns a root's block; None: no worker does."""
        block = self.by_key.get(key)
        return None if block is None else block.owner

    def pull(
        self,
        address: str,
        tasks: Mapping[Hashable, Any],
        head: Any,
        node: str | None = None,
        may_take: Callable[[str, int], bool] = lambda owner, left: True,
    ) -> Any:
        """The queued TaskState that this worker should run next; None: none in particular.

        Parameters
        ----------
        address
            Of the worker.
        tasks
            All tasks of the scheduler, by key.
        head
            The head of the queue: what the user or an older graph put before a block's roots goes first.
        node
            Name of the worker's node: it takes from its neighbours first.
        may_take
            ``(owner, roots left) -> bool``: whether to take from a block on another node.
        """
        blocks = self.by_owner.get(address)
        while True:
            while blocks and self._next(blocks[0], tasks) is None and not blocks[0].left:
                blocks.popleft()
            # Roots of an older graph may not be ready yet, those of a later one more urgent: (-priority, generation).
            for block in itertools.islice(blocks or (), LOOKED_BLOCKS):
                found = self._next(block, tasks)
                if found is not None and (head is None or head.priority[:2] >= found.priority[:2]):
                    self.pulled += 1
                    return found
            if blocks:
                return None
            self.by_owner.pop(address, None)
            taken = self._take(address, node, may_take)
            if taken is None:
                return None
            blocks = self.by_owner[address] = deque((taken,))

    def _next(self, block: Block, tasks: Mapping[Hashable, Any]) -> Any:
        """The first root of a block if it is queued; drops those that are gone. It is left in the block."""
        while block.keys:
            key = block.keys[0]
            mine = self.by_key.get(key) is block
            if mine and (ts := tasks.get(key)) is not None and ts.state in ("queued", "waiting"):
                return ts if ts.state == "queued" else None
            block.keys.popleft()
            if mine:
                self.gone(key)
        block.left = 0
        return None

    def _take(self, address: str, node: str | None, may_take: Callable[[str, int], bool]) -> Block | None:
        """A block for a worker that has none: an orphan, or a part of the longest one."""
        while self.unowned:
            block = self.unowned[0]
            if not block.left:
                self.unowned.popleft()
                continue
            if block.node is None:
                # Of a graph that came before there were workers: each new one takes half of what there is.
                part = self._back_half(block) if block.left > 1 else block
                if part is block:
                    self.unowned.popleft()
            else:
                part = self.unowned.popleft()
            part.owner, part.node = address, node
            self._note(part)
            return part
        for where in (node, None) if node is not None else (None,):
            victim = self._top(where)
            if victim is None or (
                where is None and victim.node != node and not may_take(victim.owner or "", victim.left)
            ):
                continue
            self.split += 1
            part = self._back_half(victim)
            part.owner, part.node = address, node
            self._note(part)
            return part
        return None

    def _top(self, where: str | None) -> Block | None:
        """The longest block of a node, or of all."""
        heap = self._longest.get(where)
        while heap:
            left, _, block = heap[0]
            if -left == block.left and block.left:
                return block
            if block.left:
                heapq.heapreplace(heap, (-block.left, next(self._number), block))
            else:
                heapq.heappop(heap)
        self._longest.pop(where, None)
        return None

    def _back_half(self, block: Block) -> Block:
        """Split a block; its owner keeps the front."""
        live = [k for k in block.keys if self.by_key.get(k) is block]
        at = len(live) // 2
        reach = max(1, at // 2)
        near = [i for i in range(max(1, at - reach), min(len(live), at + reach + 1)) if live[i] in self._borders]
        if near:
            at = min(near, key=lambda i: abs(i - len(live) // 2))
        part = Block(live[at:], None, None)
        for key in part.keys:
            self.by_key[key] = part
        block.keys = deque(live[:at])
        block.left = at
        return part

    def gone(self, key: Hashable) -> bool:
        """Drop a root that was assigned or is no longer needed; False when it was in no block."""
        if self.later:
            self.later.pop(key, None)
        found = self.by_key.pop(key, None)
        if found is None:
            return False
        found.left -= 1
        self._borders.discard(key)
        if not self.by_key:
            self._forget_blocks()
        elif not found.left:
            self._used_up += 1
            found.keys.clear()
        return True

    def moved(self, tasks: Iterable[TaskState]) -> None:
        """Put roots in order again, some of which have another priority than they came with. Blocks keep theirs."""
        mine: dict[Block, dict[Hashable, Any]] = {}
        for t in tasks:
            if (block := self.by_key.get(t.key)) is not None:
                mine.setdefault(block, {})[t.key] = t.priority
        for block, priorities in mine.items():
            # The places of those that moved, in the order of their new priorities.
            ordered = iter(sorted(priorities, key=lambda key: priorities[key]))
            block.keys = deque(next(ordered) if key in priorities else key for key in block.keys)

    def worker_removed(self, address: str) -> None:
        """Leave the blocks of a worker that is gone to others."""
        for block in self.by_owner.pop(address, ()):
            if block.left:
                block.owner = None
                self.unowned.append(block)

    def __len__(self) -> int:
        """Roots that are still to be assigned."""
        return len(self.by_key)

    def dissolve(self) -> None:
        """Drop all blocks: their roots are left to Dask's queue."""
        if self.by_key:
            self.dissolved += 1
            self._forget_blocks()

    def clear(self) -> None:
        """Drop all blocks and phases: the scheduler has forgotten all tasks."""
        self.later.clear()
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        for block in itertools.chain(self.unowned, *self.by_owner.values()):
            block.left = 0
        self.beyond = 0.0
        self.by_key.clear()
        self.by_owner.clear()
        self.unowned.clear()
        self._borders.clear()
        self._longest.clear()
        self._blocks = self._used_up = 0
