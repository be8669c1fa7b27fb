"""A task's thread finds its run without asking the event loop, where there is nothing to be asked.

Theory of operation. distributed's worker plugin looks up the run of every transfer and every output on the event loop
(`sync`): 0.3 ms of CPU for a look into a dict, twice for each pair of an input and an output. A run of ours that is
active, of the run id that was asked for, and neither failed nor closed is what that would answer; a look into a dict
is as safe in any thread. Everything else (no run yet, a newer one is known of, an error to raise) goes the old way.

Not seen here: a newer run that the event loop is just fetching. Neither is it by a task that has asked an instant
before; what it then does for the old run is refused or restarted as ever.

What is put on a worker's plugin stays there: without a run of ours it only passes calls on. Not `model.wrapped`, which
is for what has one owner and an end: runs overlap, and the last of them does not know that it is. Were each run to wrap
and unwrap for itself, what others had wrapped meanwhile would stay in the chain, longer with every shuffle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = ("get_or_create_shuffle", "get_shuffle_run")


def install(plugin: Any, kind: type[Any]) -> None:
    """Have runs of this kind found directly by a worker's shuffle plugin. A second call changes nothing."""
    for name in _NAMES:
        if name not in vars(plugin):
            setattr(plugin, name, _lookup(plugin.shuffle_runs, getattr(plugin, name), kind))


def _lookup(manager: Any, stock: Callable[..., Any], kind: type[Any]) -> Callable[..., Any]:
    active = seam.active_runs(manager)

    def look(shuffle_id: Any, *run_id: int, **kwargs: Any) -> Any:
        run: Any = active.get(shuffle_id)
        well = isinstance(run, kind) and seam.goes_on(run) and not manager.closed
        if well and (*run_id, *kwargs.values()) in ((), (run.run_id,)):
            return run
        return stock(shuffle_id, *run_id, **kwargs)

    return look
