"""The only module of the shuffle that names private parts of dask and distributed.

`check` compares the installed distributed with what this code was written for. The other functions do what needs a
private name. Subclasses of distributed's classes use inherited private names by ``self``; these are in the tables, too.

Theory of operation. `distributed.shuffle` is private and has no stability promise. So all that we inherit from,
override, call or read is imported here and listed in tables: methods with their parameters (`METHODS`), attributes that
instances have and the method that sets them (`ATTRIBUTES`), fields of dataclasses (`FIELDS`). A difference means that
nothing is installed (`SeamMismatch`), on the scheduler when the takeover is installed, on a worker when the scheduler
asks whether it can run our spec.

Rejected: patching `P2PShuffle._layer` (needs the client, or the scheduler's copy of dask) and a shuffle method of our
own (`dataframe.shuffle.method: gpurt`), which ten operations of dask refuse by name.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import distributed
import numpy as np
from dask._task_spec import Alias
from dask.context import thread_state
from distributed.core import Server, error_message
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.exceptions import Reschedule
from distributed.metrics import context_meter, thread_time
from distributed.protocol.serialize import Serialized, dask_deserialize, dask_serialize, serialize
from distributed.scheduler import Scheduler
from distributed.shuffle._buffer import ShardsBuffer
from distributed.shuffle._comms import CommShardsBuffer
from distributed.shuffle._core import (
    SchedulerShuffleState,
    ShuffleId,
    ShuffleRun,
    ShuffleRunSpec,
    ShuffleSpec,
    barrier_key,
    id_from_key,
)
from distributed.shuffle._exceptions import P2PConsistencyError, ShuffleClosedError
from distributed.shuffle._limiter import ResourceLimiter
from distributed.shuffle._merge import merge_unpack
from distributed.shuffle._rechunk import ArrayRechunkRun, ArrayRechunkSpec
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.shuffle._shuffle import DataFrameShuffleRun, DataFrameShuffleSpec, shuffle_unpack
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin, _ShuffleRunManager
from distributed.stealing import WorkStealing
from distributed.utils_comm import retry

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.model.checks import SUPPORTED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from concurrent.futures import ThreadPoolExecutor

    import pandas as pd
    from dask.typing import Key
    from distributed.scheduler import TaskState
    from distributed.worker import Worker
    from tornado.ioloop import IOLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: handed on to the other modules
__all__ = [
    "Alias",
    "ArrayRechunkSpec",
    "CommShardsBuffer",
    "DataFrameShuffleRun",
    "DataFrameShuffleSpec",
    "P2PConsistencyError",
    "Reschedule",
    "ResourceLimiter",
    "SchedulerShuffleState",
    "Serialized",
    "ShuffleClosedError",
    "ShuffleId",
    "ShuffleRun",
    "ShuffleSchedulerPlugin",
    "ShuffleSpec",
    "ShuffleWorkerPlugin",
    "barrier_key",
    "context_meter",
    "dask_deserialize",
    "dask_serialize",
    "error_message",
    "id_from_key",
    "merge_unpack",
    "retry",
    "serialize",
    "shuffle_unpack",
    "thread_time",
]

#: what is overridden or called: (class that defines it, name, parameters it must have, in order, without self)
METHODS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (ShuffleSchedulerPlugin, "__init__", ("scheduler",)),
    (ShuffleSchedulerPlugin, "_retrieve_spec", ("shuffle_id",)),
    (ShuffleSchedulerPlugin, "barrier", ("id", "run_id", "consistent")),
    (ShuffleSchedulerPlugin, "_set_restriction", ("ts", "worker")),
    (ShuffleSchedulerPlugin, "_unset_restriction", ("ts",)),
    (ShuffleSchedulerPlugin, "restart", ("scheduler",)),
    (ShuffleSchedulerPlugin, "get", ("id", "worker")),
    (ShuffleSchedulerPlugin, "_create", ("shuffle_id", "key", "worker")),
    (ShuffleSchedulerPlugin, "_restart_recommendations", ("id",)),
    (ShuffleSchedulerPlugin, "_restart_shuffle", ("id", "scheduler", "stimulus_id")),
    (ShuffleSchedulerPlugin, "_fail_on_workers", ("shuffle", "message")),
    (ShuffleSchedulerPlugin, "_clean_on_scheduler", ("id", "stimulus_id")),
    (ShuffleSchedulerPlugin, "remove_worker", ("scheduler", "worker", "stimulus_id", "kwargs")),
    (ShuffleSchedulerPlugin, "transition", ("key", "start", "finish", "args", "stimulus_id", "kwargs")),
    (ShuffleSchedulerPlugin, "get_or_create", ("shuffle_id", "key", "worker")),
    (ShuffleSchedulerPlugin, "restrict_task", ("id", "run_id", "key", "worker")),
    (ShuffleSchedulerPlugin, "valid_workers_downscaling", ("scheduler", "workers")),
    (ShuffleSchedulerPlugin, "_calculate_worker_for", ("spec",)),
    (SchedulerPlugin, "log_event", ("topic", "msg")),
    (WorkStealing, "move_task_request", ("ts", "victim", "thief")),
    (Scheduler, "client_desires_keys", ("keys", "client")),
    (Scheduler, "request_acquire_replicas", ("addr", "keys", "stimulus_id")),
    (Scheduler, "client_releases_keys", ("keys", "client", "stimulus_id")),
    (DataFrameShuffleSpec, "create_run_on_worker", ("run_id", "span_id", "worker_for", "plugin")),
    (DataFrameShuffleRun, "_shard_partition", ("data", "partition_id", "kwargs")),
    (DataFrameShuffleRun, "_get_assigned_worker", ("id",)),
    (ShuffleRun, "get_output_partition", ("partition_id", "key", "kwargs")),
    (ShuffleRun, "_capture_metrics", ("where",)),
    (DataFrameShuffleRun, "_get_output_partition", ("partition_id", "key", "kwargs")),
    (ShuffleRun, "_write_to_comm", ("data",)),
    (ShuffleRun, "_flush_comm", ()),
    (ShuffleRun, "barrier", ("run_ids",)),
    (ShuffleRun, "add_partition", ("data", "partition_id")),
    (ShuffleRun, "inputs_done", ()),
    (ShuffleRun, "send", ("address", "shards")),
    (ShuffleRun, "_send", ("address", "shards")),
    (ShuffleRun, "receive", ("data",)),
    (ShuffleRun, "offload", ("func", "args", "kwargs")),
    (ShuffleRun, "raise_if_closed", ()),
    (ShuffleRun, "close", ()),
    (CommShardsBuffer, "__init__", ("send", "memory_limiter", "max_message_size", "concurrency_limit")),
    (ShardsBuffer, "write", ("data",)),
    (CommShardsBuffer, "_process", ("address", "shards")),
    (ArrayRechunkSpec, "create_run_on_worker", ("run_id", "span_id", "worker_for", "plugin")),
    (ArrayRechunkRun, "_shard_partition", ("data", "partition_id")),
    (ShuffleRun, "validate_data", ("data",)),
    (ShuffleWorkerPlugin, "get_or_create_shuffle", ("shuffle_id",)),
    (ShuffleWorkerPlugin, "get_shuffle_run", ("shuffle_id", "run_id")),
    (ShuffleWorkerPlugin, "teardown", ("worker",)),
    (ShuffleWorkerPlugin, "shuffle_receive", ("shuffle_id", "run_id", "data")),
    (ResourceLimiter, "__init__", ("limit", "metrics_label")),
)
#: what instances have, and is used: (class, the method of it that sets the attribute, name)
ATTRIBUTES: tuple[tuple[Any, str, str], ...] = (
    (Server, "__init__", "_ongoing_background_tasks"),
    (ShuffleSchedulerPlugin, "__init__", "_shuffles"),
    (ShuffleSchedulerPlugin, "__init__", "active_shuffles"),
    (ShuffleWorkerPlugin, "setup", "_executor"),
    (ShuffleWorkerPlugin, "setup", "memory_limiter_comms"),
    (ShuffleWorkerPlugin, "setup", "shuffle_runs"),
    (_ShuffleRunManager, "__init__", "_active_runs"),
    (_ShuffleRunManager, "__init__", "closed"),
    (ShuffleRun, "__init__", "_comm_buffer"),
    (ShuffleRun, "__init__", "_exception"),
    (ShuffleRun, "__init__", "_loop"),
    (ShuffleRun, "__init__", "received"),
    (ShuffleRun, "__init__", "total_recvd"),
    (ShuffleRun, "__init__", "transferred"),
    (ShardsBuffer, "__init__", "_accepts_input"),
    (ShardsBuffer, "__init__", "concurrency_limit"),
    (ShardsBuffer, "__init__", "max_message_size"),
    (ShardsBuffer, "__init__", "memory_limiter"),
)
#: fields of dataclasses that are used: (class, name)
FIELDS: tuple[tuple[Any, str], ...] = (
    (SchedulerShuffleState, "_failed"),
    (SchedulerShuffleState, "participating_workers"),
    (SchedulerShuffleState, "run_spec"),
    (ShuffleRunSpec, "run_id"),
    (ShuffleRunSpec, "spec"),
    (ShuffleRunSpec, "worker_for"),
)
#: the attribute of our `teardown` that says what it awaits
_LAST = "gpurt_last"
#: the annotation by which `_set_restriction` remembers what an output's task was restricted to
_RESTRICTED = "shuffle_original_restrictions"
_SPEC_FIELDS = {"id", "disk", "npartitions", "column", "meta", "parts_out", "drop_column"}
_RECHUNK_FIELDS = {"id", "disk", "new", "old"}
_RUN_PARAMETERS = {
    *("worker_for", "column", "meta", "id", "run_id", "span_id", "local_address", "directory", "executor", "rpc"),
    *("digest_metric", "scheduler", "memory_limiter_disk", "memory_limiter_comms", "disk", "drop_column", "loop"),
}


def check() -> None:
    """Compare the installed distributed with what this code relies on; pandas too, where it is imported already.

    To import it takes 0.2 s and more, at each start, and many clusters never see a frame. So the scheduler asks
    `pandas_differs` when a frame is to be shuffled.

    Raises
    ------
    SeamMismatch
        Names every difference and the installed version.
    """
    if not __debug__:
        raise SeamMismatch(
            "this process runs without assertions (python -O, or PYTHONOPTIMIZE is set), must run with them: "
            "distributed's send buffer needs what its assert statements do. Remedy: start Python without -O"
        )
    differences = []
    for owner, name, wanted in METHODS:
        found = _parameters(vars(owner).get(name))
        if found != wanted:
            differences.append(f"{owner.__name__}.{name}({', '.join(found) if found is not None else 'missing'})")
    for owner, method, name in ATTRIBUTES:
        if not _sets(owner, method, name):
            differences.append(f"{owner.__name__}.{name} is not set by {method}")
    for owner, name in FIELDS:
        if name not in getattr(owner, "__dataclass_fields__", ()):
            differences.append(f"{owner.__name__} has no field {name}")
    if "pandas" in sys.modules and (difference := pandas_differs()):
        differences.append(difference)
    if _RESTRICTED not in _code(vars(ShuffleSchedulerPlugin).get("_set_restriction"), "co_consts"):
        differences.append(f"ShuffleSchedulerPlugin._set_restriction does not annotate {_RESTRICTED}")
    run = _parameters(DataFrameShuffleRun.__init__)
    if run is None or set(run) != _RUN_PARAMETERS:
        differences.append(f"DataFrameShuffleRun({', '.join(run or ())})")
    fields = set(getattr(DataFrameShuffleSpec, "__dataclass_fields__", ()))
    if fields != _SPEC_FIELDS:
        differences.append(f"DataFrameShuffleSpec fields {sorted(fields)}")
    fields = set(getattr(ArrayRechunkSpec, "__dataclass_fields__", ()))
    if fields != _RECHUNK_FIELDS:
        differences.append(f"ArrayRechunkSpec fields {sorted(fields)}")
    if differences:
        raise SeamMismatch(
            f"distributed {distributed.__version__} differs from what the shuffle was written for: "
            f"{'; '.join(differences)}. Remedy: use distributed {SUPPORTED}, or set gpurt.shuffle.enabled: false"
        )


def _parameters(function: object) -> tuple[str, ...] | None:
    if not callable(function):
        return None
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def _code(function: Callable[..., object] | None, table: str) -> tuple[Any, ...]:
    """A table of the bytecode of a function; empty when it is not a Python function."""
    return tuple(getattr(getattr(inspect.unwrap(function), "__code__", None), table, ())) if function else ()


def _sets(owner: type, method: str, name: str) -> bool:
    """Whether a method names an attribute: that of the class itself, or one of a base class that it calls."""
    for cls in owner.__mro__:
        if method in vars(cls):
            names = _code(vars(cls)[method], "co_names")
            if name in names or "super" not in names:
                return name in names
    return False


def in_background(server: Server, function: Callable[[*Ts], Coroutine[Any, Any, object]], *args: *Ts) -> None:
    """Have a scheduler or a worker run a coroutine soon; it is cancelled when the server closes."""
    server._ongoing_background_tasks.call_soon(function, *args)


def had_runs(plugin: ShuffleSchedulerPlugin, shuffle_id: ShuffleId) -> bool:
    """Whether a shuffle had a run before, as the scheduler's plugin knows."""
    return bool(plugin._shuffles.get(shuffle_id))


