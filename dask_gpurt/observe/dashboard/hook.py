"""How our plots get into Dask's dashboard, and why by way of a module of routes.

``distributed.dashboard.scheduler.applications`` has to have our entries when a scheduler connects its dashboard, which
is in ``Scheduler.__init__``, long before any ``dask_setup``. The body of a preload is early enough, but the same module
is imported in every nanny and worker, where Bokeh would cost half a second and tens of MB for nothing. What only a
scheduler does, between importing its dashboard and connecting it, is to import the modules of
``distributed.scheduler.http.routes`` and read their ``routes``:

1. the preload's body calls `announce`: this module's name is put into that list, nothing is imported;
2. the scheduler imports ``distributed.dashboard.scheduler`` (and Bokeh), if it has a dashboard at all;
3. it reads ``routes`` of each module in the list, ours is a module ``__getattr__`` that calls `_register`;
4. it connects the dashboard, with our entries.

An exception in step 3 would end the scheduler, so none leaves. `routes` is computed at each access: a process may start
several schedulers, the first of them without a dashboard.

Rejected: importing Bokeh in the body (cost above); a finder in ``sys.meta_path`` (touches every import of everybody).
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import dask

from dask_gpurt.config import Settings
from dask_gpurt.errors import ConfigError

logger = logging.getLogger("distributed.scheduler.gpurt")

#: key of the list of modules
ROUTES = "distributed.scheduler.http.routes"


def announce() -> None:
    """Have schedulers that are made in this process offer the plots. Imports nothing; a second call changes nothing."""
    modules = dask.config.get(ROUTES, default=None)
    if isinstance(modules, (list, tuple)) and __name__ not in modules:
        dask.config.set({ROUTES: [*modules, __name__]})


def _register() -> None:
    """Step 3."""
    if "distributed.dashboard.scheduler" not in sys.modules:
        # Asked for without a dashboard, or Bokeh is missing, which Dask tells on the page itself.
        logger.info("dask-gpurt: no plots, this scheduler has no dashboard (is bokeh installed?)")
        return
    try:
        if Settings.load().policy == "stock":
            return
    except ConfigError:
        return  # the preload's setup ends the scheduler over it, with the reason
    try:
        from dask_gpurt.observe.dashboard import pages

        pages.register()
    except Exception:
        logger.warning("dask-gpurt: no plots, they could not be added to the dashboard", exc_info=True)


def __getattr__(name: str) -> Any:
    if name == "routes":
        _register()
        return []
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
