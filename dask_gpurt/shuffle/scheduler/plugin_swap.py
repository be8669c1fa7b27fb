"""Put our shuffle plugin in the place of distributed's, and back. On the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import Scheduler

    from dask_gpurt.shuffle.seam import ShuffleSchedulerPlugin

#: the calls of workers that distributed's plugin answers
_HANDLERS = ("shuffle_barrier", "shuffle_get", "shuffle_get_or_create", "shuffle_restrict_task")


def swap_plugin(
    scheduler: Scheduler, make: Callable[[], ShuffleSchedulerPlugin]
) -> tuple[ShuffleSchedulerPlugin, ShuffleSchedulerPlugin]:
    """Replace the scheduler plugin named ``shuffle``; returns (what was there, what is there now).

    The plugin sits in three places: `plugins` (transitions), `extensions` (heartbeats of the workers) and `handlers`
    (the workers' calls; those besides distributed's are what a plugin has as ``calls``). All three change or none does.
    """
    before = scheduler.plugins["shuffle"]
    names = list(scheduler.plugins)
    handlers = dict(scheduler.handlers)
    extension = scheduler.extensions.get("shuffle")
    scheduler.remove_plugin("shuffle")
    try:
        after = make()
        if scheduler.plugins.get("shuffle") is not after:
            scheduler.add_plugin(after, name="shuffle")
        # In its place: a new graph is in order before other plugins look at it.
        for name in names[names.index("shuffle") + 1 :]:
            scheduler.plugins[name] = scheduler.plugins.pop(name)
        for name in _HANDLERS:
            scheduler.handlers[name] = getattr(after, name.removeprefix("shuffle_"))
        for name in getattr(before, "calls", ()):
            scheduler.handlers.pop(name, None)
        scheduler.handlers.update(getattr(after, "calls", {}))
        if extension is not None:
            scheduler.extensions["shuffle"] = after
    except BaseException:
        scheduler.plugins["shuffle"] = before
        scheduler.handlers.clear()
        scheduler.handlers.update(handlers)
        if extension is not None:
            scheduler.extensions["shuffle"] = extension
        raise
    return before, after
