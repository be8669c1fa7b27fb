"""`fused`: the steps of a partition of a data frame that nothing else reads become one task.

``read_csv``, a conversion of its text, a filter, two new columns and a sum by groups are six tasks a partition. Each is
sent, run, reported and forgotten by itself, and its result counted, kept and perhaps moved. Dask fuses such steps for
``persist``, and leaves it out in ``compute`` (docs/upstream.md).

A *step* is an expression that works partition by partition. A *group* is a step with those below it that only steps of
the group read. Its tasks are put into the one of its uppermost step, which keeps its key, so nothing above it changes.
That nothing else reads a task which is dropped is seen in the graph itself, task by task.

Three things a group must not do, as its steps by themselves would not:

* *Wait.* A task starts when all of its inputs are there. So all steps of a group need the same inputs from outside. It
  is cut below a step that reads one more, such as a small frame to join with: what is below runs while that is made.
* *Idle.* A group whose steps could run side by side, such as two columns computed apart, is left where there are fewer
  partitions than threads: they may be all the parallelism that there is. So are functions of the user's side by side
  where the partitions leave threads idle at the end. A chain has none to lose.
* *Hold.* What a task has in hand while it runs cannot be spilled: its inputs until it ends, and results of its steps.
  A group has no more than `MOST_ALIVE` of them at a time, where one step has two or three; or, where the columns of
  all of them are known, hardly more columns than the largest of its steps by itself. A wider one is cut where a result
  is read twice, which leaves trees, and a tree that is still too wide is left.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dask.order import order
from dask.task_spec import DataNode, Task, TaskRef

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Mapping

    from dask.typing import Key

#: the module of data frames' expressions. Without it there is none in a graph
_MODULE = "dask.dataframe.dask_expr._expr"
#: kinds that hold data of the client's. A task of theirs says by itself that it carries some
_DATA = ("FromArray", "FromDelayed", "FromPandas")
#: kinds that run a function of the user's, or read. All others are known to be short
_LONG = ("Apply", "BlockwiseIO", "Map", "MapPartitions")
#: and what is one of these and short
_SHORT = ("UFuncElemwise",)

#: inputs, and results of its steps, that a task may hold at a time; masks, of a byte a row, are an eighth of one
MOST_ALIVE = 4.0
#: columns that a task may hold at a time, over those that the largest of its steps holds by itself
MOST_COLUMNS = 1.25
#: of the time of all rounds, what the last may waste with steps that could run side by side
MOST_IDLE = 1.1
#: times that groups are cut anew; what has still steps that need not the same is left
_ROUNDS = 8
#: kinds whose result has as many columns as the widest of their inputs, or fewer
_NO_WIDER = (
    *("Add", "AsType", "Chunk", "Div", "Filter", "FloorDiv", "GroupByChunk", "Mod", "Mul", "Neg", "P2PShuffle"),
    *("Partitions", "Pow", "Sub"),
)
#: kinds whose result has the columns of all of their inputs, or fewer
_JOINS = ("BlockwiseMerge", "HashJoinP2P")
#: kinds whose result is a mask
_MASKS = ("And", "Between", "EQ", "GE", "GT", "Invert", "IsNa", "Isin", "LE", "LT", "NE", "NotNull", "Or")


class Steps:
    """The steps of an expression, each with what reads it.

    Parameters
    ----------
    expression
        As it came from a client: all that is to be computed.
    """

    def __init__(self, expression: Any) -> None:
        module = sys.modules.get(_MODULE)
        #: names of all expressions, each after those that read it
        self.order: list[str] = []
        #: names of steps
        self.names: set[str] = set()
        #: of these, those whose result is a mask, and those that may take long
        self.masks: set[str] = set()
        self.long: set[str] = set()
        #: names of data of the client's, which are there from the start, and of those that are small
        self.there: set[str] = set()
        self.small: set[str] = set()
        #: name -> columns of its result, where the expression says so
        self.columns: dict[str, int] = {}
        #: name -> names of those that read it, and of those that it reads
        self.readers: defaultdict[str, set[str]] = defaultdict(set)
        self.reads: dict[str, set[str]] = {}
        if module is None:
            return
        data, masks, long, short = (
            tuple(getattr(module, name) for name in names if hasattr(module, name))
            for names in (_DATA, _MASKS, _LONG, _SHORT)
        )
        left: list[tuple[Any, bool]] = [(expression, False)]
        while left:
            one, done = left.pop()
            name = one._name
            if done:
                self.order.append(name)
                if (columns := _columns(one, self.columns)) is not None:
                    self.columns[name] = columns
            elif name not in self.reads:
                below = one.dependencies()
                self.reads[name] = {other._name for other in below}
                for other in self.reads[name]:
                    self.readers[other].add(name)
                if isinstance(one, data):
                    if not below:
                        self.there.add(name)
                elif isinstance(one, module.Blockwise):
                    self.names.add(name)
                    if isinstance(one, masks):
                        self.masks.add(name)
                    if isinstance(one, long) and not isinstance(one, short):
                        self.long.add(name)
                left.append((one, True))
                left += ((other, False) for other in below)
        self.order.reverse()

    def groups(
        self, partitions: Mapping[str, Collection[int]], kept: Container[str], threads: float
    ) -> dict[str, list[str]]:
        """Name of the uppermost step of a group -> names of all its steps, the uppermost first. None has one step only.

        Parameters
        ----------
        partitions
            Name of a step -> numbers of its tasks.
        kept
            Names of which a task is asked for.
        threads
            Of the cluster.
        """
        top: dict[str, str] = {}
        members: defaultdict[str, list[str]] = defaultdict(list)
        for name in self.order:
            if name not in partitions:
                continue
            above = {top.get(reader, "") for reader in self.readers[name]}
            over = above.pop() if len(above) == 1 and name not in kept else ""
            if not over or partitions[over] != partitions[name]:
                over = name
            top[name] = over
            members[over].append(name)
        return {
            over: group
            for over, group in members.items()
            if len(group) > 1 and self._keeps_busy(group, len(partitions[over]), threads)
        }

    def _keeps_busy(self, group: list[str], count: int, threads: float) -> bool:
        """Whether so many tasks of a group use as many threads as its steps by themselves could."""
        if all(below in self.reads[above] for above, below in itertools.pairwise(group)):
            return True
        if count < threads:
            return False
        if math.ceil(count / threads) * threads <= MOST_IDLE * count:
            return True
        # One below the other: then each has all that are further down below it.
        below: dict[str, set[str]] = {}
        seen: set[str] = set()
        for name in reversed(group):
            below[name] = set().union(*(below[other] for other in self.reads[name] if other in below))
            if name in self.long:
                if below[name] != seen:
                    return False
                below[name].add(name)
                seen.add(name)
        return True

    def late(self, group: list[str]) -> set[str]:
        """Steps that could run before those of the group that read them, as these need more from outside."""
        needs: dict[str, set[str]] = {}
        for name in reversed(group):
            needs[name] = set().union(*(needs.get(other, {other} - self.there) for other in self.reads[name]))
        return {other for name in group for other in self.reads[name] if other in needs and needs[other] != needs[name]}

    def fits(self, group: list[str]) -> bool:
        """Whether a task of a group holds no more at a time than it may."""
        if self.alive(group, self._weight) <= MOST_ALIVE:
            return True
        names = set(group).union(*(self.reads[name] for name in group)) - self.small
        if not names <= self.columns.keys():
            return False
        largest = max(self._width(name) + sum(map(self._width, self.reads[name])) for name in group)
        return self.alive(group, self._width) <= MOST_COLUMNS * largest

    def alive(self, group: list[str], weight: Callable[[str], float]) -> float:
        """Inputs, and results of its steps, that a group holds at most at a time, run in the order of Dask's."""
        inside = set(group)
        reads = {name: self.reads[name] & inside for name in group}
        places = order({name: Task(name, len, *map(TaskRef, below)) for name, below in reads.items()})
        unread = {name: len(self.readers[name] & inside) for name in group}
        # A task has all of its inputs until it ends.
        now = most = sum(weight(name) for name in set().union(*(self.reads[name] for name in group)) - inside)
        for name in sorted(group, key=places.__getitem__):
            now += weight(name)
            most = max(most, now)
            for below in reads[name]:
                unread[below] -= 1
                now -= 0 if unread[below] else weight(below)
        return most

    def _weight(self, name: str) -> float:
        """Of a result, where each counts as one."""
        return 0.0 if name in self.small else 0.125 if name in self.masks else 1.0

    def _width(self, name: str) -> float:
        """Of a result, in columns of numbers."""
        return 0.0 if name in self.small else self.columns[name] * (0.125 if name in self.masks else 1.0)