def has_failed(run: SchedulerShuffleState) -> bool:
    """Whether a task of a run has failed."""
    return bool(run._failed)


def restart_run(plugin: ShuffleSchedulerPlugin, scheduler: Scheduler, run: SchedulerShuffleState, why: str) -> None:
    """Restart a shuffle as distributed does when a worker is lost: its run ends everywhere, its tasks run again."""
    stimulus_id = f"gpurt-restart-{run.id}-{run.run_id}"
    plugin._fail_on_workers(run, str(P2PConsistencyError(f"{run}: {why}")))
    plugin._clean_on_scheduler(run.id, stimulus_id)
    plugin._restart_shuffle(run.id, scheduler, stimulus_id=stimulus_id)


def restrict(plugin: ShuffleSchedulerPlugin, ts: TaskState, worker: str) -> None:
    """Restrict an output's task to a worker, unless it is restricted already."""
    plugin._set_restriction(ts, worker)


def unrestrict(plugin: ShuffleSchedulerPlugin, ts: TaskState) -> None:
    """Undo `restrict`."""
    plugin._unset_restriction(ts)


def is_restricted(ts: TaskState) -> bool:
    """Whether an output's task was restricted by `restrict`."""
    return bool(ts.annotations and _RESTRICTED in ts.annotations)


