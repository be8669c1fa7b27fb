"""What every plot of ours is: a Dask dashboard component that cannot fail its page.

A subclass makes its figures in `_build` and fills them in `_draw`, which returns what stands above them: a verdict in
words, and in a second line its figures. `update` guards it: without the extension the plot is emptied and says so; an
exception is counted, logged once for each plot, and shown there, and the next update tries again.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.layouts import column
from distributed.dashboard.components import DashboardComponent

from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.figures import history as feeds

if TYPE_CHECKING:
    from bokeh.models import ColumnDataSource, LayoutDOM
    from distributed import Scheduler

    from dask_gpurt.observe.figures.history import Feed

logger = logging.getLogger("distributed.scheduler.gpurt")

NOT_INSTALLED = "dask-gpurt is not installed on this scheduler"
NO_WORKERS = "no workers"
NO_FIGURES = "no worker has sent figures yet"
#: values of a column from which it is sent as an array
LONG = 40


class GpurtPlot(DashboardComponent, ABC):
    """A plot on one page: title, verdict and figures as text that wraps, and below them what the subclass builds.

    Parameters
    ----------
    scheduler
        The scheduler whose feed is shown, if it has one.
    """

    #: above the plot
    TITLE = ""
    #: name of the root in a page's template
    NAME = ""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        #: the verdict, and in a second line its figures
        self.said = ""
        #: everything that is emptied when there is nothing to show
        self.sources: list[ColumnDataSource] = []
        #: updates that failed
        self.errors = 0
        self._heading = style.heading(self.TITLE)
        self.root = column(self._heading, self._build(), name=self.NAME, sizing_mode=style.SIZING, spacing=0)
        self.source = self.sources[0]

    @abstractmethod
    def _build(self) -> LayoutDOM:
        """Make figures and sources; returns what holds them."""

    @abstractmethod
    def _draw(self, feed: Feed) -> str:
        """Fill the sources; returns the verdict and, after a newline, its figures."""

    async def prepare(self) -> None:
        """Before `update`: what takes several turns of the event loop."""

    def update(self) -> None:
        """Called by Bokeh while a page is open. Never raises."""
        try:
            feed = feeds.of(self.scheduler)
            if feed is None:
                self._clear()
                text = NOT_INSTALLED
            else:
                text = self._draw(feed)
        except Exception as e:
            self.errors += 1
            if self.errors == 1:
                logger.warning("dask-gpurt: the plot %r could not be updated", self.TITLE, exc_info=True)
            text = f"not shown ({self.errors} errors): {type(e).__name__}: {e}"
        if self.said != text:
            self.said = text
            self._heading.text = style.heading_text(self.TITLE, text)

    def _clear(self) -> None:
        for source in self.sources:
            fill(source, {key: [] for key in source.data})


def fill(source: ColumnDataSource, data: dict[str, list[Any]]) -> None:
    """Replace a source's data, unless it is the same: what did not change is not sent to the browser.

    Long columns of numbers become arrays, which Bokeh sends as they are; a list it looks through number by number.
    """
    if getattr(source, "_gpurt_given", None) != data:
        source._gpurt_given = data
        source.data = {key: _packed(column) for key, column in data.items()}


def _packed(column: list[Any]) -> Any:
    plain = len(column) < LONG or not all(type(value) in (float, int) for value in column)
    return column if plain else np.array(column, dtype=float)
