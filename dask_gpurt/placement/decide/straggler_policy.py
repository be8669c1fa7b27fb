"""When a running task is overdue, and whether a second copy on another worker is worth starting. Pure.

`overdue_seconds` gives the bound, `forbidden` the tasks that must not run twice, and `pays` compares both workers.

A task is *overdue* when it has run longer than all four bounds, each from the finished tasks of its kind:

* `TIMES` times the median;
* the median and `SPREADS` times the spread (median absolute deviation, scaled to a standard deviation);
* the median and `LEAST_SECONDS`: heartbeats are half a second apart, and event loops jitter;
* the duration of the longest tenth of them: where tasks differ by themselves, a second copy takes as long.

It needs `SAMPLES` finished tasks: before that there is no spread.

A second copy is worth starting when it is expected to end before the first. How long the first still takes is known
from how slow its worker is on other tasks. Where that says nothing, half of its present run time is assumed, because a
task that has run for long usually goes on for long.

The latter is a guess: the task may be a long one on any worker. And a copy that loses has a price. Its thread is taken
until it ends, and the scheduler, which does not know that, queues other tasks behind it. So without a slow worker a
copy is started only where nothing is queued: when all tasks left are running. On random graphs with heavy tails not one
of 105 copies won, and three of them in one graph made it a sixth longer. Nor is it made for tasks that a program names
itself (`named_by_program`): what they do besides returning a value is not known, and to do it twice is a loss for sure.

A task is never copied when it

* says so: ``dask.annotate(gpurt_rerun=False)``;
* is not pure, and Dask says so in its key: a ``delayed`` call, ``submit`` and ``map`` with ``pure=False`` have a random
  UUID there. It may put something into a queue, count, or draw a random number;
* writes, by its name (``to-parquet``, ``store-map``, ``process_and_upload``, ...): two copies *at the same time* may
  write into one file, which running again after a loss does not;
* has a step of these kinds, where several were fused (`steps`);
* belongs to a P2P shuffle, which sends shards as it runs, or is next to its barrier;
* is an actor or reads one (what it has the actor do would be done twice), needs resources, or was running when a worker
  died (it may be what kills them);
* has a second copy already, or no idle worker may run it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dask.utils import key_split

from dask_gpurt.placement.decide.steps import parts
from dask_gpurt.placement.tables.worker_facts import is_queueable

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from dask_gpurt.placement.tables.durations import Prefix

#: finished tasks of a prefix before any of it can be overdue
SAMPLES = 5
TIMES = 2.0
#: copies of a prefix that lost, less those that won, after which there are no more: its tasks are long on any worker
LOSSES = 2
SPREADS = 6.0
LEAST_SECONDS = 0.2
#: a median absolute deviation is so many times smaller than a standard deviation, for a normal distribution
_SCALE = 1.4826
#: the first copy is assumed to go on for this share of its present run time
REMAINS = 0.5
#: annotation that forbids a second copy
ANNOTATION = "gpurt_rerun"
#: beginnings of prefixes of tasks that write
WRITERS = ("to-", "to_")
#: words in the name of a function that changes the world outside. Too many rather than too few: a task that is not
#: copied costs time, one that is copied and should not have been may cost data.
CHANGES = frozenset(
    (
        *("write", "writer", "save", "insert", "upload", "append", "delete", "remove", "commit", "export"),
        *("dump", "publish", "send", "post", "put", "push", "move", "create", "update", "store"),
    )
)
_WORDS = re.compile(r"[a-z0-9]+")
#: `uuid.uuid4` in a key. Tokens, which are hashes of the recipe, have no hyphens
_IMPURE = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
#: parts of prefixes of tasks of P2P shuffles
P2P = ("shuffle", "p2p", "rechunk-transfer", "hash-join")
#: neighbours looked at for a barrier
NEIGHBOURS = 64


def overdue_seconds(prefix: Prefix) -> float | None:
    """Run time from which a task of the prefix is overdue, on a worker of slowness 1; None: not known yet."""
    middle = prefix.seconds
    if middle is None or prefix.samples < SAMPLES or prefix.only_first:
        return None  # the spread of first calls says nothing about later ones
    spread = middle + SPREADS * _SCALE * prefix.spread_seconds
    return max(TIMES * middle, spread, middle + LEAST_SECONDS, prefix.long_seconds)


def pays(run_seconds: float, here_seconds: float, there_seconds: float, spare: bool = False) -> bool:
    """Whether a second copy is worth starting: it is expected to be done before the first.

    Parameters
    ----------
    run_seconds
        How long the first has run.
    here_seconds
        How long such a task takes on its worker, as far as measured.
    there_seconds
        How long it would take on the other worker, inputs included.
    spare
        Whether no other task will need its thread.
    """
    if there_seconds < here_seconds - run_seconds:
        return True
    return spare and there_seconds < REMAINS * run_seconds


def named_by_program(ts: TaskState) -> bool:
    """Whether a program named the task, by ``submit``, ``map`` or ``delayed``; keys of collections are tuples."""
    return not isinstance(ts.key, tuple)


def _is_barrier(ts: TaskState) -> bool:
    return any(c.__name__ == "P2PBarrierTask" for c in type(ts.run_spec).__mro__)


def _writes(name: str) -> bool:
    return name.startswith(WRITERS) or not CHANGES.isdisjoint(_WORDS.findall(name))


def forbidden(ts: TaskState) -> str | None:
    """Why a TaskState must not run twice at the same time; None: it may."""
    annotations = ts.annotations or {}
    if annotations.get(ANNOTATION, True) is False:
        return "annotated"
    bases = [key[0] if isinstance(key, tuple) and key else key for key in (ts.key, *parts(ts.run_spec))]
    if any(isinstance(base, str) and _IMPURE.search(base) for base in bases):
        return "impure"
    if ts.actor:
        return "actor"
    if ts.resource_restrictions:
        return "resources"
    if ts.suspicious:
        return "suspicious"
    if ts.run_spec is None:
        return "no recipe"
    names = [ts.prefix.name, *(key_split(base) for base in bases[1:])]
    if any(_writes(name.lower()) for name in names):
        return "writes"
    if not is_queueable(ts) or any(part in name for name in names for part in P2P) or _is_barrier(ts):
        return "shuffle"
    for neighbours in (ts.dependents, ts.dependencies):
        for i, other in enumerate(neighbours):
            if i >= NEIGHBOURS:
                break
            if _is_barrier(other):
                return "shuffle"
    # Of all inputs: each copy calls the methods of the one actor, whose state changes twice.
    return "actor" if any(d.actor for d in ts.dependencies) else None