def active_runs(manager: _ShuffleRunManager) -> dict[ShuffleId, ShuffleRun]:
    """Shuffle id -> active run of a worker; the dict itself, which changes."""
    return manager._active_runs


def goes_on(run: ShuffleRun) -> bool:
    """Whether a worker's run is neither closed nor failed."""
    return not run.closed and run._exception is None


def send_buffer(run: ShuffleRun) -> CommShardsBuffer:
    """What waits to be sent by a run."""
    return run._comm_buffer


def accepts_input(buffer: ShardsBuffer) -> bool:
    """Whether a send buffer was not flushed yet."""
    return bool(buffer._accepts_input)


def executor_of(plugin: ShuffleWorkerPlugin) -> ThreadPoolExecutor:
    """The threads of a worker's shuffle plugin."""
    return plugin._executor


def sync(loop: IOLoop, function: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
    """Run a coroutine on a worker's event loop and wait for it; in another thread, for as long as it takes.

    As distributed's function of this name, in 0.2 instead of 0.3 ms of CPU: that takes three turns of the loop for it.
    """
    return asyncio.run_coroutine_threadsafe(function(*args), loop.asyncio_loop).result()


def execution() -> tuple[Key | None, float, int] | None:
    """Stands for the execution of the task that this thread is in: (key, start, thread). None outside of one."""
    start = getattr(thread_state, "start_time", None)
    return None if start is None else (getattr(thread_state, "key", None), start, threading.get_ident())


def this_key() -> Key | None:
    """Key of the task that this thread runs; None outside of one."""
    return getattr(thread_state, "key", None)


def columns_of(data: pd.DataFrame) -> Iterator[Any]:
    """The arrays of a frame's columns, in order: numpy's, or pandas' extension arrays.

    Not by way of a series for each: that takes 30 us, and a wide frame pays it hundreds of times.
    """
    array_of = getattr(data, "_get_column_array", None)
    if array_of is not None:
        return map(array_of, range(data.shape[1]))
    return (series.to_numpy() if isinstance(series.dtype, np.dtype) else series.array for _, series in data.items())


def common_dtype(actual: object, wanted: object) -> Any:
    """The dtype that stock's unpack gives a column that is `actual` in the data and `wanted` in the meta."""
    return _find_common_type()([actual, wanted])


def pandas_differs() -> str:
    """What the installed pandas lacks that this code relies on; empty: nothing. Imports it."""
    return "" if callable(_find_common_type()) else "pandas.core.dtypes.cast.find_common_type(missing)"


def _find_common_type() -> Any:
    from pandas.core.dtypes import cast

    return vars(cast).get("find_common_type")  # not in pandas' public stubs


def on_teardown(plugin: ShuffleWorkerPlugin, last: Callable[[], Awaitable[None]]) -> None:
    """Have a worker's shuffle plugin await `last` after it is torn down, which happens when the worker closes.

    It takes the place of the one before: that has been awaited, and the plugin outlives many of them.
    """
    inner = plugin.teardown
    if hasattr(inner, _LAST):
        vars(inner)[_LAST] = last
        return

    async def teardown(worker: Worker) -> None:
        try:
            await inner(worker)
        finally:
            await vars(teardown)[_LAST]()

    vars(teardown)[_LAST] = last
    plugin.teardown = teardown


def shuffle_tables() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Dask's conversions (frame to Arrow, Arrow to frame), those that stock's P2P uses."""
    from dask.dataframe.dispatch import from_pyarrow_table_dispatch, to_pyarrow_table_dispatch

    return to_pyarrow_table_dispatch, from_pyarrow_table_dispatch
