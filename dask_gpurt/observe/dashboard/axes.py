"""The two axes that plots have in common: workers downwards, and seconds before now."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bokeh.models import CustomJSTickFormatter, FixedTicker, Range1d

from dask_gpurt.observe.dashboard import style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.plotting import figure

#: thickness of a worker's bar, of 1
BARS = 0.8
#: workers up to which an axis names them; with more, names overlap and the pointer tells
NAMED = 24
#: (minutes shown at most, seconds between two ticks)
STEPS = ((1, 15), (2, 30), (5, 60), (10, 120))


class WorkerAxis:
    """One row per worker, or something else of which there are several, the first on top, at y = 0, 1, 2..."""

    def __init__(self, fig: figure) -> None:
        fig.y_range = Range1d(start=0.5, end=-0.5)
        fig.yaxis.ticker = FixedTicker(ticks=[])
        fig.yaxis.major_tick_line_color = None
        fig.ygrid.visible = False
        self._figure = fig
        self._names: list[str] = []

    def show(self, names: Sequence[str], what: str = "worker") -> None:
        """Name the rows."""
        shown = [style.short(name) for name in names]
        if shown == self._names:
            return
        self._names = shown
        fig, axis = self._figure, self._figure.yaxis[0]
        fig.y_range.start = max(len(shown), 1) - 0.5
        many = len(shown) > NAMED
        # Labels before ticks: a tick without label would show its number for a moment.
        axis.major_label_overrides = {} if many else dict(enumerate(shown))
        # Not another ticker: for a new model Bokeh looks through all of the page's, 0.1 s on the scheduler's loop.
        axis.ticker.ticks = [] if many else list(range(len(shown)))
        axis.axis_label = f"{len(shown)} {what}s" if many else what


class TimeAxis:
    """Seconds before now: the past on the left. No clock of the reader's or the cluster's time zone is involved."""

    def __init__(self, fig: figure) -> None:
        fig.x_range = Range1d(start=0, end=0)
        fig.xaxis.formatter = CustomJSTickFormatter(
            code="if (tick == 0) return 'now'; return tick % 60 ? `-${tick} s` : `-${tick / 60} min`"
        )
        fig.xaxis.axis_label = "time before now"
        fig.xaxis.ticker = FixedTicker(ticks=[])
        self._figure = fig
        self.show(())

    def show(self, ago: Sequence[float]) -> None:
        """Show all of `ago`, by whole minutes."""
        minutes = max(1, math.ceil(max(ago, default=0) / 60))
        if self._figure.x_range.start != 60 * minutes:
            self._figure.x_range.start = 60 * minutes
            step = next((s for most, s in STEPS if minutes <= most), 60 * math.ceil(minutes / 5))
            self._figure.xaxis[0].ticker.ticks = list(range(0, 60 * minutes + 1, step))
