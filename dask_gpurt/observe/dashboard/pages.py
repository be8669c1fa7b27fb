"""The addresses of the plots, and the page with all of them.

Keys of `PLOTS` that start with ``/individual-`` are listed by Dask itself: in ``/individual-plots.json``, which
JupyterLab's sidebar reads, and in the "More..." menu. The page ``/gpurt`` gets into the menu by `late.install`, which
has the scheduler at hand.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from bokeh.core.properties import without_property_validation
from distributed.dashboard import scheduler as board
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from dask_gpurt.observe.dashboard.matrix import LinkMatrix
from dask_gpurt.observe.dashboard.placement import LinkEstimates, PlacementAccuracy, PlacementDecisions
from dask_gpurt.observe.dashboard.runs import RunTable
from dask_gpurt.observe.dashboard.shuffle import ShuffleProgress, ShuffleTraffic
from dask_gpurt.observe.dashboard.speeds import WorkerSpeeds
from dask_gpurt.observe.dashboard.stalls import StallCauses
from dask_gpurt.observe.dashboard.tiers import DiskRates, TierHistory, TierOccupancy

if TYPE_CHECKING:
    from collections.abc import Callable

    from bokeh.document import Document
    from distributed import Scheduler

    from dask_gpurt.observe.dashboard.component import GpurtPlot

#: milliseconds between two updates of an open page
INTERVAL_MS = 1000

#: address -> plot, in the order of the overview
PLOTS: dict[str, type[GpurtPlot]] = {
    "/individual-stall-causes": StallCauses,
    "/individual-shuffle-progress": ShuffleProgress,
    "/individual-tier-history": TierHistory,
    "/individual-tier-occupancy": TierOccupancy,
    "/individual-tier-disk-rates": DiskRates,
    "/individual-shuffle-traffic": ShuffleTraffic,
    "/individual-placement-decisions": PlacementDecisions,
    "/individual-placement-accuracy": PlacementAccuracy,
    "/individual-link-matrix": LinkMatrix,
    "/individual-link-estimates": LinkEstimates,
    "/individual-worker-speeds": WorkerSpeeds,
}
OVERVIEW = "/gpurt"
#: the newest runs, in a table; no plot, so it is not listed by Dask itself
HISTORY = "/gpurt-history"
#: milliseconds between two looks at the runs
HISTORY_MS = 3000

_TEMPLATE = """
{% extends "base.html" %}
{% block extra_resources %}
<style>
  #gpurt { display: grid; gap: 1.5rem; padding-top: 1rem;
    grid-template-columns: repeat(auto-fit, minmax(min(100%, max(30rem, 40%)), 1fr)); }
  #gpurt > div:last-child:nth-child(odd) { grid-column: 1 / -1; }
  #gpurt > div { height: 22rem; min-width: 0; }
</style>
{% endblock %}
{% block content %}
{% from macros import embed %}
<div id="gpurt">{% for root in roots %}<div>{{ embed(root) }}</div>{% endfor %}</div>
{{ plot_script }}
{% endblock %}
"""


_HISTORY_TEMPLATE = """
{% extends "base.html" %}
{% block content %}
{% from macros import embed %}
<div style="padding: 1rem">{% for root in roots %}{{ embed(root) }}{% endfor %}</div>
{{ plot_script }}
{% endblock %}
"""


def individual(plot: type[GpurtPlot]) -> Callable[[Any, dict[str, Any], Any], None]:
    """A document with one plot and nothing else, as a JupyterLab panel shows it."""

    def page(scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
        _add(doc, plot(scheduler))
        doc.title = f"Dask: {plot.TITLE}"
        doc.theme = BOKEH_THEME

    return page


def overview(scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
    """All plots, below Dask's own menu."""
    for plot in PLOTS.values():
        _add(doc, plot(scheduler))
    doc.title = "Dask: dask-gpurt"
    doc.theme = BOKEH_THEME
    doc.template = env.from_string(_TEMPLATE)
    doc.template_variables.update(extra)


def history(scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
    """The newest runs, below Dask's own menu."""
    _add(doc, RunTable(scheduler), HISTORY_MS)
    doc.title = f"Dask: {RunTable.TITLE}"
    doc.theme = BOKEH_THEME
    doc.template = env.from_string(_HISTORY_TEMPLATE)
    doc.template_variables.update(extra)


def _add(doc: Document, component: GpurtPlot | RunTable, interval_ms: int = INTERVAL_MS) -> None:
    """Put a component on a page and update it from now on, on the event loop.

    Bokeh from 3.10 on makes documents and calls plain functions in threads; coroutines it awaits on the loop. What is
    shown belongs to the scheduler, and changes there only. So nothing is read before the first callback.
    """
    # A callback that held the component would make a circle with its document (as in `distributed.dashboard`).
    ref = weakref.ref(component)
    vars(doc).setdefault("gpurt_components", []).append(component)

    async def update() -> None:
        shown = ref()
        if shown is not None:
            await shown.prepare()
            without_property_validation(shown.update)()

    doc.add_next_tick_callback(update)
    doc.add_periodic_callback(update, interval_ms)
    doc.add_root(component.root)


def documents() -> dict[str, Callable[[Any, dict[str, Any], Any], None]]:
    """Address -> what makes its document."""
    plots = {address: individual(plot) for address, plot in PLOTS.items()}
    return {**plots, OVERVIEW: overview, HISTORY: history}


def register() -> None:
    """Add our pages to those of schedulers that are made from now on. A second call changes nothing."""
    for address, document in documents().items():
        board.applications.setdefault(address, document)
