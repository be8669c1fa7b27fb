"""What a `GpurtScheduler` tells: dashboards and Prometheus (`show`), and plain values (`figures`, `statistics`)."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt._version import __version__
from dask_gpurt.extension import delivery
from dask_gpurt.observe.dashboard import late
from dask_gpurt.observe.figures import history, prometheus

if TYPE_CHECKING:
    from distributed import Scheduler

    from dask_gpurt.config import Settings
    from dask_gpurt.extension.parts import Parts

logger = logging.getLogger("distributed.scheduler.gpurt")


class Part(Protocol):
    """What an engine or an observer has."""

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values."""


class Teller(Protocol):
    """What is read of a `GpurtScheduler`."""

    settings: Settings
    scheduler: Scheduler | None
    parts: Parts | None
    plots: str
    metrics: str
    safe_since: dict[str, float]
    news_exceptions: int
    news_traceback: str

    @property
    def told(self) -> dict[str, Part | None]:
        """Its parts by the name that they have in `figures`; None: not installed."""

    def figures(self) -> dict[str, Any]:
        """`figures` of it."""


def show(plugin: Teller, scheduler: Scheduler) -> tuple[str, str]:
    """Give figures to the dashboard and to Prometheus; whether each is "on", or why not.

    Neither is worth an installation: status says what is missing.
    """
    # By weak reference: both keep what they are given as long as the scheduler, which would then keep itself.
    read = weakref.WeakMethod(plugin.figures)

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


def figures(plugin: Teller) -> dict[str, Any]:
    """What the engines tell of themselves; plain JSON values."""
    out: dict[str, Any] = {"tier_news": {"exceptions": plugin.news_exceptions, "last_traceback": plugin.news_traceback}}
    return out | {name: part.statistics() for name, part in plugin.told.items() if part is not None}


def statistics(plugin: Teller) -> dict[str, Any]:
    """Plain JSON values; see `dask_gpurt.status`."""
    out: dict[str, Any] = {
        "version": __version__,
        "policy": plugin.settings.policy,
        "parts": dict(plugin.parts.state) if plugin.parts else {},
        "plots": plugin.plots,
        "metrics": plugin.metrics,
        "refused": _refused(plugin),
        "safe": dict(plugin.safe_since),
        **figures(plugin),
    }
    return out


def _refused(plugin: Teller) -> dict[str, str]:
    """Workers that run stock although they were sent their part: address -> why."""
    workers = {} if plugin.scheduler is None else plugin.scheduler.workers
    return {a: str(ws.metrics[delivery.REFUSED]) for a, ws in workers.items() if delivery.REFUSED in ws.metrics}
