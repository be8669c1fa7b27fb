"""The private names of distributed and dask that the simulator uses, and the only file of it that does.

`unstarted_scheduler` makes a scheduler without sockets, periodic callbacks and clients. `add_worker` does what
`Scheduler.add_worker` does without a connection, `create_tasks` what `update_graph` calls in the end. `check` looks up
what they rely on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask._task_spec import Task, TaskRef
from distributed import Scheduler
from distributed.core import Status
from distributed.scheduler import ClientState, WorkerState
from distributed.stealing import WorkStealing

from dask_gpurt.model.checks import require_call, require_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key


def check() -> None:
    """Look up the private names.

    Raises
    ------
    SeamMismatch
        One is missing, or has another signature.
    """
    # `WorkStealing._callback_time` is set when it is made, see `balance_seconds`.
    require_names(WorkStealing, "WorkStealing", ("balance",))
    require_call(
        Scheduler._create_taskstate_from_graph,
        "Scheduler._create_taskstate_from_graph",
        None,
        **dict.fromkeys(_GRAPH),
    )
    require_call(Task, "Task", "key", function, _data_producer=False)
    require_call(TaskRef, "TaskRef", "key")


#: arguments of `Scheduler._create_taskstate_from_graph`
_GRAPH = (
    *("start", "dsk", "keys", "ordered", "client", "annotations_by_type", "global_annotations", "stimulus_id"),
    *("submitting_task", "span_metadata", "user_priority"),
)


def function(*args: object) -> None:
    """What every task of a simulated graph would call."""


def task(key: Key, dependencies: Iterable[Key], data_producer: bool = False) -> Task:
    """A node of a graph for the scheduler, or for `dask.order`."""
    return Task(key, function, *map(TaskRef, dependencies), _data_producer=data_producer)


class _Unserved(Scheduler):
    """A scheduler without an HTTP server; upstream's opens its port when it is made, not when it is started."""

    def start_http_server(self, *args: object, **kwargs: object) -> None:
        pass


def unstarted_scheduler(clients: Iterable[str]) -> Scheduler:
    """A scheduler that nothing happens to by itself, with these clients. Make it on a running event loop."""
    scheduler = _Unserved(dashboard=False, dashboard_address=None, validate=False, port=0)
    for pc in scheduler.periodic_callbacks.values():
        pc.stop()
    # Only the tasks of shuffles are simulated, and it looks at every transition of every task.
    scheduler.plugins.pop("shuffle", None)
    for name in clients:
        scheduler.clients[name] = ClientState(name)
    return scheduler


def add_worker(
    scheduler: Scheduler,
    *,
    name: int,
    address: str,
    server_id: str,
    threads: int,
    memory_limit: int,
    metrics: dict[str, Any],
    stream: object,
) -> None:
    """Make a worker known to a scheduler, as `Scheduler.add_worker` does.

    Parameters
    ----------
    name, address, server_id, threads, metrics
        As the worker would tell them when it registers.
    memory_limit
        Bytes; 0: none.
    stream
        Stands in for the `BatchedSend` to it.
    """
    ws = WorkerState(
        address=address,
        status=Status.running,
        pid=0,
        nthreads=threads,
        memory_limit=memory_limit,
        name=name,
        local_directory="",
        nanny=None,
        server_id=server_id,
        scheduler=scheduler,
    )
    scheduler.workers[address] = ws
    scheduler.running.add(ws)
    host = scheduler.host_info.setdefault(ws.host, {"addresses": set(), "nthreads": 0})
    host["addresses"].add(address)
    host["nthreads"] += ws.nthreads
    scheduler.total_memory += ws.memory_limit
    scheduler.total_nthreads += ws.nthreads
    scheduler.aliases[name] = address
    ws.metrics = metrics
    scheduler.check_idle_saturated(ws)
    scheduler.stream_comms[address] = stream
    for plugin in list(scheduler.plugins.values()):
        plugin.add_worker(scheduler=scheduler, worker=address)


def create_tasks(
    scheduler: Scheduler,
    *,
    start: float,
    dsk: dict[Key, Task],
    keys: set[Key],
    ordered: dict[Key, int],
    client: str,
    annotations_by_type: dict[str, Any],
) -> None:
    """Hand over a graph, as `Scheduler.update_graph` does once it has it in its hands.

    Parameters
    ----------
    start
        Unix time.
    keys
        What the client wants.
    ordered
        Key -> position in `dask.order`.
    annotations_by_type
        Kind of annotation -> key -> value.
    """
    scheduler._create_taskstate_from_graph(
        start=start,
        dsk=dsk,
        keys=keys,
        ordered=ordered,
        client=client,
        annotations_by_type=annotations_by_type,
        global_annotations=None,
        stimulus_id="submit",
        submitting_task=None,
        span_metadata={"collections": []},
        user_priority=0,
    )


def balance_seconds(stealing: WorkStealing) -> float:
    """Seconds between two rounds of work stealing."""
    require_names(stealing, "WorkStealing", ("_callback_time",))
    return float(stealing._callback_time)
