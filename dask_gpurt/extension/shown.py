"""Where the figures of a `GpurtScheduler` are shown: on its dashboard and by Prometheus; and who refused its part."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.extension import delivery
from dask_gpurt.observe.dashboard import late
from dask_gpurt.observe.figures import history, prometheus

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

logger = logging.getLogger("distributed.scheduler.gpurt")


def show(figures: Callable[[], dict[str, Any]], scheduler: Scheduler) -> tuple[str, str]:
    """Give `figures`, a method, to the dashboard and to Prometheus; whether each is "on", or why not.

    Neither is worth an installation: status says what is missing.
    """
    # By weak reference: both keep what they are given as long as the scheduler, which would then keep itself.
    read = weakref.WeakMethod(figures)

    def now() -> dict[str, Any]:
        method = read()
        return {} if method is None else method()

    shown = prometheus.provide_scheduler(scheduler, now)
    metrics = "on" if shown else "not available because prometheus_client is missing, or refuses them (see the log)"
    try:
        history.provide(scheduler, now)
        plots = late.install(scheduler)
    except Exception as e:
        plots = f"not available because {type(e).__name__}: {e}"
    if plots != "on":
        logger.info("dask-gpurt: plots: %s", plots)
    return plots, metrics


def hide(scheduler: Scheduler) -> None:
    """Take them back."""
    history.withdraw(scheduler)
    prometheus.withdraw(scheduler)


def refused(scheduler: Scheduler | None) -> dict[str, str]:
    """Workers that run stock although they were sent their part: address -> why."""
    workers = {} if scheduler is None else scheduler.workers
    return {a: str(ws.metrics[delivery.REFUSED]) for a, ws in workers.items() if delivery.REFUSED in ws.metrics}
