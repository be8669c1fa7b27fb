"""What the scheduler can read from the tasks around a shuffle: output partitions, joins, the empty input partition.

Everything is read from a task's function and its arguments. Where that is not plain to see the answer is None, and the
shuffle is left as it is.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.join_plan import Join

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: in the order in which the task of a join's output has them
_MERGE_PARAMETERS = tuple(inspect.signature(seam.merge_unpack).parameters)


def unpack_tasks(scheduler: Scheduler, shuffle_id: seam.ShuffleId) -> list[tuple[TaskState, int]]:
    """(task state, output partition) of the outputs of a shuffle, a join's too, where that is plain to see."""
    dependents = scheduler.tasks[seam.barrier_key(shuffle_id)].dependents
    found = ((ts, output_of(ts.run_spec, shuffle_id)) for ts in dependents)
    return [(ts, part) for ts, part in found if part is not None]


def is_taken_twice(scheduler: Scheduler, spec: seam.ShuffleSpec) -> bool:
    """Whether an output has several tasks that unpack it, as those of arrays of a frame that were fused with it."""
    barrier = scheduler.tasks.get(seam.barrier_key(spec.id))
    return barrier is not None and len(barrier.dependents) > sum(1 for _ in spec.output_partitions)


def output_of(spec: object, shuffle_id: seam.ShuffleId) -> int | None:
    """The output partition that a dependent of a barrier unpacks; None when that is not plain to see."""
    func, args = getattr(spec, "func", None), list(getattr(spec, "args", ()))
    if func is seam.shuffle_unpack and len(args) == 3:
        of, part = args[:1], args[1]
    elif func is seam.merge_unpack and len(args) >= 3:
        of, part = args[:2], args[2]
    else:
        return None
    return part if shuffle_id in of and isinstance(part, int) else None


def join_of(spec: object) -> Join | None:
    """The join that the task of an output makes of two shuffles; None: it makes none, or that is not plain to see."""
    func, args = getattr(spec, "func", None), list(getattr(spec, "args", ()))
    if func is not seam.merge_unpack or getattr(spec, "kwargs", None):
        return None
    given = dict(zip(_MERGE_PARAMETERS, args, strict=False))
    try:
        return Join(
            left=given["shuffle_id_left"],
            right=given["shuffle_id_right"],
            how=given["how"],
            left_on=_plain_value(given["left_on"]),
            right_on=_plain_value(given["right_on"]),
            left_index=bool(given["left_index"]),
            right_index=bool(given["right_index"]),
        )
    except KeyError:
        return None


def meta_of(barrier: object) -> Any:
    """The empty input partition of a shuffle, from the task of its barrier; None: it has none."""
    return getattr(getattr(barrier, "spec", None), "meta", None)


def _plain_value(argument: Any) -> Any:
    """An argument of a task: lists of values may come as a node of the graph."""
    if isinstance(argument, list) or not hasattr(argument, "args"):
        return argument
    return list(argument.args)


def order_of_outputs(scheduler: Scheduler, shuffle_id: seam.ShuffleId) -> tuple[int, ...]:
    """Output partitions by the priority of the tasks that unpack them, the first to run first."""
    found = []
    barrier = scheduler.tasks.get(seam.barrier_key(shuffle_id))
    for ts in () if barrier is None else barrier.dependents:
        part = output_of(ts.run_spec, shuffle_id)
        if part is not None and ts.priority is not None:
            found.append((ts.priority, part))
    return tuple(dict.fromkeys(part for _, part in sorted(found)))