def _columns(one: Any, known: Mapping[str, int]) -> int | None:
    """Columns of an expression's result, by its operands: to make its empty frame would take long.

    Parameters
    ----------
    known
        Of those that it reads, by their names; absent: not known.
    """
    kind = type(one).__name__
    if kind in ("FusedIO", "FusedParquetIO"):
        return _columns(one.operand("_expr"), known)
    if kind == "Projection" or kind.startswith("ReadParquet"):
        columns = one.operand("columns")
        if isinstance(columns, list):
            return len(columns)
        # A reader without a list reads all columns.
        return 1 if kind == "Projection" and isinstance(columns, str | int) else None
    below = [known.get(other._name) for other in one.dependencies()]
    if kind == "Assign" and below and below[0] is not None:
        return below[0] + len(one.operands) // 2  # a frame, then names and values
    if kind in _JOINS and None not in below:
        return sum(columns for columns in below if columns is not None)
    if kind in _MASKS or kind in _NO_WIDER:
        some = [columns for columns in below if columns is not None]
        # The values of an `isin` have none.
        return max(some) if some and (len(some) == len(below) or kind == "Isin") else None
    return None


def fused(
    graph: dict[Key, Any],
    steps: Steps,
    *,
    asked: Iterable[Key],
    annotated: Iterable[Key],
    known: Container[str],
    threads: float,
) -> dict[Key, Any]:
    """A graph with fewer tasks and the same results; the same one where there are none to spare.

    Parameters
    ----------
    graph
        Key -> task, as their expression makes it.
    asked
        Keys whose results are wanted.
    annotated
        Keys with wishes of their own, such as a worker. Nothing is done about their groups.
    known
        Names of which the scheduler has tasks already, which another graph may have in common with this one.
    threads
        Of the cluster.
    """
    if len(steps.names) < 2:
        return graph
    partitions: defaultdict[str, set[int]] = defaultdict(set)
    for key, task in graph.items():
        if type(task) is DataNode and type(key) is tuple:
            # As the values of an `isin`. They travel with the graph, and Dask warns where that is large.
            steps.there.add(key[0])
            steps.small.add(key[0])
        if type(key) is tuple and len(key) == 2 and key[0] in steps.names:
            partitions[key[0]].add(key[1])
    kept = {_name(key) for key in asked} | {name for name in steps.names if name in known}
    groups = steps.groups(partitions, kept, threads)
    for _ in range(_ROUNDS):
        # What is late first: a group that is too wide may fit when that is cut.
        cut = {name for group in groups.values() for name in steps.late(group)}
        if not cut:
            wide = [group for group in groups.values() if not steps.fits(group)]
            cut = {name for group in wide for name in group[1:] if len(steps.readers[name]) > 1}
        if not cut:
            break
        kept |= cut
        groups = steps.groups(partitions, kept, threads)
    top = {
        name: over for over, group in groups.items() if steps.fits(group) and not steps.late(group) for name in group
    }
    if not top:
        return graph
    left = {top[name] for key in annotated if (name := _name(key)) in top}
    for key, task in graph.items():
        here = top.get(_name(key))
        # A worker awaits a coroutine function only where it is the function of the task.
        if here is not None and (type(task) is not Task or task.block_fusion or task.is_coro):
            left.add(here)
        for other in task.dependencies:
            over = top.get(name := _name(other))
            # What is dropped may be read by the same partition of its own group only.
            if over is not None and over != name and (over != here or key[1:] != other[1:]):
                left.add(over)
    together: defaultdict[Key, list[Any]] = defaultdict(list)
    out: dict[Key, Any] = {}
    for key, task in graph.items():
        over = top.get(_name(key))
        if over is None or over in left:
            out[key] = task
        else:
            together[over, key[1]].append(task)
    for key, tasks in together.items():
        out[key] = Task.fuse(*tasks, key=key)
    return out


#: what a task runs that was fused
_FUSED = Task.fuse(Task("a", len, ()), Task("b", len, TaskRef("a"))).func


def is_fused(task: Any) -> bool:
    """Whether a task is made of others."""
    return type(task) is Task and task.func is _FUSED


def parts(task: Any) -> Collection[Key]:
    """Keys of the tasks that a task is made of; none: of no others."""
    return task.args[0].keys() if is_fused(task) else ()


def _name(key: Any) -> Any:
    return key[0] if type(key) is tuple and key else None
