"""What the slots of the cluster do, and why they do nothing, over time."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, Div, HoverTool
from bokeh.plotting import figure

from dask_gpurt.observe.collect.causes import BUSY, CAUSES
from dask_gpurt.observe.dashboard import style
from dask_gpurt.observe.dashboard.axes import TimeAxis
from dask_gpurt.observe.dashboard.component import GpurtPlot, fill
from dask_gpurt.observe.figures.history import POINTS, SLOTS, THREADS, USES

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

    from dask_gpurt.observe.figures.history import Feed

OFF = "the stall ledger is off (gpurt.observe.enabled)"
WAITING = "no worker has reported its slots yet"
#: seconds that the shares in the headline are of
HEADLINE_SECONDS = 30

#: use -> colour, read on light and dark; related causes are of related colours
COLOURS: dict[str, str] = {
    BUSY: "#4a9c5b",
    "network": "#3f7fd0",
    "unspill": "#e0862f",
    "memory": "#d1495b",
    "shuffle_barrier": "#8a6fc4",
    "skew": "#c9518f",
    "queued_elsewhere": "#1b9e96",
    "scheduler": "#d6ab24",
    "planning": "#94912c",
    "serialisation": "#96715f",
    "resources": "#a5ab52",
    "no_ready_task": "#8296a8",
    "no_work": "#b9c0c8",
}
assert set(COLOURS) == set(USES)


class StallCauses(GpurtPlot):
    """Slots by what they do, stacked: busy at the bottom, then the causes of idleness. The height is all slots."""

    TITLE = "Stalls: what slots do (shares: last 30 s)"
    NAME = "gpurt_stall_causes"

    def _build(self) -> LayoutDOM:
        self.lines = ColumnDataSource({key: [] for key in ("ago", *USES, "total")})
        self.sources = [self.lines]
        fig = figure(title=self.TITLE, tools="", y_range=style.from_zero(), sizing_mode=style.SIZING)
        self.axis = TimeAxis(fig)
        self.areas = fig.varea_stack(
            list(USES), x="ago", color=[COLOURS[use] for use in USES], fill_alpha=0.9, source=self.lines
        )
        total = fig.line(x="ago", y="total", line_color=style.INK, line_width=1, source=self.lines)
        fig.yaxis.axis_label = "slots"
        style.dress(fig, self.headline)
        fig.add_tools(
            HoverTool(
                renderers=[total],
                mode="vline",
                tooltips=[("seconds ago", "@ago{0}"), *((label(use), f"@{use}{{0.00}}") for use in USES)],
            )
        )
        self.figure = fig
        # Outside of the figure, where it breaks into as many lines as a panel needs.
        self.legend = Div(text="", sizing_mode="stretch_width", styles={"font-size": "12px", "color": style.INK})
        return column(fig, self.legend, name=self.NAME, sizing_mode=style.SIZING)

    def _draw(self, feed: Feed) -> str:
        ago, rates = feed.rates((*USES, THREADS), over=5, points=POINTS)
        threads = rates.pop(THREADS)
        # Heartbeats bring slot-seconds in lumps, of more time than has passed or of less. Their shares are right.
        known = [sum(at) for at in zip(*rates.values(), strict=True)]
        scale = [t / k if t > 0 and k > 0 else 1.0 for t, k in zip(threads, known, strict=True)]
        data: dict[str, list[Any]] = {
            use: [round(v * s, 3) for v, s in zip(values, scale, strict=True)] for use, values in rates.items()
        }
        data["total"] = [round(sum(at), 3) for at in zip(*data.values(), strict=True)]
        fill(self.lines, {"ago": [round(s, 1) for s in ago], **data})
        self.axis.show(ago)
        style.fit(self.figure.y_range, max(data["total"], default=0))
        highest = max(data["total"], default=0)
        self._explain([use for use in USES if max(data[use], default=0) > 0.005 * highest])
        if not feed.latest.get("ledger"):
            return OFF
        return _headline(feed) or WAITING

    def _explain(self, shown: list[str]) -> None:
        """The legend: what has been there, in the order of the stack."""
        text = "".join(
            '<span style="display:inline-block;white-space:nowrap;margin:0 12px 2px 0">'
            f'<i style="display:inline-block;width:12px;height:12px;margin-right:4px;vertical-align:-1px;'
            f'background:{COLOURS[use]}"></i>{html.escape(label(use))}</span>'
            for use in shown
        )
        text = f'<div style="padding:0 8px 0 40px">{text}</div>'
        if self.legend.text != text:
            self.legend.text = text

    def _clear(self) -> None:
        super()._clear()
        self.legend.text = ""


def label(use: str) -> str:
    """How a use is called."""
    return BUSY if use == BUSY else CAUSES[use][0]


def _headline(feed: Feed) -> str:
    """Shares of the last seconds; empty without any."""
    if not feed.history:
        return ""
    new = feed.history[-1]
    old = next((s for s in feed.history if new.time - s.time <= HEADLINE_SECONDS), new)
    if old is new:
        return ""
    grown = {use: new.sums[use] - old.sums[use] for use in USES}
    every = sum(grown.values())
    if new.sums[SLOTS] <= 0 or every <= 0:
        return ""
    idle = sorted((use for use in CAUSES if grown[use] > 0.005 * every), key=lambda use: -grown[use])
    parts = [f"busy {grown[BUSY] / every:.0%}", *(f"{label(use)} {grown[use] / every:.0%}" for use in idle[:2])]
    return " · ".join(parts)
