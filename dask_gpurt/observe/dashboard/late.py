"""Plots on a scheduler that is running already, as after `dask_gpurt.attach`; and our page in Dask's menu.

Bokeh's server has no call to add an application, see `dask_gpurt.observe.seam`. Anything unexpected there means no
plots and nothing more: the reason is returned as text and shown in `dask_gpurt.status`.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from typing import TYPE_CHECKING

from dask_gpurt.observe import seam

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("distributed.scheduler.gpurt")

#: in the "More..." menu
MENU = (
    {"url": "gpurt", "name": "GPU Runtime"},
    {"url": "gpurt-history", "name": "GPU Runtime: Runs"},
)
#: schedulers that serve the reports of runs
_served: weakref.WeakSet[Scheduler] = weakref.WeakSet()


def install(scheduler: Scheduler) -> str:
    """See that a scheduler's dashboard has our pages; returns "on" or why it has not. Never raises."""
    try:
        return _install(scheduler)
    except Exception as e:
        logger.warning("dask-gpurt: no plots, they could not be added to the running dashboard", exc_info=True)
        return f"not available because {type(e).__name__}: {e}"


def _install(scheduler: Scheduler) -> str:
    # Where the dashboard runs Bokeh is imported already; where it does not, it is not imported for this.
    tornado = sys.modules.get("bokeh.server.tornado")
    apps = getattr(getattr(scheduler, "http_application", None), "applications", [])
    bokeh = None if tornado is None else next((app for app in apps if isinstance(app, tornado.BokehTornado)), None)
    if bokeh is None:
        return "not available because this scheduler has no dashboard (switched off, or bokeh is missing)"
    from distributed.dashboard import scheduler as board

    from dask_gpurt.observe.dashboard import pages, runs

    extra = {"prefix": bokeh.prefix, **board.template_variables(scheduler)}
    for address, document in pages.documents().items():
        if address not in bokeh.app_paths:
            seam.add_application(bokeh, address, functools.partial(document, scheduler, extra))
    if scheduler not in _served:
        address = bokeh.prefix.rstrip("/") + runs.REPORT
        scheduler.http_application.add_handlers(".*", [(address, runs.ReportPage, {"scheduler": scheduler})])
        _served.add(scheduler)
    _list(board.template_variables(scheduler)["plots"], list(pages.PLOTS))
    return "on"


def _list(menu: list[dict[str, str]], addresses: list[str]) -> None:
    """Put our pages into the menu, which is one list for all pages of a scheduler."""
    known = {item["url"] for item in menu}
    ours = [*MENU, *({"url": a.strip("/"), "name": " ".join(a.split("-")[1:]).title()} for a in addresses)]
    new = [item for item in ours if item["url"] not in known]
    if new:
        menu[:] = sorted([*menu, *new], key=lambda item: item["name"])
